"""Which device a name opens, and that nothing else asks which one it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigError
from octavo_worker.devices import CpuDevice, find_device

ROOT = Path(__file__).parents[3]
DEVICES = ROOT / "worker" / "octavo_worker" / "devices"


def test_without_cuda_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("auto", "cpu"):
        found = find_device(name)
        assert isinstance(found, CpuDevice)
        assert (found.torch_device, found.shares_host_memory) == (torch.device("cpu"), True)
        assert found.free_memory() > 0
    with pytest.raises(ConfigError, match="torch finds no CUDA device; use --device cpu"):
        find_device("cuda")


def test_the_cpu_does_not_ask_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: 1 / 0)
    assert isinstance(find_device("cpu"), CpuDevice)


def questions(source: str) -> Iterator[str]:
    """Expressions that name CUDA, or ask a tensor or a device of what kind it is. What is said to people does not
    count: docstrings, comments, and longer texts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            is_one = any("cuda" in name.split(".") for name in names)
        elif isinstance(node, ast.Attribute):
            asked = node.value
            owner = asked.attr if isinstance(asked, ast.Attribute) else asked.id if isinstance(asked, ast.Name) else ""
            is_one = "cuda" in node.attr or (node.attr == "type" and owner.endswith("device"))
        elif isinstance(node, ast.Constant):
            is_one = isinstance(node.value, str) and node.value.partition(":")[0] == "cuda"
        else:
            continue
        if is_one:
            yield ast.unparse(node)


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.synchronize()",
        "from torch.cuda import Event",
        "import torch.cuda as runtime",
        "from octavo_worker.devices import cuda",
        "if x.is_cuda: pass",
        "on_cpu = device.type == 'cpu'",
        "on_cpu = x.device.type == 'cpu'",
        "device = torch.device('cuda:0')",
        "runtime = getattr(torch, 'cuda')",
    ],
)
def test_a_question_is_found(source: str) -> None:
    assert list(questions(source))


def test_what_is_said_to_people_is_no_question() -> None:
    said = '''"""cuda"""\n# torch.cuda\nhelp = "auto takes cuda where there is one"\nkind = field.type\n'''
    assert list(questions(said.replace('"""cuda"""', '"""Runs on cuda."""'))) == []


def test_only_the_devices_know_cuda() -> None:
    sources = [path for part in ("worker", "router") for path in (ROOT / part).rglob("*.py")]
    assert DEVICES / "cuda.py" in sources
    found = {
        str(path.relative_to(ROOT)): asked
        for path in sources
        if DEVICES not in path.parents and (asked := list(questions(path.read_text())))
    }
    assert found == {}
