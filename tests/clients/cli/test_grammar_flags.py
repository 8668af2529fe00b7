from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.v1 import sampling_pb2
from tests.clients.fake_router import FakeRouter


def test_each_flag_is_a_grammar(router: FakeRouter, tmp_path: Path) -> None:
    schema, rules = tmp_path / "schema.json", tmp_path / "rules.lark"
    schema.write_text('{"z": 1, "a": "é"}', encoding="utf-8")
    rules.write_text('start: "a"')
    generate = ["generate", "--address", router.address, "x", "--no-progress"]
    for flags, grammar in (
        ([f"--json-schema={schema}"], {"json_schema": '{"z": 1, "a": "é"}'}),
        (["--json-object"], {"json_object": True}),
        (["--regex=a+"], {"regex": "a+"}),
        (["--choice=yes", "--choice=no"], {"choices": {"choices": ["yes", "no"]}}),
        ([f"--grammar={rules}"], {"lark": 'start: "a"'}),
    ):
        assert main([*generate, *flags]) == 0
        assert router.requests[-1].sampling.grammar == sampling_pb2.Grammar(**grammar)
    assert main([*generate, "--presence-penalty=1", "--frequency-penalty=-1", "--repetition-penalty=1.25"]) == 0
    sampling = router.requests[-1].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.25)
    assert not sampling.HasField("grammar")


def test_what_is_wrong_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--regex=a", "--json-object"]) == 2
    assert "--json-object and --regex are given" in capsys.readouterr().err
    assert main(["generate", "x", "--json-schema=/no/such/file"]) == 2
    assert "--json-schema /no/such/file cannot be read" in capsys.readouterr().err


def test_a_json_line_may_have_a_grammar_of_its_own(router: FakeRouter, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    lines = [
        {"prompt": "x", "structured_outputs": {"choice": ["a"]}, "logit_bias": {"7": 2}},
        {"prompt": "x", "structured_outputs": {"yaml": "a"}},
        {"prompt": "x", "structured_outputs": None},
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["generate", "--address", router.address, "--input", str(source), "--output", str(target)]
    assert main([*arguments, "--regex=a", "--no-progress", "--concurrency=1"]) == 1
    first, second = (request.sampling for request in router.requests)
    assert first.grammar == sampling_pb2.Grammar(choices=sampling_pb2.Choices(choices=["a"]))
    assert first.logit_bias == {7: 2.0}
    assert not second.HasField("grammar")
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert records[1]["error"]["field"] == "structured_outputs"
