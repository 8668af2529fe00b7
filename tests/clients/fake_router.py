"""A server of the public contract without a model: its tokens are bytes, and its answer is the prompt in capitals.

Tests set `answer` for anything else. It keeps the requests it got, and tells when a caller went away.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from octavo.errors import ERROR_DOMAIN, InvalidRequestError, OctavoError, OverloadedError, mapping_of
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

Answer = Callable[[inference_pb2.GenerateRequest, grpc.ServicerContext], Iterator[inference_pb2.GenerateResponse]]

SEED = 7
METADATA_HEAD_START_S = 0.1
DIGEST = "digest-of-the-fake"


def prompt_text(request: inference_pb2.GenerateRequest) -> str:
    """The prompt as text: of a conversation, its last message."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return bytes(request.token_ids.ids).decode()
    return request.chat.messages[-1].content


def first_response(request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateResponse:
    """The response that carries the prompt's facts."""
    ids = prompt_text(request).encode()
    info = inference_pb2.PromptInfo(seed=SEED, model_digest=DIGEST, token_count=len(ids))
    if request.output.return_prompt_token_ids:
        info.token_ids.extend(ids)
    return inference_pb2.GenerateResponse(request_id=request.request_id or "drawn", model="fake", prompt=info)


def echo_in_capitals(
    request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[inference_pb2.GenerateResponse]:
    """One delta a character, or everything at once where the request asks for that; stops at max_tokens bytes.

    A resume goes on behind what its first sample holds, which the others hold too.
    """
    text = prompt_text(request).upper()
    limit = request.stop.max_tokens if request.stop.HasField("max_tokens") else len(text)
    held = bytes(request.resume.samples[0].token_ids).decode() if request.resume.samples else ""
    assert text.startswith(held)
    pieces = list(text[len(held) : limit])
    if request.output.final_only:
        pieces = ["".join(pieces)]
    samples = max(request.sampling.n, 1)
    yield first_response(request)
    for piece in pieces:
        deltas = [
            inference_pb2.SampleDelta(sample_index=sample, text=piece, token_ids=piece.encode())
            for sample in range(samples)
        ]
        yield inference_pb2.GenerateResponse(deltas=deltas)
    reason = inference_pb2.FINISH_REASON_LENGTH if limit < len(text) else inference_pb2.FINISH_REASON_STOP
    end = [inference_pb2.SampleDelta(sample_index=sample, finish_reason=reason) for sample in range(samples)]
    count = len("".join([held, *pieces]).encode()) * samples
    usage = inference_pb2.Usage(prompt_token_count=len(prompt_text(request).encode()), completion_token_count=count)
    yield inference_pb2.GenerateResponse(deltas=end, usage=usage)


def cut_off(num_responses: int, error: OctavoError | None = None) -> Answer:
    """An answer whose connection is lost behind so many responses, or that ends there with the error."""

    def answer(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        context.send_initial_metadata((("octavo-accepted", "1"),))
        # grpc.aio may never show metadata behind which the status comes at once; a router lives longer than that.
        time.sleep(METADATA_HEAD_START_S)
        yield from itertools.islice(echo_in_capitals(request, context), num_responses)
        if error is not None:
            abort(context, error)
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    return answer


def in_turn(*answers: Answer) -> Answer:
    """An answer for each request, one after the other."""
    left = iter(answers)
    return lambda request, context: next(left)(request, context)


def failing_with(error: OctavoError) -> Answer:
    """An answer that is this error."""

    def answer(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        abort(context, error)
        yield inference_pb2.GenerateResponse()

    return answer


def abort(context: grpc.ServicerContext, error: OctavoError) -> None:
    """Ends the call with the error's rich status."""
    mapping = mapping_of(error)
    details: list[Message] = [error_details_pb2.ErrorInfo(domain=ERROR_DOMAIN, reason=mapping.reason)]
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, OverloadedError):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(retry)
    status = status_pb2.Status(code=mapping.grpc_code.value[0], message=error.message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    context.abort_with_status(rpc_status.to_status(status))


class FakeRouter(inference_pb2_grpc.InferenceServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Serves on `address`; give "127.0.0.1:0" to have a port drawn, and read the address again."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.answer: Answer = echo_in_capitals
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.caller_left = threading.Event()
        self.may_go_on = threading.Event()
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, self._server)
        self.health = health.HealthServicer()
        self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        port = self._server.add_insecure_port(address)
        self.address = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        self._server.start()

    def stay(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        """An answer that says "A" and then nothing until the caller leaves or `may_go_on` is set."""
        yield first_response(request)
        yield inference_pb2.GenerateResponse(deltas=[inference_pb2.SampleDelta(text="A", token_ids=[65])])
        context.add_callback(self.may_go_on.set)
        self.may_go_on.wait()
        yield inference_pb2.GenerateResponse(
            deltas=[inference_pb2.SampleDelta(finish_reason=inference_pb2.FINISH_REASON_STOP)],
            usage=inference_pb2.Usage(prompt_token_count=1, completion_token_count=1),
        )

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        finished = False

        def left() -> None:
            if not finished:
                self.caller_left.set()

        context.add_callback(left)
        yield from self.answer(request, context)
        finished = True

    def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        text = request.text if request.HasField("text") else request.chat.messages[-1].content
        return inference_pb2.TokenizeResponse(token_ids=text.encode(), max_model_len=100)

    def Detokenize(self, request: inference_pb2.DetokenizeRequest, context: Any) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def ListModels(self, request: inference_pb2.ListModelsRequest, context: Any) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name="fake", max_model_len=100)])

    def GetState(self, request: admin_pb2.GetStateRequest, context: Any) -> admin_pb2.GetStateResponse:
        return admin_pb2.GetStateResponse(version="1.2.3")

    def FlushPrefixCache(
        self, request: admin_pb2.FlushPrefixCacheRequest, context: Any
    ) -> admin_pb2.FlushPrefixCacheResponse:
        return admin_pb2.FlushPrefixCacheResponse(block_count=5)

    def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.DrainResponse:
        return admin_pb2.DrainResponse(request_count=3)

    def stop(self, grace_s: float | None = None) -> None:
        """Ends every call and stops listening."""
        self.may_go_on.set()
        self._server.stop(grace_s).wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
