"""Choosing a backend: explicit, never silent; instruction sets, threads, forks and the count of cores."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from octavo_kernels import BackendUnavailableError, available_backends, load_backend
from octavo_kernels.cpu import library, topology
from tests.kernels.cases import normal


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "LIBRARY_PATH", tmp_path / "liboctavo_cpu.so")
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


def test_auto_prefers_the_native_backend(native):
    native()
    backend = load_backend(num_threads=2)
    assert backend.name == "cpu"
    assert backend.row_invariant
    assert backend.describe() == f"cpu ({library.supported_isas()[0]}, 2 threads)"
    available = available_backends()
    assert list(available) == ["cpu", "triton", "reference"]
    assert available["cpu"] is available["reference"] is None


def test_auto_falls_back_with_a_warning(no_library, caplog):
    with caplog.at_level(logging.WARNING):
        backend = load_backend("auto")
    assert backend.name == "reference"
    assert not backend.row_invariant
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "was not built" in caplog.text


def test_cpu_by_name_raises_where_it_cannot_run(no_library):
    with pytest.raises(BackendUnavailableError, match="install a C\\+\\+17 compiler"):
        load_backend("cpu")
    assert load_backend("reference").name == "reference"


def test_a_file_that_is_no_library(no_library):
    library.LIBRARY_PATH.write_text("not a library")
    with pytest.raises(BackendUnavailableError, match="cannot be loaded"):
        load_backend("cpu")


def test_unknown_names():
    with pytest.raises(BackendUnavailableError, match="unknown backend 'cuda'"):
        load_backend("cuda")


def test_triton_by_name_raises_where_it_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        BackendUnavailableError, match=r"the triton backend cannot be used: (Triton is not|it computes on)"
    ):
        load_backend("triton")


def test_auto_takes_triton_for_other_devices(caplog):
    with caplog.at_level(logging.WARNING):
        assert load_backend("auto", device="meta").name == "reference"
    assert "the triton backend cannot be used" in caplog.text


def test_the_native_backend_is_for_the_cpu(native):
    native()
    with pytest.raises(BackendUnavailableError, match="the device is meta"):
        load_backend("cpu", device="meta")


def test_instruction_set_by_environment(native, monkeypatch):
    native()
    monkeypatch.setenv(library.ISA_VARIABLE, "generic")
    assert load_backend("cpu", num_threads=1).describe() == "cpu (generic, 1 thread)"
    monkeypatch.setenv(library.ISA_VARIABLE, "sse9")
    with pytest.raises(BackendUnavailableError, match="'sse9' is not available"):
        load_backend("cpu")


def test_num_threads_must_be_positive(native):
    native()
    with pytest.raises(ValueError, match="num_threads is 0"):
        load_backend("cpu", num_threads=0)


def test_calls_from_several_threads(native):
    backend = native()
    weight, x = normal(480, 256, dtype=torch.float32, seed=1), normal(64, 256, dtype=torch.float32, seed=2)
    layer = backend.linear(weight)
    expected = layer(x)
    wrong = []

    def call() -> None:
        wrong.extend(i for i in range(50) if not torch.equal(layer(x), expected))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_child_computes_too(native):
    layer = native().linear(normal(480, 256, dtype=torch.float32, seed=1))
    x = normal(64, 256, dtype=torch.float32, seed=2)
    expected = layer(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(layer(x), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(layer(x), expected)


THREADS_THAT_CANNOT_START = """
import resource, signal, torch
from octavo_kernels import KernelError, load_backend
backend = load_backend("cpu", num_threads=4)
pool, blocks = torch.zeros(64, 65536), torch.arange(64)
pages = int(open("/proc/self/statm").read().split()[0])
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, ((pages << 12) + (2 << 20), before[1]))  # less than a thread's stack
try:
    backend.move_blocks(pool, blocks[:32], pool, blocks[32:])
except KernelError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, before)
assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
pool[:32] = 1
backend.move_blocks(pool, blocks[:32], pool, blocks[32:])
assert bool((pool == 1).all())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory")
def test_threads_that_cannot_start_are_an_error_and_are_tried_again(native):
    native()
    done = subprocess.run([sys.executable, "-c", THREADS_THAT_CANNOT_START], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"cannot start compute thread [234] of 4: .+\n", done.stdout)


def test_backends_and_layers_are_freed(native):
    native()
    backend = load_backend("cpu", num_threads=3)
    layer = backend.linear(torch.ones(96, 8))
    layer(torch.ones(2, 8))
    alive = weakref.ref(backend)
    del backend
    gc.collect()
    assert alive() is not None, "a layer keeps its backend"
    assert layer(torch.ones(1, 8))[0, 0] == 8
    del layer
    gc.collect()
    assert alive() is None


def fake_machine(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_hardware_threads_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5}, raising=False)
    siblings = {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}
    fake_machine(
        tmp_path, {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": s for i, s in siblings.items()}
    )
    assert topology.usable_cores(tmp_path) == 2


def test_the_tightest_quota_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    fake_machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            "sys/fs/cgroup/a/cpu.max": "250000 100000",
        },
    )
    assert topology.cgroup_quota(tmp_path) == 2.5
    assert topology.usable_cores(tmp_path) == 3


def test_quota_of_the_first_cgroups(tmp_path):
    fake_machine(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/box\n0::/\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        },
    )
    assert topology.cgroup_quota(tmp_path) == 1.5


def test_no_quota(tmp_path):
    assert topology.cgroup_quota(tmp_path) is None
