"""Prompts equal what transformers renders, and whatever a template does wrong is the request's error."""

from __future__ import annotations

import copy
import json
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import InvalidRequestError
from octavo_router import chat_template, chat_templates
from octavo_router.chat_template import ChatTemplate
from octavo_router.openai_requests import chat_request
from octavo_router.openai_schema import ChatCompletionBody, parse_body
from octavo_router.prompts import checked_chat
from octavo_router.tool_definitions import templates_tools

DATA = Path(__file__).parent / "testdata" / "text"
EXPECTED: dict[str, Any] = json.loads((DATA / "chat_expected.json").read_text(encoding="utf-8"))
CONVERSATIONS: dict[str, list[dict[str, Any]]] = EXPECTED["conversations"]
HI = [{"role": "user", "content": "Hi"}]


def template(name: str) -> ChatTemplate:
    path = DATA / "templates" / f"{name}.jinja"
    source = path.read_text(encoding="utf-8") if path.exists() else chat_templates.read(name)
    return ChatTemplate(source, EXPECTED["special_tokens"])


def render(source: str, messages: list[dict[str, Any]] = HI, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **{"add_generation_prompt": True, **options})


def refusal(source: str, messages: list[dict[str, Any]] = HI, **options: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        render(source, messages, **options)
    return caught.value


class TestLikeTransformers:
    @pytest.mark.parametrize("case", EXPECTED["cases"], ids=lambda case: f"{case['template']}-{case['messages']}")
    def test_renders_the_same_prompt(self, case: dict[str, Any]) -> None:
        prompt = template(case["template"]).render(
            CONVERSATIONS[case["messages"]],
            add_generation_prompt=case.get("add_generation_prompt", False),
            continue_final_message=case.get("continue_final_message", False),
            tools=case.get("tools"),
            variables=case.get("variables"),
        )
        assert prompt == case["expected"]

    @pytest.mark.parametrize(
        "case",
        [case for case in EXPECTED["cases"] if "tools" in case],
        ids=lambda case: f"{case['template']}-{case['messages']}",
    )
    def test_tools_and_calls_that_come_through_the_contract(self, case: dict[str, Any]) -> None:
        body = {"messages": CONVERSATIONS[case["messages"]], "tools": case["tools"]}
        for message in (body := copy.deepcopy(body))["messages"]:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        chat = chat_request(parse_body(ChatCompletionBody, json.dumps(body).encode()), "").chat
        messages, _ = checked_chat(chat)
        tools = templates_tools(chat)
        assert template(case["template"]).render(messages, add_generation_prompt=True, tools=tools) == case["expected"]

    def test_the_question_of_the_readme(self) -> None:
        assert template("smollm2").render(CONVERSATIONS["question"], add_generation_prompt=True) == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_a_rendered_prompt_brings_its_own_special_tokens(self) -> None:
        """The beginning of a sequence was added twice (BR-075)."""
        assert ChatTemplate.add_special_tokens is False
        assert template("llama3").render(HI, add_generation_prompt=True).count("<s>") == 1

    def test_json_is_neither_escaped_for_html_nor_for_ascii(self) -> None:
        assert render("{{ messages[0] | tojson }}", [{"role": "user", "content": "<é>'&"}]) == (
            '{"role": "user", "content": "<é>\'&"}'
        )

    def test_strftime_now_reads_the_clock(self) -> None:
        clocked = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2026, 7, 4))
        assert clocked.render(HI, add_generation_prompt=False) == "04 Jul 2026"

    def test_missing_special_tokens_are_empty(self) -> None:
        assert render("{{ bos_token }}|{{ eos_token }}|{{ documents is none }}") == "<s>||True"


class TestContinueFinalMessage:
    def test_the_prompt_ends_with_the_message(self) -> None:
        prompt = template("smollm2").render(
            CONVERSATIONS["prefill"], add_generation_prompt=False, continue_final_message=True
        )
        assert prompt.endswith("<|im_start|>assistant\nThe capital of France is ")

    def test_space_that_the_template_trims_is_trimmed(self) -> None:
        prompt = template("mistral").render(
            CONVERSATIONS["prefill"], add_generation_prompt=False, continue_final_message=True
        )
        assert prompt.endswith(" The capital of France is")

    def test_both_flags_exclude_each_other(self) -> None:
        error = refusal("x", CONVERSATIONS["prefill"], continue_final_message=True)
        assert "exclude each other" in error.message
        assert error.field == "chat.continue_final_message"

    def test_a_template_that_drops_the_message_is_refused(self) -> None:
        options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
        assert "leaves out" in refusal("nothing", **options).message
        assert "no content" in refusal("x", [{"role": "assistant", "content": None}], **options).message


class TestContent:
    def test_text_parts_are_joined(self) -> None:
        """Content given as a list of text parts failed in the template (BR-072)."""
        parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " 2+2?"}]
        joined = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
        whole = [{"role": role, "content": "What is 2+2?"} for role in ("system", "user")]
        for name in ("smollm2", "llama3", "qwen"):
            assert template(name).render(joined, add_generation_prompt=True) == template(name).render(
                whole, add_generation_prompt=True
            )

    def test_a_template_that_takes_parts_gets_parts(self) -> None:
        prompt = template("parts").render(HI, add_generation_prompt=True)
        assert prompt == "<user>\nHi\n<assistant>\n"

    def test_a_part_that_is_no_text_is_refused_by_name(self) -> None:
        error = refusal("x", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
        assert "messages[0].content[0] is of type 'image_url'" in error.message
        assert error.field == "chat.messages[0].content[0]"

    def test_absent_and_null_are_the_same(self) -> None:
        message = {"role": "user", "content": "Hi", "name": None, "tool_calls": None}
        assert render("{{ messages[0] | tojson }}", [message]) == '{"role": "user", "content": "Hi"}'

    def test_an_assistant_turn_of_tool_calls_alone(self) -> None:
        tools = copy.deepcopy(CONVERSATIONS["tools"])
        tools[1]["content"] = None
        tools[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "東京"}'
        case = next(c for c in EXPECTED["cases"] if (c["template"], c["messages"]) == ("qwen", "tools"))
        prompt = template("qwen").render(tools, add_generation_prompt=True, tools=case["tools"])
        assert prompt == case["expected"]
        # SmolLM2's template knows no tool calls; it says so instead of making something up.
        with pytest.raises(InvalidRequestError, match="no attribute 'content'"):
            template("smollm2").render(tools, add_generation_prompt=True)

    @pytest.mark.parametrize("arguments", ["{", "[1]", "3", '{"a": "\\ud800"}', "x" * 100_000])
    def test_arguments_that_are_no_json_object_are_refused(self, arguments: str) -> None:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        error = refusal("x", [{"role": "assistant", "tool_calls": [call]}])
        assert error.field == "chat.messages[0].tool_calls[0].function.arguments"
        assert len(error.message) < 200

    def test_the_callers_messages_stay_as_they_are(self) -> None:
        messages = copy.deepcopy(CONVERSATIONS["prefill"])
        template("smollm2").render(messages, add_generation_prompt=False, continue_final_message=True)
        assert messages == CONVERSATIONS["prefill"]


class TestRefusals:
    def test_a_model_without_a_template_says_how_to_give_one(self) -> None:
        assert "--chat-template FILE" in refusal("").message

    def test_no_messages(self) -> None:
        assert refusal("x", []).field == "chat.messages"

    def test_a_message_without_a_role(self) -> None:
        assert refusal("x", [{"content": "Hi"}]).field == "chat.messages[0].role"

    def test_what_the_template_raises_is_what_the_caller_reads(self) -> None:
        """It surfaced as a 500 (BR-074)."""
        with pytest.raises(InvalidRequestError, match="System role not supported"):
            template("mistral").render(CONVERSATIONS["system"], add_generation_prompt=True)
        with pytest.raises(InvalidRequestError, match="roles must alternate user/assistant"):
            template("mistral").render([*HI, *HI], add_generation_prompt=True)

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("{% for %}", "is not Jinja: .*line 1"),
            ("{{ nothing.to.see }}", "'nothing' is undefined"),
            ("{{ messages.fly() }}", "has no attribute 'fly'"),
            ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
            ("{{ 1 // 0 }}", "division"),
            ("{{ messages | nofilter }}", "nofilter"),
            ("{{ messages.append(1) }}", "is not safely callable|unsafe"),
            ("{{ ''.__class__.__mro__ }}", "unsafe"),
            ("{{ namespace(_x=1) }}", "underscore"),
            ("{% include 'x' %}", "no loader"),
            ("{{ [1] | tojson(indent=[]) }}", "failed|refused"),
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too deeply"),
        ],
    )
    def test_template_errors_are_the_requests(self, source: str, message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            render(source)

    def test_variables_cannot_replace_the_conversation(self) -> None:
        error = refusal("x", variables={"messages": []})
        assert error.field == "chat.template_variables"


class TestBounds:
    @pytest.mark.parametrize(
        "source",
        [
            "{% for i in range(1000000000) %}{% endfor %}",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}{% endfor %}{% endfor %}",
            "{% for a in s %}{% for b in s | map('upper') %}{% for c in s %}{% endfor %}{% endfor %}{% endfor %}",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
            "{{ s * 1000000000 }}",
            "{{ 1000000000 * [s] }}",
            "{{ 9 ** 9 ** 9 }}",
            "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        ],
    )
    def test_runaway_templates_are_stopped(self, source: str) -> None:
        refusal(source, variables={"s": "x" * 2000})

    def test_output_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chat_template, "MAX_LENGTH", 1000)
        assert (
            "wrote more than 1000 characters" in refusal("{% for i in range(200) %}{{ 'abcdef' }}{% endfor %}").message
        )

    def test_a_rendering_starts_with_all_its_steps(self) -> None:
        many = ChatTemplate("{% for i in range(90000) %}{% endfor %}done", {})
        for _ in range(15):
            assert many.render(HI, add_generation_prompt=False) == "done"

    def test_loops_see_the_same_things_as_without_bounds(self) -> None:
        source = (
            "{% for m in messages | selectattr('role') %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}"
        )
        assert render(source, [*HI, *HI]) == "1/2False2/2True"

    def test_threads_may_share_a_template(self) -> None:
        shared = template("qwen")
        expected = shared.render(CONVERSATIONS["turns"], add_generation_prompt=True)
        results: list[str] = []

        def work() -> None:
            results.extend(shared.render(CONVERSATIONS["turns"], add_generation_prompt=True) for _ in range(20))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [expected] * 80
