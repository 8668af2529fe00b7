from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path

import pytest

from octavo.errors import ModelLoadError
from octavo_worker.loaders.config import config_from_hf
from octavo_worker.memory import MemoryPaths, check_weights_fit, free_host_memory, populate, reserve, weight_bytes
from tests.worker.checkpoints import tiny_config

MIB = 1 << 20


@pytest.fixture
def paths(tmp_path: Path) -> MemoryPaths:
    """A machine with 1000 MiB available, and no control groups yet."""
    write(tmp_path / "proc" / "meminfo", f"MemTotal: 2048000 kB\nMemFree: 100 kB\nMemAvailable: {1000 * 1024} kB\n")
    (tmp_path / "cgroup").mkdir()
    return MemoryPaths(tmp_path / "proc", tmp_path / "cgroup")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_control_groups(paths: MemoryPaths) -> None:
    assert free_host_memory(paths) == 1000 * MIB


def test_version_2_counts_file_cache_as_free(paths: MemoryPaths) -> None:
    write(paths.proc / "self" / "cgroup", "0::/pod/worker\n")
    group = paths.cgroup / "pod" / "worker"
    write(group / "memory.max", f"{600 * MIB}\n")
    write(group / "memory.current", f"{500 * MIB}\n")
    write(group / "memory.stat", f"anon 1\ninactive_file {200 * MIB}\nactive_file {50 * MIB}\n")
    assert free_host_memory(paths) == 350 * MIB


def test_version_2_limit_above_which_a_group_is_throttled(paths: MemoryPaths) -> None:
    write(paths.proc / "self" / "cgroup", "0::/pod\n")
    write(paths.cgroup / "pod" / "memory.max", "max")
    write(paths.cgroup / "pod" / "memory.high", str(400 * MIB))
    write(paths.cgroup / "pod" / "memory.current", str(100 * MIB))
    assert free_host_memory(paths) == 300 * MIB
    write(paths.cgroup / "pod" / "memory.max", str(250 * MIB))
    assert free_host_memory(paths) == 150 * MIB


def test_version_2_limit_of_a_group_above(paths: MemoryPaths) -> None:
    write(paths.proc / "self" / "cgroup", "0::/pod/worker\n")
    for group, limit in ((paths.cgroup / "pod", str(300 * MIB)), (paths.cgroup / "pod" / "worker", "max")):
        write(group / "memory.max", limit)
        write(group / "memory.current", str(100 * MIB))
    assert free_host_memory(paths) == 200 * MIB


def test_version_2_in_a_container_whose_path_is_the_hosts(paths: MemoryPaths) -> None:
    write(paths.proc / "self" / "cgroup", "0::/system.slice/docker-123.scope\n")
    write(paths.cgroup / "memory.max", str(256 * MIB))
    write(paths.cgroup / "memory.current", str(56 * MIB))
    assert free_host_memory(paths) == 200 * MIB


def test_version_1(paths: MemoryPaths) -> None:
    write(paths.proc / "self" / "cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    group = paths.cgroup / "memory" / "docker" / "abc"
    write(group / "memory.limit_in_bytes", str(512 * MIB))
    write(group / "memory.usage_in_bytes", str(400 * MIB))
    write(group / "memory.stat", f"cache 5\ntotal_inactive_file {80 * MIB}\ntotal_active_file 0\n")
    assert free_host_memory(paths) == 192 * MIB


def test_version_1_without_a_limit(paths: MemoryPaths) -> None:
    write(paths.proc / "self" / "cgroup", "4:memory:/\n")
    write(paths.cgroup / "memory" / "memory.limit_in_bytes", "9223372036854771712")
    write(paths.cgroup / "memory" / "memory.usage_in_bytes", "5")
    assert free_host_memory(paths) == 1000 * MIB


def test_group_over_its_limit_has_nothing_free(paths: MemoryPaths) -> None:
    write(paths.proc / "self" / "cgroup", "0::/\n")
    write(paths.cgroup / "memory.max", "100")
    write(paths.cgroup / "memory.current", "200")
    assert free_host_memory(paths) == 0


def test_this_machine_has_memory() -> None:
    assert free_host_memory() > 0


def test_weights_that_fit() -> None:
    check_weights_fit("m", num_elements=512, num_bytes=1024, precision="bfloat16", free=1024)


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_weights(tied: bool) -> None:
    config = config_from_hf(tiny_config(hidden_size=64, vocab_size=100, tie_word_embeddings=tied), "config.json")
    assert weight_bytes(config, 50_000, 2, "none") == 100_000
    # Embeddings in two bytes; layers and head in one. A head that is not tied is among the 50,000.
    assert weight_bytes(config, 50_000, 2, "int8") == (50_000 if tied else 43_600) + 12_800
    # Layers in one; embeddings and head in two.
    assert weight_bytes(config, 50_000, 2, "fp8") == (43_600 if tied else 37_200) + 12_800 + 12_800
    # Layers in 5 bits of a byte.
    assert weight_bytes(config, 50_000, 2, "int4") == (27_250 if tied else 23_250) + 6_400 + 12_800


@pytest.mark.parametrize(("size", "dtype", "hint"), [(4, "float32", True), (2, "bfloat16", False)])
def test_weights_that_do_not_fit(size: int, dtype: str, hint: bool) -> None:
    with pytest.raises(ModelLoadError) as caught:
        check_weights_fit("m", num_elements=7 << 30, num_bytes=size * (7 << 30), precision=dtype, free=1 << 30)
    message = caught.value.message
    needed = f"model m needs {7 * size}.00 GiB for its 7516192768 weights in {dtype}"
    assert message.startswith(f"{needed}, but only 1.00 GiB of memory are free")
    assert ("--dtype bfloat16" in message) is hint


def resident() -> int:
    """Bytes of this process that are in memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


@pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14), reason="needs Linux 5.14"
)
def test_reserved_memory_comes_when_asked_for_and_keeps_its_content() -> None:
    before = resident()
    memory = reserve(64 * MIB)
    assert resident() - before < 8 * MIB
    memory[5 * MIB + 7] = 9
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert populate(address + 100, 48 * MIB)  # from the first page that begins in it
    assert 40 * MIB < resident() - before < 64 * MIB
    assert populate(address, 100)
    assert memory[5 * MIB + 7] == 9
    assert not any(memory[: 5 * MIB])


def test_memory_that_is_not_there_cannot_come() -> None:
    assert not populate(1 << 40, 1 << 20)
