"""Decode steps recorded once for a few batch sizes and replayed, so that a step is not many launches but one.

A batch takes the smallest bucket that holds it. The lanes that are left over compute a token that nobody asked for, in
a block of their own. What comes before the pass (`Backend.advance_decode`) and behind it (head, sampling) is not
recorded, so its memory may change.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from octavo_kernels.decode_state import DecodeInputs
from octavo_worker.devices import Device, Graph
from octavo_worker.kv_pool import KVPool
from octavo_worker.models.decoder import Decoder

_log = logging.getLogger(__name__)
LARGEST_BUCKET = 256


def buckets(most: int) -> tuple[int, ...]:
    """Batch sizes that are recorded, ascending: 1, 2, 4 and multiples of 8, up to the first that holds `most`
    sequences, or to LARGEST_BUCKET."""
    sizes = (1, 2, 4, *range(8, LARGEST_BUCKET + 1, 8))
    return sizes[: bisect.bisect_left(sizes, most) + 1]


class DecodeGraphs:
    """The recorded passes of one model over one pool.

    inputs: where a pass finds its tokens; as many lanes as the largest bucket. largest: that bucket.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        device: Device,
        inputs: DecodeInputs,
        sizes: Sequence[int],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Records a graph for each of `sizes`, which ascend. Inputs must be lanes of padding. on_progress is called
        after each."""
        self.inputs, self.largest = inputs, sizes[-1]
        self._sizes = list(sizes)
        self._graphs: dict[int, Graph] = {}
        started = time.monotonic()
        for done, size in enumerate(reversed(self._sizes)):  # the largest first: the others fit into its memory
            self._graphs[size] = device.capture(_pass(decoder, pool, inputs, size))
            on_progress()
            if done % 8 == 7 or size == self._sizes[0]:
                _log.info("recorded %d of %d graphs of decode steps", done + 1, len(self._sizes))
        _log.info(
            "decode steps of up to %d sequences are graphs, recorded in %.1f s",
            self.largest,
            time.monotonic() - started,
        )

    def bucket(self, num_lanes: int) -> int | None:
        """The size that is recorded for so many lanes; None where they are too many."""
        at = bisect.bisect_left(self._sizes, num_lanes)
        return self._sizes[at] if at < len(self._sizes) else None

    def replay(self, size: int) -> Tensor:
        """Computes the inputs' first lanes. Returns (size, hidden), as `Decoder.hidden`; the next replay of this size
        overwrites it."""
        graph = self._graphs[size]
        graph.replay()
        return graph.output


def _pass(decoder: Decoder, pool: KVPool, inputs: DecodeInputs, size: int) -> Callable[[], Tensor]:
    token_ids, batch = inputs.token_ids[:size], inputs.batch(size)
    return lambda: decoder.hidden(token_ids, batch, pool.layers)
