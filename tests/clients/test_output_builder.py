from __future__ import annotations

import pytest

from octavo.errors import InternalError
from octavo.output_builder import OutputBuilder
from octavo.types import Logprob, ToolCall, ToolCallDelta
from octavo.v1 import inference_pb2, sampling_pb2


def logprobs(token_id: int, logprob: float, *top: tuple[int, float]) -> inference_pb2.TokenLogprobs:
    entries = [inference_pb2.TopLogprob(token_id=id, logprob=value) for id, value in top]
    return inference_pb2.TokenLogprobs(token_id=token_id, logprob=logprob, top=entries)


def test_samples_grow_apart_and_end_apart() -> None:
    builder = OutputBuilder(inference_pb2.GenerateRequest(text="p"))
    Delta, Response = inference_pb2.SampleDelta, inference_pb2.GenerateResponse
    first = builder.add(Response(request_id="r", deltas=[Delta(sample_index=1, text="b", token_ids=[2])]))
    assert [(delta.index, delta.text, delta.token_ids) for delta in first] == [(1, "b", [2])]
    builder.add(
        Response(
            deltas=[
                Delta(sample_index=0, text="a", token_ids=[1]),
                Delta(sample_index=1, text="c", finish_reason=inference_pb2.FINISH_REASON_LENGTH),
            ]
        )
    )
    output = builder.output()
    assert not output.finished
    assert [(sample.index, sample.text, sample.finish_reason) for sample in output.outputs] == [
        (0, "a", None),
        (1, "bc", "length"),
    ]
    with pytest.raises(InternalError, match="'r' without a last response"):
        builder.check_finished()
    builder.add(
        Response(usage=inference_pb2.Usage(prompt_token_count=1, completion_token_count=3, cached_token_count=1))
    )
    builder.check_finished()
    assert builder.output().finished
    assert builder.output().num_cached_tokens == 1


def test_an_output_is_not_changed_by_what_comes_later() -> None:
    builder = OutputBuilder(inference_pb2.GenerateRequest(text="p"))
    builder.add(inference_pb2.GenerateResponse(deltas=[inference_pb2.SampleDelta(text="a", token_ids=[1])]))
    before = builder.output()
    builder.add(inference_pb2.GenerateResponse(deltas=[inference_pb2.SampleDelta(text="b", token_ids=[2])]))
    assert before.outputs[0].token_ids == [1]


def test_logprobs_name_the_sampled_token_first() -> None:
    request = inference_pb2.GenerateRequest(text="p", output=sampling_pb2.OutputOptions(logprobs=2))
    builder = OutputBuilder(request)
    delta = inference_pb2.SampleDelta(
        token_ids=[7, 8],
        logprobs=[logprobs(7, -0.5, (3, -0.25), (7, -0.5)), logprobs(8, -4.0, (1, -0.125), (2, -3.0))],
        finish_reason=inference_pb2.FINISH_REASON_STOP,
        cumulative_logprob=-4.5,
    )
    (told,) = builder.add(inference_pb2.GenerateResponse(deltas=[delta]))
    sample = builder.output().outputs[0]
    assert sample.logprobs == told.logprobs
    assert sample.logprobs == [
        {7: Logprob(-0.5, 2), 3: Logprob(-0.25, 1)},
        {8: Logprob(-4.0, None), 1: Logprob(-0.125, 1), 2: Logprob(-3.0, 2)},
    ]
    assert list(sample.logprobs[0]) == [7, 3]
    assert sample.cumulative_logprob == -4.5


def test_without_being_asked_for_there_are_no_logprobs() -> None:
    builder = OutputBuilder(inference_pb2.GenerateRequest(text="p"))
    builder.add(inference_pb2.GenerateResponse(deltas=[inference_pb2.SampleDelta(token_ids=[7])]))
    assert builder.output().outputs[0].logprobs is None
    assert builder.output().outputs[0].cumulative_logprob is None


def test_prompt_logprobs_have_none_for_the_first_token() -> None:
    request = inference_pb2.GenerateRequest(text="p", output=sampling_pb2.OutputOptions(prompt_logprobs=0))
    builder = OutputBuilder(request)
    info = inference_pb2.PromptInfo(token_ids=[1, 2], logprobs=[inference_pb2.TokenLogprobs(), logprobs(2, -1.0)])
    builder.add(inference_pb2.GenerateResponse(prompt=info))
    assert builder.output().prompt_token_ids == [1, 2]
    assert builder.output().prompt_logprobs == [None, {2: Logprob(-1.0, None)}]
    # A server that goes on with the request does not tell them again.
    builder.add(inference_pb2.GenerateResponse(prompt=inference_pb2.PromptInfo(seed=1)))
    assert builder.output().prompt_logprobs == [None, {2: Logprob(-1.0, None)}]


@pytest.mark.parametrize(
    ("matched", "stop_reason"),
    [({"matched_stop": "END"}, "END"), ({"matched_token_id": 9}, 9), ({"matched_token_id": 2}, None), ({}, None)],
)
def test_stop_reason_is_none_at_an_end_of_sequence_token(matched: dict[str, object], stop_reason: object) -> None:
    request = inference_pb2.GenerateRequest(text="p", stop=sampling_pb2.StopConditions(stop_token_ids=[9]))
    builder = OutputBuilder(request)
    delta = inference_pb2.SampleDelta(finish_reason=inference_pb2.FINISH_REASON_STOP, **matched)  # type: ignore[arg-type]
    (told,) = builder.add(inference_pb2.GenerateResponse(deltas=[delta]))
    assert (told.finish_reason, told.stop_reason) == ("stop", stop_reason)


@pytest.mark.parametrize(
    ("sampling", "cumulative_logprob"),
    [
        ({"n": 2, "best_of": 2}, None),
        ({"best_of": 2}, -3.5),
        ({"beam_search": {"beam_width": 2}}, -3.5),
    ],
)
def test_what_was_chosen_by_its_log_probability_comes_with_it(
    sampling: dict[str, object], cumulative_logprob: float | None
) -> None:
    builder = OutputBuilder(inference_pb2.GenerateRequest(text="p", sampling=sampling))
    ended = inference_pb2.SampleDelta(finish_reason=inference_pb2.FINISH_REASON_STOP, cumulative_logprob=-3.5)
    builder.add(inference_pb2.GenerateResponse(deltas=[ended]))
    assert builder.output().outputs[0].cumulative_logprob == cumulative_logprob


def test_calls_grow_beside_the_text_and_over_a_resume() -> None:
    builder = OutputBuilder(inference_pb2.GenerateRequest(text="p"))
    Call, Parsed = inference_pb2.ToolCallDelta, inference_pb2.ParsedDelta
    parts = [
        Parsed(content="Adding."),
        Parsed(
            tool_calls=[Call(index=0, id="c1", name="add", arguments_json='{"a"'), Call(index=1, id="c2", name="now")]
        ),
        Parsed(tool_calls=[Call(index=0, arguments_json=": 1}"), Call(index=1, arguments_json="{}")]),
    ]
    deltas = []
    for part in parts:
        delta = inference_pb2.SampleDelta(text="x", parsed=part)
        deltas += builder.add(inference_pb2.GenerateResponse(deltas=[delta]))
    assert [delta.content for delta in deltas] == ["Adding.", "", ""]
    assert deltas[1].tool_calls == [ToolCallDelta(0, "c1", "add", '{"a"'), ToolCallDelta(1, "c2", "now")]
    (sample,) = builder.output().outputs
    assert (sample.text, sample.content) == ("xxx", "Adding.")
    assert sample.tool_calls == [ToolCall("c1", "add", '{"a": 1}'), ToolCall("c2", "now", "{}")]


def test_without_tools_there_is_no_content_beside_the_text() -> None:
    builder = OutputBuilder(inference_pb2.GenerateRequest(text="p"))
    (delta,) = builder.add(inference_pb2.GenerateResponse(deltas=[inference_pb2.SampleDelta(text="a")]))
    (sample,) = builder.output().outputs
    assert (delta.content, delta.tool_calls, sample.content, sample.tool_calls) == (None, [], None, [])
