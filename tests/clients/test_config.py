from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from octavo.config import (
    RouterConfig,
    WorkerConfig,
    pair_settings,
    private_settings,
    setting_names,
)
from octavo.errors import ConfigError
from octavo.settings import environment_name


def parsed(*arguments: str, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    WorkerConfig.add_flags(parser, skip=skip)
    RouterConfig.add_flags(parser, skip=skip)
    return vars(parser.parse_args(arguments))


def test_flags_that_were_not_given_are_left_out() -> None:
    assert parsed() == {}


def test_flags_are_derived_from_the_settings() -> None:
    given = parsed(
        "--max-num-seqs=4", "--no-enable-chunked-prefill", "--swap-space=1.5", "--served-model-name=a",
        "--served-model-name=b", "--dtype=float16",
    )  # fmt: skip
    assert given == {
        "max_num_seqs": 4,
        "enable_chunked_prefill": False,
        "swap_space": 1.5,
        "served_model_name": ["a", "b"],
        "dtype": "float16",
    }
    worker, router = pair_settings(given, {})
    assert (worker.swap_space, worker.dtype) == (1.5, "float16")
    assert (router.max_num_seqs, router.enable_chunked_prefill) == (4, False)
    assert router.served_model_name == ("a", "b")


def test_a_setting_of_both_programs_goes_to_both() -> None:
    worker, router = pair_settings(parsed("--max-num-batched-tokens=33", "--log-level=debug"), {})
    assert worker.max_num_batched_tokens == router.max_num_batched_tokens == 33
    assert worker.log_level == router.log_level == "debug"


def test_flag_before_environment_before_default() -> None:
    environ = {"OCTAVO_BLOCK_SIZE": "8", "OCTAVO_DTYPE": "float32", "OCTAVO_WORKER": "a:1,b:2"}
    worker, router = pair_settings(parsed("--block-size=32"), environ)
    assert (worker.block_size, worker.dtype, worker.device) == (32, "float32", "auto")
    assert router.worker == ("a:1", "b:2")


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("False", False), ("0", False)])
def test_booleans_in_the_environment(text: str, value: bool) -> None:
    environ = {"OCTAVO_ENABLE_CHUNKED_PREFILL": text}
    assert RouterConfig.from_values({}, environ).enable_chunked_prefill is value


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("PORT", "x", "a whole number"),
        ("STEP_TIMEOUT_S", "x", "a number"),
        ("ENABLE_CHUNKED_PREFILL", "x", "true or false"),
    ],
)
def test_an_unreadable_variable_is_named(name: str, text: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"OCTAVO_{name} is 'x'; it must be {kind}"):
        RouterConfig.from_values({}, {f"OCTAVO_{name}": text})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_size": 17}, "block_size is 17; it must be 8, 16 or 32"),
        ({"dtype": "float8"}, "dtype is 'float8'; it must be one of auto, float32, bfloat16, float16"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5; it must be from 0.01 to 1"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan"),
        ({"num_device_blocks": -1}, "num_device_blocks is -1; it must be at least 0"),
        ({"num_device_blocks": "8"}, "num_device_blocks is '8'; it must be a whole number"),
        ({"num_device_blocks": True}, "num_device_blocks is True; it must be a whole number"),
        ({"swap_space": "much"}, "swap_space is 'much'; it must be a number"),
        ({"model": 3}, "model is 3; it must be a text"),
    ],
)
def test_a_value_out_of_range_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        WorkerConfig.from_values(values, {})
    assert error.value.message.startswith(message)


def test_whole_numbers_paths_and_single_names_are_taken() -> None:
    worker, router = pair_settings({"swap_space": 2, "model": Path("/models/m"), "served_model_name": "one"}, {})
    assert worker.swap_space == 2
    assert worker.model == "/models/m"
    assert router.served_model_name == ("one",)


def test_a_misspelt_setting_is_named_with_the_one_meant() -> None:
    with pytest.raises(ConfigError, match="no setting 'max_num_seq'; did you mean max_num_seqs"):
        pair_settings({"max_num_seq": 3}, {})


def test_flags_give_the_settings_again() -> None:
    worker = WorkerConfig(model="a b", block_size=8, swap_space=0.5, listen="unix:/s")
    router = RouterConfig(worker=("a:1", "b:2"), port=0, enable_chunked_prefill=False, ready_file="/r")
    parser = argparse.ArgumentParser()
    WorkerConfig.add_flags(parser)
    assert WorkerConfig.from_values(vars(parser.parse_args(worker.to_flags())), {}) == worker
    parser = argparse.ArgumentParser()
    RouterConfig.add_flags(parser)
    assert RouterConfig.from_values(vars(parser.parse_args(router.to_flags())), {}) == router
    assert WorkerConfig().to_flags() == []


def test_skipped_settings_have_no_flag() -> None:
    with pytest.raises(SystemExit):
        parsed("--listen=x", skip=("listen",))


def test_names() -> None:
    both = {spec.name for cls in (WorkerConfig, RouterConfig) for spec in dataclasses.fields(cls)}
    assert setting_names() == both
    assert environment_name("max_num_seqs") == "OCTAVO_MAX_NUM_SEQS"


def test_secrets_are_no_flags_but_variables() -> None:
    router = RouterConfig(api_key=("first", "second"), worker_token="shared")
    assert router.to_flags() == []
    variables = router.to_environment()
    assert variables == {"OCTAVO_API_KEY": "first,second", "OCTAVO_WORKER_TOKEN": "shared"}
    assert RouterConfig.from_values({}, variables) == router
    assert WorkerConfig(worker_token="shared").to_environment() == {"OCTAVO_WORKER_TOKEN": "shared"}
    assert WorkerConfig().to_environment() == {}


def test_secrets_are_shown_nowhere() -> None:
    assert "hush" not in repr(RouterConfig(api_key=("hush",), worker_token="hush"))
    for values in (
        {"api_key": ("hush hush",)},
        {"api_key": "hush,hush"},
        {"worker_token": "hush\n"},
        {"api_key": (b"hush",)},
        {"worker_token": ["hush"]},
    ):
        with pytest.raises(ConfigError) as caught:
            pair_settings(values, {})
        assert "hush" not in caught.value.message


def test_a_flag_with_a_secret_is_taken() -> None:
    _, router = pair_settings(parsed("--api-key=a", "--api-key=b"), {})
    assert router.api_key == ("a", "b")


@pytest.mark.parametrize("origin", ["*", "https://chat.example.com", "http://localhost:3000", "http://[::1]:8080"])
def test_origins(origin: str) -> None:
    assert RouterConfig.from_values({"allowed_origins": origin}, {}).allowed_origins == (origin,)


@pytest.mark.parametrize(
    "origin", ["chat.example.com", "https://a/", "https://a/b", '["https://a"]', "", "https://a b"]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match="allowed_origins has"):
        RouterConfig.from_values({"allowed_origins": (origin,)}, {})


def test_credentials_for_every_origin_are_refused() -> None:
    with pytest.raises(ConfigError, match="allow_credentials is set while allowed_origins has"):
        RouterConfig(allowed_origins=("*",), allow_credentials=True)


def test_two_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="worker_token and worker_token_file are both given"):
        WorkerConfig(worker_token="a", worker_token_file="b")


def test_a_private_router_asks_nobody_for_a_key() -> None:
    environ = {"OCTAVO_API_KEY": "a", "OCTAVO_SSL_KEYFILE": "k", "OCTAVO_SSL_CERTFILE": "c"}
    _, router = pair_settings(private_settings(), environ)
    assert (router.api_key, router.ssl_keyfile, router.port, router.grpc_port) == ((), "", -1, -1)
    assert router.trust_request_chat_template


def test_a_variable_of_nothing_but_commas_does_not_open_the_server() -> None:
    with pytest.raises(ConfigError, match="OCTAVO_API_KEY holds nothing but commas"):
        RouterConfig.from_values({}, {"OCTAVO_API_KEY": ","})
    assert RouterConfig.from_values({}, {"OCTAVO_API_KEY": ""}).api_key == ()
