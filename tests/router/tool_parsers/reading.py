"""Reads whole answers with a parser, for its tests."""

from __future__ import annotations

from collections.abc import Sequence

from octavo_router.tool_parsers import Parsed, ToolParser

TOOLS = frozenset({"get_weather", "add", "now", "f"})
Reading = tuple[str, list[tuple[str, str]]]


class Joined:
    """The content and the calls of what a parser gave, each call a name and its arguments."""

    def __init__(self) -> None:
        self.content = ""
        self.calls: list[tuple[str, str]] = []

    def add(self, parsed: Parsed) -> None:
        self.content += parsed.content
        for piece in parsed.calls:
            if piece.index == len(self.calls):
                assert piece.name
                self.calls.append((piece.name, piece.arguments))
            else:
                # Only the last call grows.
                assert piece.index == len(self.calls) - 1
                assert piece.name is None
                name, arguments = self.calls[-1]
                self.calls[-1] = (name, arguments + piece.arguments)

    def reading(self) -> Reading:
        return self.content, self.calls


def read(kind: type[ToolParser], pieces: str | Sequence[str]) -> Reading:
    """What an answer says that comes in these pieces, to its end."""
    parser, joined = kind(TOOLS), Joined()
    for piece in [pieces] if isinstance(pieces, str) else pieces:
        joined.add(parser.feed(piece))
    joined.add(parser.finish())
    assert parser.num_calls == len(joined.calls)
    return joined.reading()


def read_so_far(kind: type[ToolParser], pieces: Sequence[str]) -> Reading:
    """What an answer says as far as it has come in these pieces."""
    parser, joined = kind(TOOLS), Joined()
    for piece in pieces:
        joined.add(parser.feed(piece))
    return joined.reading()
