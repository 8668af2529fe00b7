"""Octavo's router: it owns every decision of the server, and no tensor. See docs/architecture.md."""

from __future__ import annotations

__version__ = "0.1.0"
