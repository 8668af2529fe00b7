"""The line protocol by which a peer is asked to generate: the peer's end. Standard library only.

A peer runs in an environment of its own, with nothing of Octavo's. It reads one JSON object a line and answers with
one, then waits:

    {"prompts": [[ids], ...], "num_tokens": n}  ->  {"seconds": s, "num_tokens": tokens generated in all}

The first line it writes describes it: {"name": ..., "versions": {...}, "about": ...}. It ends when its input does.
`sides.py` is the other end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Prompts = list[list[int]]


@dataclass(frozen=True)
class Peer:
    """A loaded program. generate: makes so many tokens behind each prompt, greedily, all prompts at once, and returns
    how many it made in all; about: what it computes in, for people; close: ends what it started.
    """

    name: str
    versions: dict[str, str]
    about: str
    generate: Callable[[Prompts, int], int]
    close: Callable[[], None] = lambda: None


def serve(description: str, load: Callable[[Path, str, int], Peer]) -> None:
    """Loads the peer that the command line asks for, given the model's path, the data type and the number of compute
    threads, and answers until the input ends.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a folder")
    parser.add_argument("--dtype", default="bfloat16", help="what it computes in, where that can be chosen")
    parser.add_argument("--threads", type=int, default=2, help="compute threads")
    args = parser.parse_args()
    # Libraries print as they please; only answers may go where answers are read.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    peer = load(args.model.resolve(), args.dtype, args.threads)
    try:
        answer({"name": peer.name, "versions": peer.versions, "about": peer.about})
        for line in sys.stdin:
            task = json.loads(line)
            begin = time.perf_counter()
            num_tokens = peer.generate(task["prompts"], task["num_tokens"])
            answer({"seconds": time.perf_counter() - begin, "num_tokens": num_tokens})
    finally:
        peer.close()
