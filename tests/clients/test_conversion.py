from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format

from octavo.conversion import chat_prompt, chat_request, detokenize_request, generate_request, tokenize_request
from octavo.errors import InvalidRequestError
from octavo.types import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from octavo.v1 import inference_pb2, sampling_pb2


def request_for(**params: Any) -> inference_pb2.GenerateRequest:
    return generate_request("x", SamplingParams(**params), {}, final_only=False)


def test_no_parameters_leave_everything_to_the_server() -> None:
    request = generate_request("x", None, {}, final_only=True)
    assert not request.HasField("sampling")
    assert not request.HasField("stop")
    assert request.output == sampling_pb2.OutputOptions(final_only=True, return_prompt_token_ids=True)


def test_default_parameters_are_vllm_s() -> None:
    request = request_for()
    assert request.sampling == sampling_pb2.SamplingParams(temperature=1.0, top_p=1.0, top_k=0)
    assert request.stop == sampling_pb2.StopConditions(max_tokens=16)


def test_model_defaults_leave_the_choice_of_tokens_unset() -> None:
    request = generate_request("x", SamplingParams.model_defaults(), {}, final_only=False)
    assert request.sampling == sampling_pb2.SamplingParams()
    assert request.stop.max_tokens == 16


def test_every_parameter_has_its_place() -> None:
    request = request_for(
        n=2, best_of=3, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=2**64 - 1, presence_penalty=1.5,
        frequency_penalty=-0.5, repetition_penalty=1.25, logit_bias={5: -100.0}, allowed_token_ids=[1, 2],
        bad_words=["bad"], max_tokens=None, min_tokens=4, stop=["a", "b"], stop_token_ids=[9], ignore_eos=True,
        include_stop_str_in_output=True, logprobs=0, prompt_logprobs=2, skip_special_tokens=False,
        spaces_between_special_tokens=True,
    )  # fmt: skip
    assert request.sampling == sampling_pb2.SamplingParams(
        n=2, best_of=3, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=2**64 - 1, presence_penalty=1.5,
        frequency_penalty=-0.5, repetition_penalty=1.25, logit_bias={5: -100.0}, allowed_token_ids=[1, 2],
        bad_words=["bad"],
    )  # fmt: skip
    assert request.stop == sampling_pb2.StopConditions(
        min_tokens=4, stop=["a", "b"], stop_token_ids=[9], ignore_eos=True, include_stop_in_text=True
    )
    assert request.output == sampling_pb2.OutputOptions(
        logprobs=0, prompt_logprobs=2, skip_special_tokens=False, spaces_between_special_tokens=True,
        return_prompt_token_ids=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (5, "messages"),
        ([5], "messages[0]"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
    ],
)
def test_what_is_no_list_is_refused_by_name(message: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError, match="it must be") as caught:
        chat_request(message, None, {}, final_only=False)
    assert caught.value.field == field


def test_stop_strings_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="stop is 5; it must be a list, each item a text"):
        request_for(stop=5)


def test_one_stop_string_may_be_given_bare() -> None:
    assert request_for(stop="END").stop.stop == ["END"]


def test_wrong_values_that_fit_the_contract_go_to_the_server() -> None:
    assert request_for(temperature=-1.0).sampling.temperature == -1.0
    assert request_for(n=0).sampling.n == 0
    assert request_for(top_k=-5).sampling.top_k == -5


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"max_tokens": -1}, "stop.max_tokens"),
        ({"max_tokens": 1.5}, "stop.max_tokens"),
        ({"n": -1}, "sampling.n"),
        ({"seed": -3}, "sampling.seed"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"stop": [3]}, "stop.stop"),
        ({"stop_token_ids": [-1]}, "stop.stop_token_ids"),
        ({"stop_token_ids": 3}, "stop.stop_token_ids"),
        ({"logprobs": -1}, "output.logprobs"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias"),
        ({"bad_words": "bad"}, "sampling.bad_words"),
    ],
)
def test_what_the_contract_cannot_hold_names_the_field(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match="it must be") as error:
        request_for(**params)
    assert error.value.field == field


def test_beams() -> None:
    request = request_for(use_beam_search=True, beam_width=4, n=2, length_penalty=0.5, early_stopping="never")
    assert request.sampling.beam_search == sampling_pb2.BeamSearch(
        beam_width=4, length_penalty=0.5, early_stopping=sampling_pb2.BEAM_EARLY_STOPPING_NEVER
    )
    assert request.sampling.n == 2
    assert not request.sampling.HasField("best_of")
    with pytest.raises(InvalidRequestError, match="early_stopping is 'soon'"):
        request_for(use_beam_search=True, beam_width=4, early_stopping="soon")


@pytest.mark.parametrize(
    ("params", "width"),
    [({"n": 3}, 3), ({"best_of": 5, "n": 2}, 5), ({"beam_width": 4, "n": 2}, 4), ({"beam_width": 4, "best_of": 4}, 4)],
)
def test_the_width_of_beams_is_their_own_or_best_of_or_n(params: dict[str, Any], width: int) -> None:
    assert request_for(use_beam_search=True, **params).sampling.beam_search.beam_width == width


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"beam_width": 4}, "sampling.beam_search.beam_width"),
        ({"length_penalty": 2.0}, "sampling.beam_search.length_penalty"),
        ({"early_stopping": True}, "sampling.beam_search.early_stopping"),
        ({"use_beam_search": True, "beam_width": 4, "best_of": 3}, "sampling.best_of"),
    ],
)
def test_half_a_beam_search_is_refused(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        request_for(**params)
    assert error.value.field == field


def test_structured_outputs() -> None:
    text = '{"type":"object"}'
    assert request_for(structured_outputs=StructuredOutputsParams(json=text)).sampling.grammar.json_schema == text
    ordered = request_for(structured_outputs=StructuredOutputsParams(json={"z": {"b": 1, "a": "é"}, "c": [1]}))
    assert ordered.sampling.grammar.json_schema == '{"z": {"b": 1, "a": "é"}, "c": [1]}'
    assert request_for(structured_outputs=StructuredOutputsParams(regex="a+")).sampling.grammar.regex == "a+"
    assert request_for(
        structured_outputs=StructuredOutputsParams(choice=["a", "b"])
    ).sampling.grammar.choices.choices == ["a", "b"]
    assert request_for(structured_outputs=StructuredOutputsParams(grammar="g")).sampling.grammar.lark == "g"
    assert request_for(structured_outputs=StructuredOutputsParams(json_object=True)).sampling.grammar.json_object
    with pytest.raises(InvalidRequestError, match="given: none"):
        request_for(structured_outputs=StructuredOutputsParams())
    with pytest.raises(InvalidRequestError, match="given: json, regex"):
        request_for(structured_outputs=StructuredOutputsParams(json={"a": 1}, regex="a"))
    with pytest.raises(InvalidRequestError, match="a value that JSON can express") as caught:
        request_for(structured_outputs=StructuredOutputsParams(json={"a": float("nan")}))
    assert caught.value.field == "sampling.grammar.json_schema"


def test_prompts() -> None:
    assert generate_request("x", None, {}, final_only=False).text == "x"
    assert generate_request({"prompt": "x"}, None, {}, final_only=False).text == "x"
    assert generate_request([1, 2], None, {}, final_only=False).token_ids.ids == [1, 2]
    assert generate_request({"prompt_token_ids": [3]}, None, {}, final_only=False).token_ids.ids == [3]
    empty = generate_request([], None, {}, final_only=False)
    assert empty.WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize(
    "prompt", [{"promt": "x"}, {}, {"prompt": "x", "other": 1}, 5, None, ["a"], [-1], {"prompt": 3}]
)
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError):
        generate_request(prompt, None, {}, final_only=False)


def test_chat_messages() -> None:
    chat = chat_prompt(
        [
            {"role": "system", "content": "s", "name": "n"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "r", "tool_call_id": "1"},
        ],
        {
            "continue_final_message": True,
            "add_generation_prompt": False,
            "chat_template": "{{ x }}",
            "chat_template_kwargs": {"x": [1, "y"]},
            "tools": [
                {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
            ],
            "tool_choice": "f",
            "parallel_tool_calls": False,
        },
    )
    assert chat.messages[0] == inference_pb2.ChatMessage(role="system", content="s", name="n")
    assert [part.text for part in chat.messages[1].content_parts] == ["a", "b"]
    assert chat.messages[2].tool_calls[0] == inference_pb2.ToolCall(id="1", name="f", arguments_json="{}")
    assert chat.messages[3].tool_call_id == "1"
    assert chat.continue_final_message
    assert chat.HasField("add_generation_prompt")
    assert chat.chat_template == "{{ x }}"
    assert json_format.MessageToDict(chat.template_variables) == {"x": [1.0, "y"]}
    assert chat.tools[0] == inference_pb2.Tool(name="f", description="d", parameters_json='{"type": "object"}')
    assert chat.tool_choice == inference_pb2.ToolChoice(mode=inference_pb2.TOOL_CHOICE_MODE_NAMED, name="f")
    assert chat.HasField("parallel_tool_calls")
    assert not chat.parallel_tool_calls


def test_a_tool_may_be_chosen_as_openai_writes_it() -> None:
    chosen = chat_prompt([], {"tool_choice": {"type": "function", "function": {"name": "auto"}}}).tool_choice
    assert (chosen.mode, chosen.name) == (inference_pb2.TOOL_CHOICE_MODE_NAMED, "auto")
    assert chat_prompt([], {"tool_choice": "auto"}).tool_choice.mode == inference_pb2.TOOL_CHOICE_MODE_AUTO


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ("hello", "messages is 'hello'"),
        ({"role": "user", "content": "x"}, "list of messages"),
        (["hello"], r"messages\[0\] is 'hello'"),
        ([{"role": "user", "content": "x", "colour": 1}], "unknown key 'colour'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\]"),
        ([{"role": 3, "content": "x"}], r"messages\[0\].role is 3"),
        ([{"role": "assistant", "tool_calls": ["f"]}], r"tool_calls\[0\] is 'f'"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        chat_request(messages, None, {}, final_only=False)


def test_tokenizing() -> None:
    assert tokenize_request("x", model="m", add_special_tokens=False) == inference_pb2.TokenizeRequest(
        model="m", text="x", add_special_tokens=False
    )
    assert tokenize_request([{"role": "user", "content": "x"}], model="", add_special_tokens=None).HasField("chat")
    rendered = tokenize_request(
        [{"role": "user", "content": "x"}],
        model="",
        add_special_tokens=None,
        chat_options={"add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False}},
    )
    assert rendered.chat.HasField("add_generation_prompt")
    assert not rendered.chat.add_generation_prompt
    assert rendered.chat.template_variables["enable_thinking"] is False
    with pytest.raises(TypeError, match="unexpected keyword argument 'generation_prompt'"):
        tokenize_request(
            [],
            model="",
            add_special_tokens=None,
            chat_options={"generation_prompt": True},  # type: ignore[typeddict-unknown-key]
        )
    assert detokenize_request([1, 2], model="", skip_special_tokens=True).token_ids == [1, 2]
    with pytest.raises(InvalidRequestError, match="token_ids"):
        detokenize_request([-1], model="", skip_special_tokens=True)


def test_token_rules() -> None:
    sampling = request_for(
        presence_penalty=1.5, frequency_penalty=-0.5, repetition_penalty=1.25, logit_bias={5: -100, "7": 2.5},
        allowed_token_ids=(3, 4), bad_words=["no"],
    ).sampling  # fmt: skip
    assert sampling == sampling_pb2.SamplingParams(
        temperature=1, top_p=1, top_k=0, presence_penalty=1.5, frequency_penalty=-0.5, repetition_penalty=1.25,
        logit_bias={5: -100, 7: 2.5}, allowed_token_ids=[3, 4], bad_words=["no"],
    )  # fmt: skip
    neutral = request_for(logit_bias={}, bad_words=[], repetition_penalty=1.0).sampling
    assert neutral == request_for().sampling
    with pytest.raises(InvalidRequestError, match="allowed_token_ids is empty") as caught:
        request_for(allowed_token_ids=[])
    assert caught.value.field == "sampling.allowed_token_ids"
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        request_for(logit_bias={"foo": 1})


def test_any_json_is_a_schema_that_says_nothing() -> None:
    assert request_for(structured_outputs=StructuredOutputsParams(json={})).sampling.grammar.json_schema == "{}"


def test_guided_decoding_is_the_older_name() -> None:
    assert request_for(guided_decoding=GuidedDecodingParams(regex="a")).sampling.grammar.regex == "a"
    both = {"guided_decoding": GuidedDecodingParams(regex="a"), "structured_outputs": GuidedDecodingParams(regex="a")}
    with pytest.raises(InvalidRequestError, match="two names of one thing"):
        request_for(**both)
