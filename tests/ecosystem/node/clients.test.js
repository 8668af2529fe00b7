// OpenAI's SDK for Node and the AI SDK against a served default model. OCTAVO_URL: the server's base URL.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, jsonSchema, Output, streamText, tool } from 'ai';
import OpenAI from 'openai';

const MODEL = 'SmolLM2-135M-Instruct';
const QUESTION = 'What is the capital of France?';
const baseURL = `${process.env.OCTAVO_URL}/v1`;
const openai = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 });
const provider = createOpenAICompatible({
  name: 'octavo',
  baseURL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider.chatModel(MODEL);
const city = {
  type: 'object',
  properties: { city: { type: 'string', maxLength: 20 } },
  required: ['city'],
  additionalProperties: false,
};

test('openai: a chat, whole and streamed', async () => {
  const question = { model: MODEL, temperature: 0, max_tokens: 16, messages: [{ role: 'user', content: QUESTION }] };
  const whole = await openai.chat.completions.create(question);
  assert.match(whole.choices[0].message.content, /Paris/);
  let text = '';
  for await (const chunk of await openai.chat.completions.create({ ...question, stream: true })) {
    text += chunk.choices[0]?.delta.content ?? '';
  }
  assert.equal(text, whole.choices[0].message.content);
});

test('openai: a stream that its reader leaves', async () => {
  const stream = await openai.chat.completions.create({
    model: MODEL,
    max_tokens: 1000,
    stream: true,
    messages: [{ role: 'user', content: 'Tell a long story.' }],
  });
  for await (const _ of stream) break;
  const next = await openai.completions.create({ model: MODEL, prompt: 'The capital of France is', max_tokens: 3 });
  assert.ok(next.choices[0].text.length > 0);
});

test('openai: responses', async () => {
  const answer = await openai.responses.create({ model: MODEL, input: QUESTION, temperature: 0 });
  assert.match(answer.output_text, /Paris/);
});

test('openai: an error names the parameter', async () => {
  await assert.rejects(
    openai.completions.create({ model: MODEL, prompt: 'x', temperature: 5 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === 'temperature',
  );
});

test('ai-sdk: text, whole and streamed', async () => {
  const whole = await generateText({ model, prompt: QUESTION, temperature: 0, maxOutputTokens: 16 });
  assert.match(whole.text, /Paris/);
  assert.ok(whole.usage.outputTokens > 0);
  const stream = streamText({ model, prompt: QUESTION, temperature: 0, maxOutputTokens: 16 });
  let text = '';
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, whole.text);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
});

test('ai-sdk: a required tool call', async () => {
  const weather = tool({ description: 'Tells the weather of a city.', inputSchema: jsonSchema(city) });
  const answer = await generateText({
    model,
    prompt: QUESTION,
    temperature: 0,
    maxOutputTokens: 100,
    tools: { weather },
    toolChoice: 'required',
  });
  assert.equal(answer.toolCalls[0].toolName, 'weather');
  assert.equal(typeof answer.toolCalls[0].input.city, 'string');
});

test('ai-sdk: an object of a schema', async () => {
  const answer = await generateText({
    model,
    prompt: QUESTION,
    temperature: 0,
    maxOutputTokens: 100,
    output: Output.object({ schema: jsonSchema(city) }),
  });
  assert.equal(typeof answer.output.city, 'string');
});
