from __future__ import annotations

import json

import pytest

from octavo.cli import main
from octavo.cli.kv_size import table
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


def test_table_of_8_bits() -> None:
    sizes = {
        "model": "m",
        "dtype": "int8",
        "num_layers": 2,
        "num_kv_heads": 3,
        "head_dim": 8,
        "bytes_per_element": 1,
        "scale_bytes_per_head": 4,
        "block_size": 16,
        "bytes_per_token": 144,
        "bytes_per_block": 2304,
        "max_model_len": 8192,
        "bytes_per_max_model_len": 1179648,
    }
    lines = table(sizes).splitlines()
    assert lines[0] == "m, K and V in int8:"
    assert lines[-2:] == [
        "bytes = 2 (K and V) x layers x KV heads x (head size + bytes of a scale) x tokens",
        "      = 2 x 2 x 3 x (8 + 4) x tokens = 144 x tokens",
    ]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-size", "m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 384


def test_a_model_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FAKE_WORKER", "exit:2:octavo-worker: error: no model 'm'")
    assert main(["kv-size", "m"]) == 2
    assert capsys.readouterr().err == "octavo: error: no model 'm'\n"
