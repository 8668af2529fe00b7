"""The command as a whole: parsing, exit codes, no tracebacks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from octavo.cli import main
from tests.clients.fake_router import FakeRouter


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == "octavo 0.1.0\n"


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "kv-size"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert "model" in capsys.readouterr().out


def test_serve_help_groups_the_flags_of_both_programs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert text.index("\nworker:") < text.index("--swap-space FLOAT  ") < text.index("\nrouter:")
    assert text.index("\nrouter:") < text.index("  --max-num-seqs INT")
    assert "--listen" not in text
    assert "--ready-file" not in text


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["serve", "--no-such-flag"], ["serve", "--block-size", "x"], ["serve", "--dtype", "float8"]],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--block-size=17"], "block_size is 17; it must be 8, 16 or 32"),
        (["serve", "a", "--model=b"], "the model is given twice: 'a' and --model='b'; give one"),
        (["chat", "--address=nowhere", "--message=x"], "address is 'nowhere'"),
        (["chat", "--address=h:1", "m", "--dtype=float32"], "leave out: dtype, model"),
        (["generate", "--address=h:1", "x", "--concurrency=0"], "concurrency is 0"),
        (["generate", "--input=/nonexistent/file"], "cannot read the prompts from /nonexistent/file"),
        (["generate", "x", "--input=f"], "give one of them"),
        (["generate", "--output=/nonexistent/file", "--address=h:1", "x"], "cannot write to /nonexistent/file"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("octavo: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_wrong_environment_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "http")
    assert main(["serve"]) == 2
    assert "OCTAVO_PORT is 'http'" in capsys.readouterr().err


def test_nobody_there_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--address=127.0.0.1:9", "--message=x"]) == 1
    assert "is `octavo serve` running there?" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_traceback(router: FakeRouter) -> None:
    source, target = os.pipe()
    os.close(source)
    with os.fdopen(target, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "octavo.cli", "chat", "--address", router.address, "--message", "x"],
            stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=20, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == ""
