"""Benchmarks are scripts: they find each other in their own folder."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
