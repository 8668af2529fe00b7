"""Generates the Python stubs of the contract from protos/ into a folder; the committed ones are in clients/python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(target: Path) -> list[Path]:
    """Writes messages, services and their type stubs below `target`. Returns the files, relative to it."""
    protos = sorted(path.relative_to(ROOT / "protos") for path in (ROOT / "protos" / "octavo").rglob("*.proto"))
    plugin = Path(sys.executable).parent / "protoc-gen-mypy_grpc"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            "--proto_path=.",
            f"--python_out={target}",
            f"--pyi_out={target}",
            f"--grpc_python_out={target}",
            f"--plugin=protoc-gen-mypy_grpc={plugin}",
            f"--mypy_grpc_out=quiet:{target}",
            *map(str, protos),
        ],
        cwd=ROOT / "protos",
        check=True,
    )
    endings = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
    return [proto.with_name(proto.stem + ending) for proto in protos for ending in endings]


if __name__ == "__main__":
    for file in generate(Path(sys.argv[1]).resolve()):
        print(file)
