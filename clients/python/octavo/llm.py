"""`LLM`: a model in a script or a notebook, without a server to be started first.

Starts the same router and worker that `octavo serve` starts, on Unix sockets in a private folder, and speaks the same
contract to them. There is no second engine: what `LLM` answers is what the server answers.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

from tqdm.auto import tqdm

from octavo.async_client import AsyncClient
from octavo.background_loop import BackgroundLoop
from octavo.batch import BatchProgress, ChatJob, Job, PromptJob, run_batch
from octavo.config import DEFAULT_MODEL
from octavo.engine_args import EngineArgs
from octavo.errors import InvalidRequestError, RequestCancelledError, UnavailableError
from octavo.llm_engine import LLMEngine
from octavo.own_pair import RequestSeeds, concurrency_of, started_pair
from octavo.process import ProcessPair
from octavo.served_tokenizer import ServedTokenizer
from octavo.types import ChatOptions, Message, Prompt, RequestOptions, RequestOutput, SamplingParams
from octavo.v1 import admin_pb2, inference_pb2

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
        args = EngineArgs(model, seed=seed, **settings)
        self._max_concurrency = concurrency_of(args.router_config)
        self._seeds = RequestSeeds(seed)
        self._pair = started_pair(args)
        self._loop = BackgroundLoop("octavo-llm")
        self._client = AsyncClient(self._pair.wait_ready().grpc, wait_for_server=True, api_key="")
        self._engine: LLMEngine | None = None
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

    def get_tokenizer(self) -> ServedTokenizer:
        """The model's tokenizer, with transformers' names: encode, decode, apply_chat_template."""

        def tokenize(source: str | Sequence[Message], **options: Any) -> list[int]:
            self._check_open()
            return self._loop.run(self._client.tokenize(source, **options))

        def detokenize(token_ids: Sequence[int], skip_special_tokens: bool) -> str:
            self._check_open()
            return self._loop.run(self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens))

        return ServedTokenizer(tokenize, detokenize)

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine to look at: `llm.llm_engine.stat_logger.print_stats()`."""
        if self._engine is None:
            # A weak reference: who keeps the engine must not keep a model alive that was dropped.
            this = weakref.ref(self)
            self._engine = LLMEngine(lambda: _alive(this()).state(), lambda: _alive(this())._models())
        return self._engine

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
        return [(prompt, self._seeds.seeded(params)) for prompt, params in zip(prompts, each, strict=True)]

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

    def _models(self) -> list[inference_pb2.Model]:
        self._check_open()
        return self._loop.run(self._client.list_models())

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RequestCancelledError("this LLM is closed; make a new one")
        if self._pair.error is not None:
            raise self._pair.error


def _alive(llm: LLM | None) -> LLM:
    if llm is None:
        raise RequestCancelledError("the LLM of this engine is gone; keep it as long as its engine")
    return llm


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


def _shut_down(client: AsyncClient, loop: BackgroundLoop, pair: ProcessPair) -> None:
    try:
        loop.run(client.close())
        loop.close()
    finally:
        pair.stop()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, of one or of several. A non-empty list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [cast(Prompt, prompts)]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [cast(Prompt, items)]
    return cast(list[Prompt], items)
