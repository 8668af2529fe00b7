// Asks a running server one question and prints the answer as it comes:
//
//     npm run example -- "What is the capital of France?"
//
// OCTAVO_ADDRESS is the server's gRPC address, OCTAVO_API_KEY its key, where it asks for one.

import { Client, DEFAULT_ADDRESS } from "../src/index.js";

const question = process.argv[2] ?? "What is the capital of France?";
const { OCTAVO_ADDRESS: address = DEFAULT_ADDRESS, OCTAVO_API_KEY: apiKey } = process.env;
const client = new Client(address, { apiKey });
try {
  const stream = client.stream(
    {
      prompt: { case: "chat", value: { messages: [{ role: "user", content: question }] } },
      sampling: { temperature: 0 },
      stop: { maxTokens: 128 },
    },
    { timeoutMs: 120_000 },
  );
  for await (const delta of stream) process.stdout.write(delta.text);
  const usage = stream.output.usage;
  console.log(`\n(${usage?.promptTokenCount} tokens in, ${usage?.completionTokenCount} out)`);
} finally {
  client.close();
}
