"""transformers beside us: what is made of its answers, with a model that only pretends."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu.bench import TINY, Bench
from gpu.peer import Peer

from octavo_kernels.reference import ReferenceBackend
from octavo_worker.devices import CpuDevice

COUNT = TINY.requests * TINY.output


@dataclass
class Config:
    """As transformers' own, for what is asked of it."""

    auto_switch_to_flash: bool = True


class Model:
    """Gives every request its tokens within two seconds. works: whether a run comes to its end."""

    config = SimpleNamespace(_attn_implementation="sdpa")

    def __init__(self, works: Any = lambda config: True) -> None:
        self._works = works
        self.num_forgotten = 0

    def generate_batch(
        self,
        inputs: Any,
        generation_config: Any,
        progress_bar: bool,
        continuous_batching_config: Any = None,
        persistent_manager: bool = False,
    ) -> dict[str, Any]:
        assert persistent_manager
        error = None if self._works(continuous_batching_config) else "no kernel image"
        tokens = [] if error else [0] * TINY.output
        output = SimpleNamespace(generated_tokens=tokens, error=error, lifespan=(10.0, 12.0))
        return {str(number): output for number in range(len(inputs))}

    def destroy_cached_continuous_batching_manager(self) -> None:
        self.num_forgotten += 1


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(model: Model) -> Peer:
        library = SimpleNamespace(__version__="5.0", GenerationConfig=lambda **_: None, ContinuousBatchingConfig=Config)
        monkeypatch.setitem(sys.modules, "transformers", library)
        device, peer = torch.device("cpu"), Peer.__new__(Peer)
        reference = ReferenceBackend(device)
        peer._model, peer._options = model, {}
        peer._bench = Bench(CpuDevice(device), reference, reference, TINY)
        return peer

    return make


def test_tokens_by_the_time_from_the_first_request_to_the_last_token(make: Any) -> None:
    peer = make(Model())
    assert list(peer.continuous()) == [COUNT / 2.0] * 3
    assert peer.attention == "sdpa"


def test_attention_that_does_not_run_is_replaced_by_the_model_s_own(make: Any) -> None:
    model = Model(lambda config: config == Config(auto_switch_to_flash=False))
    assert list(make(model).continuous()) == [COUNT / 2.0] * 3
    assert model.num_forgotten == 1


def test_what_never_works_says_why(make: Any) -> None:
    rates = make(Model(lambda config: False)).continuous()
    with pytest.raises(RuntimeError, match=f"0 tokens came of {COUNT}: no kernel image"):
        next(rates)
