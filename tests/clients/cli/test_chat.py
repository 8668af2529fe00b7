from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import grpc
import pytest

from octavo.cli import main
from octavo.errors import InvalidRequestError
from octavo.v1 import inference_pb2
from tests.clients.fake_router import FakeRouter, abort, echo_in_capitals, prompt_text


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Makes input() give these lines, or raise, and then the end of the input."""
    left = iter(lines)

    def read(prompt: str = "") -> str:
        line = next(left, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def conversations(router: FakeRouter) -> list[list[tuple[str, str]]]:
    return [[(message.role, message.content) for message in request.chat.messages] for request in router.requests]


def test_one_question(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--temperature=0", "--max-tokens=3", "--stop=x", "--stop=y", "--seed=4", "--system=brief"]
    assert main(["chat", "--address", router.address, "--message", "hello", *arguments]) == 0
    assert capsys.readouterr().out == "HEL\n"
    request = router.requests[0]
    assert conversations(router) == [[("system", "brief"), ("user", "hello")]]
    assert (request.sampling.temperature, request.sampling.seed) == (0.0, 4)
    assert not request.sampling.HasField("top_p")
    assert (request.stop.max_tokens, list(request.stop.stop)) == (3, ["x", "y"])


def test_an_answer_is_as_long_as_the_model_likes(router: FakeRouter) -> None:
    assert main(["chat", "--address", router.address, "--message", "hello"]) == 0
    assert not router.requests[0].stop.HasField("max_tokens")


def test_a_conversation_remembers_and_forgets(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "one", "", "two", "/reset", "three", "/fly")
    assert main(["chat", "--address", router.address]) == 0
    assert conversations(router) == [
        [("user", "one")],
        [("user", "one"), ("assistant", "ONE"), ("user", "two")],
        [("user", "three")],
    ]
    out = capsys.readouterr().out
    assert "Talking to fake." in out
    assert "ONE\nTWO\nTHREE\nno such command: /fly" in out


def test_exit_leaves(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    type_lines(monkeypatch, "/exit", "never asked")
    assert main(["chat", "--address", router.address]) == 0
    assert router.requests == []


def test_ctrl_c_at_the_prompt_goes_on(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, KeyboardInterrupt, "one")
    assert main(["chat", "--address", router.address]) == 0
    assert "ONE" in capsys.readouterr().out


def interrupt_soon(router: FakeRouter) -> None:
    """Presses Ctrl-C once the server has begun to answer."""

    def stay(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        yield from router.stay(request, context)

    router.answer = stay


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    def lines() -> Iterator[str]:
        interrupt_soon(router)
        yield "one"
        assert router.caller_left.wait(5)
        router.answer = echo_in_capitals
        yield "two"

    left = lines()
    monkeypatch.setattr("builtins.input", lambda prompt="": _next_or_eof(left))
    assert main(["chat", "--address", router.address]) == 0
    assert conversations(router)[1] == [("user", "one"), ("assistant", "A"), ("user", "two")]


def _next_or_eof(lines: Iterator[str]) -> str:
    for line in lines:
        return line
    raise EOFError


def test_ctrl_c_ends_one_question_with_130(router: FakeRouter) -> None:
    interrupt_soon(router)
    assert main(["chat", "--address", router.address, "--message", "x"]) == 130
    assert router.caller_left.wait(5)


def test_an_error_is_shown_and_its_question_forgotten(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusing(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        if prompt_text(request) == "bad":
            abort(context, InvalidRequestError("too long"))
        yield from echo_in_capitals(request, context)

    router.answer = refusing
    type_lines(monkeypatch, "bad", "good")
    assert main(["chat", "--address", router.address]) == 0
    assert conversations(router)[1] == [("user", "good")]
    assert "error: too long" in capsys.readouterr().err


def test_the_key_comes_from_the_environment(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def answer(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        seen.append(str(dict(context.invocation_metadata())["authorization"]))
        yield from echo_in_capitals(request, context)

    router.answer = answer
    monkeypatch.setenv("OCTAVO_API_KEY", "from-the-environment")
    assert main(["chat", "--address", router.address, "--message", "x"]) == 0
    assert seen == ["Bearer from-the-environment"]


def test_ways_to_reach_a_server_need_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "m", "--tls", "--client-key=k", "--message", "x"]) == 2
    assert "--tls, --client-key says how to reach a running server; give its --address" in capsys.readouterr().err
