"""`LLM.get_tokenizer()`: the served model's tokenizer, under the names that transformers made known.

There is none in this process: each call asks the router, so that what it answers is what the server works with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from octavo.types import ChatOptions, Message


class Tokenize(Protocol):
    """`Client.tokenize`, or what does the same."""

    def __call__(
        self,
        source: str | Sequence[Message],
        *,
        add_special_tokens: bool | None = None,
        chat_options: ChatOptions | None = None,
    ) -> list[int]: ...


class ServedTokenizer:
    """Turns text and conversations into token ids and back."""

    def __init__(self, tokenize: Tokenize, detokenize: Callable[[Sequence[int], bool], str]) -> None:
        """detokenize: the text of token ids; the flag leaves special tokens out."""
        self._tokenize = tokenize
        self._detokenize = detokenize

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids."""
        return self._tokenize(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids, or of one. Bytes that are no whole character appear as U+FFFD."""
        return self._detokenize([token_ids] if isinstance(token_ids, int) else token_ids, skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **template_variables: Any,
    ) -> list[int] | str:
        """A conversation as the chat template renders it: token ids, or their text where `tokenize` is False.

        template_variables: handed to the template beside the messages, such as enable_thinking=False.
        """
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
        )
        if tools is not None:
            options["tools"] = tools
        if chat_template is not None:
            options["chat_template"] = chat_template
        if template_variables:
            options["chat_template_kwargs"] = template_variables
        token_ids = self._tokenize(conversation, chat_options=options)
        return token_ids if tokenize else self._detokenize(token_ids, False)
