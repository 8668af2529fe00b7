"""The engine with a fake worker: what streams see, whatever happens to clients and to workers."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from octavo.config import RouterConfig
from octavo.errors import (
    ContextLengthError,
    DeadlineError,
    GenerationError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    ResumeMismatchError,
    UnavailableError,
)
from octavo.v1 import admin_pb2
from octavo_router import sample as sample_module
from octavo_router.engine import Engine
from octavo_router.metrics import Metrics
from octavo_router.plan import StepPlan
from octavo_router.request import Beams, FinishReason, Request, RequestUpdate, ResumedSample, Usage
from octavo_router.sequence import SequenceGroup
from octavo_router.stream import RequestStream
from octavo_router.text_stream import TextStream
from octavo_router.worker_client import Progress, SessionLostError
from tests.router.fake_client import FakeClient, description, letter_tokenizer, text_of
from tests.router.fake_worker import EOS_TOKEN_ID, POISON, expected_hypotheses, expected_output, logprob_of
from tests.router.harness import make_request, seed_that_stops_after


async def until(condition: Callable[[], bool]) -> None:
    """Lets the event loop run until something holds that no event tells."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Router:
    """An engine, its fake worker and its metrics."""

    def __init__(self, client: FakeClient, clock: Callable[[], float], **config: Any) -> None:
        self.client = client
        self.metrics = Metrics()
        self.engine = Engine(RouterConfig(**config), client, letter_tokenizer(), self.metrics, clock)

    def submit(self, request: Request) -> RequestStream:
        return self.engine.submit(request)

    def value(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(name, labels)
        assert value is not None, f"no metric {name}"
        return value

    @property
    def worker_state(self) -> admin_pb2.WorkerState:
        (worker,) = self.engine.state().workers
        return worker

    async def until_idle(self) -> None:
        """Until the worker holds nothing any more."""
        await until(lambda: not self.engine.num_unfinished and not self.client.worker.sequences)
        self.engine.check_integrity()
        assert self.worker_state.device_pool.used_block_count == 0


@asynccontextmanager
async def serving(
    client: FakeClient | None = None, clock: Callable[[], float] = time.monotonic, **config: Any
) -> AsyncGenerator[Router]:
    router = Router(client or FakeClient(), clock, **config)
    async with asyncio.timeout(20):
        await router.engine.start()
        try:
            yield router
        finally:
            await router.engine.stop()
    assert router.client.closed


@dataclasses.dataclass
class Sample:
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    matched: str | int | None = None
    logprobs: list[float] = dataclasses.field(default_factory=list)
    cumulative_logprob: float = 0.0

    def held(self, index: int) -> ResumedSample:
        """What its caller holds by now."""
        num_bytes = len(self.text.encode())
        return ResumedSample(index, tuple(self.token_ids), num_bytes, self.finish_reason, sum(self.logprobs))


@dataclasses.dataclass
class Answer:
    """Everything that a stream gave."""

    samples: dict[int, Sample]
    usage: Usage | None = None
    num_updates: int = 0
    error: Exception | None = None

    @property
    def only(self) -> Sample:
        (sample,) = self.samples.values()
        return sample

    def add(self, update: RequestUpdate) -> None:
        """Takes in an update."""
        self.num_updates += 1
        assert self.usage is None, "an update came behind the last"
        for delta in update.deltas:
            sample = self.samples.setdefault(delta.sample_index, Sample())
            assert sample.finish_reason is None, "a sample went on behind its end"
            sample.token_ids += delta.token_ids
            sample.text += delta.text
            sample.finish_reason, sample.matched = delta.finish_reason, delta.matched
            sample.logprobs += [entry.logprob for entry in delta.logprobs]
            sample.cumulative_logprob = delta.cumulative_logprob
        self.usage = update.usage


async def read(stream: RequestStream) -> Answer:
    """Reads a stream to its end."""
    answer = Answer({})
    try:
        async for update in stream:
            answer.add(update)
    except Exception as error:
        answer.error = error
    return answer


async def read_ok(stream: RequestStream) -> Answer:
    answer = await read(stream)
    assert answer.error is None, repr(answer.error)
    assert answer.usage is not None
    return answer


# What streams carry


async def test_a_stream_gives_tokens_text_and_usage() -> None:
    request = make_request(num_prompt=7, max_tokens=9)
    tokens, _ = expected_output(request)
    async with serving() as router:
        answer = await read_ok(router.submit(request))
    assert answer.only.token_ids == tokens
    assert answer.only.text == text_of(tokens)
    assert (answer.only.finish_reason, answer.only.matched) == (FinishReason.LENGTH, None)
    assert answer.usage == Usage(prompt_tokens=7, completion_tokens=9)


async def test_what_a_slow_reader_missed_comes_in_one_update() -> None:
    async with serving() as router:
        stream = router.submit(make_request(max_tokens=20))
        await until(lambda: not router.engine.num_unfinished)
        answer = await read_ok(stream)
    assert answer.num_updates == 1
    assert len(answer.only.token_ids) == 20


async def test_an_end_of_sequence_token_counts_and_has_no_text() -> None:
    seed = seed_that_stops_after(4)
    async with serving() as router:
        answer = await read_ok(router.submit(make_request(seed=seed, max_tokens=12, ignore_eos=False)))
    assert answer.only.token_ids[-1] == EOS_TOKEN_ID
    assert answer.only.text == text_of(answer.only.token_ids[:3])
    assert (answer.only.finish_reason, answer.only.matched) == (FinishReason.STOP, EOS_TOKEN_ID)
    assert answer.usage == Usage(prompt_tokens=5, completion_tokens=4)


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_token_id_ends_a_sample(include: bool) -> None:
    tokens, _ = expected_output(make_request(max_tokens=10))
    request = make_request(max_tokens=10, stop_token_ids=frozenset({tokens[4]}), include_stop_in_text=include)
    async with serving() as router:
        answer = await read_ok(router.submit(request))
    assert answer.only.token_ids == tokens[:5]
    assert answer.only.text == text_of(tokens[: 5 if include else 4])
    assert (answer.only.finish_reason, answer.only.matched) == (FinishReason.STOP, tokens[4])


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_a_sample_and_what_was_computed_ahead_is_dropped(include: bool) -> None:
    tokens, _ = expected_output(make_request(max_tokens=30))
    stop = text_of(tokens[5:8])
    async with serving() as router:
        answer = await read_ok(router.submit(make_request(max_tokens=30, stop=(stop,), include_stop_in_text=include)))
        await router.until_idle()
    assert answer.only.token_ids == tokens[:8]
    assert answer.only.text == text_of(tokens[: 8 if include else 5])
    assert (answer.only.finish_reason, answer.only.matched) == (FinishReason.STOP, stop)
    assert answer.usage == Usage(prompt_tokens=5, completion_tokens=8)


async def test_a_stop_string_counts_before_the_limit_it_coincides_with() -> None:
    tokens, _ = expected_output(make_request(max_tokens=4))
    stop = text_of(tokens[3:])
    async with serving() as router:
        answer = await read_ok(router.submit(make_request(max_tokens=4, stop=(stop,))))
    assert (answer.only.finish_reason, answer.only.matched) == (FinishReason.STOP, stop)
    assert answer.only.text == text_of(tokens[:3])


@pytest.mark.parametrize("min_tokens", [7, 8, 9])
async def test_a_stop_string_before_min_tokens_is_text(min_tokens: int) -> None:
    request = make_request(max_tokens=12, min_tokens=min_tokens)
    tokens, _ = expected_output(request)
    stop = text_of(tokens[5:8])
    async with serving() as router:
        answer = await read_ok(router.submit(make_request(max_tokens=12, min_tokens=min_tokens, stop=(stop,))))
    ends_there = min_tokens <= 8
    assert answer.only.token_ids == (tokens[:8] if ends_there else tokens)
    assert answer.only.text == text_of(tokens[:5] if ends_there else tokens)


async def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    tokens, _ = expected_output(make_request(max_tokens=4))
    async with serving() as router:
        answer = await read_ok(router.submit(make_request(max_tokens=4, stop=(text_of(tokens[2:]) + "?",))))
    assert answer.only.text == text_of(tokens)
    assert answer.only.finish_reason is FinishReason.LENGTH


async def test_samples_and_log_probabilities() -> None:
    request = make_request(max_tokens=6, n=3, seed=9, logprobs=1)
    async with serving(max_num_seqs=2) as router:
        answer = await read_ok(router.submit(request))
    for index in range(3):
        tokens, _ = expected_output(request, index)
        assert answer.samples[index].token_ids == tokens
        assert answer.samples[index].logprobs == [logprob_of(token_id) for token_id in tokens]
        assert answer.samples[index].cumulative_logprob == sum(logprob_of(token_id) for token_id in tokens)
    assert answer.usage == Usage(prompt_tokens=5, completion_tokens=18)


# Clients


async def test_a_client_that_leaves_is_released_with_the_next_plan() -> None:
    async with serving() as router:
        leaving = router.submit(make_request("leaving", max_tokens=500))
        staying = router.submit(make_request("staying", max_tokens=40))
        await anext(leaving)
        num_plans = len(router.client.plans)
        leaving.cancel()
        leaving.cancel()
        await read_ok(staying)
        assert router.client.plans[num_plans].release_sequence_ids == [1]
        await router.until_idle()
        answer = await read(leaving)
        assert isinstance(answer.error, RequestCancelledError)
        assert router.value("octavo_requests_finished_total", reason="abort") == 1


async def test_requests_that_have_ended_are_freed_without_a_collection() -> None:
    def groups() -> set[int]:
        return {id(item) for item in gc.get_objects() if type(item) is SequenceGroup}

    async with serving() as router:
        gc.collect()
        before = groups()
        gc.disable()
        try:
            for _ in range(5):
                stream = router.submit(make_request(max_tokens=3, n=2))
                assert [update async for update in stream]
                await router.until_idle()
            del stream
            await until(lambda: len(groups() - before) <= 1)  # the last one may be in somebody's hands
        finally:
            gc.enable()


async def test_a_client_that_leaves_while_it_waits() -> None:
    async with serving(max_num_seqs=1) as router:
        running = router.submit(make_request("running", max_tokens=30))
        waiting = router.submit(make_request("waiting", max_tokens=30))
        await anext(running)
        waiting.cancel()
        assert router.engine.state().queue.waiting_sequence_count == 0
        await read_ok(running)
        await router.until_idle()


async def test_a_stream_that_nobody_holds_is_released() -> None:
    async with serving() as router:
        stream = router.submit(make_request(max_tokens=700))
        await anext(stream)
        del stream
        gc.collect()
        await router.until_idle()
        assert router.value("octavo_requests_finished_total", reason="abort") == 1


async def test_cancelling_what_has_ended_has_no_effect() -> None:
    async with serving() as router:
        stream = router.submit(make_request(max_tokens=2))
        await read_ok(stream)
        stream.cancel()
        assert router.value("octavo_requests_finished_total", reason="abort") == 0
        assert router.value("octavo_requests_finished_total", reason="length") == 1


async def test_deadlines_end_running_and_waiting_requests() -> None:
    async with serving(max_num_seqs=1) as router:
        router.client.answering.clear()
        now = asyncio.get_running_loop().time()
        running = router.submit(make_request("running", max_tokens=50, deadline=now + 0.05))
        waiting = router.submit(make_request("waiting", max_tokens=50, deadline=now + 0.06))
        patient = router.submit(make_request("patient", max_tokens=50, deadline=now + 1000))
        for stream in (running, waiting):
            answer = await read(stream)
            assert isinstance(answer.error, DeadlineError)
        router.client.answering.set()
        await read_ok(patient)
        await router.until_idle()
        assert router.value("octavo_requests_finished_total", reason="deadline") == 2
        with pytest.raises(DeadlineError):
            router.submit(make_request(deadline=now))


async def test_a_full_queue_refuses_by_requests() -> None:
    async with serving(max_num_seqs=1, max_waiting_requests=2) as router:
        router.client.answering.clear()
        first = router.submit(make_request("first", max_tokens=2))
        await router.client.sent.wait()
        others = [router.submit(make_request(str(index), max_tokens=2)) for index in range(2)]
        with pytest.raises(OverloadedError, match="2 requests wait, the limit is 2") as caught:
            router.submit(make_request("over"))
        assert caught.value.retry_after_s >= 1
        router.client.answering.set()
        for stream in (first, *others):
            await read_ok(stream)
        await read_ok(router.submit(make_request("again")))


async def test_a_full_queue_refuses_by_prompt_tokens() -> None:
    async with serving(max_num_seqs=1, max_waiting_prompt_tokens=100) as router:
        router.client.answering.clear()
        streams = [router.submit(make_request("first", max_tokens=2))]
        await router.client.sent.wait()
        streams.append(router.submit(make_request("large", num_prompt=150, max_tokens=2)))
        with pytest.raises(OverloadedError, match="150 prompt tokens wait and this request has 5, the limit is 100"):
            router.submit(make_request("over"))
        router.client.answering.set()
        for stream in streams:
            await read_ok(stream)


async def test_room_is_known_before_a_prompt_is_read() -> None:
    async with serving(max_num_seqs=1, max_waiting_requests=2) as router:
        router.client.answering.clear()
        running = router.submit(make_request("running", max_tokens=2))
        await router.client.sent.wait()
        waiting = router.submit(make_request("waiting", max_tokens=2))
        router.engine.check_room(0)
        with pytest.raises(OverloadedError, match="2 requests wait, the limit is 2"):
            router.engine.check_room(1)
        router.client.answering.set()
        for stream in (running, waiting):
            await read_ok(stream)
        router.engine.begin_drain()
        with pytest.raises(UnavailableError, match="stopping"):
            router.engine.check_room(0)


async def test_stop_strings_that_are_refused_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> TextStream:
        raise InvalidRequestError("too many", field="stop.stop")

    async with serving() as router:
        monkeypatch.setattr(sample_module, "TextStream", refuse)
        with pytest.raises(InvalidRequestError, match="too many"):
            router.submit(make_request(max_tokens=5))
        router.engine.check_integrity()
        assert router.engine.state().queue.request_count == 0


async def test_what_cannot_run_is_refused_at_once() -> None:
    async with serving(FakeClient(description(block_size=4, num_blocks=10))) as router:
        assert router.engine.model.max_model_len == 40
        with pytest.raises(
            ContextLengthError, match="30 tokens and max_tokens is 11, 41 together; the KV pool holds 40"
        ):
            router.submit(make_request(num_prompt=30, max_tokens=11))
        await read_ok(router.submit(make_request(num_prompt=30, max_tokens=10)))


async def test_one_requests_failure_is_its_own() -> None:
    async with serving() as router:
        bad = router.submit(make_request("bad", max_tokens=5, n=2, first_token=POISON))
        good = router.submit(make_request("good", max_tokens=5))
        answer = await read(bad)
        assert isinstance(answer.error, GenerationError)
        assert "poisoned" in answer.error.message
        await read_ok(good)
        await router.until_idle()
        assert router.value("octavo_requests_finished_total", reason="error") == 1


@pytest.mark.parametrize("stop", [(), ("never",)])
async def test_a_fault_while_making_text_is_its_requests_own(
    stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as router:
        good = router.submit(make_request("good", max_tokens=5))

        class BrokenTextStream(TextStream):
            def append(self, token_id: int, *, may_stop: bool = True) -> str | None:
                raise RuntimeError("a bug")

            def extend(self, token_ids: Sequence[int]) -> None:
                raise RuntimeError("a bug")

        monkeypatch.setattr(sample_module, "TextStream", BrokenTextStream)
        bad = await read(router.submit(make_request("bad", max_tokens=5, stop=stop)))
        assert isinstance(bad.error, InternalError)
        await read_ok(good)
        await router.until_idle()


# The end


async def test_draining_refuses_new_requests_and_finishes_running_ones() -> None:
    async with serving(max_num_seqs=1) as router:
        streams = [router.submit(make_request(str(index), max_tokens=20)) for index in range(3)]
        await anext(streams[0])
        assert router.engine.begin_drain() == 3
        assert router.engine.begin_drain() == 3
        assert not router.engine.is_ready
        with pytest.raises(UnavailableError, match="stopping"):
            router.submit(make_request("late"))
        drained = asyncio.create_task(router.engine.drain(10))
        for stream in streams:
            await read_ok(stream)
        await drained


async def test_what_outlives_the_grace_period_fails() -> None:
    async with serving() as router:
        router.client.answering.clear()
        stream = router.submit(make_request(max_tokens=20))
        await router.engine.drain(0.01)
        answer = await read(stream)
        assert isinstance(answer.error, UnavailableError)


async def test_stopping_ends_every_stream() -> None:
    async with serving() as router:
        router.client.answering.clear()
        stream = router.submit(make_request(max_tokens=20))
        await router.engine.stop()
        answer = await read(stream)
        assert isinstance(answer.error, UnavailableError)


# Workers


async def test_a_worker_that_dies_is_a_pause() -> None:
    requests = [
        make_request(f"R{index}", num_prompt=3 + 5 * index, max_tokens=40, n=1 + index % 2) for index in range(6)
    ]
    async with serving(FakeClient(description(num_blocks=40)), max_num_seqs=4) as router:
        client = router.client
        kills = iter([8, 20, 25])
        next_kill = next(kills)

        def maybe_kill(plan: object) -> None:
            nonlocal next_kill
            router.engine.check_integrity()
            if len(client.plans) >= next_kill:
                next_kill = next(kills, 1 << 30)
                client.kill()

        client.before_answer = maybe_kill
        answers = await asyncio.gather(*(read_ok(router.submit(request)) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            for index, sample in answer.samples.items():
                assert sample.token_ids == expected_output(request, index)[0]
                assert sample.text == text_of(sample.token_ids)
            assert answer.usage == Usage(len(request.prompt_token_ids), 40 * request.sampling.n)
        await router.until_idle()
        assert router.worker_state.lost_session_count == 3
        assert router.worker_state.epoch == 1 + 3
        assert router.value("octavo_sessions_lost_total") == 3


async def test_a_worker_that_hangs_is_given_up() -> None:
    async with serving(step_timeout_s=0.1) as router:
        router.client.answering.clear()
        stream = router.submit(make_request(max_tokens=5))
        await router.client.sent.wait()
        await until(lambda: router.worker_state.lost_session_count == 1)
        router.client.answering.set()
        answer = await read_ok(stream)
        assert answer.only.token_ids == expected_output(make_request(max_tokens=5))[0]


async def test_a_worker_whose_executor_gets_on_is_not_given_up() -> None:
    now = 0.0
    async with serving(clock=lambda: now, step_timeout_s=0.1) as router:
        client = router.client
        client.answering.clear()
        stream = router.submit(make_request(max_tokens=2))
        await client.sent.wait()
        assert client.session is not None
        for tick in range(20):
            client.session.progress.put_nowait(Progress(tick, busy=True))
            await until(client.session.progress.empty)
            for _ in range(10):  # what was taken out is on its way to the engine
                await asyncio.sleep(0)
            await asyncio.sleep(0.02)  # so that whoever watches has looked
            now += 0.08
        assert router.worker_state.lost_session_count == 0
        client.answering.set()
        await read_ok(stream)


async def test_without_a_worker_for_long_requests_fail_and_come_back_with_it() -> None:
    async with serving(worker_timeout_s=0.1) as router:
        router.client.answering.clear()
        stream = router.submit(make_request(max_tokens=5))
        await router.client.sent.wait()
        router.client.kill(restart=False)
        router.client.answering.set()
        answer = await read(stream)
        assert isinstance(answer.error, UnavailableError)
        assert "no worker has answered for 0.1 s" in answer.error.message
        with pytest.raises(UnavailableError, match="no worker has answered"):
            router.submit(make_request())
        assert router.worker_state.status == admin_pb2.WORKER_STATUS_CONNECTING
        router.client.up = True
        await until(lambda: router.engine.is_ready)
        await read_ok(router.submit(make_request()))


async def test_requests_wait_for_a_worker_that_is_soon_back() -> None:
    async with serving() as router:
        assert router.client.session is not None
        router.client.kill(restart=False)
        await until(lambda: not router.engine.is_ready)
        stream = router.submit(make_request(max_tokens=5))
        router.client.up = True
        await read_ok(stream)


async def test_another_model_fails_what_ran_and_is_served_from_then_on() -> None:
    async with serving() as router:
        router.client.answering.clear()
        stream = router.submit(make_request(max_tokens=5))
        await router.client.sent.wait()
        router.client.described.model.digest = "digest-2"
        router.client.kill()
        router.client.answering.set()
        answer = await read(stream)
        assert isinstance(answer.error, UnavailableError)
        assert "another model (digest-2, was digest-1)" in answer.error.message
        await until(lambda: router.engine.is_ready)
        assert router.engine.model.digest == "digest-2"
        await read_ok(router.submit(make_request()))


async def test_another_tokenizer_cannot_be_served() -> None:
    async with serving() as router:
        router.client.described.model.tokenizer_digest = "tokens-2"
        router.client.kill()
        stream = router.submit(make_request(max_tokens=500))
        answer = await read(stream)
        assert isinstance(answer.error, UnavailableError)
        assert "restart the router" in answer.error.message
        with pytest.raises(UnavailableError, match="restart the router"):
            router.submit(make_request())


async def test_an_answer_that_does_not_fit_costs_the_session_only() -> None:
    async with serving() as router:
        altered = False

        def alter(result: Any) -> Any:
            nonlocal altered
            if altered or result.step_seq < 3:
                return result
            altered = True
            return dataclasses.replace(result, step_seq=result.step_seq + 1)

        router.client.alter = alter
        answer = await read_ok(router.submit(make_request(max_tokens=8)))
        assert answer.only.token_ids == expected_output(make_request(max_tokens=8))[0]
        assert router.worker_state.lost_session_count == 1


async def test_a_bug_in_a_step_is_an_error_for_those_who_run_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a step left its callers waiting (BR-099)."""
    async with serving() as router:
        scheduler = router.engine._scheduler
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "apply", lambda result: 1 / 0)
            answer = await read(router.submit(make_request(max_tokens=5)))
            assert isinstance(answer.error, InternalError)
        await until(lambda: router.engine.is_ready)
        await read_ok(router.submit(make_request(max_tokens=5)))


async def test_a_bug_that_spoils_the_scheduler_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as router:
        scheduler = router.engine._scheduler
        for name in ("apply", "end_session", "cancel"):
            monkeypatch.setattr(scheduler, name, lambda *args: 1 / 0)
        streams = [router.submit(make_request(str(index), max_tokens=5)) for index in range(2)]
        for stream in streams:
            answer = await read(stream)
            assert isinstance(answer.error, InternalError)
        await until(lambda: router.engine.is_ready)
        await read_ok(router.submit(make_request(max_tokens=5)))
        await router.until_idle()


async def test_an_idle_session_is_renewed_and_no_plans_are_sent() -> None:
    async with serving() as router:
        await router.client.renewed.wait()
        assert router.client.plans == []


async def test_waits_between_steps_are_told_from_rests() -> None:
    async with serving() as router:
        for name in "abc":
            await read_ok(router.submit(make_request(name, max_tokens=5)))
            await until(lambda: router.engine._scheduler.oldest_in_flight is None)
        num_steps = router.value("octavo_step_duration_seconds_count")
        assert router.value("octavo_worker_idle_seconds_total") == pytest.approx(num_steps * 10e-6)
        assert router.value("octavo_worker_gap_seconds_total") == pytest.approx((num_steps - 3) * 10e-6)


# The whole


async def test_a_small_pool_serves_many_requests_without_waste() -> None:
    """100 blocks, 40 mixed requests that need several times as many: all end, with less than a block wasted on each."""
    rng = random.Random(7)
    requests = [
        make_request(
            f"R{index}",
            num_prompt=rng.choice((1, 5, 40, 150, 300)),
            max_tokens=rng.choice((1, 20, 80, 150)),
            n=rng.choice((1, 1, 1, 2)),
            seed=index,
        )
        for index in range(40)
    ]
    async with serving(FakeClient(description(block_size=16, num_blocks=100)), max_num_batched_tokens=128) as router:
        scheduler = router.engine._scheduler
        most_used = 0

        def check(plan: object) -> None:
            nonlocal most_used
            router.engine.check_integrity()
            for sequence in scheduler.running:
                assert 0 <= 16 * len(sequence.block_table) - sequence.num_planned < 16
            most_used = max(most_used, scheduler.blocks.device.num_used)

        router.client.before_answer = check
        answers = await asyncio.gather(*(read_ok(router.submit(request)) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            for index, sample in answer.samples.items():
                assert sample.token_ids == expected_output(request, index)[0]
        await router.until_idle()
        num_generated = sum(len(sample.token_ids) for answer in answers for sample in answer.samples.values())
        assert most_used > 90
        assert router.value("octavo_requests_finished_total", reason="length") == 40
        assert router.value("octavo_kv_usage_ratio") == 0
        assert router.value("octavo_generation_tokens_total") == num_generated
        assert router.value("octavo_prompt_tokens_total") == sum(len(r.prompt_token_ids) for r in requests)
        assert router.value("octavo_time_to_first_token_seconds_count") == 40


async def test_gauges_are_zero_at_once_when_everybody_has_left() -> None:
    async with serving(max_num_seqs=10) as router:
        router.client.answering.clear()
        streams = [router.submit(make_request(str(index), num_prompt=16, max_tokens=9)) for index in range(20)]
        await router.client.sent.wait()
        assert router.value("octavo_sequences_running") == 10
        assert router.value("octavo_sequences_waiting") == 10
        # 16 prompt tokens and, with lookahead, one more: five blocks of four.
        assert router.value("octavo_kv_blocks_used", tier="device") in (40, 50)
        for stream in streams:
            stream.cancel()
        for name in ("sequences_running", "sequences_waiting", "sequences_preempted", "requests_unfinished"):
            assert router.value(f"octavo_{name}") == 0
        assert router.value("octavo_kv_blocks_used", tier="device") == 0
        assert router.value("octavo_requests_finished_total", reason="abort") == 20
        router.client.answering.set()
        await router.until_idle()


async def test_gauges_are_zero_when_everybody_has_left_while_the_worker_was_gone() -> None:
    """Ten that ran, ten that waited, all of them suspected of two deaths."""
    async with serving(max_num_seqs=10) as router:
        router.client.answering.clear()
        streams = [router.submit(make_request(str(index), num_prompt=16, max_tokens=9)) for index in range(20)]
        for is_last in (False, True):
            await until(lambda: router.value("octavo_sequences_running") == 10)
            router.client.kill(restart=not is_last)
            router.client.answering.set()
            await until(lambda: router.worker_state.status == admin_pb2.WORKER_STATUS_CONNECTING)
            router.client.answering.clear()
        assert router.worker_state.lost_session_count == 2
        assert router.value("octavo_requests_unfinished") == 20
        for stream in streams:
            stream.cancel()
        for name in ("sequences_waiting", "sequences_preempted", "requests_unfinished", "waiting_prompt_tokens"):
            assert router.value(f"octavo_{name}") == 0
        assert router.value("octavo_requests_finished_total", reason="abort") == 20
        router.client.answering.set()
        router.client.up = True
        await until(lambda: router.engine.is_ready)
        await read_ok(router.submit(make_request()))
        await router.until_idle()


async def test_the_state_names_the_worker_and_counts_the_queue() -> None:
    async with serving(max_num_seqs=1) as router:
        router.client.answering.clear()
        streams = [router.submit(make_request(str(index), num_prompt=10, max_tokens=3)) for index in range(3)]
        await router.client.sent.wait()
        state = router.engine.state()
        (worker,) = state.workers
        assert (state.queue.running_sequence_count, state.queue.waiting_sequence_count) == (1, 2)
        assert (state.queue.request_count, state.queue.waiting_prompt_token_count) == (3, 20)
        assert (worker.name, worker.address, worker.incarnation, worker.epoch) == ("worker-0", "fake:1", 77, 1)
        assert worker.status == admin_pb2.WORKER_STATUS_READY
        assert (worker.device_pool.block_count, worker.device_pool.used_block_count) == (200, 3)
        router.client.answering.set()
        for stream in streams:
            await read_ok(stream)
        totals = router.engine.state().totals
        assert (totals.accepted_request_count, totals.prompt_token_count) == (3, 30)
        assert (totals.completion_token_count, totals.prefix_query_token_count) == (9, 30)


async def test_leaving_at_the_moment_of_the_last_token_harms_nobody() -> None:
    rng = random.Random(3)
    async with serving() as router:
        for index in range(200):
            stream = router.submit(make_request(str(index), max_tokens=rng.randint(1, 3)))
            for _ in range(rng.randint(0, 12)):
                await asyncio.sleep(0)
            stream.cancel()
        await router.until_idle()
        total = sum(router.value("octavo_requests_finished_total", reason=reason) for reason in ("abort", "length"))
        assert total == 200
        assert not router.engine._deliveries._timers
        assert router.worker_state.lost_session_count == 0


# Best of several, and beams


async def test_the_best_samples_of_several_come_back() -> None:
    request = make_request(max_tokens=6, n=2, best_of=5, seed=3)
    outputs = [expected_output(request, index)[0] for index in range(5)]
    means = [sum(logprob_of(token) for token in tokens) / len(tokens) for tokens in outputs]
    best = sorted(range(5), key=lambda index: -means[index])[:2]
    async with serving() as router:
        answer = await read_ok(router.submit(request))
        await router.until_idle()
    assert answer.num_updates == 1
    assert [answer.samples[rank].token_ids for rank in range(2)] == [outputs[index] for index in best]
    assert answer.samples[0].logprobs == []
    assert answer.samples[0].cumulative_logprob == sum(logprob_of(token) for token in outputs[best[0]])
    assert answer.usage == Usage(prompt_tokens=5, completion_tokens=sum(map(len, outputs)))


async def test_beams_come_back_best_first() -> None:
    request = make_request(max_tokens=8, n=2, beams=Beams(3), ignore_eos=False)
    async with serving() as router:
        answer = await read_ok(router.submit(request))
        await router.until_idle()
        assert router.value("octavo_generation_tokens_total") == sum(len(s.token_ids) for s in answer.samples.values())
        assert router.value("octavo_time_to_first_token_seconds_count") == 1
    hypotheses = expected_hypotheses(request)
    assert [tuple(answer.samples[rank].token_ids) for rank in range(2)] == [h.token_ids for h in hypotheses[:2]]
    assert [answer.samples[rank].finish_reason for rank in range(2)] == [h.finish_reason for h in hypotheses[:2]]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(h.token_ids) for h in hypotheses[:2])


async def test_cached_tokens_are_told_and_can_be_flushed() -> None:
    async with serving() as router:
        for num_cached in (0, 20):
            answer = await read_ok(router.submit(make_request(str(num_cached), num_prompt=21, cache_salt="same")))
            assert answer.usage == Usage(21, 4, num_cached)
        await router.until_idle()
        assert router.worker_state.device_pool.cached_block_count > 0
        assert router.value("octavo_prefix_cache_hits_total", tier="device") == 20
        assert router.engine.flush_prefix_cache() > 0
        assert router.worker_state.device_pool.cached_block_count == 0
        answer = await read_ok(router.submit(make_request("again", num_prompt=21, cache_salt="same")))
        assert answer.usage == Usage(21, 4, 0)


# Resumes


async def test_a_resume_gives_the_rest_and_nothing_twice() -> None:
    options: dict[str, Any] = {"max_tokens": 9, "n": 2, "logprobs": 0}
    tokens, _ = expected_output(make_request(**options))
    # The first sample ends with a stop string of its sixth to eighth tokens, the second with its ninth token.
    options["stop"] = (text_of(tokens[5:8]),)
    async with serving() as router:
        whole = Answer({})
        held: list[tuple[ResumedSample, ...]] = [()]
        async for update in router.submit(make_request(**options)):
            whole.add(update)
            held.append(tuple(sample.held(index) for index, sample in sorted(whole.samples.items())))
        assert whole.samples[0].matched == options["stop"][0]
        assert len(held) > 9
        for number, resumed in enumerate(held):
            rest = await read_ok(router.submit(make_request(f"B{number}", **options, resumed=resumed)))
            for index, sample in whole.samples.items():
                before = next((h for h in resumed if h.sample_index == index), ResumedSample(index, (), 0))
                behind = rest.samples.get(index, Sample())
                assert [*before.token_ids, *behind.token_ids] == sample.token_ids
                assert sample.text[: before.text_byte_count] + behind.text == sample.text
                assert behind.logprobs == sample.logprobs[len(before.token_ids) :]
                if before.finish_reason is not None:
                    assert behind == Sample()
                    continue
                assert behind.cumulative_logprob == sample.cumulative_logprob
                assert (behind.finish_reason, behind.matched) == (sample.finish_reason, sample.matched)
            assert rest.usage == whole.usage
        await router.until_idle()


async def test_samples_that_had_ended_are_not_told_again() -> None:
    tokens = [expected_output(make_request(max_tokens=4, n=2), index)[0] for index in range(2)]
    ended = ResumedSample(0, tuple(tokens[0]), 4, FinishReason.LENGTH)
    async with serving() as router:
        open_one = ResumedSample(1, tuple(tokens[1][:1]), 1)
        answer = await read_ok(router.submit(make_request(n=2, resumed=(ended, open_one))))
        assert answer.samples.keys() == {1}
        assert answer.only.token_ids == tokens[1][1:]
        assert answer.usage == Usage(5, 8)
        both = (ended, ResumedSample(1, tuple(tokens[1]), 4, FinishReason.LENGTH))
        answer = await read_ok(router.submit(make_request("B", n=2, resumed=both)))
        assert (answer.samples, answer.usage) == ({}, Usage(5, 8))
        # Its last token was received, but not that it is the last.
        unknown = (ended, ResumedSample(1, tuple(tokens[1]), 3))
        answer = await read_ok(router.submit(make_request("C", n=2, resumed=unknown)))
        assert answer.samples.keys() == {1}
        assert (answer.only.token_ids, answer.only.text) == ([], text_of(tokens[1][3:]))
        assert answer.only.finish_reason is FinishReason.LENGTH
        assert answer.usage == Usage(5, 8)
        await router.until_idle()
        assert router.value("octavo_requests_finished_total", reason="length") == 3


async def test_a_resume_that_cannot_be_leaves_nothing_behind() -> None:
    async with serving() as router:
        with pytest.raises(ResumeMismatchError):
            router.submit(make_request(resumed=(ResumedSample(0, (2,), 5),)))
        assert router.engine.num_unfinished == 0
        assert (await read_ok(router.submit(make_request("B")))).usage == Usage(5, 4)
        await router.until_idle()


async def test_a_resume_survives_its_worker_too() -> None:
    tokens, _ = expected_output(make_request(max_tokens=30))
    request = make_request(max_tokens=30, resumed=(ResumedSample(0, tuple(tokens[:10]), 10),))
    async with serving() as router:
        stream = router.submit(request)
        first = await anext(stream)
        router.client.kill()
        rest = await read_ok(stream)
    assert tokens[:10] + first.deltas[0].token_ids + rest.only.token_ids == tokens


# Who kills the worker


async def test_a_request_that_kills_the_worker_fails_and_the_others_finish() -> None:
    killer, *others = [make_request(f"R{index}", num_prompt=3 + index, max_tokens=20) for index in range(6)]
    async with serving() as router:
        client = router.client

        def kill_on_third_token(plan: StepPlan) -> None:
            ids = [new.sequence_id for new in plan.new_sequences if new.prompt_token_count == 3]
            killer_ids.update(ids)
            rows = zip(plan.sequence_ids, plan.start_positions, plan.token_counts, strict=True)
            if any(key in killer_ids and start + count == 3 + 2 for key, start, count in rows):
                client.kill()
                raise SessionLostError("the worker is gone")

        killer_ids: set[int] = set()
        client.before_answer = kill_on_third_token
        bad, *good = await asyncio.gather(*(read(router.submit(request)) for request in (killer, *others)))
        assert isinstance(bad.error, GenerationError)
        assert "the worker was lost" in bad.error.message
        assert "it is not tried again" in bad.error.message
        for request, answer in zip(others, good, strict=True):
            assert answer.error is None
            assert answer.only.token_ids == expected_output(request)[0]
        await router.until_idle()
        assert router.worker_state.lost_session_count <= 5
        assert router.value("octavo_requests_finished_total", reason="error") == 1
        assert router.value("octavo_requests_finished_total", reason="length") == 5


async def test_the_limit_of_deaths_is_a_setting() -> None:
    async with serving(max_worker_failures=1) as router:
        router.client.answering.clear()
        stream = router.submit(make_request(max_tokens=5))
        await router.client.sent.wait()
        router.client.kill()
        router.client.answering.set()
        answer = await read(stream)
        assert isinstance(answer.error, GenerationError)
        assert "was lost once while" in answer.error.message


# Readiness


async def test_a_session_behind_a_lost_one_is_ready_when_it_has_answered() -> None:
    async with serving() as router:
        readiness = [router.engine.is_ready]
        router.client.answering.clear()
        stream = router.submit(make_request(max_tokens=5))
        await router.client.sent.wait()
        readiness.append(router.engine.is_ready)
        router.client.kill()
        router.client.answering.set()
        await until(lambda: router.worker_state.lost_session_count == 1)
        readiness.append(router.engine.is_ready)
        router.client.answering.clear()
        await until(lambda: router.worker_state.status == admin_pb2.WORKER_STATUS_READY)
        readiness.append(router.engine.is_ready)  # the new session has not answered yet
        router.client.answering.set()
        await read_ok(stream)
        readiness.append(router.engine.is_ready)
        assert readiness == [True, True, False, False, True]


async def test_a_session_is_believed_when_nobody_waits_for_an_answer() -> None:
    async with serving() as router:
        router.client.answering.clear()
        stream = router.submit(make_request(max_tokens=5))
        await router.client.sent.wait()
        router.client.kill()
        router.client.answering.set()
        await until(lambda: router.worker_state.lost_session_count == 1)
        router.client.answering.clear()
        stream.cancel()
        await until(lambda: router.engine.is_ready)
        router.client.answering.set()


async def test_a_device_that_fails_every_step_is_never_ready() -> None:
    """The worker opens sessions and fails their first steps, again and again."""
    was_ready = False
    async with serving(max_worker_failures=5) as router:

        def fail(plan: StepPlan) -> None:
            nonlocal was_ready
            was_ready |= router.worker_state.lost_session_count > 0 and router.engine.is_ready
            raise SessionLostError("INTERNAL: the step failed: the device is gone")

        router.client.before_answer = fail
        answer = await read(router.submit(make_request(max_tokens=5)))
        assert isinstance(answer.error, GenerationError)
        assert router.worker_state.lost_session_count == 5
        assert not was_ready
        router.client.before_answer = lambda plan: None
        await until(lambda: router.engine.is_ready)
        await read_ok(router.submit(make_request(max_tokens=5)))
