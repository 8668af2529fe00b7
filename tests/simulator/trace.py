"""Lengths and gaps of a production trace, as a small sample to draw from.

The sample is committed beside this file with its attribution. Scaling lengths to a pool is the scenario's business.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

_SAMPLE = Path(__file__).with_name("trace_sample.csv")


class TracedRequest(NamedTuple):
    """One request of the trace: tokens of its prompt, tokens that came back, milliseconds since the one before."""

    num_context_tokens: int
    num_generated_tokens: int
    gap_ms: int


@cache
def traced_requests() -> tuple[TracedRequest, ...]:
    """The sample, in the trace's order."""
    with _SAMPLE.open(newline="") as file:
        rows = csv.reader(line for line in file if not line.startswith("#"))
        next(rows)
        return tuple(TracedRequest(*map(int, row)) for row in rows)


def mean_context_tokens() -> float:
    """The mean length of a prompt."""
    return fmean(row.num_context_tokens for row in traced_requests())


def mean_generated_tokens() -> float:
    """The mean length of an answer."""
    return fmean(row.num_generated_tokens for row in traced_requests())
