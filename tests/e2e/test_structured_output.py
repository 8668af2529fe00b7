"""Structured output from the real pair: what answers match, whatever the model would rather say."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import jsonschema
import openai
import pytest

from octavo import Client, SamplingParams, StructuredOutputsParams
from octavo.errors import InvalidRequestError
from octavo.v1 import inference_pb2
from tests.e2e.completions import Caller
from tests.e2e.harness import Server, collect, collect_reply, request_of
from tests.e2e.schemas import random_schema

CONCURRENCY = 12
NUM_TOKENS = 160
PERSON = {
    "type": "object",
    "properties": {
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["zip", "name", "age"],
    "additionalProperties": False,
}


def exact(text: str) -> Any:
    """What JSON says. Binary floats know no multiples of 0.01."""
    return json.loads(text, parse_float=Decimal)


def check_schemas(caller: Caller, seeds: Sequence[int]) -> int:
    """Asks for an answer to each schema. Those that ended by themselves must match; how many did."""

    def ask(seed: int) -> bool:
        schema = random_schema(seed)
        body = caller.complete(
            f"Some JSON, number {seed}:\n",
            NUM_TOKENS,
            temperature=1,
            seed=seed,
            ignore_eos=False,
            skip_special_tokens=True,
            structured_outputs={"json": schema},
        )
        choice = body["choices"][0]
        if choice["finish_reason"] != "stop":
            assert choice["finish_reason"] == "length"
            return False
        value = exact(choice["text"])
        jsonschema.validate(value, exact(json.dumps(schema)), jsonschema.Draft202012Validator)
        known = [name for name in schema["properties"] if name in value]
        assert list(value) == known, "properties come in the order of the schema"
        return True

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return sum(pool.map(ask, seeds))


def test_answers_match_random_schemas(caller: Caller) -> None:
    assert check_schemas(caller, range(12)) >= 9


@pytest.mark.full
def test_answers_match_a_hundred_random_schemas(caller: Caller) -> None:
    assert check_schemas(caller, range(100)) >= 75


def test_the_openai_client_gets_what_it_asks_for(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="unused", max_retries=0)
    messages: Any = [{"role": "user", "content": "Invent a person."}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    options: Any = {"model": "", "messages": messages, "max_tokens": 120, "temperature": 1, "seed": 3}
    whole = client.chat.completions.create(response_format=form, **options)
    text = whole.choices[0].message.content or ""
    assert whole.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(text), PERSON)
    assert re.match(r'\{"zip": "[0-9]{5}", "name": "', text), text
    chunks = client.chat.completions.create(response_format=form, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text


def test_the_python_client_gets_what_it_asks_for(tiny: Caller) -> None:
    with Client(tiny.server.grpc_address) as client:
        outputs = StructuredOutputsParams(
            json={"type": "object", "properties": {"b": {"const": "é"}, "a": {"enum": [7]}}}
        )
        params = SamplingParams(max_tokens=60, seed=1, structured_outputs=outputs)
        for _ in range(2):
            answer = client.generate({"prompt_token_ids": [5, 6]}, params).outputs[0]
            assert answer.finish_reason != "stop" or isinstance(json.loads(answer.text), dict)
        choice = StructuredOutputsParams(choice=["left", "right"])
        answer = client.generate({"prompt_token_ids": [5, 6]}, SamplingParams(structured_outputs=choice)).outputs[0]
        assert answer.text in ("left", "right")
        with pytest.raises(InvalidRequestError, match="regex cannot be enforced") as caught:
            client.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")))
        assert caught.value.field == "sampling.grammar.regex"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-f]{3}-[0-9]+(\\.[0-9]{2})?"}, r"[a-f]{3}-[0-9]+(\.[0-9]{2})?"),
        ({"guided_choice": ["maybe", 'per"haps', "日本"]}, 'maybe|per"haps|日本'),
        ({"guided_grammar": 'start: "a" ("b" start)? "!"'}, r"a(ba)*!+"),
        ({"guided_grammar": 'root ::= ("x" [0-9] ";")*'}, r"(x[0-9];)*"),
    ],
)
def test_other_grammars(tiny: Caller, fields: dict[str, Any], pattern: str) -> None:
    for seed in range(8):
        body = tiny.complete([5, 6, 7], 60, temperature=1, seed=seed, ignore_eos=False, **fields)
        choice = body["choices"][0]
        text = choice["text"].removesuffix("<|im_end|>").removesuffix("<|endoftext|>")
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, text), text


def test_json_mode_is_an_object(caller: Caller) -> None:
    for seed in range(3):
        body = caller.complete(
            "A JSON object:\n", 60, temperature=1, seed=seed, ignore_eos=False, response_format={"type": "json_object"}
        )
        assert body["choices"][0]["text"].startswith("{")


def test_where_min_tokens_leaves_nothing_the_grammar_wins(tiny: Caller) -> None:
    body = tiny.complete([5, 6], 20, ignore_eos=False, skip_special_tokens=True, min_tokens=15, guided_choice=["yes"])
    assert body["choices"][0]["text"] == "yes"
    assert body["choices"][0]["finish_reason"] == "stop"


def test_a_grammar_survives_preemption(tiny: Caller, pressed: Caller) -> None:
    """A sequence that lost its blocks is sent anew; the grammar goes on where it was."""
    options = {"temperature": 1.0, "ignore_eos": False, "max_tokens": 180, "grammar": {"regex": "([a-z]{3},){40}[0-9]"}}
    prompts = [[number + 5] * 60 for number in range(12)]
    expected = [tiny.server.generate(prompt, seed=9, **options) for prompt in prompts]
    before = pressed.server.metric("octavo_preemptions_total")
    answers = pressed.server.generate_all(prompts, len(prompts), seed=9, **options)
    assert pressed.server.metric("octavo_preemptions_total") > before
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


def test_a_grammar_survives_a_resume(tiny: Caller) -> None:
    """A caller that goes on with what it holds gets what it would have got."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": False, "max_tokens": 180}
    request = request_of([5, 6, 7], grammar={"regex": "([a-z]{3},){30}[0-9]"}, frequency_penalty=0.5, **options)
    whole = collect_reply(tiny.server.start(request))
    (expected,) = whole.answers
    held = 25
    assert len(expected.token_ids) > held
    text = tiny.server.inference.Detokenize(
        inference_pb2.DetokenizeRequest(token_ids=expected.token_ids[:held]), timeout=30
    ).text
    request.resume.prompt_token_ids.extend([5, 6, 7])
    request.resume.seed, request.resume.model_digest = whole.prompt.seed, whole.prompt.model_digest
    request.resume.samples.add(token_ids=expected.token_ids[:held], text_byte_count=len(text.encode()))
    (rest,) = collect(tiny.server.start(request))
    assert rest.token_ids == expected.token_ids[held:]
    assert text + rest.text == expected.text


def test_samples_have_grammars_of_their_own(tiny: Caller) -> None:
    request = request_of(
        [5, 6], max_tokens=40, ignore_eos=False, temperature=1.0, n=4, seed=1, grammar={"regex": "[a-z]{8}"}
    )
    answers = collect(tiny.server.start(request))
    texts = {answer.text.removesuffix("<|im_end|>").removesuffix("<|endoftext|>") for answer in answers}
    assert len(texts) > 1
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts), texts
