"""The contract over a fake engine: what is accepted, what is refused and how, and what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from typing import Any

import pytest
from google.protobuf import json_format

from octavo.errors import (
    ContextLengthError,
    DeadlineError,
    GenerationError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    ResumeMismatchError,
    UnsupportedError,
)
from octavo.v1 import inference_pb2 as pb
from octavo_router import validation
from octavo_router.chat_template import ChatTemplate
from octavo_router.request import Beams, EarlyStopping, FinishReason, ResumedSample, Sampling, TokenRules
from tests.router.fake_engine import EOS, FakeEngine, LineTemplate, make_inference


def request_of(**fields: Any) -> pb.GenerateRequest:
    """A GenerateRequest from its JSON form; a text prompt unless another is given."""
    if not {"text", "token_ids", "chat"} & fields.keys():
        fields["text"] = "Hi"
    return json_format.ParseDict(fields, pb.GenerateRequest())


def beams(width: int, **fields: Any) -> dict[str, Any]:
    """Sampling fields with a beam search; lengthPenalty is the search's, the others are the sampling's."""
    search = {"beamWidth": width} | {name: fields.pop(name) for name in ("lengthPenalty",) if name in fields}
    return {"sampling": {"beamSearch": search} | fields}


async def responses_of(engine: FakeEngine, request: pb.GenerateRequest, **keywords: Any) -> list[pb.GenerateResponse]:
    inference = make_inference(engine, LineTemplate())
    async with contextlib.aclosing(inference.generate(request, **keywords)) as responses:
        return [response async for response in responses]


async def test_first_response_tells_about_the_prompt_and_the_last_about_usage() -> None:
    engine = FakeEngine("Paris.")
    engine.cached_tokens = 1
    responses = await responses_of(engine, request_of(request_id="r1", sampling={"seed": 7}))
    first, *middle, last = responses
    assert (first.request_id, first.model) == ("r1", "tiny")
    assert first.prompt == pb.PromptInfo(seed=7, model_digest="sha256:0123456789abcdef", token_count=2)
    assert not first.deltas
    assert "".join(delta.text for response in middle for delta in response.deltas) == "Paris."
    ending = middle[-1].deltas[0]
    assert ending.finish_reason == pb.FINISH_REASON_STOP
    assert ending.matched_token_id == EOS
    assert ending.cumulative_logprob == -1.5
    assert last.usage == pb.Usage(prompt_token_count=2, completion_token_count=6, cached_token_count=1)
    assert not engine.cancelled


async def test_final_only_is_one_response_with_everything() -> None:
    request = request_of(
        sampling={"n": 2},
        output={"finalOnly": True, "logprobs": 0, "returnPromptTokenIds": True},
        stop={"maxTokens": 3},
    )
    engine = FakeEngine("Paris.")
    engine.finish_reason, engine.matched = FinishReason.LENGTH, None
    (response,) = await responses_of(engine, request)
    assert list(response.prompt.token_ids) == [72, 105]
    assert [delta.sample_index for delta in response.deltas] == [0, 1]
    for delta in response.deltas:
        assert delta.text == "Par"
        assert list(delta.token_ids) == [80, 97, 114]
        assert [entry.token_id for entry in delta.logprobs] == [80, 97, 114]
        assert delta.finish_reason == pb.FINISH_REASON_LENGTH
        assert delta.WhichOneof("matched") is None
    assert response.usage.completion_token_count == 6


async def test_unset_sampling_is_the_models_own_and_a_seed_is_drawn() -> None:
    engine = FakeEngine()
    responses = [await responses_of(engine, request_of()) for _ in range(2)]
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.n) == (0.5, 40, 1.0, 0.0, 1)
    seeds = [parts[0].prompt.seed for parts in responses]
    assert seeds == [request.sampling.seed for request in engine.requests]
    assert seeds[0] != seeds[1]
    # 512 fit into the context, 2 are taken by the prompt.
    assert engine.requests[0].stopping.max_tokens == 510


async def test_zero_temperature_and_neutral_values_are_values() -> None:
    engine = FakeEngine()
    request = request_of(
        sampling={
            "temperature": 0, "topK": -1, "topP": 1, "minP": 0, "seed": "18446744073709551615", "n": 1, "bestOf": 1,
            "presencePenalty": 0, "frequencyPenalty": 0, "repetitionPenalty": 1,
        },
        chat={"messages": [{"role": "user", "content": "Hi"}], "toolChoice": {"mode": "TOOL_CHOICE_MODE_NONE"}},
        cacheSalt="salt", tenant="someone", model="tiny-alias",
    )  # fmt: skip
    await responses_of(engine, request)
    assert engine.requests[0].cache_salt == "salt"
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0, 0, 2**64 - 1)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"sampling": {"temperature": -1}}, "sampling.temperature", "temperature is -1; it must be from 0 to 2"),
        ({"sampling": {"temperature": 2.5}}, "sampling.temperature", "temperature is 2.5; it must be from 0 to 2"),
        ({"sampling": {"temperature": "NaN"}}, "sampling.temperature", "temperature is nan; it must be from 0 to 2"),
        ({"sampling": {"temperature": "Infinity"}}, "sampling.temperature", "inf"),
        ({"sampling": {"topP": 0}}, "sampling.top_p", "top_p is 0; it must be above 0 and at most 1"),
        ({"sampling": {"topP": 1.5}}, "sampling.top_p", "1.5"),
        ({"sampling": {"topP": "NaN"}}, "sampling.top_p", "nan"),
        ({"sampling": {"topK": -2}}, "sampling.top_k", "top_k is -2; it must be at least 1, or 0 or -1 for all tokens"),
        ({"sampling": {"minP": 1.1}}, "sampling.min_p", "min_p is 1.1; it must be from 0 to 1"),
        ({"sampling": {"n": 0}}, "sampling.n", "n is 0; it must be from 1 to 128"),
        ({"sampling": {"n": 129}}, "sampling.n", "n is 129"),
        ({"output": {"promptLogprobs": 21}}, "output.prompt_logprobs", "prompt_logprobs is 21; it must be from"),
        ({"sampling": {"n": 3, "bestOf": 2}}, "sampling.best_of", "best_of is 2; it must be at least n, which is 3"),
        ({"sampling": {"bestOf": 129}}, "sampling.best_of", "best_of is 129; it must be at least n, which is 1"),
        (beams(0), "sampling.beam_search.beam_width", "beam_width is 0; it must be from 1 to 64"),
        (beams(65), "sampling.beam_search.beam_width", "beam_width is 65"),
        (beams(2, n=3), "sampling.n", "n is 3; it must be at most beam_width, which is 2, with beam search"),
        (beams(2, lengthPenalty=6), "sampling.beam_search.length_penalty", "length_penalty is 6; it must be from -5"),
        (beams(2, lengthPenalty="NaN"), "sampling.beam_search.length_penalty", "length_penalty is nan"),
        (beams(2, temperature=0.5), "sampling.temperature", "temperature is 0.5; it must be 0 or 1, or left out, with"),
        (beams(2, topP=0.5), "sampling.top_p", "top_p is 0.5; it must be 1, or left out, with beam search"),
        (beams(2, topK=5), "sampling.top_k", "top_k is 5; it must be 0 or -1, or left out, with beam search"),
        (beams(2, minP=0.5), "sampling.min_p", "min_p is 0.5; it must be 0, or left out, with beam search"),
        (beams(2, bestOf=2), "sampling.best_of", "best_of is 2; it must be left out: n of the beams come back"),
        ({"stop": {"maxTokens": 0}}, "stop.max_tokens", "max_tokens is 0; it must be at least 1"),
        ({"stop": {"maxTokens": 4, "minTokens": 5}}, "stop.min_tokens", "min_tokens is 5; it must be at most"),
        ({"stop": {"stop": ["x", ""]}}, "stop.stop", "empty string"),
        ({"stop": {"stop": ["x"] * 17}}, "stop.stop", "stop has 17 strings; at most 16"),
        ({"stop": {"stop": ["x" * 1025]}}, "stop.stop", "1025 characters"),
        ({"stop": {"stopTokenIds": [5, 300]}}, "stop.stop_token_ids", "stop_token_ids holds 300"),
        ({"stop": {"stopTokenIds": [5] * 301}}, "stop.stop_token_ids", "stop_token_ids has 301 ids"),
        ({"output": {"logprobs": 21}}, "output.logprobs", "logprobs is 21; it must be from 0 to 20"),
        ({"tokenIds": {"ids": [1, 999999]}}, "token_ids", "999999; token ids of this model are from 0 to 299"),
        ({"tokenIds": {"ids": []}}, "token_ids", "the prompt is empty"),
        ({"text": ""}, "text", "the prompt is empty"),
        ({"chat": {"messages": []}}, "chat.messages", "messages is empty"),
        ({"chat": {"messages": [{"content": "x"}]}}, "chat.messages[0].role", "messages[0] has no role"),
        ({"requestId": "a\nb"}, "request_id", "printable"),
        ({"requestId": "x" * 257}, "request_id", "at most 256"),
        ({"tenant": "x" * 257}, "tenant", "the limit is 256"),
    ],
)  # fmt: skip
async def test_wrong_values_are_refused_by_name(fields: dict[str, Any], field: str, message: str) -> None:
    engine = FakeEngine()
    with pytest.raises(InvalidRequestError) as caught:
        await responses_of(engine, request_of(**json_format_names(fields)))
    assert caught.value.field == field
    assert message in caught.value.message
    assert not engine.requests


def json_format_names(fields: dict[str, Any]) -> dict[str, Any]:
    """`tokenIds` and `requestId` are written as JSON has them; request_of looks for proto names of prompts."""
    return {
        {"tokenIds": "token_ids", "requestId": "request_id"}.get(name, name): value for name, value in fields.items()
    }


async def test_best_of_and_beams_reach_the_engine() -> None:
    engine = FakeEngine()
    await responses_of(engine, request_of(sampling={"n": 2, "bestOf": 5, "temperature": 1}))
    assert (engine.requests[0].sampling.n, engine.requests[0].sampling.best_of) == (2, 5)
    await responses_of(engine, request_of(**beams(4, n=2, seed=3, temperature=1, topK=-1, topP=1, minP=0)))
    assert engine.requests[1].sampling == Sampling(temperature=0, seed=3, n=2, best_of=2, beams=Beams(4))
    search = {"beamWidth": 3, "lengthPenalty": 0.5, "earlyStopping": "BEAM_EARLY_STOPPING_NEVER"}
    await responses_of(engine, request_of(sampling={"beamSearch": search}))
    assert engine.requests[2].sampling.beams == Beams(3, 0.5, EarlyStopping.NEVER)


async def test_without_room_no_prompt_is_read() -> None:
    engine, template = FakeEngine(), LineTemplate()
    engine.max_reading = 1
    inference = make_inference(engine, template)
    request = request_of(chat={"messages": [{"role": "user", "content": "Hi"}]})
    async with contextlib.aclosing(inference.generate(request)) as accepted:
        reading = asyncio.ensure_future(anext(accepted))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="1 prompts are being read"):
            await anext(inference.generate(request))
        await reading
    assert len(template.calls) == 1
    with pytest.raises(InvalidRequestError):
        await anext(inference.generate(request_of(text="")))
    await anext(inference.generate(request))


async def test_token_ids_to_decode_are_checked_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    monkeypatch.setattr(validation, "check_token_ids", lambda *args: threads.append(threading.current_thread().name))
    await make_inference(FakeEngine()).detokenize(pb.DetokenizeRequest(token_ids=[72]))
    (name,) = threads
    assert name.startswith("tokenizer")


async def test_more_token_ids_than_are_decoded_at_once() -> None:
    with pytest.raises(InvalidRequestError, match="token_ids has 1048577 ids; at most 1048576 are decoded at once"):
        await make_inference(FakeEngine()).detokenize(pb.DetokenizeRequest(token_ids=[1] * ((1 << 20) + 1)))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (beams(2, presencePenalty=0.5), "sampling.presence_penalty"),
        (beams(2, frequencyPenalty=-1), "sampling.frequency_penalty"),
        (beams(2, repetitionPenalty=1.1), "sampling.repetition_penalty"),
        (beams(2, logitBias={"5": 1}), "sampling.logit_bias"),
        (beams(2, allowedTokenIds=[5]), "sampling.allowed_token_ids"),
        (beams(2, badWords=["x"]), "sampling.bad_words"),
        (beams(2, grammar={"regex": "a"}), "sampling.grammar"),
        ({"sampling": {"beamSearch": {"beamWidth": 2}}, "stop": {"stop": ["x"]}}, "stop.stop"),
        ({"sampling": {"beamSearch": {"beamWidth": 2}}, "output": {"logprobs": 0}}, "output.logprobs"),
        ({"adapter": "a"}, "adapter"),
        ({"chat": {"messages": [{"role": "user"}], "chatTemplate": "x"}}, "chat.chat_template"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        await responses_of(FakeEngine(), request_of(**fields))
    assert caught.value.field == field
    assert "not offered" in caught.value.message


async def test_a_request_over_the_context_is_refused_with_all_numbers() -> None:
    with pytest.raises(ContextLengthError) as caught:
        await responses_of(FakeEngine(), request_of(text="x" * 500, stop={"maxTokens": 100}))
    assert caught.value.message == (
        "the prompt has 500 tokens and max_tokens is 100, together 600; at most 512 are possible: shorten the prompt "
        "or ask for at most 12 tokens"
    )
    engine = FakeEngine()
    with pytest.raises(ContextLengthError, match="the prompt has 512 tokens; at most 512 are possible"):
        await responses_of(engine, request_of(token_ids={"ids": [1] * 512}))
    assert b'octavo_requests_refused_total{reason="too_long"} 1.0' in engine.metrics.render()


async def test_a_prompt_that_must_be_too_long_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.router.fake_engine.ByteTokenizer.encode", None)
    for prompt in ({"text": "x" * 600}, {"chat": {"messages": [{"role": "user", "content": "x" * 600}]}}):
        with pytest.raises(ContextLengthError, match=r"at least 6\d\d tokens; at most 512"):
            await responses_of(FakeEngine(), request_of(**prompt))


async def test_chat_is_rendered_with_parts_joined_and_variables_as_they_were() -> None:
    engine, template = FakeEngine(), LineTemplate()
    messages = [
        {"role": "system", "contentParts": [{"text": "Be"}, {"text": " brief."}]},
        {"role": "assistant", "toolCalls": [{"id": "c1", "name": "add", "argumentsJson": '{"a": 1}'}]},
        {"role": "tool", "content": "18", "toolCallId": "c1"},
    ]
    request = request_of(chat={"messages": messages, "templateVariables": {"depth": 5, "share": 0.5, "on": True}})
    async with contextlib.aclosing(make_inference(engine, template).generate(request)) as responses:
        assert [response async for response in responses]
    assert bytes(engine.requests[0].prompt_token_ids).decode() == (
        "system: Be brief.\nassistant: \ntool: 18\nassistant:"
    )
    (call,) = template.calls
    assert call["variables"] == {"depth": 5, "share": 0.5, "on": True}
    assert isinstance(call["variables"]["depth"], int)
    assert call["messages"][1]["tool_calls"] == [
        {"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ]
    assert call["messages"][2]["tool_call_id"] == "c1"


async def test_the_final_message_can_be_continued_but_not_closed_too() -> None:
    """A prefilled turn was closed or doubled (BR-078)."""
    engine = FakeEngine()
    messages = [{"role": "assistant", "content": "The capital is"}]
    await responses_of(engine, request_of(chat={"messages": messages, "continueFinalMessage": True}))
    assert bytes(engine.requests[0].prompt_token_ids) == b"assistant: The capital is"
    both = {"messages": messages, "continueFinalMessage": True, "addGenerationPrompt": True}
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        await responses_of(engine, request_of(chat=both))


async def test_chat_without_a_template_says_how_to_give_one() -> None:
    inference = make_inference(FakeEngine(), ChatTemplate("", {}))
    with pytest.raises(InvalidRequestError, match="--chat-template"):
        await anext(inference.generate(request_of(chat={"messages": [{"role": "user", "content": "x"}]})))


async def test_echo_repeats_the_prompt_in_each_sample() -> None:
    request = request_of(token_ids={"ids": list(b"To ")}, sampling={"n": 2}, output={"echo": True})
    responses = await responses_of(FakeEngine("be"), request)
    texts = ["", ""]
    for response in responses:
        for delta in response.deltas:
            texts[delta.sample_index] += delta.text
    assert texts == ["To be", "To be"]
    request.output.final_only = True
    (response,) = await responses_of(FakeEngine("be"), request)
    assert [delta.text for delta in response.deltas] == ["To be", "To be"]


def resumed(samples: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A request of text "Hi" for two samples that goes on behind what is held of them."""
    held = {"promptTokenIds": [72, 105], "seed": "7", "modelDigest": "sha256:0123456789abcdef", "samples": samples}
    return {"text": "Hi", "sampling": {"n": 2}, "resume": held | fields}


async def test_a_resume_goes_to_the_engine_with_its_seed() -> None:
    engine = FakeEngine()
    held = [
        {"sampleIndex": 1, "tokenIds": [80, 97], "textByteCount": 2, "cumulativeLogprob": -0.5},
        {"sampleIndex": 0, "tokenIds": [80, 256], "textByteCount": 1, "finishReason": "FINISH_REASON_TOOL_CALLS"},
    ]
    first, *_ = await responses_of(engine, request_of(**resumed(held)))
    assert first.prompt.seed == 7
    assert engine.requests[0].sampling.seed == 7
    assert engine.requests[0].resumed == (
        ResumedSample(0, (80, 256), 1, FinishReason.STOP),
        ResumedSample(1, (80, 97), 2, None, -0.5),
    )
    await responses_of(engine, request_of(**resumed([{"sampleIndex": 1}])))
    assert engine.requests[1].resumed == ()


@pytest.mark.parametrize("sampling", [{"n": 2, "bestOf": 3}, {"n": 2, "beamSearch": {"beamWidth": 3}}])
async def test_what_comes_at_the_end_starts_over(sampling: dict[str, Any]) -> None:
    engine = FakeEngine()
    request = resumed([{"tokenIds": [80], "textByteCount": 1}]) | {"sampling": sampling}
    await responses_of(engine, request_of(**request))
    assert engine.requests[0].resumed == ()
    assert engine.requests[0].sampling.seed == 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (resumed([], modelDigest="sha256:other"), "was begun by model sha256:other, and sha256:0123456789abcdef is"),
        (resumed([], modelDigest=""), "was begun by model (none named)"),
        (resumed([]) | {"sampling": {"n": 2, "seed": "8"}}, "was begun with seed 7 and the request's is 8"),
        (resumed([], promptTokenIds=[]), "has no prompt_token_ids"),
        (resumed([], promptTokenIds=[72, 106]), "they differ from token 1, counted from 0"),
        (
            resumed([], promptTokenIds=[72, 105, 1]),
            "a prompt of 3 tokens and the request's has 2; they differ from token 2",
        ),
        (resumed([{"sampleIndex": 2, "tokenIds": [1]}]), "names sample 2 and n is 2"),
        (resumed([{"tokenIds": [1]}, {"tokenIds": [1]}]), "names sample 0 twice"),
        (resumed([{"tokenIds": [1, 300]}]), "holds token 300 of sample 0; token ids of this model are from 0 to 299"),
        (
            resumed([{"tokenIds": [1] * 5}]) | {"stop": {"maxTokens": 4}},
            "holds 5 tokens of sample 0 and max_tokens is 4",
        ),
        (resumed([{"textByteCount": 3}]), "holds 3 bytes of text and no tokens of sample 0"),
        (resumed([{"tokenIds": [1], "finishReason": "FINISH_REASON_ERROR"}]), "finish_reason 4 of sample 0"),
    ],
)
async def test_a_resume_that_does_not_match_is_refused(fields: dict[str, Any], message: str) -> None:
    engine = FakeEngine()
    with pytest.raises(ResumeMismatchError) as caught:
        await responses_of(engine, request_of(**fields))
    assert message in caught.value.message
    assert not engine.requests


async def test_an_echoed_prompt_counts_as_text_that_is_held() -> None:
    engine = FakeEngine("be")
    held = [
        {"sampleIndex": 0, "tokenIds": [98], "textByteCount": 4},
        {"sampleIndex": 1, "textByteCount": 2},
    ]
    fields = resumed(held, promptTokenIds=list("é ".encode())) | {"text": "é ", "output": {"echo": True}}
    first, *_ = await responses_of(engine, request_of(**fields))
    assert [(delta.sample_index, delta.text) for delta in first.deltas] == [(1, " ")]
    assert engine.requests[0].resumed == (ResumedSample(0, (98,), 1),)
    held[1]["textByteCount"] = 1
    with pytest.raises(ResumeMismatchError, match="within a character of the prompt"):
        await responses_of(engine, request_of(**fields))


def scores(*logprobs: float, first_token: int = 105) -> list[pb.TokenLogprobs]:
    """A prompt's entries: an empty one, then tokens that count up with the token above them as the likeliest."""
    entries = [pb.TokenLogprobs()]
    for token_id, logprob in enumerate(logprobs, first_token):
        top = pb.TopLogprob(token_id=token_id + 1, logprob=-0.125)
        entries.append(pb.TokenLogprobs(token_id=token_id, logprob=logprob, top=[top]))
    return entries


@pytest.mark.parametrize("final_only", [False, True])
async def test_the_first_response_has_the_prompts_logprobs(final_only: bool) -> None:
    engine = FakeEngine()
    output = {"promptLogprobs": 1, "finalOnly": final_only}
    first, *others = await responses_of(engine, request_of(output=output))
    assert list(first.prompt.logprobs) == scores(-0.25)
    assert not any(response.HasField("prompt") for response in others)
    assert engine.requests[0].output.prompt_logprobs == 1
    assert engine.requests[0].output.logprobs is None
    first, *_ = await responses_of(engine, request_of(output={"finalOnly": final_only}))
    assert not first.prompt.logprobs


async def test_many_entries_of_a_prompt() -> None:
    request = request_of(token_ids={"ids": list(range(256)) * 2}, stop={"maxTokens": 0}, output={"promptLogprobs": 1})
    first, *_ = await responses_of(FakeEngine(), request)
    assert [entry.token_id for entry in first.prompt.logprobs[1:]] == [*range(1, 256), *range(256)]


async def test_a_resume_does_not_bring_the_prompts_logprobs_again() -> None:
    """They came with the seed that it names."""
    engine = FakeEngine()
    fields = resumed([{"tokenIds": [80], "textByteCount": 1}]) | {"output": {"promptLogprobs": 1}}
    first, *_ = await responses_of(engine, request_of(**fields))
    assert not first.prompt.logprobs
    assert engine.requests[0].output.prompt_logprobs is None
    assert engine.requests[0].resumed


@pytest.mark.parametrize("output", [{"promptLogprobs": 0}, {"echo": True}])
async def test_no_token_may_be_asked_for_where_the_prompt_comes_back(output: dict[str, Any]) -> None:
    engine = FakeEngine()
    responses = await responses_of(engine, request_of(stop={"maxTokens": 0}, output=output, sampling={"n": 2}))
    deltas = [delta for response in responses for delta in response.deltas if delta.finish_reason]
    assert [(delta.sample_index, list(delta.token_ids)) for delta in deltas] == [(0, []), (1, [])]
    assert {delta.finish_reason for delta in deltas} == {pb.FINISH_REASON_LENGTH}
    # The whole context may be the prompt's, and not a token more.
    for length, kind in ((512, "text"), (512, "token_ids")):
        prompt: Any = "x" * length if kind == "text" else {"ids": [7] * length}
        await responses_of(engine, request_of(**{kind: prompt}, stop={"maxTokens": 0}, output=output))
        longer: Any = "x" * (length + 1) if kind == "text" else {"ids": [7] * (length + 1)}
        with pytest.raises(ContextLengthError, match="shorten the prompt to at most 512 tokens"):
            await responses_of(engine, request_of(**{kind: longer}, stop={"maxTokens": 0}, output=output))
        with pytest.raises(ContextLengthError, match="shorten the prompt to at most 511 tokens"):
            await responses_of(engine, request_of(**{kind: prompt}, stop={"maxTokens": 1}, output=output))


async def test_a_resume_of_a_prompt_alone_starts_over() -> None:
    """Its end comes in one response with the usage, so its caller holds nothing that counts."""
    engine = FakeEngine()
    fields = resumed([{"sampleIndex": 1, "finishReason": "FINISH_REASON_LENGTH", "textByteCount": 2}])
    fields |= {"stop": {"maxTokens": 0}, "output": {"echo": True}}
    first, *_, last = await responses_of(engine, request_of(**fields))
    assert [(delta.sample_index, delta.text) for delta in first.deltas] == [(0, "Hi")]
    assert engine.requests[0].resumed == ()
    assert last.HasField("usage")


async def test_whoever_waits_for_one_response_is_told_when_the_request_is_accepted() -> None:
    engine = FakeEngine()
    told: list[int] = []

    async def tell() -> None:
        told.append(len(engine.requests))

    await responses_of(engine, request_of(output={"finalOnly": True}), on_accepted=tell)
    assert told == [1]
    with pytest.raises(InvalidRequestError):
        await responses_of(engine, request_of(sampling={"n": 0}), on_accepted=tell)
    assert told == [1]


async def test_an_unknown_model_is_named_with_those_served() -> None:
    with pytest.raises(ModelNotFoundError, match="'other' is not served here; served: tiny, tiny-alias"):
        await responses_of(FakeEngine(), request_of(model="other"))


async def test_errors_of_the_engine_pass() -> None:
    engine = FakeEngine()
    engine.refusal = OverloadedError("full", retry_after_s=3)
    with pytest.raises(OverloadedError):
        await responses_of(engine, request_of())
    engine.refusal, engine.failure, engine.fail_at = None, GenerationError("broken"), 2
    with pytest.raises(GenerationError):
        await responses_of(engine, request_of())


async def test_a_reader_that_leaves_or_is_cancelled_cancels_the_request() -> None:
    engine = FakeEngine()
    engine.hold_after = 1
    async with contextlib.aclosing(make_inference(engine).generate(request_of(request_id="a"))) as responses:
        await anext(responses)
        await anext(responses)
    assert engine.cancelled == ["a"]
    reader = asyncio.create_task(responses_of(engine, request_of(request_id="b", output={"finalOnly": True})))
    engine.on_submit.clear()
    await engine.on_submit.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert engine.cancelled == ["a", "b"]
    assert not engine.running


async def test_the_deadline_goes_to_the_engine_and_one_that_passed_is_refused() -> None:
    engine = FakeEngine()
    deadline = time.monotonic() + 100
    await responses_of(engine, request_of(), deadline=deadline)
    assert engine.requests[0].deadline == deadline
    with pytest.raises(DeadlineError):
        await responses_of(engine, request_of(), deadline=time.monotonic() - 1)


async def test_tokenize_detokenize_and_models() -> None:
    inference = make_inference(FakeEngine(), LineTemplate())
    tokenized = await inference.tokenize(pb.TokenizeRequest(text="é"))
    assert (list(tokenized.token_ids), tokenized.max_model_len) == ([195, 169], 512)
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")])
    assert bytes((await inference.tokenize(pb.TokenizeRequest(chat=chat))).token_ids) == b"user: x\nassistant:"
    assert (await inference.detokenize(pb.DetokenizeRequest(token_ids=[195, 169, 256]))).text == "é<eos>"
    assert (await inference.detokenize(pb.DetokenizeRequest(token_ids=[195]))).text == "\ufffd"
    with pytest.raises(InvalidRequestError, match="300"):
        await inference.detokenize(pb.DetokenizeRequest(token_ids=[300]))
    with pytest.raises(InvalidRequestError, match="set text or chat"):
        await inference.tokenize(pb.TokenizeRequest())
    models = inference.list_models().models
    assert [model.name for model in models] == ["tiny", "tiny-alias"]
    assert (models[0].vocab_size, models[0].has_chat_template, models[0].created_unix_s) == (300, True, 1_700_000_000)


async def test_variables_that_are_no_json_are_refused() -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user")])
    chat.template_variables["x"] = math.inf
    with pytest.raises(InvalidRequestError, match="not finite"):
        await responses_of(FakeEngine(), pb.GenerateRequest(chat=chat))


async def test_token_rules_reach_the_engine() -> None:
    engine = FakeEngine()
    sampling = {
        "presencePenalty": 1.5, "frequencyPenalty": -2, "repetitionPenalty": 1.25, "logitBias": {"7": 2, "5": -100},
        "allowedTokenIds": [9, 5, 9], "badWords": ["no", " way"], "grammar": {"regex": "a+"},
    }  # fmt: skip
    await responses_of(engine, request_of(sampling=sampling))
    assert engine.requests[0].sampling.rules == TokenRules(
        presence_penalty=1.5,
        frequency_penalty=-2,
        repetition_penalty=1.25,
        logit_bias=((5, -100), (7, 2)),
        allowed_token_ids=(5, 9),
        bad_words=(tuple(b"no"), tuple(b"way")),
        grammar="regex:a+",
    )


async def test_a_grammar_that_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await responses_of(FakeEngine(), request_of(sampling={"grammar": {"lark": "bad"}}))
    assert caught.value.field == "sampling.grammar.lark"


async def test_a_grammar_needs_an_end() -> None:
    with pytest.raises(InvalidRequestError, match="ignore_eos together with a grammar") as caught:
        await responses_of(FakeEngine(), request_of(sampling={"grammar": {"regex": "a"}}, stop={"ignoreEos": True}))
    assert caught.value.field == "stop.ignore_eos"


@pytest.mark.parametrize(
    ("fields", "field", "capability"),
    [
        ({"sampling": {"presencePenalty": 1}}, "sampling.presence_penalty", "CAPABILITY_LOGIT_PROCESSORS"),
        ({"sampling": {"badWords": ["x"]}}, "sampling.bad_words", "CAPABILITY_LOGIT_PROCESSORS"),
        ({"sampling": {"grammar": {"jsonObject": True}}}, "sampling.grammar", "CAPABILITY_GRAMMARS"),
        (beams(2), "sampling.beam_search", "CAPABILITY_BEAMS"),
        ({"output": {"promptLogprobs": 0}}, "output.prompt_logprobs", "CAPABILITY_PROMPT_LOGPROBS"),
    ],
)
async def test_what_the_worker_lacks_is_refused_by_name(fields: dict[str, Any], field: str, capability: str) -> None:
    engine = FakeEngine()
    engine.model.capabilities = frozenset()
    with pytest.raises(UnsupportedError, match=f"its worker lacks {capability}; leave it out") as caught:
        await responses_of(engine, request_of(**fields))
    assert caught.value.field == field
    neutral = request_of(sampling={"presencePenalty": 0, "repetitionPenalty": 1})
    assert await responses_of(engine, neutral)
