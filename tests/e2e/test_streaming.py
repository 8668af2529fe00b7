"""Streamed text is the unstreamed text, character for character, wherever a stop string cuts it.

The prompts make the default model answer with Chinese, flags, families, Hangul and Devanagari, whose characters span
several tokens, so that a token's end is seldom a character's. What is expected is worked out from the whole text alone:
a stop string ends the text where it first appears.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from octavo.v1 import inference_pb2
from tests.e2e.harness import Answer, Reference, Server

NUM_TOKENS = 40
LONGEST_STOP = 4
CONCURRENCY = 32
SCRIPTS = ("chat_emoji", "flags", "families", "emoji", "chinese", "japanese", "korean", "hindi", "greek")
FLAG = "\N{REGIONAL INDICATOR SYMBOL LETTER B}\N{REGIONAL INDICATOR SYMBOL LETTER B}"
FAMILY = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Generation:
    """A prompt's token ids, and what the model says behind it, unstreamed."""

    prompt: list[int]
    token_ids: list[int]
    text: str

    def stops(self) -> list[str]:
        """Every substring of one to four characters, without those of half characters at the end."""
        whole = self.text.rstrip(REPLACEMENT)
        return sorted({whole[i:j] for i in range(len(whole)) for j in range(i + 1, i + 1 + LONGEST_STOP)})


@pytest.fixture(scope="module")
def generations(server: Server, references: list[Reference]) -> dict[str, Generation]:
    chosen = [reference for reference in references if reference.name in SCRIPTS]
    prompts = [reference.prompt_token_ids for reference in chosen]
    answers = server.generate_all(prompts, CONCURRENCY, max_tokens=NUM_TOKENS, final_only=True)
    return {
        reference.name: Generation(reference.prompt_token_ids, answer.token_ids, answer.text)
        for reference, answer in zip(chosen, answers, strict=True)
    }


def generate_with_stops(server: Server, generation: Generation, stops: Sequence[str], **options: bool) -> list[Answer]:
    def ask(stop: str) -> Answer:
        return server.generate(generation.prompt, max_tokens=NUM_TOKENS, stop=[stop], **options)

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(ask, stops))


def test_prompts_bring_out_what_is_to_be_tested(generations: dict[str, Generation]) -> None:
    assert FAMILY in generations["chat_emoji"].text
    assert "我喜欢喝茶" in generations["chat_emoji"].text
    assert FLAG * 3 in generations["flags"].text
    assert all(generation.text.encode() for generation in generations.values())


@pytest.mark.parametrize("script", SCRIPTS)
def test_streamed_text_is_unstreamed_text(server: Server, generations: dict[str, Generation], script: str) -> None:
    generation = generations[script]
    streamed = server.generate(generation.prompt, max_tokens=NUM_TOKENS)
    assert streamed.token_ids == generation.token_ids
    assert streamed.text == generation.text
    assert len(streamed.deltas) > 3
    # Half a character may stand at the very end, where nothing can complete it, and nowhere before.
    assert all(REPLACEMENT not in delta for delta in streamed.deltas[:-1])
    request = inference_pb2.DetokenizeRequest(token_ids=generation.token_ids)
    assert server.inference.Detokenize(request, timeout=30).text == generation.text


@pytest.mark.parametrize("script", ["chat_emoji", "flags", "families", "chinese"])
def test_stop_string_at_every_position(server: Server, generations: dict[str, Generation], script: str) -> None:
    """A stop string was only seen where it ended with a token (BR-028)."""
    generation = generations[script]
    stops = generation.stops()
    for stop, answer in zip(stops, generate_with_stops(server, generation, stops), strict=True):
        expected = generation.text[: generation.text.index(stop)]
        assert answer.text == expected, f"stop {stop!r}"
        assert (answer.finish_reason, answer.matched_stop) == ("stop", stop)
        assert answer.token_ids == generation.token_ids[: len(answer.token_ids)]


def test_stop_string_is_kept_where_asked(server: Server, generations: dict[str, Generation]) -> None:
    generation = generations["chat_emoji"]
    stops = generation.stops()[::5]
    answers = generate_with_stops(server, generation, stops, include_stop=True)
    for stop, answer in zip(stops, answers, strict=True):
        assert answer.text == generation.text[: generation.text.index(stop) + len(stop)], f"stop {stop!r}"


def test_unstreamed_text_stops_at_the_same_places(server: Server, generations: dict[str, Generation]) -> None:
    generation = generations["chat_emoji"]
    stops = generation.stops()[::5]
    answers = generate_with_stops(server, generation, stops, final_only=True)
    for stop, answer in zip(stops, answers, strict=True):
        assert answer.text == generation.text[: generation.text.index(stop)], f"stop {stop!r}"


def test_stop_string_that_never_comes_keeps_nothing_back(server: Server, generations: dict[str, Generation]) -> None:
    """Beginnings of the stop string appear again and again, the end of the text among them."""
    generation = generations["flags"]
    stop = FLAG * 200
    (answer,) = generate_with_stops(server, generation, [stop])
    assert answer.text == generation.text
    assert answer.finish_reason == "length"


def sse_texts(response: httpx.Response) -> Iterator[str]:
    """The texts of a streamed completion; the stream must end with [DONE]."""
    done = False
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        assert not done, f"after [DONE]: {line}"
        if line == "data: [DONE]":
            done = True
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            yield choice["text"]
    assert done


@pytest.mark.parametrize("script", ["chat_emoji", "flags", "korean"])
def test_http_streams_the_same_text(server: Server, generations: dict[str, Generation], script: str) -> None:
    generation = generations[script]
    url = f"{server.http_url}/v1/completions"
    stops = generation.stops()[::9]
    with httpx.Client(timeout=120) as client:
        for stop in [None, *stops]:
            body = {
                "prompt": generation.prompt,
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "skip_special_tokens": False,
                "stop": stop,
            }
            expected = generation.text if stop is None else generation.text[: generation.text.index(stop)]
            unstreamed = client.post(url, json=body)
            assert unstreamed.status_code == 200, unstreamed.text
            assert unstreamed.json()["choices"][0]["text"] == expected, f"stop {stop!r}"
            with client.stream("POST", url, json={**body, "stream": True}) as response:
                assert "".join(sse_texts(response)) == expected, f"stop {stop!r}"
