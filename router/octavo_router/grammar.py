"""Grammars that answers must match: from the contract's words to llguidance's, compiled once to see whether it works.

The compiler is `grammar_process.py`, a process that a hostile grammar may end; here it is started, asked and replaced,
and what it found is remembered. Which tokens a grammar leaves is the worker's matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from octavo.errors import InvalidRequestError, OverloadedError, UnavailableError, UnsupportedError
from octavo.v1 import sampling_pb2
from octavo_router.child_process import child_command, child_environment

if TYPE_CHECKING:
    from octavo_router.worker_client import TokenizerFiles

logger = logging.getLogger(__name__)

MAX_GRAMMAR_LENGTH = 128 << 10
MAX_COMPILING = 64
MAX_REMEMBERED_LENGTH = 8 << 20
# On a busy machine the CPU time that a grammar may take is long in coming.
TIMEOUT_S = 15.0
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0

GrammarKind = Literal["json_object", "json_schema", "regex", "choices", "lark"]

_LENGTH = struct.Struct(">I")
_MAX_CHARACTER_BYTES = 4  # in UTF-8


@dataclass(frozen=True, slots=True)
class Source:
    """A grammar as it was asked for. text: the schema, the expression, a JSON list of choices, or the rules."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class _Compiled:
    """What became of a source: llguidance's JSON, or why there is none."""

    grammar: str = ""
    error: str = ""


def source_of(message: sampling_pb2.Grammar) -> Source:
    """What a request asks for. Raises InvalidRequestError for an empty grammar and one of too many characters."""
    kind: GrammarKind | None = message.WhichOneof("grammar")
    if kind is None or (kind == "json_object" and not message.json_object):
        raise InvalidRequestError(
            "grammar says nothing; set one of json_object, json_schema, regex, choices, lark, or leave it out",
            field="sampling.grammar",
        )
    field = f"sampling.grammar.{kind}"
    if (size := message.ByteSize()) > _MAX_CHARACTER_BYTES * MAX_GRAMMAR_LENGTH:
        # Much more than that takes its time to count.
        raise InvalidRequestError(
            f"{kind} has {size} bytes; at most {MAX_GRAMMAR_LENGTH} characters are possible", field=field
        )
    if kind == "choices":
        if not message.choices.choices or not all(message.choices.choices):
            raise InvalidRequestError(
                "choices is empty or holds an empty text; give at least one choice, each with a character", field=field
            )
        source = Source(kind, json.dumps(list(message.choices.choices), ensure_ascii=False))
    else:
        source = Source(kind, "" if kind == "json_object" else getattr(message, kind))
    if kind != "json_object" and not source.text:
        raise InvalidRequestError(f"{kind} is empty; give one, or leave it out", field=field)
    if len(source.text) > MAX_GRAMMAR_LENGTH:
        raise InvalidRequestError(
            f"{kind} has {len(source.text)} characters; at most {MAX_GRAMMAR_LENGTH} are possible", field=field
        )
    return source


class GrammarCompiler:
    """Compiles grammars, one after the other, in a process that starts with the first. Needs a running event loop."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        self._process: asyncio.subprocess.Process | None = None
        self._no_grammars_reason = ""  # what is wrong with the tokenizer, once it is known
        self._lock = asyncio.Lock()
        self._compiling: dict[Source, asyncio.Task[_Compiled]] = {}
        self._remembered: OrderedDict[Source, _Compiled] = OrderedDict()
        self._remembered_length = 0

    async def compile(self, source: Source) -> str:
        """llguidance's JSON for a grammar.

        Raises InvalidRequestError with the library's reason where it cannot be kept to or takes too much time or
        memory, UnsupportedError where the model's tokenizer is none for grammars, OverloadedError where too many wait.
        """
        compiled = self._remembered.get(source)
        if compiled is None:
            # What has begun goes on when its caller goes away: another may ask for the same, and it is remembered.
            compiled = await asyncio.shield(self._task(source))
        else:
            self._remembered.move_to_end(source)
        if compiled.error:
            raise InvalidRequestError(
                f"{source.kind} cannot be enforced: {compiled.error}; change or leave out what is named",
                field=f"sampling.grammar.{source.kind}",
            )
        return compiled.grammar

    async def close(self) -> None:
        """Ends the process. Whoever waits is cancelled."""
        tasks = list(self._compiling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._end()

    def _task(self, source: Source) -> asyncio.Task[_Compiled]:
        task = self._compiling.get(source)
        if task is None:
            if len(self._compiling) >= MAX_COMPILING:
                raise OverloadedError(f"{MAX_COMPILING} grammars wait to be compiled; try again in a moment")
            task = asyncio.create_task(self._compile(source), name="grammar")
            self._compiling[source] = task
            task.add_done_callback(lambda done: self._take(source, done))
        return task

    def _take(self, source: Source, task: asyncio.Task[_Compiled]) -> None:
        del self._compiling[source]
        if task.cancelled() or task.exception() is not None:
            return
        compiled = task.result()
        self._remembered[source] = compiled
        self._remembered_length += _length(source, compiled)
        while self._remembered_length > MAX_REMEMBERED_LENGTH:
            self._remembered_length -= _length(*self._remembered.popitem(last=False))

    async def _compile(self, source: Source) -> _Compiled:
        async with self._lock:
            process = self._process or await self._start()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    answer = await _ask(process, {"kind": source.kind, "text": source.text})
            except (asyncio.IncompleteReadError, ConnectionError):
                return _Compiled(error=_why(await self._end(has_ended=True)))
            except TimeoutError:
                await self._end()
                raise OverloadedError(f"the grammar was not compiled within {TIMEOUT_S:g} s; try again") from None
            except asyncio.CancelledError:
                # Its answer would be taken for the next one's.
                await self._end()
                raise
            return _Compiled(**answer)

    async def _start(self) -> asyncio.subprocess.Process:
        """Starts the process and hands it the tokenizer."""
        self._check_tokenizer()
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *child_command("octavo_router.grammar_process"),
                stdin=pipe,
                stdout=pipe,
                start_new_session=True,  # Ctrl-C is the router's to handle
                env=child_environment(),
            )
        except OSError as error:
            raise UnavailableError(f"the compiler of grammars does not start: {error.strerror}") from None
        first = {
            "tokenizer": self._files.tokenizer_json.decode(),
            "eos_token_ids": list(self._files.defaults.eos_token_ids),
        }
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await _ask(self._process, first)
        except BaseException as error:
            code = await self._end(has_ended=not isinstance(error, TimeoutError | asyncio.CancelledError))
            if isinstance(error, asyncio.IncompleteReadError | ConnectionError | TimeoutError):
                raise UnavailableError(f"the compiler of grammars did not start and ended with {code}") from None
            raise
        if reason := answer.get("error"):
            await self._end()
            self._no_grammars_reason = reason
            self._check_tokenizer()
        return self._process

    def _check_tokenizer(self) -> None:
        if self._no_grammars_reason:
            raise UnsupportedError(
                f"grammars are not offered with this model's tokenizer: {self._no_grammars_reason}",
                field="sampling.grammar",
            )

    async def _end(self, *, has_ended: bool = False) -> int:
        """Ends the process, if there is one. Returns its exit code, negative for a signal; 0 where there is none.

        has_ended: it seems to have ended by itself. Its exit code is lost where it is killed at that moment.
        """
        process, self._process = self._process, None
        if process is None:
            return 0
        if has_ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_TIMEOUT_S):
                    return await process.wait()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()


def _why(code: int) -> str:
    """What the end of the process says about the grammar that it compiled."""
    if code == -signal.SIGKILL:
        raise UnavailableError("the compiler of grammars was killed; try again")
    if code == -signal.SIGPROF:
        return "it takes too long to compile"
    logger.warning("the compiler of grammars ended with %d; it is started again", code)
    return "it takes too much memory, nests too deeply, or makes the library fail"


def _length(source: Source, compiled: _Compiled) -> int:
    return len(source.text) + len(compiled.grammar) + len(compiled.error) + 100


async def _ask(process: asyncio.subprocess.Process, request: dict[str, Any]) -> dict[str, str]:
    """The answer to a request, a frame each."""
    assert process.stdin is not None
    assert process.stdout is not None
    data = json.dumps(request).encode()
    process.stdin.write(_LENGTH.pack(len(data)) + data)
    await process.stdin.drain()
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    answer: dict[str, str] = json.loads(await process.stdout.readexactly(length))
    return answer
