"""JSON as the HTTP front end writes it: compact, strictly valid, and safe within an event stream."""

from __future__ import annotations

import json
from typing import Any

# Line ends to Unicode, though not to JSON or to events. Clients that split an event stream with their language's own
# idea of lines would cut an event at them; escaped they are the same text.
_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def dumps(value: Any) -> str:
    """JSON text of a value. Raises ValueError for a number that is not finite: JSON has none."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text if text.isascii() else text.translate(_LINE_ENDS)
