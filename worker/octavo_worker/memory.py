"""How much memory is really free: what the kernel can give, and what the process's control groups still allow; and
whether a model's weights fit into it.

Pages that only cache files count as free, since the kernel gives them up. Everything is read through two paths, so
tests can put files there. What to do with the memory is `kv_pool`'s.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass
from pathlib import Path

from octavo.config import GIB
from octavo.errors import ModelLoadError
from octavo_worker.loaders.config import ModelConfig

# Limits above this are "none": version 1 writes 2^63 rounded down to a page.
_NO_LIMIT = 1 << 60
# glibc's names and numbers; the first threshold has a highest value, of 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_TENSOR_BYTES, _KEPT_BYTES = 32 << 20, 256 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it


@dataclass(frozen=True)
class MemoryPaths:
    """Where the kernel's files are. Tests give a folder of their own."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")


def free_host_memory(paths: MemoryPaths | None = None) -> int:
    """Bytes that this process may still take: the least of MemAvailable and what each control group leaves."""
    paths = paths or MemoryPaths()
    free = _available(paths.proc / "meminfo")
    for group in _control_groups(paths):
        left = _left_in_group(group)
        if left is not None:
            free = min(free, left)
    return max(free, 0)


def keep_freed_memory() -> None:
    """Has the C library keep what tensors give back, up to some tens of MiB each, where it would return it to the
    kernel: logits of a step come and go, and touching new pages costs more than computing them. glibc alone; with
    another one nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _KEPT_TENSOR_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def reserve(num_bytes: int) -> mmap.mmap:
    """Zeros that take no memory before they are first written, in huge pages where the kernel has any: for what is
    read in long stretches.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def populate(address: int, num_bytes: int) -> bool:
    """Has the kernel put memory behind the pages that begin in a stretch of reserved memory, whose content stays as it
    is. Returns whether it did: it must be Linux 5.14 or later, and have memory left.
    """
    if sys.platform != "linux":
        return False
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = address + num_bytes - first
    madvise = ctypes.CDLL(None).madvise  # not Python's own, which keeps all other threads waiting
    return length <= 0 or madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) == 0


def weight_bytes(config: ModelConfig, num_elements: int, bytes_per_element: int, quantization: str) -> int:
    """Bytes of a loaded model's weights. num_elements: in all tensors; bytes_per_element: of its dtype.

    With int8, all but the embeddings take a byte; tied ones serve as the head as well, which does. With int4, layers
    take 5 bits of it, scales and minimums included. With fp8, embeddings and head are of the dtype.
    """
    if quantization == "none":
        return num_elements * bytes_per_element
    embedding = config.vocab_size * config.hidden_size
    layers = num_elements - embedding if config.tie_word_embeddings else num_elements - 2 * embedding
    layer_bytes = -(-layers * 5 // 8) if quantization == "int4" else layers
    head_bytes = embedding * (bytes_per_element if quantization == "fp8" else 1)
    return layer_bytes + head_bytes + embedding * bytes_per_element


def check_weights_fit(name: str, *, num_elements: int, num_bytes: int, precision: str, free: int) -> None:
    """Raises ModelLoadError, with the numbers and the remedies, for a model whose weights alone exceed the free memory:
    loading it would end with the system killing this process or another, without a word.

    num_elements: in all tensors; num_bytes: what they take in this precision; free: bytes on the device.
    """
    if num_bytes <= free:
        return
    smaller = "" if num_bytes <= 2 * num_elements else ", load it in --dtype bfloat16"
    raise ModelLoadError(
        f"model {name} needs {num_bytes / GIB:.2f} GiB for its {num_elements} weights in {precision}, but only "
        f"{free / GIB:.2f} GiB of memory are free; free some, raise the limit that this process runs under{smaller}, "
        "or take a smaller model"
    )


def _available(meminfo: Path) -> int:
    """MemAvailable in bytes; MemFree on kernels that do not tell it."""
    values = {line.split(":")[0]: line.split()[1] for line in meminfo.read_text().splitlines() if ":" in line}
    return int(values.get("MemAvailable", values["MemFree"])) * 1024


def _control_groups(paths: MemoryPaths) -> list[Path]:
    """Folders of the process's memory group and of those above it, of version 1 and 2.

    In a container the path that the kernel tells may be the host's, and not be mounted: then the mount's own root is
    the container's group.
    """
    try:
        lines = (paths.proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    groups: list[Path] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            root = paths.cgroup
        elif "memory" in controllers.split(","):
            root = paths.cgroup / "memory"
        else:
            continue
        folder = root / path.strip("/")
        while folder != root:
            groups.append(folder)
            folder = folder.parent
        groups.append(root)
    return [group for group in groups if group.is_dir()]


def _left_in_group(folder: Path) -> int | None:
    """Bytes below a group's limit, with its file cache counted as free. None: no limit.

    Above memory.high a group is not killed but slowed down to a crawl, so it is a limit as well.
    """
    for limit_names, usage_name, prefix in (
        (("memory.max", "memory.high"), "memory.current", ""),
        (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
    ):
        limits = [limit for name in limit_names if (limit := _number(folder / name)) is not None and limit < _NO_LIMIT]
        usage = _number(folder / usage_name)
        if limits and usage is not None:
            return min(limits) - usage + _file_cache(folder / "memory.stat", prefix)
    return None


def _file_cache(stat: Path, prefix: str) -> int:
    """Bytes of pages that cache files and can be dropped."""
    try:
        pairs = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return sum(int(pairs.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
