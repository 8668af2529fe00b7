from __future__ import annotations

import dataclasses

import pytest

import octavo
from octavo import CompletionOutput, RequestOutput, SamplingParams
from octavo.types import Usage


def test_unknown_parameter_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_parameters_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]


def test_output_tells_whether_it_has_finished() -> None:
    assert not CompletionOutput(index=0, text="a", token_ids=[1]).finished()
    assert CompletionOutput(index=0, text="a", token_ids=[1], finish_reason="length").finished()


def test_cached_tokens() -> None:
    output = RequestOutput("r", None, None, [], finished=False)
    assert output.num_cached_tokens is None
    assert dataclasses.replace(output, usage=Usage(5, 6, 4)).num_cached_tokens == 4


def test_the_package_exports_lazily() -> None:
    assert set(octavo.__all__) <= set(dir(octavo))
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        octavo.nothing  # noqa: B018


def test_importing_the_package_is_light() -> None:
    import subprocess
    import sys

    code = "import sys, octavo; print([m for m in ('grpc', 'tqdm', 'asyncio', 'google.protobuf') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
