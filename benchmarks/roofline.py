"""The floor of a model's steps on a device, from counted bytes and operations. Nothing is run.

    python benchmarks/roofline.py llama-3-8b --device h200
    python benchmarks/roofline.py path/to/config.json --gb-per-s 900 --tflops 120 --weights int4 --kv-dtype fp8_e4m3

Prints a table of decode steps by batch and context, and one of prompts by length. Every figure is computed and none is
measured: docs/roofline.md tells what is counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from floor import KV_DTYPES, Floor, Rates, Work
from gpu.bench import llama_8b

from octavo.errors import OctavoError
from octavo_worker.loaders.checkpoint import read_config
from octavo_worker.loaders.config import DTYPE_BYTES, ModelConfig, config_from_hf, read_json
from octavo_worker.loaders.source import find_model

# Bytes of a weight, scales included: one a row is not counted, two of fp16 for 32 weights are.
WEIGHT_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5 + 4 / 32}


@dataclass(frozen=True)
class DeviceFigures:
    """What is taken for a device: its rates, on bf16 numbers, its memory, and where these come from."""

    rates: Rates
    memory_gb: float
    source: str


SHEET = "data sheet, dense, without sparsity"
DEVICES = {
    "a100": DeviceFigures(Rates(2.039e12, 312e12), 80, SHEET),
    "h100": DeviceFigures(Rates(3.35e12, 989e12), 80, SHEET),
    "h200": DeviceFigures(Rates(4.8e12, 989e12), 141, SHEET),
}


SHAPES = {"llama-3-8b": llama_8b}


def model_config(name: str) -> ModelConfig:
    """A known shape by name, a config.json, or the config of a model that can be found."""
    if name in SHAPES:
        return SHAPES[name]()
    if name.endswith(".json"):
        return config_from_hf(read_json(Path(name)), name)
    return read_config(find_model(name))


def bound_by(work: Work, rates: Rates) -> str:
    """What takes the longest part of the floor."""
    if work.compute_s(rates) > work.memory_s(rates):
        return "arithmetic"
    return "weights" if work.weight_bytes > work.kv_bytes else "KV"


def decode_table(floor: Floor, batches: Sequence[int], contexts: Sequence[int], memory_bytes: float) -> str:
    """Markdown."""
    rows = [
        "| sequences | tokens before | weights, ms | KV, ms | arithmetic, ms | floor, ms | bound by | most tokens/s |",
        "|---:|---:|---:|---:|---:|---:|---|---:|",
    ]
    for batch in batches:
        for context in contexts:
            work, rates = floor.decode(batch, context), floor.rates
            if floor.memory_bytes(batch, context) > memory_bytes:
                needed = floor.memory_bytes(batch, context) / 1e9
                rows.append(f"| {batch:,} | {context:,} | | | | | does not fit: {needed:.0f} GB | |")
                continue
            parts = (work.weight_bytes / rates.bytes_per_s, work.kv_bytes / rates.bytes_per_s, work.compute_s(rates))
            seconds = work.floor_s(rates)
            shown = " | ".join(f"{1000 * part:.2f}" for part in (*parts, seconds))
            rows.append(f"| {batch:,} | {context:,} | {shown} | {bound_by(work, rates)} | {batch / seconds:,.0f} |")
    return "\n".join(rows)


def prefill_table(floor: Floor, lengths: Sequence[int]) -> str:
    """Markdown."""
    rows = [
        "| tokens of a prompt | memory, ms | linear layers, ms | attention, ms | floor, ms | most tokens/s |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for length in lengths:
        work, rates = floor.prefill(length), floor.rates
        parts = (work.memory_s(rates), work.linear_flops / rates.flops_per_s, work.attention_flops / rates.flops_per_s)
        seconds = work.floor_s(rates)
        shown = " | ".join(f"{1000 * part:.2f}" for part in (*parts, seconds))
        rows.append(f"| {length:,} | {shown} | {length / seconds:,.0f} |")
    return "\n".join(rows)


def numbers(text: str) -> list[int]:
    """Of a comma-separated list, each at least 1."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise ValueError
    return values


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("model", help=f"{', '.join(SHAPES)}, a config.json, or a model's folder or file")
    parser.add_argument("--device", choices=tuple(DEVICES), help="take this device's data sheet")
    parser.add_argument("--gb-per-s", type=float, help="memory rate in 10^9 bytes/s, in place of the device's")
    parser.add_argument("--tflops", type=float, help="arithmetic rate in 10^12 operations/s, in place of the device's")
    parser.add_argument("--memory-gb", type=float, help="memory in 10^9 bytes, in place of the device's")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPE_BYTES), help="data type of activations")
    parser.add_argument("--weights", default="", choices=("", *WEIGHT_BYTES), help="kind of weights; unset: dtype")
    parser.add_argument("--kv-dtype", default="", choices=("", *KV_DTYPES), help="of K and V; unset: dtype")
    parser.add_argument("--batches", type=numbers, default="1,16,64,256", help="sequences at once")
    parser.add_argument("--contexts", type=numbers, default="1000,8000", help="tokens before a step's own")
    parser.add_argument("--prompts", type=numbers, default="1000,8000", help="lengths of prompts")
    args = parser.parse_args(given)
    if args.device is None and (args.gb_per_s is None or args.tflops is None):
        parser.error("give --device, or both --gb-per-s and --tflops")
    for name in ("gb_per_s", "tflops", "memory_gb"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be positive")
    return args


def figures_of(args: argparse.Namespace) -> DeviceFigures:
    """The device's figures, with what was given in place of its own."""
    figures = DEVICES.get(args.device, DeviceFigures(Rates(0, 0), float("inf"), "as given"))
    given = (args.gb_per_s, args.tflops)
    rates = Rates(
        figures.rates.bytes_per_s if args.gb_per_s is None else args.gb_per_s * 1e9,
        figures.rates.flops_per_s if args.tflops is None else args.tflops * 1e12,
    )
    memory_gb = figures.memory_gb if args.memory_gb is None else args.memory_gb
    return DeviceFigures(rates, memory_gb, figures.source if given == (None, None) else "as given")


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    try:
        config = model_config(args.model)
    except OctavoError as error:
        print(error, file=sys.stderr)
        return 1
    figures = figures_of(args)
    weight_bytes = WEIGHT_BYTES.get(args.weights, DTYPE_BYTES[args.dtype])
    floor = Floor(config, args.dtype, weight_bytes, figures.rates, args.kv_dtype)
    print(f"Computed, not measured: {args.model}, {floor.num_weights:,} weights in linear layers and head,")
    print(f"{floor.kv_bytes_per_token:,} bytes of K and V a token;")
    rates = figures.rates
    print(f"{rates.bytes_per_s / 1e9:,.0f} GB/s and {rates.flops_per_s / 1e12:,.0f} TFLOP/s ({figures.source}).\n")
    print(decode_table(floor, args.batches, args.contexts, figures.memory_gb * 1e9) + "\n")
    print(prefill_table(floor, args.prompts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
