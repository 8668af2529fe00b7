"""The parts of the benchmark, by name: each is a list of cases, which fail alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from gpu import decoding
from gpu.equality import equality_cases
from gpu.groups import PART_NAMES
from gpu.kernels import kernel_cases
from gpu.load import serve_load
from gpu.model import load as load_model
from gpu.model import serve
from gpu.peer import Peer
from gpu.rows import Row
from gpu.run import Case, Run
from gpu.swap import measure_swap
from octavo_worker.run_ahead import RunAhead

_GIB = 1 << 30
_GOAL_BATCHES = (1, 64)
_COMPILED_LAYERS = 2


def equality(run: Run) -> Iterator[Case]:
    """Every kernel, in the dtype that matters most."""
    return _equality(run, run.bench.sizes.checked[0])


def dtypes(run: Run) -> Iterator[Case]:
    """Every kernel, in the other dtypes."""
    for dtype in run.bench.sizes.checked[1:]:
        yield from _equality(run, dtype)


def _equality(run: Run, dtype: torch.dtype) -> Iterator[Case]:
    sizes = dataclasses.replace(run.bench.sizes, dtype=dtype)
    return equality_cases(dataclasses.replace(run.bench, sizes=sizes))


def compile_kernels(run: Run) -> Iterator[Case]:
    """What steps of the model need is compiled and left in Triton's cache, by a model of the same shape with few layers
    and a small pool: others may be on the device."""

    def measure() -> Iterator[Row]:
        sizes, few = run.bench.sizes, min(_COMPILED_LAYERS, run.bench.sizes.model.num_layers)
        model = dataclasses.replace(sizes.model, num_layers=few, sliding_windows=(None,) * few)
        bench = dataclasses.replace(run.bench, sizes=dataclasses.replace(sizes, model=model, contexts=(1000,)))
        serve(bench, load_model(bench), RunAhead, run.noting)
        yield from ()

    yield "kernels of the model's steps", measure


def decode(run: Run) -> Iterator[Case]:
    """Decode steps by batch and context, those that have a goal first."""
    for batch in sorted(run.bench.sizes.batches, key=lambda batch: batch not in _GOAL_BATCHES):
        for context in run.bench.sizes.contexts:

            def measure(batch: int = batch, context: int = context) -> Iterator[Row]:
                return _decode(run, batch, context)

            yield f"decode step, {batch} x {context}", measure
    yield "decode step without waits", lambda: _waits(run)


def _waits(run: Run) -> Iterator[Row]:
    """Whether the host waits for the device while it launches a decode step, which no timing tells for certain."""
    name, served = "decode step: waits of the host in its launch", run.served()
    batch, context = min(run.bench.sizes.batches), min(run.bench.sizes.contexts)
    facts = {"is_graph": served.has_graphs, "batch": batch, "context": context}
    try:
        decoding.step_without_waits(run.bench, served, batch, context)
    except RuntimeError as error:
        if "synchroniz" in str(error):
            yield Row(name, 1, "or more", 1.0, "waits", at_most=0.0, facts={**facts, "first": str(error)})
        raise
    if run.bench.device.is_asynchronous:  # elsewhere there is nothing to wait for, and nothing was found out
        yield Row(name, 0, "", 0.0, "waits", at_most=0.0, facts=facts)


def _decode(run: Run, batch: int, context: int) -> Iterator[Row]:
    floor, served = run.floor(), run.served()
    steps = decoding.decode(run.bench, served, batch, context)
    name = f"decode step, {batch} x {context}"
    if steps is None:
        needed = batch * context / run.bench.sizes.block_size * served.pool.layout.bytes_per_block
        yield Row(f"{name}: left out, its KV memory does not fit", needed / _GIB, "GiB")
        return
    least = floor.step_s(batch, context)
    at_most = 1.25 if batch in _GOAL_BATCHES else None
    facts = {"mean_s": steps.mean_s, "floor_s": least, "tokens_per_s": batch / steps.mean_s}
    facts |= {"is_graph": served.has_graphs}
    yield Row(name, steps.step_s * 1e3, "ms", steps.step_s / least, "times its floor", at_most=at_most, facts=facts)
    if steps.idle is None:
        raise RuntimeError("steps were not put into the device's queue ahead, so nothing is known of its idle time")
    name = f"  without work between steps, {batch} x {context}"
    yield Row(name, 100 * steps.idle, "%", steps.idle, "of the time", at_most=0.02)


def prefill(run: Run) -> Iterator[Case]:
    """A long prompt in one step."""

    def measure() -> Iterator[Row]:
        floor, count = run.floor(), run.bench.sizes.prefill
        seconds = decoding.prefill(run.bench, run.served())
        work = floor.prefill(count)
        flops = work.linear_flops + work.attention_flops
        facts = {"seconds": seconds, "flops": flops, "floor_s": work.floor_s(floor.rates)}
        ratio = flops / seconds / floor.rates.flops_per_s
        name = f"prompt of {count} tokens"
        yield Row(name, count / seconds, "tokens/s", ratio, "of the matrix rate", at_least=0.55, facts=facts)

    yield "prompt", measure


def swap(run: Run) -> Iterator[Case]:
    """Moves between the tiers."""
    yield "swap", lambda: measure_swap(run.bench, run.served())


def load(run: Run) -> Iterator[Case]:
    """Many requests at once."""

    def measure() -> Iterator[Row]:
        sizes, served = run.bench.sizes, run.served()
        serve_load(run.bench, served, 0)
        loads = [serve_load(run.bench, served, seed) for seed in (1, 2)]
        best = max(loads, key=lambda load: load.num_tokens / load.seconds)
        run.tokens_per_s = best.num_tokens / best.seconds
        name = f"{sizes.requests} requests of {sizes.prompt} + {sizes.output} tokens"
        yield Row(name, run.tokens_per_s, "tokens/s", facts={"first_s": best.first_s, "steps": best.num_steps})

    yield "load", measure


def peer(run: Run) -> Iterator[Case]:
    """transformers with the same load."""
    if not run.tokens_per_s:
        yield from load(run)
    run.drop_served()
    made: list[Peer] = []

    def make() -> Iterator[Row]:
        made.append(Peer(run.bench))
        yield from ()

    def compare(kind: str, at_least: float | None) -> Iterator[Row]:
        """A row for each time that is counted, each in place of the one before: the best so far."""
        name, best = f"transformers {made[0].version}, {kind}, the same load", 0.0
        for number, rate in enumerate(getattr(made[0], kind)()):
            best = max(best, rate)
            ratio = run.tokens_per_s / best if run.tokens_per_s else None
            facts = {"times": number + 1, "attention": made[0].attention}
            yield Row(name, best, "tokens/s", ratio, "times as fast are we", at_least, facts=facts)

    yield "transformers", make
    if made:
        yield "transformers, generate", lambda: compare("generate", None)
        yield "transformers, continuous", lambda: compare("continuous", 5.0)
        made[0].close()


PARTS: dict[str, Callable[[Run], Iterator[Case]]] = {
    "equality": equality,
    "compile": compile_kernels,
    "decode": decode,
    "prefill": prefill,
    "swap": swap,
    "load": load,
    "kernels": lambda run: kernel_cases(run.bench, run.rates),
    "peer": peer,
    "dtypes": dtypes,
}
assert PARTS.keys() == set(PART_NAMES)
