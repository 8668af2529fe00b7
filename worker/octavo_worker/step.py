"""A plan under way: what is answered already, and what the device still owes."""

from __future__ import annotations

from collections.abc import Callable

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.run_ahead import Launch


class Step:
    """One plan that was begun. sequence_ids: of the sequences that it computes; launch: None where nothing is owed.

    collect: fills `result` with what the launch gave; called once, by `finish`.
    """

    def __init__(
        self,
        result: pb.StepResult,
        sequence_ids: list[int],
        launch: Launch | None,
        collect: Callable[[Step], None],
    ) -> None:
        self.result, self.sequence_ids, self.launch = result, sequence_ids, launch
        self._collect = collect
        self._is_finished = launch is None

    @property
    def is_over(self) -> bool:
        """Whether `finish` need not wait for the device."""
        return self._is_finished or self.launch is None or self.launch.tokens.is_over

    def wait(self) -> None:
        """Waits for the device; may be called from any thread."""
        if self.launch is not None:
            self.launch.tokens.wait()

    def finish(self) -> pb.StepResult:
        """The answer. Called from the executor's thread; again it gives the same. Raises what the device says where it
        failed."""
        if not self._is_finished:
            self._collect(self)
            self._is_finished = True
        return self.result

    def abandon(self) -> None:
        """Nobody wants the answer any more, and the sequences are gone."""
        self._is_finished = True
