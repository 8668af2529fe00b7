"""What fails in one process: it is noted, fails alone, and is told apart from a device that is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gpu import equality, kernels, model, parts, run
from gpu.bench import TINY, Bench
from gpu.equality import difference, equality_cases
from gpu.kernels import kernel_cases
from gpu.rows import Row
from gpu.run import DeviceLostError, NoModelError, Run

from octavo_kernels.reference import ReferenceBackend
from octavo_worker.devices import CpuDevice


class Device(CpuDevice):
    """A CPU that can be lost."""

    is_lost = False

    def synchronize(self) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def bench() -> Bench:
    device = torch.device("cpu")
    return Bench(Device(device), ReferenceBackend(device), ReferenceBackend(device), TINY)


@pytest.fixture
def this(bench: Bench, tmp_path: Path) -> Run:
    return Run(bench, tmp_path / "results.json", {"of": "a test"})


def failing(error: Exception) -> Callable[[], Iterator[Row]]:
    def measure() -> Iterator[Row]:
        raise error
        yield

    return measure


def good() -> Iterator[Row]:
    yield Row("good", 1.0, "s")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TimeoutError(), "TimeoutError"),
        (ValueError("\n first\nsecond"), "ValueError: first"),
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"),
         "RuntimeError: CUDA error: operation not permitted when stream is capturing"),
    ],
)  # fmt: skip
def test_a_case_that_fails_fails_alone(this: Run, error: Exception, text: str) -> None:
    this.each([("bad", failing(error)), ("good", good)])
    found = json.loads(this.path.read_text())
    assert found["failures"] == {"bad": text}
    assert [row["name"] for row in found["rows"]] == ["good"]
    assert (found["tried"], found["is_finished"], found["of"]) == (["bad", "good"], False, "a test")


@pytest.mark.parametrize(
    "text",
    ["CUDA error: an illegal memory access was encountered", "Triton Error [CUDA]: an illegal memory access", ""],
)
def test_a_lost_device_ends_the_process_whatever_the_error_says(this: Run, text: str) -> None:
    def lose() -> Iterator[Row]:
        this.bench.device.is_lost = True  # type: ignore[attr-defined]
        raise RuntimeError(text)
        yield

    with pytest.raises(DeviceLostError, match="bad"):
        this.each([("bad", lose), ("good", good)])
    found = json.loads(this.path.read_text())
    assert found["tried"] == ["bad"]
    assert list(found["failures"]) == ["bad"]


def test_a_row_takes_the_place_of_an_earlier_one_of_its_name(this: Run) -> None:
    this.add(Row("a", 1.0, "s"))
    this.add(Row("b", 1.0, "s"))
    this.add(Row("a", 2.0, "s"))
    assert [(row["name"], row["value"]) for row in json.loads(this.path.read_text())["rows"]] == [
        ("a", 2.0),
        ("b", 1.0),
    ]


def test_a_model_that_cannot_be_made_is_tried_once(this: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def load(_: Bench) -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("17 GiB are missing")

    monkeypatch.setattr(run, "load", load)
    with pytest.raises(torch.OutOfMemoryError):
        this.served()
    with pytest.raises(NoModelError, match="17 GiB are missing"):
        this.served()
    assert len(tries) == 1


def test_without_graphs_steps_are_measured_op_by_op(this: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(*_: Any) -> None:
        raise RuntimeError("no capture today")

    monkeypatch.setattr(model, "record", record)
    this.each(parts.decode(this))
    assert this.failures == {"graphs of decode steps": "RuntimeError: no capture today"}
    (step,) = (row for row in this.rows if row.name == "decode step, 3 x 40")
    assert step.facts["is_graph"] is False


@pytest.mark.parametrize(("text", "ratios"), [("called a synchronizing CUDA operation", [1.0]), ("out of blocks", [])])
def test_a_wait_in_a_step_is_told_and_loses_nothing_else(
    this: Run, monkeypatch: pytest.MonkeyPatch, text: str, ratios: list[float]
) -> None:
    def begin(*_: Any) -> None:
        raise RuntimeError(text)

    served = this.served()
    with monkeypatch.context() as patch:
        patch.setattr(served.executor, "begin", begin)
        patch.setattr(served.executor, "execute", lambda _: None)
        this.each([("waits", lambda: parts._waits(this))])
    assert this.failures == {"waits": f"RuntimeError: {text}"}
    assert [row.ratio for row in this.rows if "waits of the host" in row.name] == ratios
    this.each(parts.decode(this))
    assert list(this.failures) == ["waits"]
    assert "decode step, 3 x 40" in {row.name for row in this.rows}


def test_without_a_host_tier_only_swap_fails(this: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    make = model.KVPool

    def pool(layout: Any, size: Any, *others: Any) -> Any:
        if size.num_host_blocks:
            raise OSError("cannot be locked")
        return make(layout, size, *others)

    monkeypatch.setattr(model, "KVPool", pool)
    this.each([*parts.swap(this), *parts.prefill(this)])
    assert this.failures == {
        "host tier": "OSError: cannot be locked",
        "swap": "RuntimeError: there is no host tier: the host's memory could not be locked",
    }
    assert "prompt of 32 tokens" in {row.name for row in this.rows}


def test_a_step_that_fails_does_not_spoil_the_next_one(this: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    served = this.served()
    with monkeypatch.context() as patch:
        patch.setattr(served.decoder, "logits", lambda *_: 1 / 0)
        this.each([("bad", lambda: parts._decode(this, 1, 20)), *parts.prefill(this)])
    assert this.failures == dict.fromkeys(("bad", "prompt"), "ZeroDivisionError: division by zero")
    this.each([("good", lambda: parts._decode(this, 1, 20))])
    assert "good" not in this.failures


@pytest.mark.parametrize("module", [equality, kernels])
def test_inputs_that_cannot_be_made_fail_alone(this: Run, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    def paged_pass(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no pool")

    monkeypatch.setattr(module, "paged_pass", paged_pass)
    is_equality = module is equality
    this.each(equality_cases(this.bench) if is_equality else kernel_cases(this.bench, this.rates))
    assert set(this.failures.values()) == {"OutOfMemoryError: no pool"}
    assert all(name.startswith(("attention", "write_kv", "rotary")) for name in this.failures)
    assert len(this.failures) == 9
    names = {row.name for row in this.rows}
    assert ("advance_decode, float32: equal" if is_equality else "least_kept, 3 rows") in names


def test_equality_finds_a_bound_that_is_off(bench: Bench, this: Run) -> None:
    class Off(ReferenceBackend):
        def least_kept(self, *arguments: Any) -> torch.Tensor:
            return super().least_kept(*arguments) * 1.01

    bench = Bench(bench.device, Off(torch.device("cpu")), bench.reference, TINY)
    this.each([(name, case) for name, case in equality_cases(bench) if "least_kept" in name])
    assert list(this.failures) == ["least_kept, float32", "least_kept, top-k alone, float32"]


def test_differences() -> None:
    expected = torch.tensor([1.0, -4.0, float("inf")])
    assert difference(expected.clone(), expected) == 0.0
    assert difference(torch.tensor([1.5, -4.0, float("inf")]), expected) == 0.125
    assert difference(torch.tensor([1.0, -4.0, float("nan")]), expected) == float("inf")
    with pytest.raises(ValueError, match=r"the result is \(1,\), the oracle's \(3,\)"):
        difference(torch.tensor([1.0]), expected)
