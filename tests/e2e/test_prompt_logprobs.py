"""Log-probabilities of prompts: transformers' values, whatever the cache holds and however the prompt is cut."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from octavo import Client, SamplingParams
from octavo.types import Logprob
from octavo.v1 import inference_pb2
from tests.e2e.completions import BLOCK_SIZE, Caller, cached_tokens
from tests.e2e.harness import REFERENCES, Reference, Server, collect_reply, request_of

TOLERANCE = 1e-3
SCORES: dict[str, dict[str, list[Any]]] = {
    entry["name"]: entry
    for entry in json.loads((REFERENCES / "prompt_logprobs" / "smollm2-135m-instruct.json").read_text())["prompts"]
}
CHUNKED = ("one_token", "two_tokens", "repetition", "digits", "code", "english_400")
SCORING = SamplingParams(prompt_logprobs=1, max_tokens=1, temperature=0)

Entry = tuple[float, tuple[tuple[int, float], ...]]
Json = dict[str, Any]


def score(server: Server, prompt: Any, *, num_top: int = 1, max_tokens: int = 0, **options: Any) -> list[Entry]:
    """The prompt's entries from the second token on, over gRPC. They must be computed, all of them."""
    request = request_of(prompt, max_tokens=max_tokens, **options)
    request.output.prompt_logprobs = num_top
    reply = collect_reply(server.start(request))
    first, *entries = reply.prompt.logprobs
    assert first == inference_pb2.TokenLogprobs()
    assert [entry.token_id for entry in entries] == prompt[1:]
    assert reply.usage.cached_token_count == 0
    assert reply.usage.completion_token_count == max_tokens
    return [(entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top)) for entry in entries]


def check_equal(name: str, entries: Sequence[Entry]) -> None:
    """The values are transformers', and so is the likeliest token unless two are as likely."""
    expected = SCORES[name]
    assert [logprob for logprob, _ in entries] == pytest.approx(expected["logprobs"], abs=TOLERANCE)
    assert [top[0][1] for _, top in entries] == pytest.approx(expected["likeliest_logprobs"], abs=TOLERANCE)
    equal = [top[0][0] == likeliest for (_, top), likeliest in zip(entries, expected["likeliest_ids"], strict=True)]
    assert equal.count(False) <= len(equal) // 100


@pytest.fixture(scope="module")
def cold(server: Server, references: list[Reference]) -> dict[str, list[Entry]]:
    """Every prompt, while nothing of it is cached."""
    return {reference.name: score(server, reference.prompt_token_ids, cache_salt="scores") for reference in references}


@pytest.fixture(scope="module", params=[16, 33])
def chunking(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(max_num_batched_tokens=request.param)
    yield server
    server.close(at_once=True)


@pytest.fixture(scope="module")
def sdk(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0)


def test_values_are_those_of_transformers(cold: dict[str, list[Entry]]) -> None:
    for name, entries in cold.items():
        check_equal(name, entries)


def test_a_hot_prefix_cache_moves_no_bit(
    server: Server, references: list[Reference], cold: dict[str, list[Entry]]
) -> None:
    for reference in references:
        prompt = reference.prompt_token_ids
        again = server.reply(prompt, max_tokens=1, cache_salt="scores")
        assert again.usage.cached_token_count == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE, "it was not published"
        assert score(server, prompt, max_tokens=2, cache_salt="scores") == cold[reference.name]


def test_chunks_move_no_bit(chunking: Server, references: list[Reference], cold: dict[str, list[Entry]]) -> None:
    for reference in references:
        if reference.name in CHUNKED:
            assert score(chunking, reference.prompt_token_ids) == cold[reference.name]


def test_prompts_that_are_scored_together(
    server: Server, references: list[Reference], cold: dict[str, list[Entry]]
) -> None:
    """Short and long ones, the same twice, and others that only generate."""
    calls = []
    for reference in [*references[:12], *references[:12]]:
        request = request_of(reference.prompt_token_ids, max_tokens=1, cache_salt="together")
        request.output.prompt_logprobs = 1
        calls.append((reference.name, server.start(request)))
        calls.append(("", server.start(request_of(reference.prompt_token_ids, max_tokens=3, cache_salt="together"))))
    for name, call in calls:
        entries = collect_reply(call).prompt.logprobs[1:]
        found = [(entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top)) for entry in entries]
        assert found == (cold[name] if name else [])
    server.wait_idle()


def test_up_to_twenty_likeliest_tokens(server: Server, english: list[int]) -> None:
    entries = score(server, english[:40], num_top=20)
    assert {len(top) for _, top in entries} == {20}
    for logprob, top in entries:
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True)
        assert logprob in values or logprob < values[-1]


@pytest.mark.parametrize("num_tokens", [2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1])
def test_br004_a_prompt_of_full_cached_blocks_is_scored_again(
    caller: Caller, english: list[int], num_tokens: int
) -> None:
    """BR-004: with the whole prompt cached there was nothing left to compute, and the second call failed."""
    prompt = english[100 : 100 + num_tokens]
    options = {"logprobs": 1, "echo": True, "cache_salt": f"br004 scored {num_tokens}"}
    first, second = (caller.complete(prompt, 1, **options) for _ in range(2))
    assert first["choices"] == second["choices"]
    assert cached_tokens(first) == cached_tokens(second) == 0
    assert len(first["choices"][0]["logprobs"]["tokens"]) == num_tokens + 1


def test_br006_values_do_not_depend_on_the_order_of_a_batch(server: Server, english: list[int]) -> None:
    """BR-006: cached positions had whatever was in the buffer."""
    shared = english[: 2 * BLOCK_SIZE]
    prompts = [shared + english[40:57], shared + english[60:64], english[70:110]]
    with Client(server.grpc_address) as client, ThreadPoolExecutor(len(prompts)) as pool:

        def scores(batch: list[list[int]]) -> list[list[dict[int, Logprob] | None] | None]:
            return [
                output.prompt_logprobs for output in pool.map(lambda prompt: client.generate(prompt, SCORING), batch)
            ]

        forth, back = scores(prompts), scores(prompts[::-1])
    assert forth == back[::-1]
    assert forth[0] is not None
    assert forth[0][0] is None
    assert all(isinstance(value, Logprob) for values in forth[0][1:] for value in (values or {}).values())


def test_br046_echo_brings_the_prompts_logprobs(sdk: openai.OpenAI, references: list[Reference]) -> None:
    """BR-046: only generated tokens had them, so that evaluations scored at chance."""
    reference = next(reference for reference in references if len(reference.prompt_token_ids) == 30)
    completion = sdk.completions.create(model="", prompt=reference.text, echo=True, logprobs=1, max_tokens=1)
    (choice,) = completion.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 31
    values: list[Any] = list(logprobs.token_logprobs)
    assert values[0] is None
    assert values[1:-1] == pytest.approx(SCORES[reference.name]["logprobs"], abs=TOLERANCE)
    assert choice.text.startswith(reference.text)


def test_br047_logprobs_0_are_logprobs(caller: Caller) -> None:
    """BR-047: 0 was taken for none."""
    for echo in (False, True):
        (choice,) = caller.complete("One two three", 2, logprobs=0, echo=echo)["choices"]
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == (5 if echo else 2)
        for token, value, top in zip(
            *(logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        ):
            assert top == (None if value is None else {token: value})


@pytest.mark.parametrize("text", ["\n1. Carol has 20", "def f(x):\n\treturn x  # né", "<|im_start|>user\nHi<|im_end|>"])
def test_br050_token_strings_are_the_text(caller: Caller, text: str) -> None:
    """BR-050: tokens had text of their neighbours."""
    (choice,) = caller.complete(text, 3, logprobs=1, echo=True)["choices"]
    tokens = choice["logprobs"]["tokens"]
    assert "".join(tokens) == choice["text"]
    assert choice["text"].startswith(text)
    for token, offset in zip(tokens, choice["logprobs"]["text_offset"], strict=True):
        assert choice["text"].startswith(token, offset)


def test_br052_offsets_count_from_the_start_of_the_prompt(caller: Caller) -> None:
    """BR-052: OpenAI's do, with echo and without."""
    prompt = "Once upon a time"
    echoed, plain = (
        caller.complete(prompt, 4, logprobs=1, echo=echo)["choices"][0]["logprobs"]["text_offset"]
        for echo in (True, False)
    )
    assert echoed[0] == 0
    assert plain[0] == len(prompt)
    assert echoed[-4:] == plain


def test_a_batch_of_prompts_streamed_and_whole(caller: Caller, sdk: openai.OpenAI) -> None:
    prompts = ["The cat sat on", "Naïve café 🙂", "1 2 3"]
    whole: list[Json] = caller.complete(prompts, 3, logprobs=2, echo=True)["choices"]
    joined: list[Json] = [{name: [] for name in whole[0]["logprobs"]} | {"text": ""} for _ in prompts]
    stream = sdk.completions.create(
        model="", prompt=prompts, echo=True, logprobs=2, max_tokens=3, temperature=0, stream=True,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )  # fmt: skip
    for chunk in stream:
        (choice,) = chunk.choices
        joined[choice.index]["text"] += choice.text
        for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
            joined[choice.index][name] += values
    assert joined == [{**choice["logprobs"], "text": choice["text"]} for choice in whole]
    assert [choice["text"][: len(prompt)] for choice, prompt in zip(whole, prompts, strict=True)] == prompts


def test_vllms_prompt_logprobs(sdk: openai.OpenAI, caller: Caller, references: list[Reference]) -> None:
    reference = next(reference for reference in references if reference.name == "story")
    extra = {"prompt_logprobs": 1, "max_tokens": 0}
    completion: Any = sdk.completions.create(model="", prompt=reference.text, extra_body=extra)
    first, *rest = completion.choices[0].prompt_logprobs
    assert first is None
    own = [values[str(token)]["logprob"] for values, token in zip(rest, reference.prompt_token_ids[1:], strict=True)]
    assert own == pytest.approx(SCORES["story"]["logprobs"], abs=TOLERANCE)
    assert "".join(next(iter(values.values()))["decoded_token"] for values in rest) in reference.text
    messages: Any = [{"role": "user", "content": "Hi"}]
    chat: Any = sdk.chat.completions.create(
        model="", messages=messages, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert chat.prompt_logprobs[0] is None
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_a_prompt_as_long_as_the_context_is_scored(server: Server) -> None:
    """Nothing is generated, so nothing needs room."""
    longest = 160
    with Client(server.grpc_address) as client:
        (model, *_) = client.list_models()
    assert model.max_model_len > longest
    tight = Server(max_model_len=longest)
    try:
        prompt = [(7 * index) % 1000 + 300 for index in range(longest)]
        assert score(tight, prompt) == score(server, prompt)
        tight.wait_idle()
    finally:
        tight.close(at_once=True)
