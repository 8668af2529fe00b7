from __future__ import annotations

import pytest

from octavo.errors import UnavailableError
from octavo.llm_engine import LLMEngine, ModelConfig
from octavo.v1 import admin_pb2, inference_pb2

STATE = admin_pb2.GetStateResponse(workers=[admin_pb2.WorkerState(dtype="float32")])


def test_the_first_served_name_is_the_models() -> None:
    models = [
        inference_pb2.Model(name="first", digest="d", max_model_len=512, vocab_size=96),
        inference_pb2.Model(name="alias", digest="d", max_model_len=512, vocab_size=96),
    ]
    engine = LLMEngine(lambda: STATE, lambda: models)
    assert engine.model_config == ModelConfig("first", 512, 96, "float32", "d")
    assert engine.get_model_config() == engine.model_config


def test_no_model_is_told() -> None:
    with pytest.raises(UnavailableError, match="serves no model yet"):
        _ = LLMEngine(lambda: STATE, lambda: []).model_config


def test_statistics_are_printed_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    engine = LLMEngine(lambda: STATE, lambda: [])
    engine.stat_logger.print_stats()
    engine.do_log_stats()
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["Avg prompt throughput"] * 2
