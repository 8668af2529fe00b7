"""Opens a model: its config, its weights, its tokenizer and the digest that names its content.

Weights are read with torch, which is imported only when a checkpoint is opened: telling a config needs none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ModelLoadError
from octavo_worker.loaders.config import ModelConfig, config_from_hf, read_json
from octavo_worker.loaders.gguf import GGUFFile
from octavo_worker.loaders.gguf_config import config_from_gguf
from octavo_worker.loaders.source import ModelSource
from octavo_worker.tokenizer import TokenizerBundle, bundle_from_folder, bundle_from_gguf

if TYPE_CHECKING:
    from octavo_worker.loaders.weights import Weights

WHOLE_FILE_BYTES = 256 << 20
_SAMPLES, _SAMPLE_BYTES = 256, 64 << 10


@dataclass(frozen=True)
class Checkpoint:
    """An opened model. Weights are read when they are asked for."""

    source: ModelSource
    config: ModelConfig
    weights: Weights
    tokenizer: TokenizerBundle
    weight_files: tuple[Path, ...]

    def digest(self) -> str:
        """SHA-256, in hex, over the config and the weight files; takes up to 0.3 s.

        Files of 256 MiB in all or less are hashed whole. Of larger ones it takes names' order, sizes and 256
        stretches of 64 KiB, spread evenly from the first byte (where the formats keep their headers: names, shapes
        and dtypes) to the last: this tells models and conversions apart, but would miss a change of a few bytes
        between. The dtype of computing is no part of it.
        """
        digest = hashlib.sha256()
        shape = dataclasses.asdict(dataclasses.replace(self.config, dtype=""))
        digest.update(json.dumps(shape, sort_keys=True).encode())
        whole = sum(path.stat().st_size for path in self.weight_files) <= WHOLE_FILE_BYTES
        for path in self.weight_files:
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with path.open("rb") as file:
                for offset, count in [(0, size)] if whole else _stretches(size):
                    file.seek(offset)
                    _hash_bytes(digest, file.read, count)
        return digest.hexdigest()


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Reads everything but the weights. Raises ModelLoadError."""
    if source.is_gguf:
        from octavo_worker.loaders.weights import GGUFWeights

        file = GGUFFile(source.path)
        config = config_from_gguf(file)
        tokenizer = bundle_from_gguf(file)
        return Checkpoint(source, config, GGUFWeights(file, config), tokenizer, (source.path,))
    from octavo_worker.loaders.safetensors import SafetensorsWeights

    config = read_config(source)
    weights = SafetensorsWeights(source.path)
    if not config.tie_word_embeddings and "lm_head.weight" not in weights.entries:
        raise ModelLoadError(
            f"{source.path}: tensor lm_head.weight is missing, and config.json does not tie it to the embeddings "
            f"(tie_word_embeddings is false)"
        )
    tokenizer = bundle_from_folder(source.path, config.eos_token_ids)
    return Checkpoint(source, config, weights, tokenizer, tuple(sorted(set(weights.files.values()))))


def read_config(source: ModelSource) -> ModelConfig:
    """Only a model's config. Raises ModelLoadError."""
    if source.is_gguf:
        return config_from_gguf(GGUFFile(source.path))
    path = source.path / "config.json"
    return config_from_hf(read_json(path), str(path))


def _stretches(size: int) -> Iterable[tuple[int, int]]:
    """(offset, count) of the parts of a large file that are hashed."""
    last = max(size - _SAMPLE_BYTES, 0)
    for index in range(_SAMPLES):
        yield last * index // (_SAMPLES - 1), _SAMPLE_BYTES


def _hash_bytes(digest: hashlib._Hash, read: Callable[[int], bytes], count: int) -> None:
    while count > 0 and (piece := read(min(count, 1 << 20))):
        digest.update(piece)
        count -= len(piece)
