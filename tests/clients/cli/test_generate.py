from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.cli import main
from octavo.errors import InvalidRequestError
from octavo.v1 import inference_pb2, sampling_pb2
from tests.clients.fake_router import FakeRouter, abort, echo_in_capitals, prompt_text


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def refusing_bad(
    request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[inference_pb2.GenerateResponse]:
    if prompt_text(request) == "bad":
        abort(context, InvalidRequestError("bad it is", field="prompt"))
    yield from echo_in_capitals(request, context)


def test_prompts_as_arguments(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--address", router.address, "one", "été", "--max-tokens=3", "--no-progress"]) == 0
    captured = capsys.readouterr()
    assert records(captured.out) == [
        {"index": 0, "text": "ONE", "token_count": 3, "prompt_token_count": 3, "finish_reason": "stop"},
        {"index": 1, "text": "ÉTÉ", "token_count": 5, "prompt_token_count": 5, "finish_reason": "stop"},
    ]
    assert "ÉTÉ" in captured.out
    assert captured.err == ""


def test_progress_is_on_stderr(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--address", router.address, "one", "two"]) == 0
    captured = capsys.readouterr()
    assert len(records(captured.out)) == 2
    assert "2/2" in captured.err


def test_many_prompts_from_stdin_come_in_order(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"line {i}\n" for i in range(50)) + "\n"))
    assert main(["generate", "--address", router.address, "--concurrency=7", "--no-progress"]) == 0
    assert [(record["index"], record["text"]) for record in records(capsys.readouterr().out)] == [
        (i, f"LINE {i}") for i in range(50)
    ]


def test_json_lines_with_parameters_of_their_own(router: FakeRouter, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    lines: list[object] = [
        {"prompt": "hello", "max_tokens": 2},
        {"messages": [{"role": "user", "content": "you"}], "temperature": 0},
        {"prompt_token_ids": [104, 105]},
        {"prompt": "x", "max_token": 2},
        {"prompt": "x", "messages": []},
        {"prompt": "x", "max_tokens": -1},
        {"prompt": "x", "stop": 5},
        {"messages": 5},
        ["no object"],
    ]
    source.write_text("\n".join([*map(json.dumps, lines), "no json"]))
    arguments = ["generate", "--address", router.address, "--input", str(source), "--output", str(target)]
    assert main([*arguments, "--no-progress"]) == 1
    found = records(target.read_text())
    assert [record["index"] for record in found] == list(range(10))
    assert [record.get("text") for record in found[:3]] == ["HE", "YOU", "HI"]
    assert found[0]["finish_reason"] == "length"
    assert found[3]["error"] == {
        "type": "InvalidRequestError",
        "message": "the line has the unknown key 'max_token'",
        "field": "max_token",
    }
    assert "exactly one of prompt, messages, prompt_token_ids" in found[4]["error"]["message"]
    assert found[5]["error"]["field"] == "stop.max_tokens"
    assert found[6]["error"]["field"] == "stop.stop"
    assert found[7]["error"]["field"] == "messages"
    assert "must be a JSON object" in found[8]["error"]["message"]
    assert "not JSON" in found[9]["error"]["message"]


def test_one_prompt_s_error_is_in_its_line(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    router.answer = refusing_bad
    assert main(["generate", "--address", router.address, "a", "bad", "b", "--no-progress"]) == 1
    first, second, third = records(capsys.readouterr().out)
    assert (first["text"], third["text"]) == ("A", "B")
    assert second == {
        "index": 1,
        "error": {"type": "InvalidRequestError", "message": "bad it is", "field": "prompt"},
    }


def test_several_samples_are_lines_of_their_own(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--address", router.address, "a", "--n=2", "--no-progress"]) == 0
    assert [(record["index"], record["sample"]) for record in records(capsys.readouterr().out)] == [(0, 0), (0, 1)]


def test_plain_lines_may_be_messages(router: FakeRouter) -> None:
    assert main(["generate", "--address", router.address, "--chat", "hi", "--no-progress"]) == 0
    assert router.requests[0].chat.messages[0].role == "user"


def test_a_text_that_looks_like_json_may_be_a_prompt(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--address", router.address, "--no-progress"]
    assert main([*arguments, '{"a": 1}']) == 0
    assert main([*arguments, "--input-format=text", '{"prompt": "x"}']) == 0
    assert [record["text"] for record in records(capsys.readouterr().out)] == ['{"A": 1}', '{"PROMPT": "X"}']


def test_no_prompts_is_wrong_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    assert main(["generate", "--address=127.0.0.1:9"]) == 2
    assert "there are no prompts" in capsys.readouterr().err


def test_nobody_there_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--address=127.0.0.1:9", "a", "b"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("octavo: error:") == 1


def test_samples_and_beams_are_asked_for(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    generate = ["generate", "--address", router.address, "x", "--no-progress"]
    assert main([*generate, "--n=2", "--best-of=3"]) == 0
    assert (router.requests[0].sampling.n, router.requests[0].sampling.best_of) == (2, 3)
    assert [record["sample"] for record in records(capsys.readouterr().out)] == [0, 1]
    assert main([*generate, "--beam-width=4", "--length-penalty=0.5", "--early-stopping=never"]) == 0
    assert router.requests[1].sampling.beam_search == sampling_pb2.BeamSearch(
        beam_width=4, length_penalty=0.5, early_stopping=sampling_pb2.BEAM_EARLY_STOPPING_NEVER
    )
    assert main([*generate, "--length-penalty=0.5"]) == 2
    assert "--length-penalty is given without --beam-width" in capsys.readouterr().err
