"""The exceptions of octavo-kernels.

KernelError
+- BackendUnavailableError   the named backend does not exist or cannot run on this machine
+- InvalidArgumentError      a tensor or a value that an op cannot take (also a ValueError)
"""

from __future__ import annotations


class KernelError(Exception):
    """Base of every error that this package raises on purpose."""


class BackendUnavailableError(KernelError):
    """The named backend does not exist, or cannot run on this machine; the message says why and what helps."""


class InvalidArgumentError(KernelError, ValueError):
    """An op was given a tensor or a value it cannot take."""
