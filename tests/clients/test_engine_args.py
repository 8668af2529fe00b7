from __future__ import annotations

import argparse
from typing import Any

import pytest

from octavo import AsyncEngineArgs, EngineArgs
from octavo.errors import ConfigError


def test_settings_are_read_back_with_their_defaults() -> None:
    args = EngineArgs("m", dtype="float32", max_num_seqs=7, max_model_len=None)
    assert (args.model, args.dtype, args.max_num_seqs) == ("m", "float32", 7)
    assert (args.max_model_len, args.block_size, args.swap_space, args.seed) == (0, 16, 1.0, None)
    assert EngineArgs().model == "SmolLM2-135M-Instruct"
    assert AsyncEngineArgs is EngineArgs
    with pytest.raises(AttributeError, match="no setting 'tensor'"):
        _ = args.tensor


def test_the_environment_fills_in_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("OCTAVO_PORT", "8000")
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    assert EngineArgs("m").max_num_seqs == 9
    assert EngineArgs("m", max_num_seqs=8).max_num_seqs == 8
    assert EngineArgs("m").router_config.port == -1
    assert EngineArgs("m").router_config.api_key == ()


def test_equal_settings_are_equal_and_none_can_be_changed() -> None:
    assert EngineArgs("m", max_num_seqs=7) == EngineArgs("m", max_num_seqs=7)
    assert len({EngineArgs("m"), EngineArgs("m"), EngineArgs("m", seed=1)}) == 2
    assert EngineArgs("m") != "m"
    with pytest.raises(AttributeError, match="make a new one with max_num_seqs=8"):
        EngineArgs("m").max_num_seqs = 8
    assert repr(EngineArgs("m", seed=3, max_num_seqs=7)) == (
        "EngineArgs(model='m', seed=3, log_level='warning', max_num_seqs=7)"
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("port", "it says how others are served; `octavo serve` takes it"),
        ("api_key", "it says how others are served; `octavo serve` takes it"),
        ("max_num_seq", "did you mean max_num_seqs?"),
        ("zzz", "settings are .*block_size, "),
    ],
)
def test_an_unknown_setting_is_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"an engine has no setting '{name}': {hint}"):
        EngineArgs("m", **{name: 2})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tensor_parallel_size", 2, "only as 1, and it is 2: one worker computes on one device; leave it out"),
        (
            "disable_log_stats",
            False,
            r"only as True, and it is False: nothing is logged until you call print_stats\(\)",
        ),
        ("trust_remote_code", True, "only as False, and it is True: code that comes with a model is never run"),
    ],
)
def test_foreign_settings_that_ask_for_something_are_refused(name: str, value: Any, message: str) -> None:
    """Sizes of tensor parallelism that cannot be failed late and unclearly (BR-113); there is one size here."""
    with pytest.raises(TypeError, match=f"an engine takes {name} {message}"):
        EngineArgs("m", **{name: value})


def test_foreign_settings_that_ask_for_nothing_are_taken() -> None:
    settings = {"disable_log_requests": True, "tensor_parallel_size": 1, "quantization": None}
    assert EngineArgs("m", **settings) == EngineArgs("m")
    with pytest.raises(TypeError, match="code that comes with a model is never run"):
        EngineArgs("m", trust_remote_code=True)


def test_an_attention_class_is_given_by_the_name_that_the_worker_imports() -> None:
    by_class = EngineArgs("m", attention_class=argparse.Namespace)
    assert by_class == EngineArgs("m", attention_backend="argparse:Namespace")
    assert by_class == EngineArgs("m", attention_class="argparse:Namespace")

    class Local:
        """One that no other process can import."""

    with pytest.raises(ConfigError, match="must be able to import the class: put it into a module"):
        EngineArgs("m", attention_class=Local)


def test_a_value_out_of_range_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="block_size is 17"):
        EngineArgs("m", block_size=17)


def test_flags_of_a_program_of_ones_own() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser = AsyncEngineArgs.add_cli_args(parser)
    given = parser.parse_args(["--port", "80", "--model", "m", "--max-num-seqs", "7", "--seed", "3"])
    assert AsyncEngineArgs.from_cli_args(given) == EngineArgs("m", max_num_seqs=7, seed=3)
    assert AsyncEngineArgs.from_cli_args(parser.parse_args([])) == EngineArgs()
