"""Every kernel compiles for every GPU it ships for, and keeps its registers. Needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from octavo_kernels.triton.compile_table import OPS, Usage, table


@pytest.fixture(scope="module")
def usages(tmp_path_factory) -> list[Usage]:
    """The table, made in a process that does not interpret."""
    path = tmp_path_factory.mktemp("table") / "table.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "octavo_kernels.triton.compile_table", "--json", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert path.exists(), done.stderr
    return [Usage(**row) for row in json.loads(path.read_text())]


@pytest.mark.timeout(900)
def test_no_kernel_spills(usages, capsys):
    with capsys.disabled():
        print(f"\n{table(usages)}")
    assert [u for u in usages if not u.is_good] == []
    # Where attention may spill, it is two registers.
    assert [u for u in usages if u.op.startswith("paged_attention") and u.stack > 8] == []


def test_every_op_is_there_on_both_targets(usages):
    assert {(u.op, u.target) for u in usages} >= {(op, target) for op in OPS for target in (80, 90)}


def test_programs_fit_their_gpus(usages):
    for u in usages:
        assert u.shared <= {80: 99, 90: 227}[u.target] << 10, u
        assert u.registers * 32 * u.num_warps <= 65536, u


def test_a_table_of_one():
    row = Usage("rms_norm", "_rms_norm_kernel", "hidden 64, bf16", 80, 4, 40, 512, 0, False)
    assert table([row]).splitlines() == [
        "| kernel   | variant         | target | warps | registers | shared, bytes | stack, bytes |",
        "|----------|-----------------|--------|-------|-----------|---------------|--------------|",
        "| rms_norm | hidden 64, bf16 | sm_80  | 4     | 40        | 512           | 0            |",
    ]


def test_refuses_to_interpret():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "octavo_kernels.triton.compile_table", "--op", "blocks"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr
