"""Bodies of OpenAI's API: what is read from them, and how one that is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf import json_format

from octavo.errors import InvalidRequestError, UnsupportedError
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import sampling_pb2
from octavo_router.openai_requests import chat_request, completion_requests, param_of, tokenize_request
from octavo_router.openai_schema import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    StreamOptions,
    TokenizeBody,
    parse_body,
)


def completion(**fields: Any) -> pb.GenerateRequest:
    (request,) = completion_requests(parse_body(CompletionBody, json.dumps({"prompt": "x"} | fields).encode()), "r1")
    return request


def chat(**fields: Any) -> pb.GenerateRequest:
    body = {"messages": [{"role": "user", "content": "x"}]} | fields
    return chat_request(parse_body(ChatCompletionBody, json.dumps(body).encode()), "r1")


def test_every_parameter_reaches_its_field() -> None:
    request = completion(
        model="m", max_tokens=5, temperature=0, top_p=0.5, top_k=7, min_p=0.25, n=2, best_of=2, seed=9,
        presence_penalty=1.5, frequency_penalty=-1.5, repetition_penalty=1.25, stop=["a", "b"], stop_token_ids=[3],
        logit_bias={"5": -100, "0": 2.5}, allowed_token_ids=[5, 0], bad_words=["no"],
        response_format={"type": "json_object"},
        include_stop_str_in_output=True, ignore_eos=True, min_tokens=2, skip_special_tokens=False,
        spaces_between_special_tokens=True, stream=True, priority=-3, cache_salt="s", user="u", logprobs=4, echo=True,
    )  # fmt: skip
    assert request == pb.GenerateRequest(
        request_id="r1",
        model="m",
        text="x",
        sampling={
            "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "n": 2, "best_of": 2, "seed": 9,
            "presence_penalty": 1.5, "frequency_penalty": -1.5, "repetition_penalty": 1.25,
            "logit_bias": {5: -100, 0: 2.5}, "allowed_token_ids": [5, 0], "bad_words": ["no"],
            "grammar": {"json_object": True},
        },
        stop={
            "max_tokens": 5, "min_tokens": 2, "stop": ["a", "b"], "stop_token_ids": [3], "ignore_eos": True,
            "include_stop_in_text": True,
        },
        output={
            "logprobs": 4, "prompt_logprobs": 4, "echo": True, "return_prompt_token_ids": True,
            "skip_special_tokens": False, "spaces_between_special_tokens": True,
        },
        priority=-3,
        cache_salt="s",
        tenant="u",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ["x"] * 2049}, "prompt has 2049 prompts; at most 2048 are possible"),
        ({"prompt": ["x"] * 2048, "stop": "y" * 40_000}, "2048 prompts with 40014 bytes of parameters each"),
    ],
)
def test_a_body_does_not_grow_beyond_measure(fields: dict[str, Any], message: str) -> None:
    body = parse_body(CompletionBody, json.dumps(fields).encode())
    with pytest.raises(InvalidRequestError, match=message) as caught:
        completion_requests(body, "r1")
    assert caught.value.field == "prompt"


def test_the_first_of_many_wrong_items_is_told_and_no_other_looked_at() -> None:
    for body, fields, field in [
        (DetokenizeBody, {"tokens": [1, "a"] + [{}] * 1000}, "tokens[1]"),
        (CompletionBody, {"prompt": "x", "stop_token_ids": [None] * 1000}, "stop_token_ids[0]"),
        (ChatCompletionBody, {"messages": [5] * 1000}, "messages[0]"),
    ]:
        with pytest.raises(InvalidRequestError) as caught:
            parse_body(body, json.dumps(fields).encode())
        assert caught.value.field == field


def test_many_unknown_fields_are_counted() -> None:
    fields = {"prompt": "x"} | {f"k{index}": 1 for index in range(1000)}
    with pytest.raises(InvalidRequestError, match="the body has 1000 fields that are wrong or unknown"):
        parse_body(CompletionBody, json.dumps(fields).encode())


def test_what_is_not_given_is_not_set() -> None:
    request = completion()
    assert not request.sampling.ListFields()
    assert request.stop == type(request.stop)(max_tokens=16)
    assert request.output == type(request.output)(final_only=True)
    assert not chat().stop.HasField("max_tokens")
    assert not chat().output.HasField("logprobs")


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert list(completion(stop="ab").stop.stop) == ["ab"]


@pytest.mark.parametrize(("seed", "meant"), [(-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1), (0, 0)])
def test_any_64_bit_integer_is_a_seed(seed: int, meant: int) -> None:
    assert completion(seed=seed).sampling.seed == meant


def test_prompts_of_every_form() -> None:
    def prompts(prompt: Any) -> list[Any]:
        requests = completion_requests(parse_body(CompletionBody, json.dumps({"prompt": prompt}).encode()), "r1")
        return [list(r.token_ids.ids) if r.WhichOneof("prompt") == "token_ids" else r.text for r in requests]

    assert prompts("ab") == ["ab"]
    assert prompts(["ab", "c"]) == ["ab", "c"]
    assert prompts([1, 2]) == [[1, 2]]
    assert prompts([[1, 2], [3]]) == [[1, 2], [3]]
    assert prompts([[]]) == [[]]


def test_chat_lengths_and_logprobs() -> None:
    assert chat(max_tokens=3).stop.max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=4).stop.max_tokens == 4
    assert chat(logprobs=True).output.logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).output.logprobs == 5
    assert not chat(logprobs=False).output.HasField("logprobs")


def test_messages_keep_their_parts_and_calls() -> None:
    request = chat(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "18", "tool_call_id": "c"},
        ],
        chat_template_kwargs={"enable_thinking": False},
        continue_final_message=True,
        add_generation_prompt=False,
    )
    user, assistant, tool = request.chat.messages
    assert user == pb.ChatMessage(
        role="user", content_parts=[pb.ContentPart(text="a"), pb.ContentPart(text="b")], name="n"
    )
    assert list(assistant.tool_calls) == [pb.ToolCall(id="c", name="f", arguments_json="{}")]
    assert tool == pb.ChatMessage(role="tool", content="18", tool_call_id="c")
    assert request.chat.template_variables["enable_thinking"] is False
    assert request.chat.continue_final_message
    assert request.chat.HasField("add_generation_prompt")


@pytest.mark.parametrize("body", [CompletionBody, ChatCompletionBody, Message, StreamOptions, TokenizeBody])
def test_fields_that_are_not_offered_are_declared(body: type[Any]) -> None:
    assert body.not_offered.keys() <= body.model_fields.keys()


@pytest.mark.parametrize("body", [CompletionBody, ChatCompletionBody])
def test_each_field_that_is_not_offered_says_so(body: type[Any]) -> None:
    prompt = {"prompt": "x"} if body is CompletionBody else {"messages": [{"role": "user", "content": "x"}]}
    for name, neutrals in body.not_offered.items():
        for neutral in (None, *neutrals):
            parse_body(body, json.dumps(prompt | {name: neutral}).encode()).check_offered()
        with pytest.raises(UnsupportedError, match=f"^{name} is not offered") as caught:
            parse_body(body, json.dumps(prompt | {name: {"some": "thing"}}).encode()).check_offered()
        assert caught.value.field == name


@pytest.mark.parametrize("key", ["foo", "-1", "1.5", "", " 5", "05", "4294967296", "99999999999999999999", "\u0665"])
def test_keys_of_logit_bias_are_token_ids(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias has the key") as caught:
        completion(logit_bias={key: 1})
    assert caught.value.field == "logit_bias"


def test_allowing_no_token_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="allowed_token_ids is empty"):
        completion(allowed_token_ids=[])
    empty = completion(logit_bias={}, bad_words=[])
    assert not empty.sampling.ListFields()


def test_a_neutral_number_is_no_boolean() -> None:
    with pytest.raises(UnsupportedError):
        completion(return_token_ids=0)


@pytest.mark.parametrize(
    ("data", "message", "field"),
    [
        (b"{", "the body is not valid JSON in UTF-8: EOF while parsing", ""),
        (b"[1]", "the body must be a JSON object", ""),
        (b'{"prompt": "\\ud800"}', "the body is not valid JSON", ""),
        (b'{"prompt": "x", "n": true}', "n is true; it must be a valid integer", "n"),
        (b'{"prompt": "x", "stream_options": {"x": 1}}', "unknown field stream_options.x", "stream_options.x"),
        (b'{"prompt": "x", "stop_token_ids": [1, "2"]}', 'stop_token_ids[1] is "2"; it must be', "stop_token_ids[1]"),
        (b'{"prompt": {"long": "' + b"x" * 200 + b'"}}', "x...; it must be a string, a list of strings", "prompt"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, message: str, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(CompletionBody, data)
    assert message in caught.value.message
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "beams"),
    [
        ({"n": 3}, {"beam_width": 3}),
        ({"n": 2, "best_of": 4}, {"beam_width": 4}),
        ({"beam_width": 5, "length_penalty": 0, "early_stopping": "never"},
         {"beam_width": 5, "length_penalty": 0, "early_stopping": "BEAM_EARLY_STOPPING_NEVER"}),
        ({"beam_width": 5, "best_of": 5, "early_stopping": True, "stream": True},
         {"beam_width": 5, "early_stopping": "BEAM_EARLY_STOPPING_TRUE"}),
        ({"early_stopping": False}, {"beam_width": 1, "early_stopping": "BEAM_EARLY_STOPPING_FALSE"}),
    ],
)  # fmt: skip
def test_beams_are_asked_for_as_in_vllm(fields: dict[str, Any], beams: dict[str, Any]) -> None:
    for request in (completion(use_beam_search=True, **fields), chat(use_beam_search=True, **fields)):
        assert request.sampling.beam_search == json_format.ParseDict(beams, sampling_pb2.BeamSearch())
        assert request.sampling.n == fields.get("n", 0)
        assert not request.sampling.HasField("best_of")


def test_without_beams_their_parameters_must_be_neutral() -> None:
    neutral = completion(use_beam_search=False, length_penalty=1.0, early_stopping=False, beam_width=None)
    assert not neutral.sampling.HasField("beam_search")
    for name, value in (("beam_width", 4), ("length_penalty", 2), ("early_stopping", "never")):
        with pytest.raises(InvalidRequestError, match=f"{name} is given without use_beam_search") as caught:
            completion(**{name: value})
        assert caught.value.field == name


def test_names_of_the_contract_become_those_of_openai() -> None:
    for field, param in {
        "sampling.temperature": "temperature",
        "sampling.beam_search.beam_width": "beam_width",
        "sampling.grammar.json_schema": "response_format",
        "sampling.grammar.regex": "structured_outputs",
        "stop.stop": "stop",
        "stop": "stop",
        "stop.include_stop_in_text": "include_stop_str_in_output",
        "output.echo": "echo",
        "text": "prompt",
        "token_ids": "prompt",
        "chat": "messages",
        "chat.messages[2].role": "messages[2].role",
        "chat.template_variables": "chat_template_kwargs",
        "stream_options.include_obfuscation": "stream_options.include_obfuscation",
        "": "",
    }.items():
        assert param_of(field) == param


def test_tokenize_takes_a_prompt_or_messages() -> None:
    def tokenize(**fields: Any) -> pb.TokenizeRequest:
        return tokenize_request(parse_body(TokenizeBody, json.dumps(fields).encode()))

    assert tokenize(prompt="x", add_special_tokens=False) == pb.TokenizeRequest(text="x", add_special_tokens=False)
    assert tokenize(messages=[{"role": "user", "content": "x"}]).chat.messages[0].content == "x"
    for wrong in ({}, {"prompt": "x", "messages": []}, {"messages": [], "add_special_tokens": True}):
        with pytest.raises(InvalidRequestError):
            tokenize(**wrong)
