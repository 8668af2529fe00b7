"""How the router starts processes of its own, for work that a stranger's input may make fatal to whoever does it.

What they do and how they are asked is `grammar.py`'s and `template_process.py`'s.
"""

from __future__ import annotations

import os
import sys

# What Python and the system's libraries need. The rest holds the router's keys.
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "LC_ALL", "TZ", "TMPDIR")


def child_command(module: str) -> tuple[str, ...]:
    """Runs a module as a program. Modules in the folder where the router was started are not found."""
    return sys.executable, "-P", "-m", module


def child_environment() -> dict[str, str]:
    """The environment of a child: nothing of it is secret."""
    return {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
