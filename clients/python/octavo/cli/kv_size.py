"""`octavo kv-size`: how much KV memory a model's tokens take. The worker computes it; this prints it for people."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from octavo.config import WorkerConfig
from octavo.errors import InternalError, StartError
from octavo.program import WORKER, check_installed, own_words

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "kv-size",
        help="tell how much KV memory a model's tokens take",
        description="Reads a model's configuration, not its weights, and tells the bytes of K and V for a token, a "
        "block, a full context and --tokens tokens.",
    )
    defaults = WorkerConfig()
    parser.add_argument("model", metavar="MODEL", nargs="?", default=defaults.model, help="the model")
    parser.add_argument("--dtype", help="the model's data type (default: as it is served)")
    parser.add_argument(
        "--kv-cache-dtype", help="data type of K and V: auto is the model's, or int8 or fp8_e4m3 (default: auto)"
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=defaults.block_size,
        help=f"tokens in a block (default: {defaults.block_size})",
    )
    parser.add_argument("--tokens", type=int, help="tell the bytes of this many tokens, too")
    parser.add_argument("--json", action="store_true", help="print the worker's JSON as it is")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the sizes. Raises StartError with the worker's own words where the model cannot be read."""
    check_installed(WORKER)
    command = [
        sys.executable,
        "-m",
        WORKER.module,
        "kv-size",
        f"--model={args.model}",
        f"--block-size={args.block_size}",
    ]
    if args.dtype is not None:
        command.append(f"--dtype={args.dtype}")
    if args.kv_cache_dtype is not None:
        command.append(f"--kv-cache-dtype={args.kv_cache_dtype}")
    if args.tokens is not None:
        command.append(f"--tokens={args.tokens}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StartError(
            own_words(WORKER, done.stderr.splitlines()) or f"octavo-worker exited with code {done.returncode}",
            exit_code=done.returncode,
        )
    if args.json:
        print(done.stdout, end="")
        return 0
    try:
        sizes = json.loads(done.stdout)
    except ValueError:
        raise InternalError(f"octavo-worker answered something else than JSON: {done.stdout[:200]!r}") from None
    print(table(sizes))
    return 0


def table(sizes: Mapping[str, Any]) -> str:
    """The worker's figures as lines for people. Whole blocks are counted, as the pool gives them out."""
    layers, kv_heads, head_dim = sizes["num_layers"], sizes["num_kv_heads"], sizes["head_dim"]
    per_token = sizes["bytes_per_token"]
    element, scale = sizes["bytes_per_element"], sizes["scale_bytes_per_head"]
    factors = ("head size x bytes per element", f"{head_dim} x {element}")
    if scale:
        factors = ("(head size + bytes of a scale)", f"({head_dim} + {scale})")
    rows = [
        ("a token", per_token),
        (f"a block of {sizes['block_size']} tokens", sizes["bytes_per_block"]),
        (f"a full context of {sizes['max_model_len']} tokens", sizes["bytes_per_max_model_len"]),
    ]
    if "tokens" in sizes:
        rows.append((f"{sizes['tokens']} tokens, in blocks", sizes["bytes"]))
    width = max(len(label) for label, _ in rows)
    lines = [f"{sizes['model']}, K and V in {sizes['dtype']}:"]
    lines += [f"  {label:<{width}}  {_shown(size)}" for label, size in rows]
    lines += [
        f"bytes = 2 (K and V) x layers x KV heads x {factors[0]} x tokens",
        f"      = 2 x {layers} x {kv_heads} x {factors[1]} x tokens = {per_token} x tokens",
    ]
    return "\n".join(lines)


def _shown(size: int) -> str:
    """A size in bytes and, from a kibibyte on, in the largest unit that it fills."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{size} B" if unit == 0 else f"{size} B ({value:.2f} {_UNITS[unit]})"
