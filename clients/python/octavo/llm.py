"""`LLM`: a model in a script or a notebook, without a server to be started first.

Starts the same router and worker that `octavo serve` starts, on Unix sockets in a private folder, and speaks the same
contract to them. There is no second engine: what `LLM` answers is what the server answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

from tqdm.auto import tqdm

from octavo.async_client import AsyncClient
from octavo.background_loop import BackgroundLoop
from octavo.batch import BatchProgress, ChatJob, Job, PromptJob, run_batch
from octavo.config import DEFAULT_MODEL, RouterConfig, WorkerConfig, pair_settings, quiet_log_level, setting_names
from octavo.errors import InvalidRequestError, RequestCancelledError, UnavailableError
from octavo.process import ProcessPair
from octavo.types import ChatOptions, Message, Prompt, RequestOptions, RequestOutput, SamplingParams
from octavo.v1 import admin_pb2

# What only makes sense where others connect, or is the pair's own to decide.
_NOT_OURS = frozenset({"listen", "worker", "host", "port", "grpc_port", "grpc_socket", "ready_file"})
_SETTINGS = setting_names() - _NOT_OURS
_SEED_MASK = (1 << 64) - 1
_PAIR_CHECK_INTERVAL_S = 0.2

_T = TypeVar("_T")


class LLM:
    """A model, ready to generate.

        with LLM("SmolLM2-135M-Instruct", dtype="float32") as llm:
            outputs = llm.generate(["Hello"], SamplingParams(max_tokens=32))

    Takes every setting of `octavo serve` under the same name, with vLLM's meaning: dtype, block_size, max_model_len,
    max_num_seqs, max_num_batched_tokens, gpu_memory_utilization, swap_space and so on. With `seed`, requests without a
    seed of their own get one derived from it and from how many requests came before: the same calls give the same
    tokens.

    Ctrl-C during a call cancels its requests; the model stays usable. A router or worker that dies is started again,
    and a call that was under way goes on where it was. Close it, or use it as a context manager, to
    give its memory back at once; otherwise that happens when it is dropped or the program ends.

    Raises TypeError for an unknown setting, ConfigError for a value out of range, StartError if the model cannot be
    loaded.
    """

    def __init__(
        self, model: str | os.PathLike[str] = DEFAULT_MODEL, *, seed: int | None = None, **settings: Any
    ) -> None:
        for name in settings:
            if name not in _SETTINGS:
                raise TypeError(f"LLM() has no setting {name!r}; settings are: {', '.join(sorted(_SETTINGS))}")
        worker, router = pair_settings(
            {"log_level": quiet_log_level(), **settings, "model": model, "port": -1, "grpc_port": -1}
        )
        self._max_concurrency = _concurrency(router)
        self._seeds = None if seed is None else map(_derived_seed, itertools.repeat(seed), itertools.count())
        self._pair = _started(worker, router)
        self._loop = BackgroundLoop("octavo-llm")
        self._client = AsyncClient(self._pair.wait_ready().grpc, wait_for_server=True)
        self._finalizer = weakref.finalize(self, _shut_down, self._client, self._loop, self._pair)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Generates behind every prompt, all at once, and returns the answers in the order of the prompts.

        prompts: a text, token ids ({"prompt_token_ids": [...]} or a list of integers), or a list of those.
        sampling_params: one for all, or one for each; None leaves the choice of tokens to the model's defaults and, as
        in vLLM, the length at 16 tokens. use_tqdm: shows progress; a callable makes the bar.

        Raises the first prompt's error, with a note that names it, after cancelling the others.
        """
        each = _as_prompts(prompts)
        return self._run([PromptJob(p, params, options) for p, params in self._pairs(each, sampling_params)], use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Generates the next turn of one conversation or of each of several. Otherwise as `generate`."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        each = cast(Sequence[Sequence[Message]], messages if several else [messages])
        return self._run([ChatJob(m, params, options) for m, params in self._pairs(each, sampling_params)], use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without `sampling_params` uses: the model's own defaults, and 16 tokens."""
        return SamplingParams.model_defaults()

    def state(self) -> admin_pb2.GetStateResponse:
        """What the worker, the queue and the KV pool hold now, as the contract's message."""
        self._check_open()
        return self._loop.run(self._client.state())

    def flush_prefix_cache(self) -> int:
        """Forgets every cached prefix. Returns how many KV blocks became free."""
        self._check_open()
        return self._loop.run(self._client.flush_prefix_cache())

    @property
    def address(self) -> str:
        """The gRPC address of this model, for a `Client` in another thread or process of this machine."""
        return self._client.address

    def close(self) -> None:
        """Stops router and worker and gives the memory back. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pairs(
        self, prompts: Sequence[_T], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[_T, SamplingParams]]:
        """Each prompt with its parameters, seeded where the caller left that to this LLM's seed."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        each = [sampling_params] * len(prompts) if isinstance(sampling_params, SamplingParams) else sampling_params
        if len(each) != len(prompts):
            raise InvalidRequestError(
                f"{len(each)} sampling_params for {len(prompts)} prompts; give one for each, or one for all",
                field="sampling_params",
            )
        return [(prompt, self._seeded(params)) for prompt, params in zip(prompts, each, strict=True)]

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        if self._seeds is None:
            return params
        seed = next(self._seeds)  # drawn for every request, so that one with its own seed shifts no other's
        return params if params.seed is not None else dataclasses.replace(params, seed=seed)

    def _run(self, jobs: Sequence[Job], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        self._check_open()
        bar = use_tqdm if callable(use_tqdm) else tqdm
        with BatchProgress(len(jobs), bar=bar, enabled=bool(use_tqdm)) as progress:
            try:
                batch = run_batch(
                    self._client,
                    jobs,
                    max_concurrency=self._max_concurrency,
                    keep_going=False,
                    on_result=progress.take,
                )
                results = self._loop.run(_while_alive(self._pair, batch))
            except UnavailableError as error:
                if self._pair.error is not None:
                    raise self._pair.error from error
                raise
        return cast(list[RequestOutput], results)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RequestCancelledError("this LLM is closed; make a new one")
        if self._pair.error is not None:
            raise self._pair.error


async def _while_alive(pair: ProcessPair, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of work. Raises what ended the pair as soon as something has: then nobody is left to wait for."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            if pair.error is not None:
                raise pair.error
            await asyncio.wait({task}, timeout=_PAIR_CHECK_INTERVAL_S)
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _started(worker: WorkerConfig, router: RouterConfig) -> ProcessPair:
    """A pair that serves. Stops what was started if it cannot serve, or if the caller interrupts the wait."""
    pair = ProcessPair(worker, router, on_log=_show)
    try:
        pair.wait_ready()
    except BaseException:
        pair.stop(at_once=True)
        raise
    return pair


def _shut_down(client: AsyncClient, loop: BackgroundLoop, pair: ProcessPair) -> None:
    try:
        loop.run(client.close())
        loop.close()
    finally:
        pair.stop()


def _show(name: str, line: str) -> None:
    print(f"{name} | {line}", file=sys.stderr, flush=True)


def _concurrency(router: RouterConfig) -> int:
    """Requests to keep under way: enough to fill the batch and to have the next ones queued, below the queue's
    limit.
    """
    wanted = 2 * router.max_num_seqs
    return min(wanted, router.max_waiting_requests) if router.max_waiting_requests else wanted


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, of one or of several. A non-empty list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [cast(Prompt, prompts)]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [cast(Prompt, items)]
    return cast(list[Prompt], items)


def _derived_seed(seed: int, position: int) -> int:
    """The seed of the request at `position`: SplitMix64's output function (Steele et al. 2014) over seed and position.

    Neighbouring requests must not get neighbouring seeds: sample i of a request draws from its seed + i.
    """
    value = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _SEED_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _SEED_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _SEED_MASK
    return value ^ (value >> 31)
