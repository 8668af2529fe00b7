"""Finds the attention class of `--attention-backend` and puts it in place of the backend's.

What such a class must be is `octavo_kernels.attention`'s to say; docs/attention.md has it for people.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import cast

import torch

from octavo.errors import ConfigError
from octavo_kernels.attention import Attention, AttentionSetup, BackendWithAttention, check_attention
from octavo_kernels.backend import Backend, KVLayout
from octavo_worker.loaders.config import ModelConfig

_log = logging.getLogger(__name__)


def with_attention(name: str, backend: Backend, model: ModelConfig, layout: KVLayout, dtype: torch.dtype) -> Backend:
    """The backend with an attention in place of its own; the backend itself where name is empty.

    name: MODULE:CLASS, the module as `import` finds it. dtype: of queries and outputs. Raises ConfigError that says
    what is wrong with the class, which is made and tried here.
    """
    if not name:
        return backend
    attention_class = _find(name)
    setup = AttentionSetup(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=layout.block_size,
        dtype=dtype,
        kv_dtype=layout.dtype,
        device=backend.device,
        backend=backend,
    )
    pool = torch.zeros(layout.pool_shape(2), dtype=layout.pool_dtype, device=backend.device)
    try:
        attention: Attention = attention_class(setup)
        with torch.inference_mode():
            check_attention(attention, setup, layout.layer(pool, 0))
    except Exception as error:
        raise _refused(name, f"{type(error).__name__}: {error}") from error
    _log.info("attention is computed by %s", name)
    if not attention.only_enqueues and backend.only_enqueues:
        _log.warning("%s may wait for the device: every step waits for the one before it, and none is recorded", name)
    return cast(Backend, BackendWithAttention(backend, attention, name))


def _find(name: str) -> Callable[[AttentionSetup], Attention]:
    """The class of this name."""
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise _refused(name, "it must be MODULE:CLASS, such as my_package.my_attention:MyAttention")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        raise _refused(name, f"the module cannot be imported: {type(error).__name__}: {error}") from error
    for part in class_name.split("."):
        if not hasattr(found, part):
            raise _refused(name, f"{found!r} has no {part!r}")
        found = getattr(found, part)
    if not isinstance(found, type):
        raise _refused(name, f"it is a {type(found).__name__}, and must be a class")
    return found


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(f"attention_backend {name!r}: {why}")
