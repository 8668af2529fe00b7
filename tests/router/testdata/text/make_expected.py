"""Writes chat_expected.json: what transformers renders for the templates and conversations here.

python make_expected.py      (with transformers 5.23.0; neither torch nor a model is needed)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).parent
ROUTER_TEMPLATES = HERE.parents[3] / "router" / "octavo_router" / "chat_templates"

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Tells the weather <now> & "here" in 東京',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# Key order, numbers and characters that a rendering could lose; a tool without parameters as transformers makes it.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "a + b",
            "parameters": {
                "type": "object",
                "required": ["b", "a"],
                "properties": {
                    "b": {"type": "number", "minimum": -0.5, "default": 1e21},
                    "a": {"type": ["integer", "null"], "enum": [1, 12345678901234567890, None], "title": "</é> & '"},
                },
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = [
    {"id": "a1B2c3D4e", "type": "function", "function": {"name": "add", "arguments": {"b": 2.50, "a": None}}},
    {"id": "f5G6h7I8j", "type": "function", "function": {"name": "now", "arguments": {}}},
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "東京"}}}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": "What is the capital of France?"}],
    "system": [
        {"role": "system", "content": " You are terse. "},
        {"role": "user", "content": "Hi & <bye> 'x' 🇫🇷"},
    ],
    "turns": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "  4 \n"},
        {"role": "user", "content": "And 3+3?"},
    ],
    "prefill": [
        {"role": "user", "content": "The capital of France?"},
        {"role": "assistant", "content": "The capital of France is "},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "18", "tool_call_id": "call_1"},
        {"role": "user", "content": "Thanks"},
    ],
    "several_calls": [
        {"role": "user", "content": "Add and tell"},
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "content": '{"sum": 3}', "tool_call_id": "a1B2c3D4e"},
        {"role": "tool", "content": "12:00", "tool_call_id": "f5G6h7I8j"},
        {"role": "assistant", "content": "3, at 12:00."},
        {"role": "user", "content": "Again"},
    ],
    "one_call": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add"},
        {"role": "assistant", "content": "Adding.", "tool_calls": CALLS[:1]},
        {"role": "tool", "content": "3", "tool_call_id": "a1B2c3D4e"},
    ],
}

CASES: list[dict[str, Any]] = [
    *(
        {"template": name, "messages": c, "add_generation_prompt": True}
        for name in ("smollm2", "llama3", "qwen")
        for c in ("question", "system", "turns")
    ),
    *(
        {"template": name, "messages": "prefill", "continue_final_message": True}
        for name in ("smollm2", "llama3", "qwen", "mistral")
    ),
    *({"template": name, "messages": "turns", "add_generation_prompt": False} for name in ("smollm2", "mistral")),
    *(
        {"template": name, "messages": "tools", "add_generation_prompt": True, "tools": [TOOL]}
        for name in ("llama3", "qwen")
    ),
    *(
        {"template": name, "messages": messages, "add_generation_prompt": True, "tools": TOOLS}
        for name, messages in (
            ("qwen", "several_calls"),
            ("qwen", "one_call"),
            ("hermes", "several_calls"),
            ("hermes", "one_call"),
            ("hermes", "question"),
            ("llama3", "one_call"),
            ("mistral_tools", "several_calls"),
        )
    ),
    {"template": "hermes", "messages": "prefill", "continue_final_message": True},
    {
        "template": "qwen",
        "messages": "question",
        "add_generation_prompt": True,
        "variables": {"enable_thinking": False},
    },
    {
        "template": "llama3",
        "messages": "question",
        "add_generation_prompt": True,
        "variables": {"date_string": "1 Jan 2026", "bos_token": "<other>"},
    },
]


def template_path(name: str) -> Path:
    """A template here, or one that comes with the router."""
    path = HERE / "templates" / f"{name}.jinja"
    return path if path.exists() else ROUTER_TEMPLATES / path.name


def main() -> None:
    """Renders every case and writes the file."""
    for case in CASES:
        rendered, _ = render_jinja_template(
            conversations=[CONVERSATIONS[case["messages"]]],
            tools=case.get("tools"),
            chat_template=template_path(case["template"]).read_text(),
            continue_final_message=case.get("continue_final_message", False),
            add_generation_prompt=case.get("add_generation_prompt", False),
            **{**SPECIAL, **case.get("variables", {})},
        )
        case["expected"] = rendered[0]
    data = {"special_tokens": SPECIAL, "conversations": CONVERSATIONS, "cases": CASES}
    (HERE / "chat_expected.json").write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
