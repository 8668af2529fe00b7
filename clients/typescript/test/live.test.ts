// Against a running server, which tests/interop/test_typescript.py of the repository starts. It tells by environment:
//
//     OCTAVO_TEST_ADDRESS      the server's gRPC address
//     OCTAVO_TEST_API_KEY      the key that it asks for
//     OCTAVO_TEST_KILL_URL     a POST there kills the router, which is then started again
//     OCTAVO_TEST_TLS_ADDRESS  a server with TLS, of the same key; OCTAVO_TEST_TLS_ROOTS its authority's file

import assert from "node:assert/strict";
import { after, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import { Client, FinishReason, type GenerateInit, OctavoError, type Output, type SampleDelta, status } from "../src/index.js";

const { env } = process;
const address = env["OCTAVO_TEST_ADDRESS"] ?? "";
const apiKey = env["OCTAVO_TEST_API_KEY"] ?? "";
const skip = address === "" ? "no server: OCTAVO_TEST_ADDRESS is not set" : false;
const client = new Client(address || "127.0.0.1:1", { apiKey });
after(() => client.close());

const ids = Array.from({ length: 40 }, (_, index) => index + 5);

/** Two samples of 240 tokens each, the same at every call: long enough that a router dies in the middle. */
const long: GenerateInit = {
  prompt: { case: "tokenIds", value: { ids } },
  sampling: { temperature: 1, seed: 11n, n: 2 },
  stop: { maxTokens: 240, ignoreEos: true },
  output: { logprobs: 2 },
};

async function killRouter(): Promise<void> {
  const answer = await fetch(env["OCTAVO_TEST_KILL_URL"] ?? "", { method: "POST" });
  assert.equal(answer.status, 204);
}

async function untilIdle(): Promise<void> {
  for (let tries = 0; tries < 500; tries += 1) {
    if ((await client.state()).queue?.requestCount === 0) return;
    await sleep(20);
  }
  assert.fail("requests are left");
}

function assertSame(output: Output, expected: Output): void {
  assert.deepEqual(output.samples, expected.samples);
  assert.deepEqual(output.usage?.completionTokenCount, expected.usage?.completionTokenCount);
}

test("a stream brings what a whole answer is", { skip }, async () => {
  const whole = await client.generate(long);
  assert.equal(whole.samples.length, 2);
  assert.equal(whole.usage?.promptTokenCount, 40);
  assert.equal(whole.usage?.completionTokenCount, 480);
  const stream = client.stream(long);
  const deltas: SampleDelta[] = [];
  for await (const delta of stream) deltas.push(delta);
  assert.ok(deltas.length > 100);
  assertSame(stream.output, whole);
  for (const sample of whole.samples) {
    const own = deltas.filter((delta) => delta.sampleIndex === sample.index);
    assert.equal(own.map((delta) => delta.text).join(""), sample.text);
    assert.deepEqual(own.flatMap((delta) => delta.tokenIds), sample.tokenIds);
    assert.equal(sample.finishReason, FinishReason.LENGTH);
    assert.equal(sample.logprobs.length, 240);
  }
});

test("models, tokens and text", { skip }, async () => {
  const [model] = await client.listModels();
  assert.equal(model?.maxModelLen, 512);
  const text = await client.detokenize({ tokenIds: ids });
  assert.ok(text.length > 0);
  const { tokenIds } = await client.tokenize({ input: { case: "text", value: "hello" }, addSpecialTokens: false });
  assert.equal(await client.detokenize({ tokenIds }), "hello");
});

test("a deadline ends a request, a call as well as a stream", { skip }, async () => {
  const isDeadline = (error: unknown) => error instanceof OctavoError && error.code === status.DEADLINE_EXCEEDED;
  await assert.rejects(client.generate(long, { timeoutMs: 20 }), isDeadline);
  await assert.rejects(async () => {
    for await (const _ of client.stream(long, { timeoutMs: 20 }));
  }, isDeadline);
  await assert.rejects(client.tokenize({ input: { case: "text", value: "x".repeat(1e6) } }, { timeoutMs: 0 }), isDeadline);
  await untilIdle();
});

test("an abort signal cancels on the server and throws its reason", { skip }, async () => {
  const controller = new AbortController();
  await assert.rejects(
    async () => {
      for await (const _ of client.stream(long, { signal: controller.signal })) controller.abort();
    },
    { name: "AbortError" },
  );
  await assert.rejects(client.generate(long, { signal: AbortSignal.abort(new Error("before")) }), /before/);
  await assert.rejects(client.listModels({ signal: AbortSignal.abort(new Error("before")) }), /before/);
  await untilIdle();
});

test("leaving the loop and closing cancel on the server", { skip }, async () => {
  for await (const _ of client.stream(long)) break;
  const stream = client.stream(long);
  stream.close();
  for await (const _ of stream) assert.fail("nothing comes of a closed stream");
  await untilIdle();
});

test("errors carry the server's code, reason and field", { skip }, async () => {
  const wrong = client.generate({ ...long, sampling: { temperature: 9 } });
  await assert.rejects(wrong, { code: status.INVALID_ARGUMENT, reason: "INVALID_REQUEST", field: "sampling.temperature" });
  const other = new Client(address, { apiKey: "another" });
  await assert.rejects(other.listModels(), { code: status.UNAUTHENTICATED });
  other.close();
});

test("nobody at the address is told with the address", async () => {
  const lost = new Client("127.0.0.1:1");
  await assert.rejects(lost.generate(long), /cannot reach an Octavo server at 127\.0\.0\.1:1/);
  lost.close();
  await assert.rejects(lost.generate(long), /is closed; make a new one/);
  assert.throws(() => new Client("http://localhost:50051"), /HOST:PORT or unix:PATH/);
});

test("a stream and a whole answer outlive their router, twice", { skip }, async () => {
  const expected = await client.generate(long);
  const whole = client.generate(long);
  const stream = client.stream(long);
  const kills = [60, 300];
  const deltas: SampleDelta[] = [];
  let tokenCount = 0;
  for await (const delta of stream) {
    deltas.push(delta);
    tokenCount += delta.tokenIds.length;
    if (tokenCount >= (kills[0] ?? Infinity)) {
      kills.shift();
      await killRouter();
    }
  }
  assert.equal(kills.length, 0);
  assertSame(stream.output, expected);
  for (const sample of expected.samples) {
    const own = deltas.filter((delta) => delta.sampleIndex === sample.index);
    assert.equal(own.map((delta) => delta.text).join(""), sample.text);
    assert.deepEqual(own.flatMap((delta) => delta.tokenIds), sample.tokenIds);
  }
  assertSame(await whole, expected);
});

test("without resumption a lost server is an error; one that is waited for comes back", { skip }, async () => {
  const brittle = new Client(address, { apiKey, resumeTimeoutMs: 0 });
  let isKilled = false;
  await assert.rejects(
    async () => {
      for await (const _ of brittle.stream(long)) {
        if (!isKilled) await killRouter(); // what was on its way may still come
        isKilled = true;
      }
    },
    { code: status.UNAVAILABLE },
  );
  await assert.rejects(brittle.generate(long), { code: status.UNAVAILABLE });
  brittle.close();
  const patient = new Client(address, { apiKey, waitForServer: true });
  assert.equal((await patient.generate(long, { timeoutMs: 60_000 })).usage?.completionTokenCount, 480);
  patient.close();
});

test("TLS", { skip: skip || (env["OCTAVO_TEST_TLS_ADDRESS"] ? false : "no server with TLS") }, async () => {
  const rootCertificates = env["OCTAVO_TEST_TLS_ROOTS"] ?? "";
  const secure = new Client(env["OCTAVO_TEST_TLS_ADDRESS"], { apiKey, tls: { rootCertificates } });
  assert.equal((await secure.listModels()).length, 1);
  secure.close();
  const distrustful = new Client(env["OCTAVO_TEST_TLS_ADDRESS"], { apiKey, tls: true });
  await assert.rejects(distrustful.listModels(), { code: status.UNAVAILABLE });
  distrustful.close();
});
