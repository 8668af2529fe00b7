from __future__ import annotations

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from octavo.errors import (
    ERROR_DOMAIN,
    ERROR_TABLE,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from octavo.status import error_of


class Call:
    """A call that failed."""

    def __init__(self, code: grpc.StatusCode, message: str, reason: str = "", raw: bytes | None = None) -> None:
        self._code, self._message = code, message
        status = status_pb2.Status(code=code.value[0], message=message)
        if reason:
            packed = any_pb2.Any()
            packed.Pack(error_details_pb2.ErrorInfo(domain=ERROR_DOMAIN, reason=reason))
            status.details.append(packed)
        self._raw = status.SerializeToString() if raw is None else raw

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._message

    def trailing_metadata(self) -> list[tuple[str, str | bytes]]:
        return [("other", "x"), ("grpc-status-details-bin", self._raw)]


@pytest.mark.parametrize("kind", list(ERROR_TABLE))
def test_every_error_comes_back_as_itself(kind: type[OctavoError]) -> None:
    row = ERROR_TABLE[kind]
    error = error_of(Call(row.grpc_code, "words", row.reason), "here")
    assert type(error) is kind
    assert error.message == "words"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
        (grpc.StatusCode.UNIMPLEMENTED, UnsupportedError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, OverloadedError),
        (grpc.StatusCode.INTERNAL, InternalError),
        (grpc.StatusCode.UNKNOWN, InternalError),
    ],
)
def test_a_status_without_details_is_judged_by_its_code(code: grpc.StatusCode, kind: type[OctavoError]) -> None:
    assert type(error_of(Call(code, "words"), "here")) is kind


def test_unavailable_from_the_transport_names_address_and_remedy() -> None:
    error = error_of(Call(grpc.StatusCode.UNAVAILABLE, "refused"), "host:1")
    assert type(error) is UnavailableError
    assert error.message == "cannot reach an Octavo server at host:1: is `octavo serve` running there? (refused)"


def test_details_that_cannot_be_read_are_left_out() -> None:
    error = error_of(Call(grpc.StatusCode.INVALID_ARGUMENT, "words", raw=b"\xff\xff"), "here")
    assert type(error) is InvalidRequestError


def test_an_empty_message_names_code_and_address() -> None:
    assert error_of(Call(grpc.StatusCode.UNKNOWN, ""), "here").message == "UNKNOWN from here"
