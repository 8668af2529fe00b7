"""The GPU path on a GPU, in a few minutes: kernels against the oracle and against their floors, a model of random
weights in the shape of Llama 3 8B, swap, and transformers beside it.

Needs nothing but this repository, torch, triton, transformers, grpcio, protobuf and numpy: no network, no checkpoint,
nothing of ours installed. Prints rows as they come and tables at the end. The JSON file holds at any time what was
measured so far, so a run may be stopped; by itself it ends after --seconds. What fails is told and does not end the
rest, not even where it takes the device with it; the run then ends with status 1.

    python benchmarks/bench_gpu.py [--only kernels --only decode] [--seconds 500] [--out DIR]
    python benchmarks/bench_gpu.py --device cpu --tiny      tries the benchmark itself, without a GPU
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("clients/python", "router", "worker", "kernels")]

# This process only starts others: it needs none of the packages that a machine may lack.
from gpu.children import run_jobs  # noqa: E402
from gpu.groups import PART_NAMES, chosen_groups, jobs_of, limit_s  # noqa: E402
from gpu.preflight import look  # noqa: E402
from gpu.results import Results  # noqa: E402
from gpu.rows import Row, goals, table  # noqa: E402

_SHORTEST_S = 10.0  # a group needs more to begin
_MOST_PROCESSES = 8
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StoppedError(Exception):
    """Somebody wants the run to end."""


def main() -> int:
    """Runs what is asked for. Returns 1 where something failed, 2 where the machine has not what a run needs."""
    started = time.monotonic()
    options = _options()
    if options.child:
        from gpu.measure import measure

        status = measure(options)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # threads that a library has left behind must not keep it
    parts = options.only or PART_NAMES
    preflight = look(
        on_gpu=options.device == "cuda",
        needs_triton=options.kernel_backend == "triton",
        needs_transformers="peer" in parts,
    )
    print(preflight.shown(), flush=True)
    for problem in preflight.problems:
        print(problem, file=sys.stderr)
    if preflight.problems:
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # whoever looks for something there would wait for a network
    results = Results(options.out, {"preflight": preflight.as_json(), "arguments": sys.argv[1:]})
    print(f"results: {results.path}", flush=True)
    _handle(_stop)
    try:
        _run(options, results, started + options.seconds)
    except StoppedError as error:
        results.fail("the run", str(error))
    _handle(signal.SIG_IGN)  # what is left takes no time, and is what the run was for
    return _report(results, time.monotonic() - started)


def _handle(handler: Any) -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, handler)


def _stop(number: int, _: Any) -> NoReturn:
    _handle(signal.SIG_IGN)  # once is enough, and must not keep the processes from being ended
    raise StoppedError(f"stopped by {signal.Signals(number).name} before it was through")


def _run(options: argparse.Namespace, results: Results, ends_at: float) -> None:
    """All groups, within the time that there is."""
    arguments = ["--device", options.device, "--kernel-backend", options.kernel_backend]
    arguments += ["--tiny"] if options.tiny else []
    groups = chosen_groups(options.only or PART_NAMES)
    while groups:
        left_s = ends_at - time.monotonic()
        if left_s < _SHORTEST_S:
            for group in groups:
                results.fail(group.name, f"not measured: the {options.seconds:g} s of --seconds were over")
            return
        run_jobs(jobs_of(groups[0], options.processes), arguments, results, limit_s=limit_s(groups, left_s))
        groups = groups[1:]


def _report(results: Results, seconds: float) -> int:
    """Prints what there is, goals last."""
    found = results.close()
    rows = [Row(**row) for row in found["rows"]]
    print(f"\n{table(rows)}\n\n{goals(rows)}")
    for name, failure in found["failures"].items():
        print(f"FAILED {name}: {failure}")
    print(f"\n{found.get('backend', 'no kernels')}; {seconds:.0f} s in all; written to {results.path}", flush=True)
    return 1 if found["failures"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--kernel-backend", default="triton", help="as of octavo-worker (default: triton)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short contexts, to try the benchmark")
    parser.add_argument("--only", action="append", choices=PART_NAMES, help="a part; may be given more than once")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the JSON file")
    parser.add_argument("--seconds", type=float, default=500.0, help="the run ends after so long (default: 500)")
    parser.add_argument(
        "--processes",
        type=int,
        default=max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2)),
        help=f"that compare kernels at the same time (default: half of the cores, {_MOST_PROCESSES} at most)",
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--skip", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--our-rate", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--shard", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.processes < 1:
        parser.error(f"--processes is {options.processes}; it must be 1 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
