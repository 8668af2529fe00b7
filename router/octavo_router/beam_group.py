"""One request's beams between steps: whose candidates are there, and what the search made of the last full round.

    candidates of every beam --advance--> step, not carried out --(the scheduler forks)--> next round

What the search decides is `beam_search.py`'s; tables and plans are the scheduler's.
"""

from __future__ import annotations

from octavo_router.beam_search import BeamSearch, BeamStep
from octavo_router.request import Request


class BeamGroup:
    """The state of one search.

    num_active: beams that have tokens of their own: one, which computes the prompt, then all; step: where the search
    goes next, decided and not yet carried out.
    """

    def __init__(self, request: Request, *, eos_token_ids: frozenset[int]) -> None:
        beams = request.sampling.beams
        assert beams is not None
        self.width = beams.beam_width
        self.search = BeamSearch(beams, max_tokens=request.stopping.max_tokens, eos_token_ids=eos_token_ids)
        self.num_active = 1
        self.step: BeamStep | None = None
        self._candidates: dict[int, list[tuple[int, float]]] = {}

    def add(self, index: int, candidates: list[tuple[int, float]]) -> bool:
        """Takes in a beam's candidates. Returns whether this round has all."""
        self._candidates[index] = candidates
        return len(self._candidates) == self.num_active

    def advance(self) -> None:
        """Decides on a full round. Raises ValueError for candidates that the search cannot go on from."""
        self.step = self.search.step([self._candidates[index] for index in range(self.num_active)])
        self._candidates.clear()

    def carried_out(self) -> None:
        """Every beam has the tokens that the step gave it."""
        self.step = None
        self.num_active = self.width

    def drop_candidates(self) -> None:
        """The round is lost: every beam has to bring its candidates anew."""
        self._candidates.clear()
