"""Requests with tools through the contract, over a fake engine that says what the tests write."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from typing import Any

import pytest
from google.protobuf import json_format

from octavo.errors import InvalidRequestError
from octavo.v1 import inference_pb2 as pb
from octavo_router import tool_calls
from octavo_router.chat_template import ChatTemplate
from octavo_router.request import FinishReason
from octavo_router.tool_calls import CallReader, ToolFormat, ToolUse
from tests.router.fake_engine import FakeEngine, LineTemplate, make_inference
from tests.router.text_samples import byte_level

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TWO_CALLS = f"Adding.\n{CALL}\n{CALL}"
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
HERMES = ToolFormat(family="hermes", takes_tools=True)
REQUIRED, NAMED = {"mode": "TOOL_CHOICE_MODE_REQUIRED"}, {"mode": "TOOL_CHOICE_MODE_NAMED", "name": "add"}


def request_of(
    choice: dict[str, Any] | None = None, chat: dict[str, Any] | None = None, **fields: Any
) -> pb.GenerateRequest:
    """A request with the tools add and now."""
    prompt: dict[str, Any] = {
        "messages": [{"role": "user", "content": "1+1?"}],
        "tools": [{"name": "add", "parametersJson": SCHEMA}, {"name": "now"}],
        **(chat or {}),
    }
    if choice is not None:
        prompt["toolChoice"] = choice
    return json_format.ParseDict({"chat": prompt, **fields}, pb.GenerateRequest())


async def responses_of(
    engine: FakeEngine, request: pb.GenerateRequest, tools: ToolFormat = HERMES, template: Any = None
) -> list[pb.GenerateResponse]:
    inference = make_inference(engine, template or LineTemplate(), tools)
    async with contextlib.aclosing(inference.generate(request)) as responses:
        return [response async for response in responses]


class Said:
    """What the deltas of one sample come to."""

    def __init__(self, responses: list[pb.GenerateResponse], index: int = 0) -> None:
        self.deltas = [d for r in responses for d in r.deltas if d.sample_index == index]
        self.text = "".join(delta.text for delta in self.deltas)
        self.content = "".join(delta.parsed.content for delta in self.deltas)
        self.finish_reason = self.deltas[-1].finish_reason
        self.ids: list[str] = []
        self.calls: list[tuple[str, str]] = []
        for call in (call for delta in self.deltas for call in delta.parsed.tool_calls):
            if call.index == len(self.calls):
                self.ids.append(call.id)
                self.calls.append((call.name, call.arguments_json))
            else:
                assert not call.id
                assert not call.name
                name, arguments = self.calls[call.index]
                self.calls[call.index] = (name, arguments + call.arguments_json)


@pytest.mark.parametrize("final_only", [False, True])
async def test_calls_stand_beside_the_text(final_only: bool) -> None:
    request = request_of(output={"finalOnly": final_only}, sampling={"n": 2})
    responses = await responses_of(FakeEngine(TWO_CALLS), request)
    for index in range(2):
        said = Said(responses, index)
        assert said.text == TWO_CALLS
        assert said.content == "Adding."
        assert said.calls == [("add", '{"a": 1}')] * 2
        assert said.finish_reason == pb.FINISH_REASON_TOOL_CALLS
        assert all(delta.HasField("parsed") for delta in said.deltas)
    ids = Said(responses, 0).ids + Said(responses, 1).ids
    assert len(set(ids)) == 4
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", call_id) for call_id in ids)


@pytest.mark.parametrize("final_only", [False, True])
async def test_much_text_is_read_in_threads(final_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(output={"finalOnly": final_only})
    expected = Said(await responses_of(FakeEngine(TWO_CALLS), request))
    monkeypatch.setattr(tool_calls, "LONG_TEXT", 0)
    threads: set[str] = set()
    read = CallReader.read

    def note(reader: CallReader, delta: pb.SampleDelta, *, start: int = 0) -> None:
        threads.add(threading.current_thread().name)
        read(reader, delta, start=start)

    monkeypatch.setattr(CallReader, "read", note)
    said = Said(await responses_of(FakeEngine(TWO_CALLS), request))
    assert (said.content, said.calls, said.text) == (expected.content, expected.calls, expected.text)
    assert any(name != threading.main_thread().name for name in threads)


def test_what_a_caller_holds_is_much_to_read_once() -> None:
    reader = CallReader(ToolUse("hermes", frozenset({"add"})), lambda index: "x" * tool_calls.LONG_TEXT)
    delta = pb.SampleDelta(sample_index=1, text="y")
    assert reader.has_much_to_read(delta)
    reader.read(delta)
    assert not reader.has_much_to_read(delta)
    assert reader.has_much_to_read(pb.SampleDelta(sample_index=1, text="y" * (tool_calls.LONG_TEXT + 1)))


async def test_arguments_stream_while_they_come() -> None:
    said = Said(await responses_of(FakeEngine(CALL), request_of()))
    pieces = [call.arguments_json for delta in said.deltas for call in delta.parsed.tool_calls]
    assert pieces == list('{"a": 1}')


async def test_an_answer_without_calls_is_content() -> None:
    said = Said(await responses_of(FakeEngine("2 <tool"), request_of()))
    assert (said.content, said.calls, said.finish_reason) == ("2 <tool", [], pb.FINISH_REASON_STOP)


async def test_a_call_that_is_cut_off_ends_with_length() -> None:
    engine = FakeEngine(CALL)
    engine.finish_reason, engine.matched = FinishReason.LENGTH, None
    said = Said(await responses_of(engine, request_of(stop={"maxTokens": CALL.index("1") + 1})))
    assert (said.calls, said.finish_reason) == ([("add", '{"a": 1')], pb.FINISH_REASON_LENGTH)


async def test_one_call_at_most_where_the_caller_wants_no_more() -> None:
    said = Said(await responses_of(FakeEngine(TWO_CALLS), request_of(chat={"parallelToolCalls": False})))
    assert said.calls == [("add", '{"a": 1}')]
    assert said.text == TWO_CALLS


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"choice": {"mode": "TOOL_CHOICE_MODE_NONE"}}, "none"),
        ({"sampling": {"grammar": {"regex": ".*"}}}, "a grammar of the caller's own"),
    ],
)
async def test_text_is_not_read_where_no_call_can_come(fields: dict[str, Any], reason: str) -> None:
    engine, template = FakeEngine(CALL), LineTemplate()
    said = Said(await responses_of(engine, request_of(**fields), template=template))
    assert not any(delta.HasField("parsed") for delta in said.deltas), reason
    assert said.finish_reason == pb.FINISH_REASON_STOP
    # The template is told about the tools all the same.
    assert [tool["function"]["name"] for tool in template.calls[0]["tools"]] == ["add", "now"]


async def test_a_required_call_has_a_grammar_and_is_told_by_the_finish_reason() -> None:
    engine = FakeEngine(CALL)
    said = Said(await responses_of(engine, request_of(REQUIRED)))
    assert said.finish_reason == pb.FINISH_REASON_TOOL_CALLS
    grammar = engine.requests[0].sampling.rules.grammar
    assert grammar.startswith('lark:start: call ("\\n" call)*\n')
    assert '{\\"name\\": \\"now\\"' in grammar


async def test_strict_tools_have_a_grammar_in_calls_of_free_choice() -> None:
    engine, tools = FakeEngine(TWO_CALLS), [{"name": "add", "parametersJson": SCHEMA, "strict": True}, {"name": "now"}]
    said = Said(await responses_of(engine, request_of(chat={"tools": tools})))
    assert (said.content, said.calls) == ("Adding.", [("add", '{"a": 1}')] * 2)
    grammar = engine.requests[0].sampling.rules.grammar
    assert grammar.startswith("lark:start: call* TEXT\n")
    assert '{\\"name\\": \\"now\\"' in grammar
    await responses_of(engine, request_of())
    assert not engine.requests[1].sampling.rules.grammar


async def test_a_named_call_is_one_and_ends_as_any_other_answer() -> None:
    engine, request = FakeEngine(CALL), request_of(NAMED)
    said = Said(await responses_of(engine, request))
    assert (said.calls, said.finish_reason) == ([("add", '{"a": 1}')], pb.FINISH_REASON_STOP)
    grammar = engine.requests[0].sampling.rules.grammar
    assert grammar.startswith("lark:start: call\n")
    assert "now" not in grammar
    # The caller's message stays as it was.
    assert not request.sampling.HasField("grammar")


async def test_a_resumed_call_goes_on_where_it_was_cut() -> None:
    for cut in range(len(CALL)):
        engine = FakeEngine(CALL[cut:])
        engine.held_text = CALL[:cut]
        begun = Said([pb.GenerateResponse(deltas=[_read(CALL[:cut])])])
        request = request_of(
            resume={
                "promptTokenIds": list(b"user: 1+1?\nassistant:"),
                "seed": 1,
                "modelDigest": engine.model.digest,
                "samples": [{"sampleIndex": 0, "tokenIds": list(CALL[:cut].encode()), "textByteCount": cut}],
            }
        )
        rest = Said(await responses_of(engine, request)) if cut else Said(await responses_of(engine, request_of()))
        joined = Said([pb.GenerateResponse(deltas=[*begun.deltas, *rest.deltas])])
        assert (joined.content, joined.calls) == ("", [("add", '{"a": 1}')]), cut
        assert joined.finish_reason == pb.FINISH_REASON_TOOL_CALLS


def _read(text: str) -> pb.SampleDelta:
    delta = pb.SampleDelta(text=text)
    CallReader(ToolUse("hermes", frozenset({"add"}))).read(delta)
    return delta


async def test_an_echoed_prompt_is_not_read() -> None:
    for final_only in (False, True):
        request = request_of(
            chat={"messages": [{"role": "user", "content": CALL}]}, output={"echo": True, "finalOnly": final_only}
        )
        said = Said(await responses_of(FakeEngine("2"), request))
        assert said.text.startswith("user: <tool_call>")
        assert (said.content, said.calls) == ("2", [])


@pytest.mark.parametrize(
    ("tools", "fields", "field", "message"),
    [
        (ToolFormat(), {}, "chat.tools", "template does nothing with tools; leave them out, set tool_choice to none"),
        (
            ToolFormat(takes_tools=True),
            {},
            "chat.tools",
            "start the server with --tool-call-parser hermes, llama3_json",
        ),
        (
            HERMES,
            {"choice": REQUIRED, "sampling": {"grammar": {"jsonObject": True}}},
            "chat.tool_choice",
            "they exclude each other",
        ),
        (HERMES, {"choice": {"mode": "TOOL_CHOICE_MODE_NAMED", "name": "x"}}, "chat.tool_choice.name", "none of the"),
        (
            HERMES,
            {"choice": REQUIRED, "chat": {"tools": [{"name": "f", "parametersJson": '{"type": "bad"}'}]}},
            "chat.tools",
            "cannot be enforced",
        ),
        (
            HERMES,
            {"choice": REQUIRED, "stop": {"ignoreEos": True}},
            "stop.ignore_eos",
            "ignore_eos",
        ),
        (
            HERMES,
            {
                "choice": REQUIRED,
                "chat": {"tools": [{"name": "f", "parametersJson": f'{{"title": "{"x" * 150_000}"}}'}]},
            },
            "chat.tools",
            "a call that is required or strict takes a grammar, which is made of the tools: lark has 150",
        ),
        (
            ToolFormat("pythonic", takes_tools=True),
            {"chat": {"tools": [{"name": "f"}, {"name": "g", "strict": True}]}},
            "chat.tools[1].strict",
            "leave strict out, or require a call",
        ),
    ],
)
async def test_refused(tools: ToolFormat, fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await responses_of(FakeEngine(), request_of(**fields), tools)
    assert caught.value.field == field
    assert message in caught.value.message


async def test_calls_that_the_template_would_drop_are_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    message = {"role": "assistant", "toolCalls": [{"id": "c", "name": "add", "argumentsJson": "{}"}]}
    request = request_of(chat={"messages": [{"role": "user", "content": "x"}, message], "tools": []})
    with pytest.raises(InvalidRequestError, match=r"messages\[1\] has tool_calls, which this model's chat template"):
        await responses_of(FakeEngine(), request, template=template)


def test_the_format_follows_the_template_unless_it_is_told() -> None:
    source = "{% if tools %}<|python_tag|>{% endif %}"
    tokenizer, template = byte_level(), ChatTemplate(source, {})
    assert ToolFormat.of(template, tokenizer, "auto").family == "llama3_json"
    assert ToolFormat.of(template, tokenizer, "auto").takes_tools
    assert ToolFormat.of(template, tokenizer, "mistral").family == "mistral"
    plain = ToolFormat.of(ChatTemplate("{{ messages }}", {}), tokenizer, "auto")
    assert (plain.family, plain.takes_tools) == ("", False)
    assert plain.special_ids == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


def test_a_template_of_the_request_has_a_format_of_its_own() -> None:
    request = request_of(chat={"chatTemplate": "{{ tools }}[TOOL_CALLS]"})
    use = ToolFormat().use_of(request)
    assert use is not None
    assert use.family == "mistral"
    told = ToolFormat(family="hermes", is_auto=False).use_of(request)
    assert told is not None
    assert told.family == "hermes"


def test_marks_that_are_special_tokens_are_shown() -> None:
    tools = ToolFormat("mistral", takes_tools=True, special_ids={"[TOOL_CALLS]": 5, "[ARGS]": 6, "</s>": 2})
    use = tools.use_of(request_of())
    assert use is not None
    assert use.shown_token_ids == {5, 6}


def test_ids_of_mistrals_calls_are_what_its_templates_take() -> None:
    delta = pb.SampleDelta(text='[TOOL_CALLS] [{"name": "add", "arguments": {}}]')
    CallReader(ToolUse("mistral", frozenset({"add"}))).read(delta)
    assert re.fullmatch(r"[A-Za-z0-9]{9}", delta.parsed.tool_calls[0].id)


def test_required_calls_of_pythonic_models_are_json() -> None:
    use = ToolFormat("pythonic", takes_tools=True).use_of(request_of(REQUIRED))
    assert use is not None
    assert use.family == "llama3_json"
    delta = pb.SampleDelta(text='{"name": "add", "parameters": {"a": 1}}', finish_reason=pb.FINISH_REASON_STOP)
    CallReader(use).read(delta)
    assert json.loads(delta.parsed.tool_calls[0].arguments_json) == {"a": 1}
