"""Collecting garbage in a server: short pauses instead of long ones."""

from __future__ import annotations

import gc


def spare_long_lived() -> None:
    """To be called once a program is ready: what is there by then, modules and all they hold, stays to the end, and
    full collections need not look at it any more. With torch loaded that is several hundred thousand objects.
    """
    gc.collect()
    gc.freeze()
