"""The table from errors to statuses is total: every error of the tree has a row, and rows can be told apart."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator

import grpc
import pytest

from octavo import errors
from octavo.errors import ERROR_TABLE, InternalError, InvalidRequestError, OctavoError, OverloadedError, mapping_of


def descendants(kind: type[OctavoError]) -> Iterator[type[OctavoError]]:
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
            yield from descendants(child)


def test_every_error_has_a_row_of_its_own() -> None:
    assert set(ERROR_TABLE) == set(descendants(OctavoError))


def test_the_drawn_tree_is_the_tree() -> None:
    """The picture at the top of the module names every class, under its parent."""
    depths: dict[int, str] = {}
    drawn: dict[str, str] = {}
    for line in inspect.cleandoc(errors.__doc__ or "").splitlines():
        name = line.lstrip(" │├└─").partition(" ")[0]
        if isinstance(getattr(errors, name, None), type):
            depth = len(line) - len(line.lstrip(" │├└─"))
            parents = [parent for at, parent in sorted(depths.items()) if at < depth]
            depths = {at: parent for at, parent in depths.items() if at < depth} | {depth: name}
            drawn[name] = parents[-1] if parents else "Exception"
    kinds: list[type[OctavoError]] = [OctavoError, *descendants(OctavoError)]
    tree = {kind.__name__: kind.__bases__[0].__name__ for kind in kinds}
    assert drawn == tree


@pytest.mark.parametrize("kind", ERROR_TABLE, ids=lambda kind: kind.__name__)
def test_rows_are_sensible(kind: type[OctavoError]) -> None:
    mapping = mapping_of(kind("what happened"))
    assert mapping is ERROR_TABLE[kind]
    assert mapping.grpc_code is not grpc.StatusCode.OK
    assert 400 <= mapping.http_status < 600
    assert mapping.reason.isupper()
    assert kind("what happened").message == str(kind("what happened")) == "what happened"


def test_reasons_tell_errors_apart() -> None:
    kinds = defaultdict(list)
    for kind, mapping in ERROR_TABLE.items():
        kinds[mapping.reason].append(kind)
    assert all(len(kinds_of_reason) == 1 for kinds_of_reason in kinds.values())


def test_a_subclass_without_a_row_takes_its_parents() -> None:
    class StaleError(InvalidRequestError):
        pass

    class OddError(OctavoError):
        pass

    assert mapping_of(StaleError("x")) is ERROR_TABLE[InvalidRequestError]
    assert mapping_of(OddError("x")) is ERROR_TABLE[InternalError]


def test_errors_carry_what_a_caller_needs() -> None:
    assert InvalidRequestError("x", field="sampling.top_p").field == "sampling.top_p"
    assert OverloadedError("x", retry_after_s=2.5).retry_after_s == 2.5
