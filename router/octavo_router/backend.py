"""What stands behind the front ends: nothing until a worker has answered, an engine from then on.

The servers take connections as soon as the router runs, so that health and metrics are answered while a model loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import UnavailableError

if TYPE_CHECKING:
    from octavo_router.engine import Engine
    from octavo_router.inference import Inference
    from octavo_router.tokenizer import Tokenizer

RETRY_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class Serving:
    """All that answers requests once there is a worker."""

    engine: Engine
    inference: Inference
    tokenizer: Tokenizer


class Backend:
    """Opened once. Every attribute but is_ready raises UnavailableError before."""

    def __init__(self) -> None:
        self._serving: Serving | None = None

    def open(self, engine: Engine, inference: Inference, tokenizer: Tokenizer) -> None:
        """There is a worker: requests go to these from now on."""
        self._serving = Serving(engine, inference, tokenizer)

    @property
    def is_ready(self) -> bool:
        """Whether a request would be served at once: a worker answers, and nothing drains."""
        return self._serving is not None and self._serving.engine.is_ready

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._opened().engine

    @property
    def inference(self) -> Inference:
        """The contract over the engine."""
        return self._opened().inference

    @property
    def tokenizer(self) -> Tokenizer:
        """The served model's tokenizer."""
        return self._opened().tokenizer

    def _opened(self) -> Serving:
        if self._serving is None:
            raise UnavailableError(
                "the router waits for its first worker, which may still be loading the model; try again, or ask /ready "
                "(grpc.health.v1 over gRPC) when to",
                retry_after_s=RETRY_AFTER_S,
            )
        return self._serving
