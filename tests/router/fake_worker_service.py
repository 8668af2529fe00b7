"""octavo.worker.v1 over `FakeWorker`: a gRPC server with the contract's rules of sessions, and no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from octavo.worker.v1 import worker_pb2 as pb
from octavo.worker.v1 import worker_pb2_grpc
from octavo_router.plan import (
    BlockMoves,
    Forks,
    LogprobColumns,
    Moves,
    NewSequence,
    SequenceParams,
    StepPlan,
    StepResult,
)
from tests.router.fake_worker import FakeWorker

Context = grpc.aio.ServicerContext[Any, Any]


class FakeWorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """stop_after: plans after which the process "dies", its stream with it. requests: every message of every
    session."""

    def __init__(self, described: pb.DescribeResponse, address: str, *, stop_after: int = 1 << 30) -> None:
        self.described = described
        self.stop_after = stop_after
        self.requests: list[pb.RunRequest] = []
        self.stopped = asyncio.Event()
        self.worker: FakeWorker | None = None
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(address)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        return self.described

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        yield pb.GetTokenizerResponse(defaults=pb.TokenizerDefaults(eos_token_ids=[1], temperature=0.5, top_k=7))
        for piece in (b'{"mo', b'del"', b": {}}"):
            yield pb.GetTokenizerResponse(tokenizer_json=piece)

    async def Run(self, requests: AsyncIterator[pb.RunRequest], context: Context) -> AsyncIterator[pb.RunResponse]:
        opening = await anext(requests)
        self.requests.append(opening)
        if opening.WhichOneof("body") != "open" or opening.epoch <= self.described.last_epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"epoch {opening.epoch} is not a new one")
        self.described.last_epoch = opening.epoch
        memory = self.described.kv_memory
        self.worker = FakeWorker(
            block_size=memory.block_size,
            num_blocks=memory.device_block_count,
            num_host_blocks=memory.host_block_count,
        )
        yield pb.RunResponse(epoch=opening.epoch, incarnation=opening.incarnation, opened=pb.SessionOpened())
        progress = pb.Progress(executor_tick=1)
        yield pb.RunResponse(epoch=opening.epoch, incarnation=opening.incarnation, progress=progress)
        ahead: dict[int, list[int]] = {}
        async for request in requests:
            self.requests.append(request)
            if request.HasField("sequence_tokens"):
                tokens = request.sequence_tokens
                ahead.setdefault(tokens.sequence_id, []).extend(tokens.token_ids)
            elif request.HasField("plan"):
                # An answer that is none of this session's must be passed over.
                yield pb.RunResponse(epoch=opening.epoch - 1, step_seq=request.step_seq, result=pb.StepResult())
                result = self.worker.execute(plan_columns(request, ahead))
                yield pb.RunResponse(
                    epoch=opening.epoch,
                    incarnation=opening.incarnation,
                    step_seq=request.step_seq,
                    result=result_message(result),
                )
                if self.worker.num_plans >= self.stop_after:
                    self.stopped.set()
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the fake worker dies")


def plan_columns(request: pb.RunRequest, ahead: dict[int, list[int]]) -> StepPlan:
    """A plan from its message, joined with the tokens that were sent ahead of it, which are taken out of `ahead`."""
    plan, scheduled = request.plan, request.plan.scheduled
    return StepPlan(
        epoch=request.epoch,
        step_seq=request.step_seq,
        new_sequences=[
            NewSequence(
                new.sequence_id,
                new.prompt_token_count,
                [*ahead.pop(new.sequence_id, []), *new.token_ids],
                SequenceParams(
                    temperature=new.params.temperature,
                    top_p=new.params.top_p,
                    top_k=new.params.top_k,
                    min_p=new.params.min_p,
                    seed=new.params.seed,
                    return_logprobs=new.params.return_logprobs,
                    top_logprob_count=new.params.top_logprob_count,
                    suppressed_token_ids=tuple(new.params.suppressed_token_ids),
                    min_token_count=new.params.min_token_count,
                    candidate_count=new.params.candidate_count,
                    return_prompt_logprobs=new.params.return_prompt_logprobs,
                    top_prompt_logprob_count=new.params.top_prompt_logprob_count,
                ),
                list(new.block_ids),
            )
            for new in plan.new_sequences
        ],
        release_sequence_ids=list(plan.release_sequence_ids),
        moves=Moves(_moves(plan.swap_out), _moves(plan.swap_in), _moves(plan.copies)),
        forks=Forks(
            parent_sequence_ids=list(plan.forks.parent_sequence_ids),
            child_sequence_ids=list(plan.forks.child_sequence_ids),
            token_ids=list(plan.forks.token_ids),
            token_counts=list(plan.forks.token_counts),
            block_counts=list(plan.forks.block_counts),
            block_ids=list(plan.forks.block_ids),
        ),
        sequence_ids=list(scheduled.sequence_ids),
        start_positions=list(scheduled.start_positions),
        token_counts=list(scheduled.token_counts),
        samples=list(scheduled.samples),
        new_block_counts=list(scheduled.new_block_counts),
        new_block_ids=list(scheduled.new_block_ids),
    )


def _moves(moves: pb.BlockMoves) -> BlockMoves:
    return BlockMoves(list(moves.source_block_ids), list(moves.target_block_ids))


def _columns_message(columns: LogprobColumns) -> pb.LogprobColumns:
    return pb.LogprobColumns(
        logprobs=columns.logprobs,
        top_counts=columns.top_counts,
        top_token_ids=columns.top_token_ids,
        top_logprobs=columns.top_logprobs,
    )


def result_message(result: StepResult) -> pb.StepResult:
    """A result as its message."""
    return pb.StepResult(
        sequence_ids=result.sequence_ids,
        token_ids=result.token_ids,
        logprobs=_columns_message(result.logprobs),
        prompt_logprobs=[
            pb.PromptLogprobs(
                sequence_id=stretch.sequence_id,
                start_position=stretch.start_position,
                columns=_columns_message(stretch.columns),
            )
            for stretch in result.prompt_logprobs
        ],
        candidates=[
            pb.Candidates(sequence_id=beam.sequence_id, token_ids=beam.token_ids, logprobs=beam.logprobs)
            for beam in result.candidates
        ],
        errors=[pb.SequenceError(sequence_id=error.sequence_id, message=error.message) for error in result.errors],
        duration_us=result.duration_us,
        idle_us=result.idle_us,
    )
