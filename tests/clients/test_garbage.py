"""What is there when a program is ready is left out of later collections; what comes afterwards is not."""

from __future__ import annotations

import subprocess
import sys

_CODE = """
import gc, weakref
from octavo.garbage import spare_long_lived

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

gc.disable()
before = cycle()
spare_long_lived()
assert before() is None
assert gc.get_freeze_count() > 1000
later = cycle()
gc.collect()
assert later() is None
"""


def test_only_what_comes_later_is_looked_at() -> None:
    subprocess.run([sys.executable, "-c", _CODE], check=True)
