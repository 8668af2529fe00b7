"""One process's run: what was measured so far, where it is written, and what later parts need of earlier ones."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from floor import Floor, Rates

from gpu.bench import Bench
from gpu.model import Served, load, serve
from gpu.rows import Row

Case = tuple[str, Callable[[], Iterable[Row]]]


class DeviceLostError(Exception):
    """The device answers no more in this process."""


class Run:
    """rows, failures: what came of it; facts: what the figures were measured on; tokens_per_s: of the served load, 0
    until it is known. skipped: names of cases that are left out."""

    def __init__(self, bench: Bench, path: Path, facts: dict[str, Any], skipped: Iterable[str] = ()) -> None:
        self.bench, self.path, self.facts = bench, path, facts
        self.rows: list[Row] = []
        self.failures: dict[str, str] = {}
        self.tokens_per_s = 0.0
        self._tried: list[str] = []
        self._skipped = frozenset(skipped)
        self._rates: Rates | None = None
        self._served: Served | None = None

    def each(self, cases: Iterable[Case]) -> None:
        """Measures cases, one after the other. One that fails is noted and does not end the others, unless the device
        is lost with it: then DeviceLostError is raised, and whoever runs this again skips what was tried."""
        for name, measure in cases:
            if name in self._skipped:
                continue
            self._tried.append(name)
            self.write()
            try:
                for row in measure():
                    self.add(row)
            except Exception as error:
                traceback.print_exc()
                self.failures[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                self.write()
                if "CUDA error" in str(error):
                    raise DeviceLostError(name) from error
                gc.collect()
        self.write()

    def add(self, row: Row) -> None:
        """Keeps a row, and shows it."""
        self.rows.append(row)
        print("  " + " | ".join(cell for cell in row.cells() if cell), flush=True)

    def write(self) -> None:
        """The file, as it is now."""
        found = {"rows": [row.as_json() for row in self.rows], "failures": self.failures, "tried": self._tried}
        self.path.write_text(json.dumps({**self.facts, "tokens_per_s": self.tokens_per_s, **found}, indent=2) + "\n")

    def rates(self) -> Rates:
        """The device's rates, measured once."""
        from gpu.kernels import measure_rates

        if self._rates is None:
            self._rates = measure_rates(self.bench)
            self.facts["rates"] = self._rates.as_json()
            self.add(Row("copy within the device", self._rates.bytes_per_s / 1e9, "GB/s"))
            self.add(Row("product of matrices", self._rates.flops_per_s / 1e12, "TFLOP/s"))
        return self._rates

    def floor(self) -> Floor:
        """The floor of the model's steps."""
        dtype = str(self.bench.sizes.dtype).removeprefix("torch.")
        return Floor(self.bench.sizes.model, dtype, self.bench.sizes.dtype.itemsize, self.rates())

    def served(self) -> Served:
        """The model, loaded once."""
        from gpu.decoding import WatchedRunAhead

        if self._served is None:
            started = time.perf_counter()
            decoder = load(self.bench)
            loaded = time.perf_counter()
            self._served = serve(self.bench, decoder, WatchedRunAhead)
            ready = time.perf_counter()
            blocks = self._served.pool.size.num_device_blocks
            self.add(Row("weights made", loaded - started, "s", facts={"parameters": decoder.num_parameters}))
            self.add(Row("kernels ready and graphs recorded", ready - loaded, "s", facts={"num_device_blocks": blocks}))
        return self._served

    def drop_served(self) -> None:
        """Gives the model's memory back."""
        self._served = None
        gc.collect()
        self.bench.device.free_memory()
