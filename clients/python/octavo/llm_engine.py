"""`LLM.llm_engine`: what people ask the engine behind an `LLM` for.

There is no engine in this process: it is a view of the router and the worker that the `LLM` started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.errors import UnavailableError
from octavo.stats import StatLogger
from octavo.v1 import admin_pb2, inference_pb2


@dataclass(frozen=True)
class ModelConfig:
    """Facts of the served model.

    model: its name. max_model_len: most tokens of a request, prompt and output together. vocab_size: number of token
    ids. dtype: of weights and activations. digest: of weights and configuration.
    """

    model: str
    max_model_len: int
    vocab_size: int
    dtype: str
    digest: str


def model_config_of(models: list[inference_pb2.Model], state: admin_pb2.GetStateResponse) -> ModelConfig:
    """The first served model's facts. Raises UnavailableError where none is served."""
    if not models:
        raise UnavailableError("the router serves no model yet; try again")
    model = models[0]
    dtype = state.workers[0].dtype if state.workers else ""
    return ModelConfig(model.name, model.max_model_len, model.vocab_size, dtype, model.digest)


class LLMEngine:
    """The engine behind an `LLM`, as far as people look at it: `stat_logger` and `model_config`."""

    def __init__(
        self,
        read_state: Callable[[], admin_pb2.GetStateResponse],
        list_models: Callable[[], list[inference_pb2.Model]],
    ) -> None:
        self._read_state = read_state
        self._list_models = list_models
        self.stat_logger = StatLogger(read_state)

    @property
    def model_config(self) -> ModelConfig:
        """The model's facts, read from the router."""
        return model_config_of(self._list_models(), self._read_state())

    def get_model_config(self) -> ModelConfig:
        """The same as `model_config`."""
        return self.model_config

    def do_log_stats(self) -> None:
        """The same as `stat_logger.print_stats()`."""
        self.stat_logger.print_stats()
