from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.errors import ModelLoadError
from octavo_worker.loaders.checkpoint import Checkpoint, open_checkpoint
from octavo_worker.loaders.gguf import GGUFFile
from octavo_worker.loaders.gguf_config import gguf_tensor_name
from octavo_worker.loaders.source import find_model
from tests.worker.checkpoints import tiny_config, write_checkpoint


@pytest.fixture(scope="module")
def stored(default_model: Path) -> Checkpoint:
    return open_checkpoint(find_model(str(default_model)))


@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"])
def test_groups_of_a_file_are_kept(stored: Checkpoint, part: str) -> None:
    """Also where rows are put into another order."""
    config, name = stored.config, f"model.layers.3.{part}.weight"
    rows = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads, "v_proj": config.num_kv_heads}
    heads = rows.get(part.split(".")[1])
    shape = (config.hidden_size, config.intermediate_size)
    if heads is not None:
        shape = (heads * config.head_dim, config.hidden_size)
    weight = stored.weights.get_int4(name, shape)
    assert weight is not None
    assert torch.equal(weight.dequantize(), stored.weights.get(name, shape, torch.float32))


def test_bytes_of_a_block(stored: Checkpoint, default_model: Path) -> None:
    """Q4_1: a scale and a minimum in fp16, then 16 bytes, whose low halves are the first 16 values."""
    config, name = stored.config, "model.layers.0.mlp.down_proj.weight"
    weight = stored.weights.get_int4(name, (config.hidden_size, config.intermediate_size))
    assert weight is not None
    block = GGUFFile(default_model).data(gguf_tensor_name(name))[20:40]  # the second of the first row
    numbers = block[:4].view(np.float16)
    assert weight.scales[0, 1].item() == numbers[0]
    assert weight.minimums[0, 1].item() == numbers[1]
    assert weight.integers[0, 32:64].tolist() == [*(block[4:] & 15).tolist(), *(block[4:] >> 4).tolist()]


def test_what_is_not_of_4_bits_has_no_groups(stored: Checkpoint, tmp_path: Path) -> None:
    shape = (stored.config.vocab_size, stored.config.hidden_size)
    assert stored.weights.get_int4("model.embed_tokens.weight", shape) is None  # Q8_0
    folder = open_checkpoint(find_model(str(write_checkpoint(tmp_path, tiny_config()))))
    shape = (folder.config.vocab_size, folder.config.hidden_size)
    assert folder.weights.get_int4("lm_head.weight", shape) is None


def test_a_wrong_shape_is_refused(stored: Checkpoint) -> None:
    with pytest.raises(ModelLoadError, match=r"ffn_down\.weight has shape"):
        stored.weights.get_int4("model.layers.0.mlp.down_proj.weight", (7, 7))
