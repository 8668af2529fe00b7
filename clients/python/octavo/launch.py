"""Runs a module as a program that dies with its parent: `python -m octavo.launch PARENT_PID MODULE [ARGUMENT ...]`.

A parent that is killed with SIGKILL cannot stop its children, and a worker without a router would hold its memory for
nothing. On Linux the kernel is asked to kill this process when its parent ends (prctl, PR_SET_PDEATHSIG; the "parent"
is the thread that started it, so `ProcessPair` starts every child from one thread that lives as long as the pair).
Elsewhere a thread watches for the parent's end. This is done here and not between fork and exec: running Python there
is unsafe in a process with threads, which every gRPC client is.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_WATCH_INTERVAL_S = 0.5


def die_with_parent(parent_pid: int) -> None:
    """Arranges for this process to be killed when its parent ends, and ends it now if that has already happened."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch, args=(parent_pid,), name="octavo-parent-watch", daemon=True).start()
    if os.getppid() != parent_pid:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_WATCH_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Runs the module that the arguments name, as `python -m` does."""
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent_pid)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
