"""Chat templates of requests: rendered in processes of their own, with little time and memory.

A client's template is a client's program. The sandbox of `chat_template.py` keeps it from Python's internals, and its
meter bounds loops, but an operator or a filter may still take any time and memory in one step. So it runs in a child
process whose memory is limited by the system and which is killed when its time is over; a child that lived is used
again. Run as a module this is that child: one request a line on stdin, one answer a line on stdout, both JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from octavo.errors import InvalidRequestError, UnavailableError
from octavo_router.chat_template import ChatTemplate
from octavo_router.child_process import child_command, child_environment

MAX_SOURCE_LENGTH: Final = 256 << 10
"""Most characters of a request's template."""

MAX_PROMPT_LENGTH: Final = 16 << 20
"""Most characters that it may write."""

TIMEOUT_S: Final = 2.0
MEMORY_BYTES: Final = 768 << 20
MAX_CPU_S: Final = 4.0
"""Ends a child whose router was killed and cannot end it. Above TIMEOUT_S, which a living router keeps."""

_START_TIMEOUT_S: Final = 20.0
_FIELD: Final = "chat.chat_template"
_READY: Final = "ready"
_DOES_NOT_START: Final = "the process for chat templates of requests does not start"


class TemplateProcesses:
    """Renders templates of requests. To be called in threads; each call has a child of its own while it runs."""

    def __init__(self, special_tokens: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> None:
        """special_tokens: as `ChatTemplate`'s. Children are started when they are needed."""
        self._special_tokens = dict(special_tokens)
        self._timeout_s = timeout_s
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        self._closed = False

    def render(self, source: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """What `ChatTemplate(source).render(messages, **options)` gives. Raises InvalidRequestError where that does,
        and for a template that is too long, takes too long or needs too much memory; UnavailableError where no child
        can be started.
        """
        if len(source) > MAX_SOURCE_LENGTH:
            raise _refusal(f"has {len(source)} characters; at most {MAX_SOURCE_LENGTH} are taken")
        request = {
            "source": source,
            "special_tokens": self._special_tokens,
            "messages": [dict(message) for message in messages],
            "options": options,
        }
        child = self._take_idle() or _Child()
        try:
            answer = child.ask(json.dumps(request), self._timeout_s)
        except BaseException:
            child.kill()
            raise
        self._idle.put(child)
        if self._closed:
            self._end_idle()
        if "error" in answer:
            raise InvalidRequestError(answer["error"], field=answer["field"])
        return str(answer["text"])

    def close(self) -> None:
        """Ends the children that are idle, and the others once they have answered."""
        self._closed = True
        self._end_idle()

    def _take_idle(self) -> _Child | None:
        """An idle child that still runs; what else there is has been killed by the system, and is cleared away."""
        with contextlib.suppress(queue.Empty):
            while True:
                child = self._idle.get_nowait()
                if child.is_running:
                    return child
                child.kill()
        return None

    def _end_idle(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().kill()


class _Child:
    """One child process, waiting for a request."""

    def __init__(self) -> None:
        """Raises UnavailableError where it does not start."""
        try:
            self._process = subprocess.Popen(
                child_command("octavo_router.template_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the router's to handle
                env=child_environment(),
            )
        except OSError as error:
            raise UnavailableError(f"{_DOES_NOT_START}: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        try:
            if self._read_line(_START_TIMEOUT_S) != _READY:
                raise UnavailableError(f"{_DOES_NOT_START}: it ended at once")
        except TimeoutError:
            self.kill()
            raise UnavailableError(f"{_DOES_NOT_START} within {_START_TIMEOUT_S:g} s") from None
        except BaseException:
            self.kill()
            raise

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def ask(self, request: str, timeout_s: float) -> dict[str, Any]:
        """The answer to a request. Raises InvalidRequestError where none comes in time; the child is of no use then."""
        try:
            self._stdin.write(request.encode() + b"\n")
            self._stdin.flush()
            line = self._read_line(timeout_s)
        except BrokenPipeError:
            line = ""
        except TimeoutError:
            raise _refusal(f"takes more than {timeout_s:g} s") from None
        if not line:
            raise _refusal("needs more memory than it may have, or made its process fail")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """Ends it now."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._stdout.close()
        self._process.wait()

    def _read_line(self, timeout_s: float) -> str:
        """A line without its end; empty once the child has ended. Raises TimeoutError where none comes in time."""
        ends_at = time.monotonic() + timeout_s
        parts: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while not (parts and parts[-1].endswith(b"\n")):
                if not selector.select(max(0.0, ends_at - time.monotonic())):
                    raise TimeoutError
                if not (part := os.read(self._stdout.fileno(), 1 << 20)):
                    return ""
                parts.append(part)
        return b"".join(parts)[:-1].decode()


def _refusal(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"the request's chat template {what}", field=_FIELD)


@functools.lru_cache(maxsize=8)
def _template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def _answer(request: Mapping[str, Any]) -> dict[str, str]:
    """Renders. What is refused is an answer too."""
    try:
        template = _template(request["source"], tuple(request["special_tokens"].items()))
        text = template.render(request["messages"], **request["options"])
        if len(text) > MAX_PROMPT_LENGTH:
            raise _refusal(f"wrote more than {MAX_PROMPT_LENGTH} characters")
        return {"text": text}
    except InvalidRequestError as error:
        return {"error": error.message, "field": _FIELD if error.field == "chat" else error.field}
    except MemoryError:
        return {"error": _refusal("needs more memory than it may have").message, "field": _FIELD}


def main(max_cpu_s: float = MAX_CPU_S) -> None:
    """Answers requests until stdin ends, which it does with the router. A request may take so much CPU time."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(_READY, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        print(json.dumps(_answer(json.loads(line))), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
