"""Many requests at once over one connection, with bounded concurrency, in order, and with a progress bar.

`LLM.generate` and `octavo generate` stand on it. The server batches; this only keeps it supplied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

from octavo.async_client import AsyncClient
from octavo.errors import OctavoError, OverloadedError
from octavo.types import ChatOptions, Message, Prompt, RequestOptions, RequestOutput, SamplingParams

_MAX_TRIES = 100

Result = RequestOutput | OctavoError


@dataclass(frozen=True)
class PromptJob:
    """Generate behind a prompt."""

    prompt: Prompt
    params: SamplingParams | None
    options: RequestOptions = field(default_factory=lambda: RequestOptions())

    async def run(self, client: AsyncClient) -> RequestOutput:
        return await client.generate(self.prompt, self.params, **self.options)


@dataclass(frozen=True)
class ChatJob:
    """Generate the next turn of a conversation."""

    messages: Sequence[Message]
    params: SamplingParams | None
    options: ChatOptions = field(default_factory=lambda: ChatOptions())

    async def run(self, client: AsyncClient) -> RequestOutput:
        return await client.chat(self.messages, self.params, **self.options)


Job = PromptJob | ChatJob


async def run_batch(
    client: AsyncClient,
    jobs: Sequence[Job],
    *,
    max_concurrency: int,
    keep_going: bool,
    on_result: Callable[[int, Result], None] = lambda index, result: None,
) -> list[Result]:
    """Runs the jobs, at most `max_concurrency` at a time, and returns their results in the order of the jobs.

    A job that a full queue refuses is tried again when the server says. `on_result` is told each result as it comes.
    With `keep_going` an error takes its job's place in the results; without it the first error cancels the rest and is
    raised, with a note that names the job. Cancelling this coroutine cancels every request.
    """
    results: list[Result | None] = [None] * len(jobs)
    waiting: Iterator[tuple[int, Job]] = iter(enumerate(jobs))

    async def work() -> None:
        for index, job in waiting:  # shared: each job is taken once
            try:
                result: Result = await _run_patiently(client, job)
            except OctavoError as error:
                if not keep_going:
                    error.add_note(f"in prompt {index} of {len(jobs)}, counted from 0")
                    raise
                result = error
            results[index] = result
            on_result(index, result)

    tasks = [asyncio.create_task(work()) for _ in range(min(max_concurrency, len(jobs)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [result for result in results if result is not None]


async def _run_patiently(client: AsyncClient, job: Job) -> RequestOutput:
    for _ in range(_MAX_TRIES - 1):
        try:
            return await job.run(client)
        except OverloadedError as error:
            await asyncio.sleep(error.retry_after_s)
    return await job.run(client)


class BatchProgress:
    """A progress bar over requests that also shows prompt and output tokens per second. Feed it `on_result`."""

    def __init__(self, total: int, *, bar: Callable[..., Any] = tqdm, enabled: bool = True) -> None:
        self._bar = bar(
            total=total,
            desc="Processed prompts",
            dynamic_ncols=True,
            disable=not enabled,
            postfix="input: 0.00 toks/s, output: 0.00 toks/s",
        )
        self._started_at = monotonic()
        self._prompt_tokens = 0
        self._completion_tokens = 0

    def take(self, index: int, result: Result) -> None:
        """Counts a result."""
        if isinstance(result, RequestOutput) and result.usage is not None:
            self._prompt_tokens += result.usage.prompt_tokens
            self._completion_tokens += result.usage.completion_tokens
        seconds = max(monotonic() - self._started_at, 1e-6)
        self._bar.postfix = (
            f"input: {self._prompt_tokens / seconds:.2f} toks/s, output: {self._completion_tokens / seconds:.2f} toks/s"
        )
        self._bar.update(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
