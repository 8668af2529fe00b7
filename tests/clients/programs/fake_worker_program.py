"""Stands in for octavo-worker: says its flags, and lives until it is told to end; answers `kv-size`.

What it does is told by FAKE_WORKER: "run" (the default), "exit:CODE:LAST WORDS", or "once:PATH" to run, but to exit
with 1 at once where the file PATH exists.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

KV_SIZES = {
    "model": "m",
    "dtype": "float32",
    "num_layers": 2,
    "num_kv_heads": 3,
    "head_dim": 8,
    "bytes_per_element": 4,
    "scale_bytes_per_head": 0,
    "block_size": 16,
    "bytes_per_token": 384,
    "bytes_per_block": 6144,
    "max_model_len": 8192,
    "bytes_per_max_model_len": 3145728,
}


def main() -> None:
    """Does what FAKE_WORKER tells."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    kind, _, rest = os.environ.get("FAKE_WORKER", "run").partition(":")
    if kind == "exit":
        code, _, words = rest.partition(":")
        print(words, file=sys.stderr, flush=True)
        sys.exit(int(code))
    if sys.argv[1:2] == ["kv-size"]:
        sizes = KV_SIZES | ({"tokens": 100, "bytes": 43008} if "--tokens=100" in sys.argv else {})
        print(json.dumps(sizes))
        return
    print("worker flags:", *sys.argv[1:], flush=True)
    if kind == "once" and Path(rest).exists():
        sys.exit(1)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    print("worker says goodbye", flush=True)


if __name__ == "__main__":
    main()
