"""One process that measures: opens device and kernels, and goes through the cases of its parts."""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import logging
import resource
import signal
import sys
import time
from typing import Any

import torch
from machine import machine

from gpu.bench import FULL, TINY, Bench
from gpu.children import LOST
from gpu.parts import PARTS
from gpu.run import DeviceLostError, Run
from octavo_kernels import load_backend
from octavo_kernels.reference import ReferenceBackend
from octavo_worker.devices import open_device

_GRACE_S = 30.0


def measure(options: argparse.Namespace) -> int:
    """Measures parts and writes what came of them. Returns LOST where the device is, 1 where something else failed."""
    _let_itself_be_watched(options.limit_s)
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stdout)
    bench = _open(options)
    facts: dict[str, Any] = {
        "machine": machine(),
        "backend": bench.backend.describe(),
        "torch": torch.__version__,
        "tiny": options.tiny,
        "model": f"{bench.sizes.model.num_layers} layers, hidden {bench.sizes.model.hidden_size}, random weights",
    }
    run = Run(bench, options.child, facts, options.skip)
    run.tokens_per_s = options.our_rate
    shard, of = map(int, options.shard.split("/"))
    for name in options.only:
        began = time.perf_counter()
        print(f"{name}: {facts['backend']}, torch {torch.__version__}", flush=True)
        try:
            with run.noting(name):
                run.each(itertools.islice(PARTS[name](run), shard, None, of))
        except DeviceLostError as error:
            print(f"the device is lost in {error}", flush=True)
            return LOST
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    run.finish()
    return 1 if run.failures else 0


def _let_itself_be_watched(limit_s: float) -> None:
    """Tells where its threads are when it crashes or is asked to, and ends by itself if nobody watches any more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # writing one would take as long as the rest of the run
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    if limit_s:
        faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True)


def _open(options: argparse.Namespace) -> Bench:
    device = torch.device(options.device)
    if options.tiny:
        torch.set_num_threads(1)  # tiny ops, which threads only slow down
    backend = load_backend(options.kernel_backend, device=device)
    return Bench(open_device(device), backend, ReferenceBackend(device), TINY if options.tiny else FULL)
