#!/usr/bin/env python3
"""Generates the stubs of the clients in other languages from protos/, each where its generator is installed.

    python scripts/generate_client_stubs.py [go] [typescript]

Without arguments: all whose generators are here. The compiler is grpcio-tools'; the generators are

    go          protoc-gen-go and protoc-gen-go-grpc of the versions in GO_VERSIONS, on the PATH or in GOPATH/bin;
                without the first it is built of Debian's golang-google-protobuf-dev, where that is installed
    typescript  protoc-gen-es, which `npm install` in clients/typescript brings
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from generate_stubs import ROOT

GO_FOLDER = ROOT / "clients" / "go"
TYPESCRIPT_FOLDER = ROOT / "clients" / "typescript"
# Import paths are given here, so that the protos stay neutral to language.
GO_PACKAGES = {"octavo/v1": "octavo/v1;octavov1"}
# Old on purpose: what they write compiles with their own libraries and with every newer one.
GO_VERSIONS = {"protoc-gen-go": "v1.28.1", "protoc-gen-go-grpc": "1.0"}
DEBIAN_GO_SOURCES = Path("/usr/share/gocode")
PROTOC_GEN_GO = "google.golang.org/protobuf/cmd/protoc-gen-go"


class MissingGeneratorError(Exception):
    """A language's generator is not installed; the message says how to get it."""


def public_protos() -> list[str]:
    """The public contract's files, relative to protos/."""
    protos = ROOT / "protos"
    return sorted(str(path.relative_to(protos)) for path in (protos / "octavo" / "v1").glob("*.proto"))


def generate_go(target: Path) -> None:
    """Writes clients/go's stubs below `target`: v1/*.pb.go. Raises MissingGeneratorError."""
    with tempfile.TemporaryDirectory() as scratch:
        grpc_plugin = _checked_version("protoc-gen-go-grpc", _go_tool("protoc-gen-go-grpc"))
        plugin = _checked_version("protoc-gen-go", _go_tool("protoc-gen-go") or _built_protoc_gen_go(Path(scratch)))
        mapping = [f"M{file}={GO_PACKAGES[str(Path(file).parent)]}" for file in public_protos()]
        options = ",".join(["module=octavo", *mapping])
        _protoc(
            f"--plugin=protoc-gen-go={plugin}",
            f"--plugin=protoc-gen-go-grpc={grpc_plugin}",
            f"--go_out={options}:{target}",
            f"--go-grpc_out={options}:{target}",
            *public_protos(),
        )
    for file in target.rglob("*.pb.go"):
        _drop_compiler_version(file)


def generate_typescript(target: Path) -> None:
    """Writes clients/typescript's stubs below `target`: octavo/v1/*.ts, and google/rpc for the details of errors.
    Raises MissingGeneratorError.
    """
    plugin = TYPESCRIPT_FOLDER / "node_modules" / ".bin" / "protoc-gen-es"
    if not plugin.exists() or shutil.which("node") is None:
        raise MissingGeneratorError("protoc-gen-es is missing; run `npm install` in clients/typescript")
    _protoc(
        f"--plugin=protoc-gen-es={plugin}",
        f"--es_out=target=ts,import_extension=js:{target}",
        *public_protos(),
        "google/rpc/status.proto",
        "google/rpc/error_details.proto",
    )


# Language: what generates, and the folder where what it writes is committed.
LANGUAGES: dict[str, tuple[Callable[[Path], None], Path]] = {
    "go": (generate_go, GO_FOLDER),
    "typescript": (generate_typescript, TYPESCRIPT_FOLDER / "src" / "gen"),
}


def _protoc(*arguments: str) -> None:
    import google.rpc.status_pb2 as bundled  # its folder has the .proto files of google.rpc

    assert bundled.__file__ is not None
    common = Path(bundled.__file__).parent.parent.parent
    command = [sys.executable, "-m", "grpc_tools.protoc", "--proto_path=.", f"--proto_path={common}", *arguments]
    subprocess.run(command, cwd=ROOT / "protos", check=True)


def _go_tool(name: str) -> str | None:
    gopath = os.environ.get("GOPATH", str(Path.home() / "go"))
    folders = [str(Path(folder) / "bin") for folder in gopath.split(os.pathsep)]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))


def _checked_version(name: str, plugin: str | None) -> str:
    """The plugin. Raises MissingGeneratorError where there is none, or one of another version, whose code differs."""
    if plugin is None:
        raise MissingGeneratorError(f"{name} {GO_VERSIONS[name]} is missing; see clients/go/README.md")
    said = subprocess.run([plugin, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    if said != GO_VERSIONS[name]:
        raise MissingGeneratorError(f"{plugin} is version {said}; the stubs are made with {GO_VERSIONS[name]}")
    return plugin


def _built_protoc_gen_go(scratch: Path) -> str | None:
    """The generator, built of Debian's sources; None without them."""
    if shutil.which("go") is None or not (DEBIAN_GO_SOURCES / "src" / PROTOC_GEN_GO).is_dir():
        return None
    plugin = scratch / "protoc-gen-go"
    environment = {**os.environ, "GO111MODULE": "off", "GOFLAGS": "", "GOPATH": f"{scratch}:{DEBIAN_GO_SOURCES}"}
    subprocess.run(["go", "build", "-o", str(plugin), PROTOC_GEN_GO], env=environment, check=True)
    return str(plugin)


def _drop_compiler_version(file: Path) -> None:
    """The version of protoc is in the head of Go's files, and tells nothing: equal protos give equal stubs."""
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if not (line.startswith("// ") and " protoc  " in line)))


def main() -> int:
    """Generates for the languages that are named, or for all that can be. Returns 1 if a named one cannot."""
    failed = False
    for language in sys.argv[1:] or LANGUAGES:
        generate, folder = LANGUAGES[language]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            generate(folder)
        except MissingGeneratorError as error:
            print(f"{language}: not generated: {error}", file=sys.stderr)
            failed = failed or language in sys.argv[1:]
        else:
            print(f"{language}: generated below {folder.relative_to(ROOT)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
