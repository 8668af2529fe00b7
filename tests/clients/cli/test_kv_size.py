from __future__ import annotations

import json

import pytest

from octavo.cli import main
from octavo.program import ProgramSpec


@pytest.fixture(autouse=True)
def _stand_in(programs: tuple[ProgramSpec, ProgramSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.kv_size.WORKER", programs[0])


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-size", "m", "--tokens=100"]) == 0
    assert capsys.readouterr().out == (
        "m, K and V in float32:\n"
        "  a token                        384 B\n"
        "  a block of 16 tokens           6144 B (6.00 KiB)\n"
        "  a full context of 8192 tokens  3145728 B (3.00 MiB)\n"
        "  100 tokens, in blocks          43008 B (42.00 KiB)\n"
        "bytes = 2 (K and V) x layers x KV heads x head size x bytes per element x tokens\n"
        "      = 2 x 2 x 3 x 8 x 4 x tokens = 384 x tokens\n"
    )


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-size", "m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 384


def test_a_model_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FAKE_WORKER", "exit:2:octavo-worker: error: no model 'm'")
    assert main(["kv-size", "m"]) == 2
    assert capsys.readouterr().err == "octavo: error: no model 'm'\n"
