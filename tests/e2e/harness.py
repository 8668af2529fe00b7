"""The real pair of programs under test and the few calls that the end-to-end tests make to it.

A `Server` is a worker and a router as `octavo serve` starts them, joined by a Unix socket, on ports that the system
picked. Calls are made with the bare stubs, so that a fault of our own client library cannot hide one of the server's.
What is compared, and with what, is the tests'.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from octavo.channel import channel_options
from octavo.config import pair_settings
from octavo.process import ProcessPair
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, sampling_pb2

REFERENCES = Path(__file__).resolve().parent.parent / "references"
START_TIMEOUT_S = 90.0
CALL_TIMEOUT_S = 240.0
# Shared by all servers of the default model: fp32, and a pool that holds every request of a test at once.
DEFAULT_SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 2,
    "num_device_blocks": 1200,
    "port": 0,
    "grpc_port": 0,
}
FINISH_REASONS = {
    sampling_reason: name.removeprefix("FINISH_REASON_").lower()
    for name, sampling_reason in inference_pb2.FinishReason.items()
}
# A line of Prometheus' text format: octavo_preemptions_total{kind="swap"} 3.0
_SAMPLE = re.compile(r"^(?P<name>\w+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$", re.MULTILINE)


@dataclass
class Answer:
    """What one sample of a request came to. `deltas` are the texts as they were streamed."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)
    finish_reason: str = ""
    matched_stop: str = ""

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    def bits(self) -> tuple[list[int], list[float], list[tuple[tuple[int, float], ...]]]:
        """What must be equal, bit for bit, however the request was scheduled."""
        return self.token_ids, self.logprobs, self.top


@dataclass
class Reply:
    """All that a call brought: its samples in order of their index, what became of its prompt, what it took."""

    answers: list[Answer]
    prompt: inference_pb2.PromptInfo
    usage: inference_pb2.Usage


@dataclass(frozen=True)
class Reference:
    """A prompt and what transformers generates behind it; tests/references/README.md describes the fields."""

    name: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    margins: list[float]
    logprobs: list[float]
    runner_up_ids: list[int]
    text: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)


def load_references(path: Path = REFERENCES / "smollm2-135m-instruct.json") -> list[Reference]:
    """The references in a file; without an argument the default model's."""
    return [Reference(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["references"]]


def request_of(
    prompt: Any,
    *,
    max_tokens: int = 16,
    stop: Sequence[str] = (),
    ignore_eos: bool = True,
    include_stop: bool = False,
    logprobs: int | None = None,
    final_only: bool = False,
    skip_special_tokens: bool = False,
    temperature: float = 0.0,
    cache_salt: str = "",
    priority: int = 0,
    **sampling: Any,
) -> inference_pb2.GenerateRequest:
    """A request for a prompt (text, token ids or chat messages); greedy and without an end unless told otherwise."""
    request = inference_pb2.GenerateRequest(
        cache_salt=cache_salt,
        priority=priority,
        sampling=sampling_pb2.SamplingParams(temperature=temperature, **sampling),
        stop=sampling_pb2.StopConditions(
            max_tokens=max_tokens, stop=stop, ignore_eos=ignore_eos, include_stop_in_text=include_stop
        ),
        output=sampling_pb2.OutputOptions(
            logprobs=logprobs, final_only=final_only, skip_special_tokens=skip_special_tokens
        ),
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], dict):
        for message in prompt:
            request.chat.messages.add(role=message["role"], content=message["content"])
    else:
        request.token_ids.ids.extend(prompt)
    return request


def collect_reply(responses: Iterable[inference_pb2.GenerateResponse]) -> Reply:
    """Reads a call to its end."""
    reply = Reply([], inference_pb2.PromptInfo(), inference_pb2.Usage())
    answers: dict[int, Answer] = {}
    for response in responses:
        add_deltas(answers, response)
        if response.HasField("prompt"):
            reply.prompt = response.prompt
        if response.HasField("usage"):
            reply.usage = response.usage
    reply.answers = [answers[index] for index in sorted(answers)]
    return reply


def collect(responses: Iterable[inference_pb2.GenerateResponse]) -> list[Answer]:
    """Reads a call to its end; the samples in order of their index."""
    return collect_reply(responses).answers


def add_deltas(answers: dict[int, Answer], response: inference_pb2.GenerateResponse) -> None:
    """Adds what a response brings to the answers, by sample index."""
    for delta in response.deltas:
        answer = answers.setdefault(delta.sample_index, Answer())
        answer.token_ids.extend(delta.token_ids)
        answer.logprobs.extend(entry.logprob for entry in delta.logprobs)
        answer.top.extend(tuple((top.token_id, top.logprob) for top in entry.top) for entry in delta.logprobs)
        if delta.text:
            answer.deltas.append(delta.text)
        if delta.finish_reason:
            answer.finish_reason = FINISH_REASONS[delta.finish_reason]
            answer.matched_stop = delta.matched_stop


class Server:
    """A running pair. `settings` are those of both programs, by name."""

    def __init__(self, **settings: Any) -> None:
        self.settings = {**DEFAULT_SETTINGS, **settings}
        self.log: list[str] = []
        worker, router = pair_settings(self.settings, environ={})
        self.pair = ProcessPair(worker, router, on_log=lambda name, line: self.log.append(f"{name}: {line}"))
        try:
            endpoints = self.pair.wait_ready(START_TIMEOUT_S)
        except BaseException:
            self.pair.stop(at_once=True)
            raise
        self.grpc_address, self.http_url = endpoints.grpc, endpoints.http
        self.channel = grpc.insecure_channel(self.grpc_address, options=channel_options(self.grpc_address))
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    def close(self, *, at_once: bool = False) -> None:
        """Stops both programs and waits for them."""
        self.channel.close()
        self.pair.stop(at_once=at_once)

    def start(
        self, request: inference_pb2.GenerateRequest, timeout_s: float = CALL_TIMEOUT_S
    ) -> grpc._CallIterator[inference_pb2.GenerateResponse]:
        """Sends a request; iterate over what is returned, or cancel it."""
        return self.inference.Generate(request, timeout=timeout_s)

    def generate(self, prompt: Any, **options: Any) -> Answer:
        """The answer to a request of one sample; options as `request_of`'s."""
        (answer,) = collect(self.start(request_of(prompt, **options)))
        return answer

    def generate_all(self, prompts: Sequence[Any], concurrency: int, **options: Any) -> list[Answer]:
        """The answers to all prompts, `concurrency` of them under way at a time."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **options), prompts))

    def reply(self, prompt: Any, **options: Any) -> Reply:
        """The whole reply to a request, usage included; options as `request_of`'s."""
        return collect_reply(self.start(request_of(prompt, **options)))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels. Raises KeyError if there is none."""
        text = httpx.get(f"{self.http_url}/metrics", timeout=30).text
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        found = [
            float(match["value"])
            for match in _SAMPLE.finditer(text)
            if match["name"] == name and wanted <= set((match["labels"] or "").split(","))
        ]
        if not found:
            raise KeyError(f"no sample of {name} with {labels or 'any labels'} among the metrics")
        return sum(found)

    def state(self) -> admin_pb2.GetStateResponse:
        return self.admin.GetState(admin_pb2.GetStateRequest(), timeout=30)

    def is_connected(self) -> bool:
        """Whether the router has a session with its worker now."""
        return self.state().workers[0].status == admin_pb2.WORKER_STATUS_READY

    def used_blocks(self) -> int:
        """Device blocks that sequences hold now."""
        return sum(worker.device_pool.used_block_count for worker in self.state().workers)

    def wait_idle(self, timeout_s: float = 30.0) -> None:
        """Waits until no request is known and no block is held; AssertionError tells what is left."""
        wait_until(
            lambda: self.state().queue.request_count == 0 and self.used_blocks() == 0,
            timeout_s,
            lambda: f"requests or blocks are left: {self.state()}",
        )


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, from /proc."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_until(condition: Callable[[], bool], timeout_s: float, describe: Callable[[], str]) -> None:
    """Polls until a condition holds; AssertionError with a description once the time is over."""
    ends_at = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= ends_at:
            raise AssertionError(describe())
        time.sleep(0.02)


@contextmanager
def running(**settings: Any) -> Iterator[Server]:
    """A server for the length of a with block."""
    server = Server(**settings)
    try:
        yield server
    finally:
        server.close(at_once=True)
