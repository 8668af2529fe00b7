"""The handlers of HTTP's routes: they read a body, make requests of the contract from it and let an exchange answer.

Bodies are `openai_schema.py`'s and `openai_responses_schema.py`'s, what becomes of them `openai_requests.py`'s and
`openai_responses.py`'s; which path leads here is `http_server.py`'s.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.errors import InvalidRequestError, ModelNotFoundError
from octavo.v1 import inference_pb2 as pb
from octavo_router import __version__, docs_page, openai_requests, openapi
from octavo_router.backend import Backend
from octavo_router.http_errors import error_response
from octavo_router.http_exchange import Answer, Exchange, GenerationResponse, read_body
from octavo_router.inference import Inference
from octavo_router.metrics import CONTENT_TYPE, Metrics
from octavo_router.openai_answers import AnswerOptions, ChatAnswer, CompletionAnswer
from octavo_router.openai_body import Body, parse_body
from octavo_router.openai_grammar import grammar_param
from octavo_router.openai_responses import responses_request
from octavo_router.openai_responses_answers import ResponseAnswer, response_options
from octavo_router.openai_responses_schema import ResponsesBody
from octavo_router.openai_schema import ChatCompletionBody, CompletionBody, DetokenizeBody, TokenizeBody

BodyT = TypeVar("BodyT", bound=Body)
RequestT = TypeVar("RequestT")

# Above this, reading a body takes longer than the event loop should wait: lists of token ids, 0.3 us each.
_SMALL_BODY_BYTES = 64 << 10


class Routes:
    """The handlers of the application, each named as its operation in `openapi.py`."""

    def __init__(self, backend: Backend, *, metrics: Metrics, max_request_bytes: int) -> None:
        self._backend = backend
        self._metrics = metrics
        self._max_request_bytes = max_request_bytes

    async def completions(self, request: Request) -> Response:
        """Completes prompts."""
        with self._metrics.counting_refusals():
            body, requests = await self._read(
                request,
                CompletionBody,
                lambda body: openai_requests.completion_requests(body, _request_id(request, body.request_id)),
            )
            inference = self._backend.inference
            options = self._options(body, f"cmpl-{_request_id(request, body.request_id)}")
            if body.logprobs is not None:
                options = dataclasses.replace(
                    options,
                    prompt_texts=await _prompt_texts(inference, requests),
                    echo_logprobs=body.logprobs if body.echo else None,
                )
        return _generation(inference, requests, CompletionAnswer(options, body.n or 1), bool(body.stream))

    async def chat_completions(self, request: Request) -> Response:
        """Answers a conversation."""
        with self._metrics.counting_refusals():
            body, chat_request = await self._read(
                request,
                ChatCompletionBody,
                lambda body: openai_requests.chat_request(body, _request_id(request, body.request_id)),
            )
            inference = self._backend.inference
        options = self._options(body, f"chatcmpl-{_request_id(request, body.request_id)}")
        return _generation(inference, [chat_request], ChatAnswer(options, body.n or 1), bool(body.stream))

    async def responses(self, request: Request) -> Response:
        """Answers a conversation, as the Responses API has it."""
        try:
            with self._metrics.counting_refusals():
                body, response_request = await self._read(
                    request, ResponsesBody, lambda body: responses_request(body, _request_id(request, body.request_id))
                )
                inference = self._backend.inference
        except InvalidRequestError as error:
            # Its field is the body's already.
            return error_response(error, str)
        options = response_options(
            body,
            response_request,
            model=body.model or inference.model_name,
            token_bytes=self._backend.tokenizer.token_bytes,
        )
        return _generation(inference, [response_request], ResponseAnswer(options), bool(body.stream))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or of messages."""
        body, tokenize_request = await self._read(request, TokenizeBody, openai_requests.tokenize_request)
        response = await self._backend.inference.tokenize(tokenize_request)
        token_ids = list(response.token_ids)
        spelling = self._backend.tokenizer.token_spelling
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": response.max_model_len,
                "tokens": token_ids,
                "token_strs": [spelling(token_id) for token_id in token_ids] if body.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        _, detokenize_request = await self._read(request, DetokenizeBody, openai_requests.detokenize_request)
        try:
            response = await self._backend.inference.detokenize(detokenize_request)
        except InvalidRequestError as error:
            error.field = "tokens"
            raise
        return JSONResponse({"prompt": response.text})

    async def models(self, request: Request) -> Response:
        """Lists what `model` may be."""
        models = self._backend.inference.list_models().models
        return JSONResponse({"object": "list", "data": [_model_json(model, models[0].name) for model in models]})

    async def model(self, request: Request) -> Response:
        """Tells about one model."""
        name = request.path_params["model"]
        models = self._backend.inference.list_models().models
        for model in models:
            if model.name == name:
                return JSONResponse(_model_json(model, models[0].name))
        raise ModelNotFoundError(
            f"model {name[:200]!r} is not served here; served: {', '.join(m.name for m in models)}"
        )

    async def health(self, request: Request) -> Response:
        """200 as long as the process serves at all."""
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """200 while requests are taken; 503 while no worker answers, and while the server drains."""
        if self._backend.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def metrics(self, request: Request) -> Response:
        """Counters and gauges in Prometheus' text format."""
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        """The router's version."""
        return JSONResponse({"version": __version__})

    async def openapi_document(self, request: Request) -> Response:
        """This API as an OpenAPI document."""
        return JSONResponse(openapi.document())

    async def docs(self, request: Request) -> Response:
        """The OpenAPI document as a page that needs nothing from elsewhere."""
        return Response(docs_page.render(openapi.document()), headers=docs_page.HEADERS)

    async def _read(
        self, request: Request, kind: type[BodyT], convert: Callable[[BodyT], RequestT]
    ) -> tuple[BodyT, RequestT]:
        """The request's body, and what convert makes of it; large ones in a thread."""
        data = await read_body(request, self._max_request_bytes)

        def work() -> tuple[BodyT, RequestT]:
            body = parse_body(kind, data)
            return body, convert(body)

        return work() if len(data) <= _SMALL_BODY_BYTES else await asyncio.to_thread(work)

    def _options(self, body: CompletionBody | ChatCompletionBody, answer_id: str) -> AnswerOptions:
        inference = self._backend.inference
        return AnswerOptions(
            id=answer_id,
            model=body.model or inference.model_name,
            digest=inference.model_digest,
            logprobs=body.logprobs is not None and body.logprobs is not False,
            token_bytes=self._backend.tokenizer.token_bytes,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            continuous_usage=bool(
                body.stream_options and body.stream_options.include_usage and body.stream_options.continuous_usage_stats
            ),
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            prompt_logprobs=body.prompt_logprobs,
            grammar_param=grammar_param(body),
        )


def _generation(
    inference: Inference, requests: list[pb.GenerateRequest], answer: Answer, stream: bool
) -> GenerationResponse:
    return GenerationResponse(inference, Exchange(requests, answer, stream))


async def _prompt_texts(inference: Inference, requests: list[pb.GenerateRequest]) -> list[str]:
    """Each prompt as it would be echoed."""
    texts = []
    for request in requests:
        if request.WhichOneof("prompt") == "text":
            texts.append(request.text)
            continue
        output = request.output
        ids = pb.DetokenizeRequest(
            token_ids=request.token_ids.ids,
            skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        )
        texts.append((await inference.detokenize(ids)).text)
    return texts


def _request_id(request: Request, in_body: str | None) -> str:
    return in_body or str(request.state.request_id)


def _model_json(model: pb.Model, root: str) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "octavo",
        "root": root,
        "parent": None,
        "max_model_len": model.max_model_len,
    }
