"""The worker of Octavo: holds the paged KV memory and computes the steps that a router orders.

It decides nothing: which sequences run, which blocks they own and what is moved comes in plans (`octavo.worker.v1`).
"""

from __future__ import annotations

__version__ = "0.1.0"
