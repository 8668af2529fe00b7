from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.served_tokenizer import ServedTokenizer
from octavo.types import ChatOptions, Message


class FakeServer:
    """Its tokens are bytes, and it renders a conversation as its last message. Keeps the options it was sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.tokenizer = ServedTokenizer(self.tokenize, self.detokenize)

    def tokenize(
        self,
        source: str | Sequence[Message],
        *,
        add_special_tokens: bool | None = None,
        chat_options: ChatOptions | None = None,
    ) -> list[int]:
        self.sent.append(add_special_tokens if isinstance(source, str) else chat_options)
        return list((source if isinstance(source, str) else source[-1]["content"]).encode())

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.sent.append(skip_special_tokens)
        return bytes(token_ids).decode()


def test_text_and_token_ids() -> None:
    server = FakeServer()
    assert server.tokenizer.encode("hi") == [104, 105]
    assert server.tokenizer.encode("hi", add_special_tokens=False) == [104, 105]
    assert server.tokenizer.decode([104, 105], skip_special_tokens=True) == "hi"
    assert server.tokenizer.decode(104) == "h"
    assert server.sent == [True, False, True, False]


def test_a_conversation_is_rendered_as_the_options_say() -> None:
    server = FakeServer()
    conversation = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert server.tokenizer.apply_chat_template(conversation) == [104, 105]
    text = server.tokenizer.apply_chat_template(
        conversation, tools, "{{ x }}", add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    assert text == "hi"
    assert server.sent == [
        {"add_generation_prompt": False, "continue_final_message": False},
        {
            "add_generation_prompt": True,
            "continue_final_message": False,
            "tools": tools,
            "chat_template": "{{ x }}",
            "chat_template_kwargs": {"enable_thinking": False},
        },
        False,
    ]
