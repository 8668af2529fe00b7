"""What goes into a generation and what comes out of it, under the names that vLLM made known.

These are plain values: they know nothing of protobuf (`conversion` does) and check nothing that the server checks, so
that a parameter is refused in one place, in the same words, whatever language the caller speaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length", "tool_calls", "error", "abort"]
"""Why a sample ended. "abort" is said by `AsyncLLMEngine.abort`; the others are the server's."""


class RequestOutputKind(Enum):
    """What each output of `AsyncLLMEngine.generate` holds: everything so far, only what is new, or everything once."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids of the served model, used as they are."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
"""Text, token ids, or a dictionary that says which."""

Message = Mapping[str, Any]
"""One turn of a conversation, as OpenAI writes it: {"role": "user", "content": "Hello"}."""


class RequestOptions(TypedDict, total=False):
    """What a request may carry beside its prompt and its sampling parameters.

    timeout: seconds until the call is given up with DeadlineError; unset waits as long as it takes.
    request_id: the caller's name for the request in the server's logs; unset lets the router draw one.
    model: a name that `list_models` returns; unset is the served model.
    priority: lower is scheduled first.
    cache_salt: prompts share cached blocks only where their salts are equal.
    adapter: name of a loaded adapter.
    tenant: whom the request is accounted to.
    """

    timeout: float | None
    request_id: str
    model: str
    priority: int
    cache_salt: str
    adapter: str
    tenant: str


class ChatOptions(RequestOptions, total=False):
    """`RequestOptions`, and how the model's chat template renders the messages.

    add_generation_prompt: whether the template opens the assistant's turn; unset is yes, unless the last message is
    continued. continue_final_message: leaves the last message open, so that generation continues it. chat_template: a
    Jinja template to use instead of the model's. chat_template_kwargs: variables handed to the template beside the
    messages. tools: functions that the model may call, as OpenAI writes them. tool_choice: "auto", "none", "required",
    or the one function to call, by its name or as OpenAI writes it. parallel_tool_calls: False allows one call a turn
    at most.
    """

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str
    chat_template_kwargs: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the output must match. Exactly one is given.

    json: a JSON schema, as a dictionary or as text; properties come in the schema's order. regex: a regular expression
    for the whole output. choice: one of these texts. grammar: a context-free grammar in the notation of Lark or of
    GBNF. json_object: any JSON object.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False


GuidedDecodingParams = StructuredOutputsParams
"""The name that StructuredOutputsParams had in older versions of vLLM."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, when a generation stops and what comes back.

    Names, meanings and defaults are vLLM's. The one difference: `spaces_between_special_tokens` is False, because that
    is what fast tokenizers do whatever vLLM is told. For temperature, top_p and top_k, None leaves the value to the
    model's own defaults.

    n: samples to return. best_of: samples to generate, of which the n likeliest are returned, best first.
    use_beam_search: beams instead of sampling, of which the n best are returned; beam_width: how many are kept, where
    unset best_of, else n; length_penalty: scores are divided by generated length to this power; early_stopping: False
    ends when a better beam is unlikely, True as soon as beam_width of them have ended, "never" when none can exist.
    temperature: 0 takes the likeliest token. top_p, top_k (0 or -1: all), min_p: cut unlikely tokens off.
    seed: sample i draws from seed + i; None lets the router draw a seed.
    presence_penalty, frequency_penalty (-2 to 2): lower the logits of tokens that the output holds, once or as often as
    it holds them. repetition_penalty (0.01 to 100): above 1, tokens that prompt or output hold are less likely.
    logit_bias: token id to what is added to its logit, from -100 to 100. allowed_token_ids: only these may come.
    bad_words: texts that must not come. structured_outputs: what the output must match; guided_decoding is its older
    name.
    max_tokens: None generates up to the context's end. min_tokens: no end-of-sequence or stop token before this many.
    stop: texts that end a sample where the first of them appears. stop_token_ids: tokens that end it.
    logprobs: log-probabilities of the sampled token and of this many likeliest; 0 is the sampled token's alone.
    prompt_logprobs: the same for the prompt's tokens.
    output_kind: of `AsyncLLMEngine`'s outputs; the clients and `LLM` do not look at it.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    @classmethod
    def model_defaults(cls, *, max_tokens: int | None = 16) -> SamplingParams:
        """Parameters that leave the choice of tokens to the model's own defaults."""
        return cls(temperature=None, top_p=None, top_k=None, max_tokens=max_tokens)


@dataclass(frozen=True)
class Logprob:
    """A token's natural log-probability, before temperature and truncation.

    rank: 1 is the likeliest; None where the token is not among the likeliest that were asked for.
    decoded_token: the token's text, where the caller has looked it up.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class Usage:
    """What a request took, in tokens: of the prompt, generated over all samples, and of the prompt from the prefix
    cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. arguments: JSON text as the model wrote it, an object unless the model erred or was cut off."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallDelta:
    """What one call gained. index: which call of the sample, from 0; id and name: set in its first delta, else empty;
    arguments: new characters of them.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class OutputDelta:
    """What one sample gained. `index` is the sample's; text may lag behind the tokens while a character is incomplete.

    finish_reason and stop_reason are set in the sample's last delta only.
    content and tool_calls: what the text says, where the request has tools; None and none otherwise.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


@dataclass(frozen=True)
class CompletionOutput:
    """One sample.

    logprobs: per token, token id to `Logprob`, the sampled token first; None if not asked for. cumulative_logprob: sum
    over the sample's tokens; None unless log-probabilities were asked for, or chose the sample (best_of, beams).
    finish_reason: None while it runs.
    stop_reason: the stop string or the stop token's id; None at an end-of-sequence token.
    content and tool_calls: what the text says, where the request has tools; None and none otherwise.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    def finished(self) -> bool:
        """Whether the sample has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """One request's answer.

    prompt: its text, None where it was given as token ids or messages. prompt_token_ids: None until the server has
    told them. outputs: the samples in order of their index. seed: the one used. usage: None until the request has
    finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    usage: Usage | None = None
    seed: int | None = None
    model: str = ""
    model_digest: str = field(default="", repr=False)

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompt whose K and V came from the prefix cache; None until the request has finished."""
        return None if self.usage is None else self.usage.cached_tokens
