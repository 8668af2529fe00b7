"""Checks that the committed stubs are what protos/ gives, and that the contract breaks nobody since the last tag.

Stubs of other languages are checked where their generators are installed.
"""

from __future__ import annotations

import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

from generate_client_stubs import LANGUAGES, MissingGeneratorError
from generate_stubs import ROOT, generate

COMMITTED = ROOT / "clients" / "python"


def stale_stubs() -> list[Path]:
    """Committed stubs that are missing, or differ from what protos/ gives now."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            file
            for file in generate(Path(folder))
            if not (COMMITTED / file).exists() or not filecmp.cmp(Path(folder) / file, COMMITTED / file, shallow=False)
        ]


def stale_client_stubs() -> list[str]:
    """Stubs of clients in other languages that are missing or differ from what protos/ gives now. Says which languages
    it could not check.
    """
    stale = []
    for language, (generate_language, committed) in LANGUAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                generate_language(Path(folder))
            except MissingGeneratorError as error:
                print(f"{language} stubs are not checked: {error}")
                continue
            for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                file = committed / path.relative_to(folder)
                if not file.exists() or not filecmp.cmp(path, file, shallow=False):
                    stale.append(str(file.relative_to(ROOT)))
    return stale


def breaking_changes() -> str:
    """What `buf breaking` says against the last tag; empty where nothing breaks or nothing was released yet."""
    tag = subprocess.run(["git", "describe", "--tags", "--abbrev=0"], cwd=ROOT, capture_output=True, text=True)
    if tag.returncode != 0:
        return ""
    buf = Path(sys.executable).parent / "buf"
    against = f".git#tag={tag.stdout.strip()},subdir=protos"
    found = subprocess.run([buf, "breaking", "protos", "--against", against], cwd=ROOT, capture_output=True, text=True)
    return found.stdout + found.stderr if found.returncode != 0 else ""


def main() -> int:
    """Prints what is wrong and returns 1, or returns 0."""
    stale = stale_stubs()
    for file in stale:
        print(f"clients/python/{file}: differs from protos/; run `make proto` and commit what it writes")
    stale_clients = stale_client_stubs()
    for name in stale_clients:
        print(f"{name}: differs from protos/; run `make proto-clients` and commit what it writes")
    broken = breaking_changes()
    if broken:
        print(f"the contract breaks clients of the last tag:\n{broken}")
    return 1 if stale or stale_clients or broken else 0


if __name__ == "__main__":
    sys.exit(main())
