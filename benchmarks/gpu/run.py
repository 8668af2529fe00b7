"""One process's run: what was measured so far, where it is written, and what later parts need of earlier ones."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from floor import Floor, Rates

from gpu.bench import Bench
from gpu.model import Noting, Served, load, serve
from gpu.results import write_json
from gpu.rows import Row

Case = tuple[str, Callable[[], Iterable[Row]]]


class DeviceLostError(Exception):
    """The device answers no more in this process."""


class NoModelError(Exception):
    """The model could not be made, which an earlier case has met already."""


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
        self._is_finished = False
        self._rates: Rates | None = None
        self._served: Served | None = None
        self._no_model = ""
        self.write()

    def each(self, cases: Iterable[Case]) -> None:
        """Measures cases, one after the other. One that fails is noted and does not end the others, unless the device
        is lost with it: then DeviceLostError is raised, and whoever runs this again skips what was tried."""
        for name, measure in cases:
            if name in self._skipped:
                continue
            self._tried.append(name)
            self.write()
            with self.noting(name):
                for row in measure():
                    self.add(row)
            if name in self.failures:  # the error is gone now, and with it what its frames held of the device's memory
                gc.collect()
                self.bench.device.free_memory()

    def noting(self, name: str) -> Noting:
        """A `with` block whose failure is noted under this name, and does not end what is behind it. Raises
        DeviceLostError where the device went with it."""
        return _Noted(self, name)

    def note(self, name: str, error: Exception) -> None:
        """Keeps a failure, and shows it."""
        traceback.print_exception(error)
        self.failures[name] = described(error)
        self.write()

    def device_answers(self) -> bool:
        """Whether the device is still there. It is asked, for no text tells it of all errors: some come from torch,
        some from Triton, and of either some are only about the call."""
        try:
            self.bench.device.synchronize()
        except Exception as error:
            print(f"the device: {described(error)}", flush=True)
            return False
        return True

    def add(self, row: Row) -> None:
        """Keeps a row, in place of an earlier one of its name, and shows it."""
        names = [other.name for other in self.rows]
        if row.name in names:
            self.rows[names.index(row.name)] = row
        else:
            self.rows.append(row)
        self.write()
        print("  " + " | ".join(cell for cell in row.cells() if cell), flush=True)

    def finish(self) -> None:
        """Nothing is left to measure."""
        self._is_finished = True
        self.write()

    def write(self) -> None:
        """The file, as it is now."""
        state = {"tried": self._tried, "is_finished": self._is_finished, "tokens_per_s": self.tokens_per_s}
        found = {"rows": [row.as_json() for row in self.rows], "failures": self.failures}
        write_json(self.path, {**self.facts, **found, **state})

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
        """The model, loaded once. Raises NoModelError where that has failed before: it takes its time every time."""
        if self._no_model:
            raise NoModelError(f"there is no model: {self._no_model}")
        if self._served is None:
            try:
                self._served = self._serve()
            except Exception as error:
                self._no_model = described(error)
                raise
        return self._served

    def _serve(self) -> Served:
        from gpu.decoding import WatchedRunAhead

        started = time.perf_counter()
        decoder = load(self.bench)
        loaded = time.perf_counter()
        served = serve(self.bench, decoder, WatchedRunAhead, self.noting)
        ready = time.perf_counter()
        blocks = served.pool.size.num_device_blocks
        self.add(Row("weights made", loaded - started, "s", facts={"parameters": decoder.num_parameters}))
        self.add(Row("kernels ready and graphs recorded", ready - loaded, "s", facts={"num_device_blocks": blocks}))
        return served

    def drop_served(self) -> None:
        """Gives the model's memory back."""
        self._served = None
        gc.collect()
        self.bench.device.free_memory()


class _Noted:
    """See `Run.noting`."""

    def __init__(self, run: Run, name: str) -> None:
        self._run, self._name = run, name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, DeviceLostError):
            return False
        self._run.note(self._name, error)
        if not self._run.device_answers():
            raise DeviceLostError(self._name) from error
        return True


def described(error: BaseException) -> str:
    """An error in a line: its type, and the first line of what it says, if it says anything."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
