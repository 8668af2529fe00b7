"""What other servers' users reported about stop conditions, text, log-probabilities, sampling and lengths, tried here.

Each test names the report it stands for (BR-…) and what went wrong there. They go through HTTP, as the reports' authors
did: to the default model where its words matter, else to a tiny random one with a context of 512 tokens. Reports that
other tests already try are named there.
"""

from __future__ import annotations

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from octavo import LLM, SamplingParams
from tests.e2e.completions import Caller, Json
from tests.e2e.harness import Reference, collect, request_of
from tests.e2e.streams import HttpStream

PROMPT = [5, 6, 7]
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "The capital of France is Paris."
CAPITAL = "The capital of France is"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_MODEL_LEN = 512
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def post(caller: Caller, path: str, **body: Any) -> httpx.Response:
    """Sends exactly this body."""
    return httpx.post(f"{caller.server.http_url}{path}", json=body, timeout=60)


def refusal(response: httpx.Response) -> str:
    """The message of a 400 of OpenAI's form. AssertionError for any other answer."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return str(error["message"])


def chat(caller: Caller, content: str, **options: Any) -> Json:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **options}
    response = post(caller, CHAT, **body)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def both_ways(caller: Caller, prompt: Any, **options: Any) -> tuple[str, str]:
    """Text and finish reason of a completion. AssertionError unless a stream brings the same."""
    choice = caller.complete(prompt, **options)["choices"][0]
    streamed = HttpStream(caller.server, prompt, **options).finish()
    assert (streamed.text, streamed.finish_reason) == (choice["text"], choice["finish_reason"])
    return streamed.text, streamed.finish_reason


def count_tokens(caller: Caller, **body: Any) -> int:
    return int(post(caller, "/tokenize", **body).json()["count"])


# STOP: stop strings, stop tokens, end of sequence, finish reason


def test_br028_a_stop_string_may_begin_and_end_inside_tokens(caller: Caller) -> None:
    """BR-028: it was only seen where it ended with a token."""
    choice = caller.complete(CAPITAL, 40, logprobs=0)["choices"][0]
    text, tokens = choice["text"], choice["logprobs"]["tokens"]
    edges = {sum(map(len, tokens[:count])) for count in range(len(tokens) + 1)}
    inside = [at for at in range(len(text) - 3) if not {at, at + 3} & edges]
    stops = [text[at : at + 3] for at in random.Random(28).sample(inside, 10)]
    with ThreadPoolExecutor(len(stops)) as pool:
        answers = list(pool.map(lambda stop: both_ways(caller, CAPITAL, max_tokens=40, stop=[stop]), stops))
    assert answers == [(text[: text.index(stop)], "stop") for stop in stops]


@pytest.mark.parametrize("stop", ["", ["", "x"]])
def test_br030_an_empty_stop_string_is_refused(tiny: Caller, stop: str | list[str]) -> None:
    """BR-030: it matched at once, so that the answer was empty; over gRPC it was a panic."""
    for stream in (False, True):
        assert "stop holds an empty string" in refusal(tiny.post(PROMPT, stop=stop, stream=stream))
    with pytest.raises(grpc.RpcError) as caught:
        collect(tiny.server.start(request_of(PROMPT, stop=[stop] if isinstance(stop, str) else stop)))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "stop holds an empty string" in (caught.value.details() or "")


def test_br032_min_tokens_puts_off_every_end_of_sequence(
    tiny: Caller, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """BR-032: of several end-of-sequence ids only one was masked.

    The two ids are tokens that the model would give soon: one at once, the other where the first is forbidden.
    """
    first = tiny.server.generate(PROMPT, max_tokens=20).token_ids[1]
    second = tiny.server.generate(PROMPT, max_tokens=20, logit_bias={first: -100.0}).token_ids[3]
    forbidden = {first: -100.0, second: -100.0}
    expected = tiny.server.generate(PROMPT, max_tokens=20, logit_bias=forbidden).token_ids

    model = tmp_path / "two_ends"
    shutil.copytree(tiny_models["llama-linear-bias"], model)
    file = model / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [first, second]}))
    with LLM(model=str(model), dtype="float32", max_model_len=MAX_MODEL_LEN, num_device_blocks=100) as llm:

        def tokens(**sampling: Any) -> tuple[list[int], str | None]:
            params = SamplingParams(temperature=0, max_tokens=40, **sampling)
            (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
            return list(output.outputs[0].token_ids), output.outputs[0].finish_reason

        ended, reason = tokens()
        assert (ended[-1], reason) == (first, "stop")
        assert len(ended) <= 2
        put_off, _ = tokens(min_tokens=20)
    assert put_off[:20] == expected


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_br033_a_special_token_is_a_stop_string(caller: Caller, ignore_eos: bool) -> None:
    """BR-033: the end-of-turn marker was taken out of the text before stop strings were looked for."""
    options: dict[str, Any] = {"max_tokens": 40, "skip_special_tokens": True, "ignore_eos": ignore_eos}
    assert both_ways(caller, QUESTION, stop=["<|im_end|>"], **options) == (ANSWER, "stop")


def test_br034_the_stop_string_is_kept_where_asked(caller: Caller) -> None:
    """BR-034: include_stop_str_in_output had no effect in one of the two modes."""
    for stop, before in [(" Paris", "The capital of France is"), ("tal of Fr", "The capi")]:
        for include in (True, False):
            text, reason = both_ways(caller, QUESTION, max_tokens=12, stop=[stop], include_stop_str_in_output=include)
            assert (text, reason) == (before + stop * include, "stop")


def test_br035_answers_end(caller: Caller) -> None:
    """BR-035: the end of sequence was ignored, so that every answer had max_tokens."""
    answer = chat(caller, "Say hi.", max_tokens=200)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 200
    endless = chat(caller, "Say hi.", max_tokens=200, ignore_eos=True)
    assert endless["choices"][0]["finish_reason"] == "length"
    assert endless["usage"]["completion_tokens"] == 200


def test_br036_text_behind_an_ignored_end_is_usable(caller: Caller) -> None:
    """BR-036: with ignore_eos there were end markers in the text, or nothing but blanks."""
    ended = caller.complete(QUESTION, 64, ignore_eos=False, skip_special_tokens=True)
    assert ended["usage"]["completion_tokens"] < 64, "the model ends its answer where it may"
    endless = caller.complete(QUESTION, 64, skip_special_tokens=True)
    (choice,) = endless["choices"]
    assert (endless["usage"]["completion_tokens"], choice["finish_reason"]) == (64, "length")
    assert choice["text"].startswith(ANSWER)
    assert choice["text"].removeprefix(ANSWER).strip()
    assert "<|im_" not in choice["text"]


def test_br037_the_limits_reason_is_length(caller: Caller) -> None:
    """BR-037: finish_reason was stop although the limit had ended the answer."""
    text, reason = both_ways(caller, CAPITAL, max_tokens=3, ignore_eos=False)
    assert text
    assert reason == "length"
    assert chat(caller, "Tell me a story.", max_tokens=3)["choices"][0]["finish_reason"] == "length"


# DETOK: text


def test_br039_a_character_that_is_cut_is_replaced(caller: Caller, references: list[Reference]) -> None:
    """BR-039: a limit in the middle of a character, or a prompt of broken bytes, crashed the server."""
    flags = next(reference for reference in references if reference.name == "flags")
    texts = [both_ways(caller, flags.prompt_token_ids, max_tokens=count)[0] for count in range(1, 7)]
    assert any(text.endswith(REPLACEMENT) for text in texts), "a limit cuts a character"
    assert all(REPLACEMENT not in text[:-1] for text in texts)
    flamingo = post(caller, "/tokenize", prompt="\N{FLAMINGO}").json()["tokens"]
    assert len(flamingo) == 3
    for broken in (flamingo[:2], flamingo[1:], [*flamingo[:1] * 2, *flamingo[2:], 504]):
        plain, _ = both_ways(caller, broken, max_tokens=4)
        echoed, _ = both_ways(caller, broken, max_tokens=4, echo=True)
        assert echoed.startswith(REPLACEMENT)
        assert echoed.endswith(plain)
        assert echoed.encode(), "no half of a surrogate pair"


def test_br041_the_first_blank_is_kept(caller: Caller) -> None:
    """BR-041: the first piece of a stream lost its leading blank."""
    text, _ = both_ways(caller, CAPITAL, max_tokens=5)
    assert text.startswith(" Paris")


# LOGPROBS: of chats


def test_br048_logprobs_of_a_chat_alone(tiny: Caller) -> None:
    """BR-048: logprobs without top_logprobs was refused."""
    (choice,) = chat(tiny, "Hi", max_tokens=3, logprobs=True)["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], [], []]
    messages = [{"role": "user", "content": "Hi"}]
    assert "top_logprobs" in refusal(post(tiny, CHAT, messages=messages, top_logprobs=3))


def test_br051_logprobs_of_a_chat_have_its_form(caller: Caller) -> None:
    """BR-051: chats had the log-probabilities of completions."""
    sdk = openai.OpenAI(base_url=f"{caller.server.http_url}/v1", api_key="none", max_retries=0)
    completion = sdk.chat.completions.create(
        model=sdk.models.list().data[0].id,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=4,
        logprobs=True,
        top_logprobs=2,
    )
    (choice,) = completion.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert [entry.token for entry in entries] == ["The", " capital", " of", " France"]
    assert "".join(entry.token for entry in entries) == choice.message.content
    for entry in entries:
        assert bytes(entry.bytes or []).decode() == entry.token
        likeliest, second = entry.top_logprobs
        assert (likeliest.token, likeliest.logprob) == (entry.token, entry.logprob)
        assert second.logprob <= entry.logprob <= 0


# SAMPLING: seeds, top-k, top-p


def test_br055_a_seed_means_the_same_each_time(tiny: Caller) -> None:
    """BR-055: the generator's state was carried over from one request to the next."""

    def text(seed: int) -> str:
        return str(tiny.complete(PROMPT, 24, temperature=1.0, seed=seed)["choices"][0]["text"])

    first = text(7)
    assert text(7) == text(7) == first
    assert text(8) != first
    assert text(7) == first


@pytest.fixture(scope="module")
def greedy(tiny: Caller) -> str:
    return str(tiny.complete(PROMPT, 24)["choices"][0]["text"])


def sampled(tiny: Caller, **sampling: Any) -> str:
    choice = tiny.complete(PROMPT, 24, **{"temperature": 2.0, "seed": 3, **sampling})["choices"][0]
    return str(choice["text"])


def test_br059_top_k_of_zero_is_off(tiny: Caller, greedy: str) -> None:
    """BR-059: 0 was refused although it means off."""
    unrestricted = sampled(tiny)
    assert unrestricted != greedy
    assert [sampled(tiny, top_k=top_k) for top_k in (0, -1, 10**9)] == [unrestricted] * 3
    assert sampled(tiny, top_k=1) == greedy
    assert "top_k is -2" in refusal(tiny.post(PROMPT, top_k=-2))


def test_br060_top_p_of_zero_is_refused(tiny: Caller, greedy: str) -> None:
    """BR-060: 1 was refused, and 0 was taken for 1."""
    unrestricted = sampled(tiny)
    assert sampled(tiny, top_p=1.0) == sampled(tiny, top_p=1) == unrestricted != greedy
    assert sampled(tiny, top_p=1e-9) == greedy
    for top_p in (0, 0.0, 1.5, -0.1):
        assert f"top_p is {top_p:g}; it must be above 0 and at most 1" in refusal(tiny.post(PROMPT, top_p=top_p))


# LENGTH: limits


def test_br062_a_chat_over_the_context_is_told_its_length(tiny: Caller) -> None:
    """BR-062: without max_tokens the error spoke of a negative max_tokens."""
    messages = [{"role": "user", "content": "the cat sat on the mat " * 100}]
    count = count_tokens(tiny, messages=messages)
    assert count > MAX_MODEL_LEN
    message = refusal(post(tiny, CHAT, messages=messages))
    assert f"the prompt has {count} tokens; at most {MAX_MODEL_LEN}" in message
    assert "max_tokens" not in message


def test_br063_prompt_and_limit_together_exceed_the_context(tiny: Caller) -> None:
    """BR-063: the message was wrong where the prompt alone would have fitted. Nothing is capped here."""
    message = refusal(tiny.post([7] * 500, 100))
    assert "the prompt has 500 tokens and max_tokens is 100" in message
    assert f"at most {MAX_MODEL_LEN} are possible" in message
    assert "at most 12 tokens" in message
    refusal(tiny.post([7] * 500, 13))
    assert tiny.complete([7] * 500, 12)["usage"]["total_tokens"] == MAX_MODEL_LEN


def test_br064_no_prompt_is_cut(tiny: Caller) -> None:
    """BR-064: a prompt that was too long lost a part without a word, and the usage told the rest."""
    text = "one two three " * 400
    for prompt in ([7] * 600, [7] * MAX_MODEL_LEN, text):
        assert f"at most {MAX_MODEL_LEN} are possible" in refusal(post(tiny, COMPLETIONS, prompt=prompt))
    messages = [{"role": "user", "content": text}]
    assert f"at most {MAX_MODEL_LEN} are possible" in refusal(post(tiny, CHAT, messages=messages))
    text = "one two three " * 40
    count = count_tokens(tiny, prompt=text)
    assert 100 < count < MAX_MODEL_LEN
    assert tiny.complete(text, 1)["usage"]["prompt_tokens"] == count
    assert tiny.complete([7] * (MAX_MODEL_LEN - 1), 1)["usage"]["prompt_tokens"] == MAX_MODEL_LEN - 1


def test_br065_max_tokens_may_be_left_out(tiny: Caller, caller: Caller) -> None:
    """BR-065: leaving it out crashed, or filled the context. `null` is the same as leaving it out."""
    for unset in ({}, {"max_tokens": None}):
        answer = post(tiny, COMPLETIONS, prompt=PROMPT, temperature=0, ignore_eos=True, **unset).json()
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["choices"][0]["finish_reason"] == "length"
        answer = chat(tiny, "Hi", ignore_eos=True, **unset)
        assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN
        assert answer["choices"][0]["finish_reason"] == "length"
        answer = chat(caller, "What is the capital of France?", **unset)
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (8, "stop")


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, "5"])
def test_br066_max_tokens_that_is_no_limit_is_refused(tiny: Caller, max_tokens: Any) -> None:
    """BR-066: 0 and negative numbers were taken for unset."""
    messages = [{"role": "user", "content": "Hi"}]
    for stream in (False, True):
        for path, prompt in ((COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": messages})):
            assert "max_tokens is" in refusal(post(tiny, path, max_tokens=max_tokens, stream=stream, **prompt))
        body = {"messages": messages, "max_completion_tokens": max_tokens, "stream": stream}
        assert "max_completion_tokens is" in refusal(post(tiny, CHAT, **body))


def test_br066_no_token_beside_an_echo(tiny: Caller) -> None:
    """BR-066: 0 is a limit where the prompt comes back."""
    answer = tiny.complete("the cat", 0, echo=True)
    assert answer["choices"][0]["text"] == "the cat"
    assert answer["usage"]["completion_tokens"] == 0


# PROMPT: forms of prompts


@pytest.mark.parametrize("stream", [False, True])
def test_br067_an_empty_prompt_is_refused(tiny: Caller, stream: bool) -> None:
    """BR-067: it took the engine down."""
    prompts: list[Any] = ["", [""], [], [[]], ["a", ""], [[5], []]]
    for prompt in prompts:
        assert "empty" in refusal(tiny.post(prompt, stream=stream))
    assert "messages is empty" in refusal(post(tiny, CHAT, messages=[], stream=stream))
    assert tiny.complete(PROMPT, 3)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([999_999], "999999"),
        ([384], "384"),
        ([-1], "-1"),
        ([[1, 2], [10**9]], "1000000000"),
        ([2**32 + 5], "4294967301"),
        ([5279552648203111001], "5279552648203111001"),
        ([2**64], "18446744073709551616"),
        ([-(2**63)], "-9223372036854775808"),
    ],
)
def test_br068_token_ids_that_are_none_are_refused(tiny: Caller, prompt: Any, named: str) -> None:
    """BR-068: ids outside the vocabulary crashed the model's step. BR-071: ids beyond 32 or 64 bits came back as odd
    errors."""
    for stream in (False, True):
        assert named in refusal(tiny.post(prompt, stream=stream))
    assert tiny.complete([383], 3)["usage"]["completion_tokens"] == 3


def test_br070_token_ids_are_echoed_as_text(caller: Caller) -> None:
    """BR-070: echo with a prompt of token ids was a 500."""
    ids = [504, 3575, 282, 4649]
    prompt = post(caller, "/detokenize", tokens=ids).json()["prompt"]
    assert prompt == "The capital of France"
    plain, _ = both_ways(caller, ids, max_tokens=4)
    echoed, _ = both_ways(caller, ids, max_tokens=4, echo=True)
    assert echoed == prompt + plain
