"""The parts of the benchmark, by name: each is a list of cases, which fail alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from gpu import decoding
from gpu.equality import equality_cases
from gpu.kernels import kernel_cases
from gpu.load import serve_load
from gpu.peer import Peer
from gpu.rows import Row
from gpu.run import Case, Run
from gpu.swap import measure_swap

_GIB = 1 << 30


def equality(run: Run) -> Iterator[Case]:
    """Every kernel, in every dtype."""
    for dtype in run.bench.sizes.checked:
        sizes = dataclasses.replace(run.bench.sizes, dtype=dtype)
        yield from equality_cases(dataclasses.replace(run.bench, sizes=sizes))


def kernels(run: Run) -> Iterator[Case]:
    """Every kernel against its floor."""
    yield from kernel_cases(run.bench, run.rates())


def decode(run: Run) -> Iterator[Case]:
    """Decode steps by batch and context."""
    for batch in run.bench.sizes.batches:
        for context in run.bench.sizes.contexts:

            def measure(batch: int = batch, context: int = context) -> Iterator[Row]:
                return _decode(run, batch, context)

            yield f"decode step, {batch} x {context}", measure


def _decode(run: Run, batch: int, context: int) -> Iterator[Row]:
    floor, served = run.floor(), run.served()
    steps = decoding.decode(run.bench, served, batch, context)
    name = f"decode step, {batch} x {context}"
    if steps is None:
        needed = batch * context / run.bench.sizes.block_size * served.pool.layout.bytes_per_block
        yield Row(f"{name}: left out, its KV memory does not fit", needed / _GIB, "GiB")
        return
    least = floor.step_s(batch, context)
    goal = "1.25 or less" if batch in (1, 64) else ""
    facts = {"mean_s": steps.mean_s, "floor_s": least, "tokens_per_s": batch / steps.mean_s}
    yield Row(name, steps.step_s * 1e3, "ms", steps.step_s / least, "times its floor", goal, facts)
    yield Row(f"  without work between steps, {batch} x {context}", 100 * steps.idle, "%", None, "", "2 % or less")


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
        yield Row(name, count / seconds, "tokens/s", ratio, "of the matrix rate", "0.55 or more", facts)

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

    def compare(kind: str, goal: str) -> Iterator[Row]:
        rate = getattr(made[0], kind)()
        name = f"transformers {made[0].version}, {kind}, the same load"
        yield Row(name, rate, "tokens/s", run.tokens_per_s / rate, "times as fast are we", goal)

    yield "transformers", make
    if made:
        yield "transformers, generate", lambda: compare("generate", "")
        yield "transformers, continuous", lambda: compare("continuous", "5 or more")
        made[0].close()


PARTS: dict[str, Callable[[Run], Iterator[Case]]] = {
    "equality": equality,
    "kernels": kernels,
    "decode": decode,
    "prefill": prefill,
    "swap": swap,
    "load": load,
    "peer": peer,
}
GROUPS = (("equality",), ("kernels",), ("decode", "prefill", "swap", "load"), ("peer",))
"""Parts that run in a process of their own, so that a device that is lost in one is there for the others."""
