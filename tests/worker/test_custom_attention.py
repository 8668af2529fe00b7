from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigError
from octavo_kernels import Backend
from octavo_worker.custom_attention import with_attention
from octavo_worker.executor import Executor
from octavo_worker.loaders.checkpoint import open_checkpoint
from octavo_worker.loaders.source import find_model
from octavo_worker.models.decoder import Decoder
from tests.worker.checkpoints import tiny_config, write_checkpoint
from tests.worker.conftest import generate, layout_of, load_decoder, make_executor, new_sequence
from tests.worker.own_attention import Plain

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
MODULE = "tests.worker.own_attention"


def attending(name: str, decoder: Decoder, backend: Backend) -> Backend:
    return with_attention(f"{MODULE}:{name}", backend, decoder.config, layout_of(decoder, backend), torch.float32)


@pytest.mark.parametrize("name", ["Plain", "Oracle"])
def test_a_class_of_ones_own_computes_attention(
    name: str, decoder: Decoder, backend: Backend, executor: Executor, tmp_path: Path
) -> None:
    expected = generate(executor, new_sequence(1, PROMPT, [5, 1, 2, 3]), 12)
    own = attending(name, decoder, backend)
    folder = write_checkpoint(tmp_path, tiny_config())
    own_executor = make_executor(load_decoder(open_checkpoint(find_model(str(folder))), own), own)
    before = Plain.num_calls
    assert generate(own_executor, new_sequence(1, PROMPT, [5, 1, 2, 3]), 12, chunk=3) == expected
    assert (Plain.num_calls - before) == (15 * decoder.config.num_layers if name == "Plain" else 0)


def test_what_a_backend_with_it_promises(decoder: Decoder, backend: Backend) -> None:
    own = attending("Plain", decoder, backend)
    assert not own.only_enqueues
    assert own.describe() == f"{backend.describe()}, attention {MODULE}:Plain"
    assert own.rms_norm == backend.rms_norm
    assert with_attention("", backend, decoder.config, layout_of(decoder, backend), torch.float32) is backend
    with pytest.raises(AttributeError, match="no attribute 'whole_layer'"):
        own.whole_layer  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Plain", "it must be MODULE:CLASS, such as"),
        ("no.such.module:Plain", "the module cannot be imported: ModuleNotFoundError: No module named 'no'"),
        (f"{MODULE}:Missing", "has no 'Missing'"),
        (f"{MODULE}:function", "it is a function, and must be a class"),
        (f"{MODULE}:Picky", "ValueError: heads of 8 are not supported"),
        (f"{MODULE}:Narrow", r"it returns shape \(3, 24\), dtype torch.float32 on cpu for three tokens; contiguous"),
        (f"{MODULE}:Unsure", "it has no only_enqueues, which must be True or False"),
    ],
)
def test_a_class_that_does_not_do_is_refused_at_start(
    name: str, message: str, decoder: Decoder, backend: Backend
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        with_attention(name, backend, decoder.config, layout_of(decoder, backend), torch.float32)
    assert error.value.message.startswith(f"attention_backend '{name}': ")
