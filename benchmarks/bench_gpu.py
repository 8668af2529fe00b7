"""The GPU path on a GPU, in a few minutes: kernels against the oracle and against their floors, a model of random
weights in the shape of Llama 3 8B, swap, and transformers beside it.

Needs nothing but this repository, torch, triton, transformers, grpcio and numpy: no network, no checkpoint, nothing of
ours installed. Prints rows as they come, the table at the end, and writes them as JSON. What fails is told and does not
end the rest, not even where it takes the device with it; the run then ends with status 1.

    python benchmarks/bench_gpu.py [--only kernels --only decode] [--out DIR]
    python benchmarks/bench_gpu.py --device cpu --tiny      tries the benchmark itself, without a GPU
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("clients/python", "router", "worker", "kernels")]

import torch  # noqa: E402
from gpu.bench import FULL, TINY, Bench  # noqa: E402
from gpu.children import LOST, run_groups  # noqa: E402
from gpu.parts import GROUPS, PARTS  # noqa: E402
from gpu.rows import Row, table  # noqa: E402
from gpu.run import DeviceLostError, Run  # noqa: E402
from machine import machine  # noqa: E402

from octavo_kernels import load_backend  # noqa: E402
from octavo_kernels.reference import ReferenceBackend  # noqa: E402
from octavo_worker.devices import open_device  # noqa: E402


def main() -> int:
    """Runs what is asked for. Returns 1 where something failed."""
    options = _options()
    if options.child:
        return _measure(options)
    started = time.perf_counter()
    groups = [[part for part in group if part in (options.only or PARTS)] for group in GROUPS]
    arguments = ["--device", options.device, "--kernel-backend", options.kernel_backend]
    results = run_groups(
        [group for group in groups if group], [*arguments, *(["--tiny"] if options.tiny else [])], options.limit_s
    )
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"gpu-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    print("\n" + table([Row(**row) for row in results["rows"]]))
    for name, failure in results["failures"].items():
        print(f"FAILED {name}: {failure}")
    print(f"\n{results.get('backend', 'no kernels')}; {time.perf_counter() - started:.0f} s in all; written to {path}")
    return 1 if results["failures"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--kernel-backend", default="", help="as of octavo-worker (default: triton)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short contexts, to try the benchmark")
    parser.add_argument("--only", action="append", choices=tuple(PARTS), help="a part; may be given more than once")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the JSON file")
    parser.add_argument("--limit-s", type=float, default=400.0, help="seconds for a group of parts, which then ends")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--skip", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--our-rate", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.kernel_backend = options.kernel_backend or "triton"
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --device cpu --tiny tries the benchmark without one")
    return options


def _measure(options: argparse.Namespace) -> int:
    """Measures parts in this process and writes what came of them. Returns LOST where the device is."""
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stdout)
    device = torch.device(options.device)
    if options.tiny:
        torch.set_num_threads(1)  # tiny ops, which threads only slow down
    backend = load_backend(options.kernel_backend, device=device)
    bench = Bench(open_device(device), backend, ReferenceBackend(device), TINY if options.tiny else FULL)
    facts: dict[str, Any] = {
        "machine": machine(),
        "backend": backend.describe(),
        "torch": torch.__version__,
        "tiny": options.tiny,
        "model": f"{bench.sizes.model.num_layers} layers, hidden {bench.sizes.model.hidden_size}, random weights",
    }
    run = Run(bench, options.child, facts, options.skip)
    run.tokens_per_s = options.our_rate
    for name in options.only:
        began = time.perf_counter()
        print(f"{name}: {facts['backend']}, torch {torch.__version__}", flush=True)
        try:
            run.each(PARTS[name](run))
        except DeviceLostError as error:
            print(f"the device is lost in {error}", flush=True)
            return LOST
        except Exception as error:
            traceback.print_exc()
            run.failures[name] = f"{type(error).__name__}: {error}"
            run.write()
            if "CUDA error" in str(error):
                return LOST
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
