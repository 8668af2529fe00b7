// When a request is sent again and what is sent then, without a server.

import assert from "node:assert/strict";
import { test } from "node:test";

import { create } from "@bufbuild/protobuf";
import { status } from "@grpc/grpc-js";

import { OctavoError } from "../src/errors.js";
import {
  FinishReason,
  GenerateRequestSchema,
  GenerateResponseSchema,
} from "../src/gen/octavo/v1/inference_pb.js";
import { OutputBuilder } from "../src/output.js";
import { Resumption, type ResumptionOptions } from "../src/resumption.js";

const unavailable = new OctavoError("gone", status.UNAVAILABLE);
const overloaded = new OctavoError("full", status.RESOURCE_EXHAUSTED, "OVERLOADED", "", 700);
const invalid = new OctavoError("wrong", status.INVALID_ARGUMENT, "INVALID_REQUEST");

function tries(options: Partial<ResumptionOptions> = {}) {
  let now = 1000;
  const request = create(GenerateRequestSchema, { prompt: { case: "text", value: "hé" } });
  const builder = new OutputBuilder(request);
  const resumption = new Resumption(request, builder, {
    timeoutMs: undefined,
    resumeTimeoutMs: 10_000,
    waitForServer: false,
    clock: () => now,
    ...options,
  });
  return { builder, resumption, request, pass: (milliseconds: number) => (now += milliseconds) };
}

test("a request that nobody has taken on is not sent again", () => {
  const { resumption } = tries();
  assert.equal(resumption.delayAfter(unavailable, false), undefined);
  assert.equal(tries().resumption.delayAfter(invalid, true), undefined);
  assert.notEqual(tries().resumption.delayAfter(unavailable, true), undefined);
  assert.notEqual(tries({ waitForServer: true }).resumption.delayAfter(unavailable, false), undefined);
});

test("delays double up to a second, and end with the time to resume", () => {
  const { resumption, pass } = tries();
  resumption.progressed();
  for (const most of [50, 100, 200, 400, 800, 1000, 1000]) {
    const delay = resumption.delayAfter(unavailable, false);
    assert.ok(delay !== undefined && delay >= most / 2 && delay <= most, `${delay} of ${most}`);
  }
  pass(10_000);
  assert.equal(resumption.delayAfter(unavailable, false), undefined);
});

test("a full queue is waited for by a request that was running, as long as the server says", () => {
  const { resumption } = tries();
  assert.equal(resumption.delayAfter(overloaded, true), undefined);
  resumption.progressed();
  resumption.delayAfter(unavailable, false);
  assert.equal(resumption.delayAfter(overloaded, false), 700);
});

test("no delay goes past the deadline", () => {
  const { resumption, pass } = tries({ timeoutMs: 500 });
  resumption.progressed();
  pass(495);
  assert.equal(resumption.remainingMs, 5);
  assert.equal(resumption.delayAfter(unavailable, false), 5);
  pass(100);
  assert.equal(resumption.remainingMs, 0);
});

test("what is sent again goes on behind what has come", () => {
  const { builder, resumption, request } = tries();
  assert.equal(resumption.request(), request);
  const prompt = { seed: 7n, modelDigest: "d", tokenCount: 2, tokenIds: [1, 2] };
  const logprobs = [{ tokenId: 5, logprob: -0.5 }];
  builder.add(
    create(GenerateResponseSchema, {
      requestId: "drawn",
      prompt,
      deltas: [{ sampleIndex: 0, tokenIds: [5], text: "é", logprobs }, { sampleIndex: 1, finishReason: FinishReason.STOP }],
    }),
  );
  const again = resumption.request();
  assert.equal(again.requestId, "drawn");
  assert.deepEqual(again.prompt.case === "tokenIds" && again.prompt.value.ids, [1, 2]);
  assert.equal(again.resume?.seed, 7n);
  assert.equal(again.resume?.modelDigest, "d");
  const [first, second] = again.resume?.samples ?? [];
  assert.deepEqual([first?.tokenIds, first?.textByteCount, first?.cumulativeLogprob], [[5], 2, -0.5]);
  assert.equal(second?.finishReason, FinishReason.STOP);
  assert.equal(request.resume, undefined);
});
