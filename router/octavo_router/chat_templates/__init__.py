"""Chat templates that come with the router, for models whose own does nothing with tools."""

from __future__ import annotations

from importlib import resources
from typing import Final

NAMES: Final = ("hermes",)
"""What `--chat-template` may be beside a path. hermes: ChatML with tools, as Hermes and Qwen have it."""


def read(name: str) -> str:
    """The source of a template in NAMES."""
    return resources.files(__name__).joinpath(f"{name}.jinja").read_text(encoding="utf-8")
