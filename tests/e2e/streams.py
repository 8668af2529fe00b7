"""Streams that are read in threads of their own, over gRPC and over HTTP, so that a test can disturb them meanwhile.

Both count as they read and keep an `Answer`. HTTP does not tell token ids: there it has texts and log-probabilities.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import httpx

from octavo.v1 import inference_pb2
from tests.e2e.harness import CALL_TIMEOUT_S, Answer, Server, add_deltas, request_of, wait_until


class Stream(threading.Thread, ABC):
    """A request of one sample that is being read. `error` is what ended it early, if anything did."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.answer = Answer()
        self.num_completion_tokens = 0
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._read()
        except Exception as error:
            self.error = error

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens received so far."""

    @abstractmethod
    def leave(self) -> None:
        """Ends the call from the client's side, whatever it is doing."""

    @abstractmethod
    def _read(self) -> None: ...

    def wait_begun(self) -> None:
        """Waits for the first token. AssertionError if none comes."""
        wait_until(lambda: self.num_tokens > 0 or not self.is_alive(), 60, lambda: "no token came")
        assert self.error is None, f"the stream ended with {self.error}"

    def finish(self, timeout_s: float = CALL_TIMEOUT_S) -> Answer:
        """The answer once the stream has ended. Raises what ended it early."""
        self.join(timeout_s)
        assert not self.is_alive(), f"the stream has not ended within {timeout_s:g} s"
        if self.error is not None:
            raise self.error
        return self.answer


class GrpcStream(Stream):
    """Over gRPC; options as `request_of`'s."""

    def __init__(self, server: Server, prompt: Any, **options: Any) -> None:
        self._call = server.start(request_of(prompt, **options))
        super().__init__()

    @property
    def num_tokens(self) -> int:
        return len(self.answer.token_ids)

    def leave(self) -> None:
        self._call.cancel()

    def _read(self) -> None:
        answers = {0: self.answer}
        for response in self._call:
            add_deltas(answers, response)
            self._take_usage(response)

    def _take_usage(self, response: inference_pb2.GenerateResponse) -> None:
        if response.HasField("usage"):
            self.num_completion_tokens = response.usage.completion_token_count


class HttpStream(Stream):
    """Over HTTP, from /v1/completions with log-probabilities; options are the body's fields."""

    def __init__(self, server: Server, prompt: Any, **options: Any) -> None:
        self._url = f"{server.http_url}/v1/completions"
        self._body = {
            "prompt": prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": 0,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
            **options,
        }
        self._has_left = False
        super().__init__()

    @property
    def num_tokens(self) -> int:
        return len(self.answer.logprobs)

    def leave(self) -> None:
        self._has_left = True

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=CALL_TIMEOUT_S) as response:
            if response.status_code != 200:
                raise RuntimeError(f"status {response.status_code}: {response.read().decode()}")
            for line in lines_of(response.iter_bytes()):
                if self._has_left:
                    return
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    self._take(json.loads(line.removeprefix(b"data: ")))

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise RuntimeError(f"the stream ended with {event['error']}")
        if event.get("usage"):
            self.num_completion_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            if choice["logprobs"]:
                self.answer.logprobs.extend(choice["logprobs"]["token_logprobs"])
            if choice["text"]:
                self.answer.deltas.append(choice["text"])
            self.answer.finish_reason = choice["finish_reason"] or self.answer.finish_reason


def lines_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of an event stream. httpx' own would also end at U+2028 and U+0085, which a token's text may hold."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines


def wait_for_tokens(streams: Sequence[Stream], num_tokens: int) -> None:
    """Waits until the streams have brought so many tokens together. AssertionError if they stop before."""

    def received() -> int:
        return sum(stream.num_tokens for stream in streams)

    wait_until(lambda: received() >= num_tokens, CALL_TIMEOUT_S, lambda: f"{received()} tokens came, and no more")


def kill_worker_during(server: Server, streams: Sequence[Stream], num_expected: int, num_kills: int) -> None:
    """Kills the worker with SIGKILL `num_kills` times, evenly spread over the tokens that the streams will bring. The
    server is one that has not lost a worker before.

    num_expected: tokens of all streams together.
    """
    for kill in range(1, num_kills + 1):
        wait_for_tokens(streams, num_expected * kill // (num_kills + 1))
        # What had been on its way to the clients may have been enough: the next worker must be there to be killed.
        wait_until(lambda: server.is_connected(), CALL_TIMEOUT_S, lambda: "the worker did not come back")
        assert any(stream.is_alive() for stream in streams), "everything had ended before the kill"
        os.kill(server.pair.pids()["worker"], signal.SIGKILL)
        wait_until(partial(_has_lost, server, kill), 30, lambda: "the router did not notice that its worker is gone")


def _has_lost(server: Server, num_sessions: int) -> bool:
    return server.state().workers[0].lost_session_count >= num_sessions
