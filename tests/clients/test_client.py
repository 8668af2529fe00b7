from __future__ import annotations

import threading
from pathlib import Path

import grpc
import pytest

from octavo import Client
from octavo.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    ResumeMismatchError,
    UnavailableError,
    UnsupportedError,
)
from octavo.types import SamplingParams
from octavo.v1 import inference_pb2
from tests.clients.fake_router import (
    DIGEST,
    SEED,
    FakeRouter,
    cut_off,
    echo_in_capitals,
    failing_with,
    first_response,
    in_turn,
)


def test_generate_returns_the_whole_answer(router: FakeRouter) -> None:
    with Client(router.address) as client:
        output = client.generate("paris é", SamplingParams(max_tokens=100))
    assert output.prompt == "paris é"
    assert output.prompt_token_ids == [112, 97, 114, 105, 115, 32, 195, 169]
    assert output.outputs[0].text == "PARIS É"
    assert output.outputs[0].token_ids == [80, 65, 82, 73, 83, 32, 195, 137]
    assert output.outputs[0].finish_reason == "stop"
    assert output.finished
    assert output.usage is not None
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (8, 8)
    assert (output.seed, output.model, output.model_digest) == (SEED, "fake", DIGEST)
    assert router.requests[0].output.final_only


def test_generate_takes_token_ids(router: FakeRouter) -> None:
    with Client(router.address) as client:
        assert client.generate([104, 105]).outputs[0].text == "HI"
        output = client.generate({"prompt_token_ids": [104, 105]})
    assert output.prompt is None
    assert output.prompt_token_ids == [104, 105]
    assert output.outputs[0].text == "HI"
    assert not router.requests[0].output.return_prompt_token_ids


def test_samples_come_in_order_of_their_index(router: FakeRouter) -> None:
    with Client(router.address) as client:
        output = client.generate("hi", SamplingParams(n=3))
    assert [(sample.index, sample.text) for sample in output.outputs] == [(0, "HI"), (1, "HI"), (2, "HI")]


def test_stream_yields_deltas_and_keeps_the_output(router: FakeRouter) -> None:
    with Client(router.address) as client, client.stream("abc") as stream:
        deltas = list(stream)
    assert [delta.text for delta in deltas] == ["A", "B", "C", ""]
    assert [delta.finish_reason for delta in deltas] == [None, None, None, "stop"]
    assert stream.output.outputs[0].text == "ABC"
    assert not router.requests[0].output.final_only


def test_chat_sends_the_conversation(router: FakeRouter) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    with Client(router.address) as client:
        assert client.chat(messages, add_generation_prompt=True).outputs[0].text == "HELLO"
        assert [delta.text for delta in client.stream_chat(messages)] == ["H", "E", "L", "L", "O", ""]
    sent = router.requests[0].chat
    assert [(message.role, message.content) for message in sent.messages] == [
        ("system", "Be brief."),
        ("user", "hello"),
    ]
    assert sent.add_generation_prompt


def test_options_reach_the_server(router: FakeRouter) -> None:
    with Client(router.address) as client:
        output = client.generate("x", request_id="mine", model="fake", priority=-2, cache_salt="s", tenant="t")
    request = router.requests[0]
    assert (request.request_id, request.model, request.priority) == ("mine", "fake", -2)
    assert (request.cache_salt, request.tenant) == ("s", "t")
    assert output.request_id == "mine"


def test_unknown_option_is_a_type_error(router: FakeRouter) -> None:
    with Client(router.address) as client, pytest.raises(TypeError, match="'priorty'"):
        client.generate("x", priorty=1)  # type: ignore[call-arg]
    assert router.requests == []


def test_other_calls(router: FakeRouter) -> None:
    with Client(router.address) as client:
        assert client.tokenize("hi") == [104, 105]
        assert client.tokenize([{"role": "user", "content": "ho"}]) == [104, 111]
        assert client.detokenize([104, 105]) == "hi"
        assert [model.name for model in client.list_models()] == ["fake"]
        assert client.health()
        assert client.state().version == "1.2.3"
        assert client.drain() == 3
        assert client.flush_prefix_cache() == 5


def test_health_tells_a_server_that_does_not_serve(router: FakeRouter) -> None:
    router.health.enter_graceful_shutdown()
    with Client(router.address) as client:
        assert not client.health()


def test_errors_carry_their_field_and_retry_hint(router: FakeRouter) -> None:
    with Client(router.address) as client:
        router.answer = failing_with(InvalidRequestError("temperature is -1", field="sampling.temperature"))
        with pytest.raises(InvalidRequestError, match="temperature is -1") as invalid:
            client.generate("x")
        assert type(invalid.value) is InvalidRequestError
        assert invalid.value.field == "sampling.temperature"
        router.answer = failing_with(ContextLengthError("101 tokens", field="prompt"))
        with pytest.raises(ContextLengthError):
            client.generate("x")
        router.answer = failing_with(UnsupportedError("no beams", field="sampling.beam_search"))
        with pytest.raises(UnsupportedError):
            client.generate("x")
        router.answer = failing_with(OverloadedError("full", retry_after_s=2.5))
        with pytest.raises(OverloadedError) as overloaded:
            client.generate("x")
        assert overloaded.value.retry_after_s == 2.5
        router.answer = failing_with(UnavailableError("draining"))
        with pytest.raises(UnavailableError, match=r"^draining$"):
            client.generate("x")


def test_a_request_that_is_too_large_is_no_overload(router: FakeRouter) -> None:
    with Client(router.address) as client, pytest.raises(InvalidRequestError, match="send less") as caught:
        client.generate("x" * (5 << 20))
    assert "--max-request-bytes" in caught.value.message


def test_closing_a_stream_cancels_the_request(router: FakeRouter) -> None:
    router.answer = router.stay
    with Client(router.address) as client:
        stream = client.stream("x")
        assert next(stream).text == "A"
        stream.close()
        assert router.caller_left.wait(5)
        assert list(stream) == []
        assert stream.output.outputs[0].text == "A"
        assert not stream.output.finished


def test_dropping_a_stream_cancels_the_request(router: FakeRouter) -> None:
    router.answer = router.stay
    with Client(router.address) as client:
        stream = client.stream("x")
        next(stream)
        del stream
        assert router.caller_left.wait(5)


def test_closing_from_another_thread_ends_the_wait(router: FakeRouter) -> None:
    router.answer = router.stay
    with Client(router.address) as client:
        stream = client.stream("x")
        next(stream)
        threading.Timer(0.05, stream.close).start()
        assert list(stream) == []


def test_timeout_is_a_deadline_error(router: FakeRouter) -> None:
    router.answer = router.stay
    with Client(router.address) as client, pytest.raises(DeadlineError):
        client.generate("x", timeout=0.1)
    assert router.caller_left.wait(5)


def test_nobody_there_names_the_address_and_the_remedy() -> None:
    with Client("127.0.0.1:9") as client, pytest.raises(UnavailableError) as error:
        client.generate("x")
    assert "127.0.0.1:9" in error.value.message
    assert "`octavo serve`" in error.value.message


def test_stream_without_a_last_response_is_an_error(router: FakeRouter) -> None:
    def cut_off(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext):  # type: ignore[no-untyped-def]
        yield first_response(request)

    router.answer = cut_off
    with Client(router.address) as client, pytest.raises(InternalError, match="without a last response"):
        client.generate("x")


def test_closed_client_says_so(router: FakeRouter) -> None:
    client = Client(router.address)
    client.close()
    client.close()
    with pytest.raises(RequestCancelledError, match="closed"):
        client.generate("x")
    with pytest.raises(RequestCancelledError, match="closed"):
        client.health()


@pytest.mark.parametrize("address", ["http://127.0.0.1:8000", "127.0.0.1", "host:0", "host:99999", "unix:", ""])
def test_wrong_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="address is"):
        Client(address)


def test_a_stream_goes_on_where_its_server_went_away(router: FakeRouter) -> None:
    router.answer = in_turn(cut_off(3), cut_off(2), cut_off(0), echo_in_capitals)
    with Client(router.address) as client, client.stream("abcdé") as stream:
        deltas = list(stream)
    assert [delta.text for delta in deltas] == ["A", "B", "C", "D", "É", ""]
    assert stream.output.outputs[0].text == "ABCDÉ"
    assert stream.output.finished
    first, second, *_, last = router.requests
    assert not first.HasField("resume")
    assert second.WhichOneof("prompt") == "token_ids"
    assert second.request_id == "drawn"
    assert second.resume == inference_pb2.Resume(
        prompt_token_ids="abcdé".encode(),
        seed=SEED,
        model_digest=DIGEST,
        samples=[inference_pb2.ResumedSample(token_ids=b"AB", text_byte_count=2)],
    )
    assert last.resume.samples[0].text_byte_count == 3


def test_a_request_for_one_answer_is_sent_again(router: FakeRouter) -> None:
    router.answer = in_turn(cut_off(0), echo_in_capitals)
    with Client(router.address) as client:
        assert client.generate("abc").outputs[0].text == "ABC"
    assert [request.HasField("resume") for request in router.requests] == [False, False]


def test_a_server_that_drains_is_left_for_the_next(router: FakeRouter) -> None:
    router.answer = in_turn(
        cut_off(2, UnavailableError("stopping")),
        failing_with(OverloadedError("full", retry_after_s=0)),
        echo_in_capitals,
    )
    with Client(router.address) as client, client.stream("ab") as stream:
        assert [delta.text for delta in stream] == ["A", "B", ""]


def test_what_is_lost_behind_the_last_response_is_not_missed(router: FakeRouter) -> None:
    router.answer = in_turn(cut_off(4))
    with Client(router.address) as client, client.stream("ab") as stream:
        assert [delta.text for delta in stream] == ["A", "B", ""]
    assert len(router.requests) == 1


def test_another_error_of_the_server_that_came_back_is_the_end(router: FakeRouter) -> None:
    router.answer = in_turn(cut_off(2), failing_with(ResumeMismatchError("another model")))
    with Client(router.address) as client, client.stream("ab") as stream:
        assert next(stream).text == "A"
        with pytest.raises(ResumeMismatchError, match="another model"):
            next(stream)
        assert list(stream) == []


def test_without_resuming_a_loss_is_an_error_at_once(router: FakeRouter) -> None:
    router.answer = in_turn(cut_off(2))
    with Client(router.address, resume_timeout_s=0) as client, client.stream("ab") as stream:
        assert next(stream).text == "A"
        with pytest.raises(UnavailableError, match=router.address):
            next(stream)


def test_closing_ends_the_wait_for_a_server(router: FakeRouter) -> None:
    with Client("127.0.0.1:9", wait_for_server=True) as client:
        stream = client.stream("x")
        threading.Timer(0.05, stream.close).start()
        assert list(stream) == []


def test_a_timeout_holds_over_all_tries() -> None:
    with Client("127.0.0.1:9", wait_for_server=True) as client, pytest.raises(DeadlineError):
        client.generate("x", timeout=0.2)


def test_a_server_that_starts_late_is_waited_for(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/router.sock"
    with Client(address, wait_for_server=True) as client:
        stream = client.stream("ab")
        with FakeRouter(address):
            assert [delta.text for delta in stream] == ["A", "B", ""]
