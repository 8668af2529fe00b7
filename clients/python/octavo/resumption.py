"""Whether and when a request whose server went away is sent again, and what is sent then.

A server that took a request on and is gone (killed, restarted, cut off) leaves its caller with what came so far. The
request goes on behind that, on the server that is found at the same address within a time. Does no I/O and keeps no
time of its own but the clock's; both clients ask it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

from octavo.errors import OctavoError, OverloadedError, UnavailableError
from octavo.output_builder import OutputBuilder
from octavo.v1 import inference_pb2

DEFAULT_RESUME_TIMEOUT_S = 60.0

_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 1.0
_ACCEPTED_KEY = "octavo-accepted"


def is_accepted(initial_metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether a call's initial metadata say that the server has taken the request on."""
    return any(key == _ACCEPTED_KEY for key, _ in initial_metadata or ())


class Resumption:
    """One request's tries. `request` and `timeout_s` are for the next call, also for the first one."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        builder: OutputBuilder,
        *,
        timeout_s: float | None,
        resume_timeout_s: float,
        wait_for_server: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """timeout_s: for the whole request, over all tries. resume_timeout_s: from a loss until it is given up.
        wait_for_server: the first server that is not reached is waited for as one that went away is.
        """
        self._request = request
        self._builder = builder
        self._deadline = None if timeout_s is None else clock() + timeout_s
        self._resume_timeout_s = resume_timeout_s
        self._may_resume = wait_for_server
        self._clock = clock
        self._gives_up_at: float | None = None
        self._delay_s = _FIRST_DELAY_S

    @property
    def timeout_s(self) -> float | None:
        """What is left of the request's time."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def request(self) -> inference_pb2.GenerateRequest:
        """The request, going on behind what has come of it."""
        resume = self._builder.resume()
        if resume is None:
            return self._request
        again = inference_pb2.GenerateRequest()
        again.CopyFrom(self._request)
        again.request_id = self._builder.request_id
        # The prompt as it was rendered: a template that knows the date may render another one now.
        again.token_ids.ids[:] = resume.prompt_token_ids
        again.output.return_prompt_token_ids = False
        again.resume.CopyFrom(resume)
        return again

    def progressed(self) -> None:
        """A response has come: the server is there, and a loss from now on is another one."""
        self._may_resume = True
        self._gives_up_at = None
        self._delay_s = _FIRST_DELAY_S

    def delay_after(self, error: OctavoError, *, accepted: bool) -> float | None:
        """Seconds until the next try after a call that failed; None where the error is the request's end.

        accepted: whether the server had taken the call on. A full queue is waited for only by a request that was.
        """
        self._may_resume = self._may_resume or accepted
        if not self._may_resume or not isinstance(error, UnavailableError | OverloadedError):
            return None
        now = self._clock()
        if isinstance(error, OverloadedError):
            if self._gives_up_at is None:
                return None
            delay = error.retry_after_s
        else:
            # Many callers lose one server at the same moment; they should not come back at the same one.
            delay = self._delay_s * random.uniform(0.5, 1.0)
            self._delay_s = min(2 * self._delay_s, _MAX_DELAY_S)
        if self._gives_up_at is None:
            self._gives_up_at = now + self._resume_timeout_s
        if now >= self._gives_up_at:
            return None
        limits = [delay, self._gives_up_at - now]
        if self._deadline is not None:
            limits.append(max(0.0, self._deadline - now))
        return min(limits)
