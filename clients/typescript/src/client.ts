// The client of a running server: the contract's calls, with typed messages, deadlines and resumption.

import { clone, create, type DescMethod, fromBinary, type MessageInitShape, type MessageShape, toBinary } from "@bufbuild/protobuf";
import { Client as GrpcClient, type CallOptions, Metadata, type ServiceError, status } from "@grpc/grpc-js";

import { type Access, callMetadata, channelCredentials, channelOptions, checkAddress, DEFAULT_ADDRESS } from "./channel.js";
import { errorOf, OctavoError } from "./errors.js";
import { AdminService, type GetStateResponse } from "./gen/octavo/v1/admin_pb.js";
import {
  type DetokenizeRequestSchema,
  type GenerateRequest,
  GenerateRequestSchema,
  type GenerateResponse,
  GenerateResponseSchema,
  InferenceService,
  type Model,
  type TokenizeRequestSchema,
  type TokenizeResponse,
} from "./gen/octavo/v1/inference_pb.js";
import { OutputOptionsSchema } from "./gen/octavo/v1/sampling_pb.js";
import { type Output, OutputBuilder } from "./output.js";
import { DEFAULT_RESUME_TIMEOUT_MS, Resumption } from "./resumption.js";
import { GenerationStream } from "./stream.js";

export interface ClientOptions extends Access {
  /** How long a generation whose server went away looks for it before it fails. 0: not at all. Unset: 60,000. */
  resumeTimeoutMs?: number | undefined;
  /** Whether a generation that cannot be sent at first is waited for in the same way. Unset: false. */
  waitForServer?: boolean | undefined;
}

export interface CallControls {
  /** After so long the call fails with DEADLINE_EXCEEDED; of a generation, over all tries. Unset: never. */
  timeoutMs?: number | undefined;
  /** Cancels the call, which then throws the signal's reason. */
  signal?: AbortSignal | undefined;
}

/** A request as plain properties: `{ prompt: { case: "text", value: "Hello" }, stop: { maxTokens: 16 } }`. */
export type GenerateInit = MessageInitShape<typeof GenerateRequestSchema>;

/**
 * Calls the server at `address`, its gRPC address: HOST:PORT or unix:PATH. The connection is made with the first call and
 * again after it breaks. Every method throws an OctavoError where the server or the way to it fails.
 */
export class Client implements Disposable {
  readonly #client: GrpcClient;
  readonly #metadata: Metadata;
  #isClosed = false;

  constructor(
    readonly address: string = DEFAULT_ADDRESS,
    private readonly options: ClientOptions = {},
  ) {
    this.#client = new GrpcClient(checkAddress(address), channelCredentials(options.tls), channelOptions(address));
    this.#metadata = callMetadata(options.apiKey);
  }

  /** Generates, and yields what is new as it comes. */
  stream(request: GenerateInit, controls: CallControls = {}): GenerationStream {
    return this.#start(prepared(request, false), controls);
  }

  /** Generates to the end. */
  async generate(request: GenerateInit, controls: CallControls = {}): Promise<Output> {
    const stream = this.#start(prepared(request, true), controls);
    for await (const _ of stream);
    return stream.output;
  }

  /** The token ids of text or of a conversation. */
  tokenize(request: MessageInitShape<typeof TokenizeRequestSchema>, controls: CallControls = {}): Promise<TokenizeResponse> {
    return this.#call(InferenceService.method.tokenize, request, controls);
  }

  /** The text of token ids. */
  async detokenize(request: MessageInitShape<typeof DetokenizeRequestSchema>, controls: CallControls = {}): Promise<string> {
    return (await this.#call(InferenceService.method.detokenize, request, controls)).text;
  }

  /** The served models. */
  async listModels(controls: CallControls = {}): Promise<Model[]> {
    return (await this.#call(InferenceService.method.listModels, {}, controls)).models;
  }

  /** What the router's workers, queues and KV pools hold now. */
  state(controls: CallControls = {}): Promise<GetStateResponse> {
    return this.#call(AdminService.method.getState, {}, controls);
  }

  /** Closes the connection; running requests are cancelled. Idempotent. */
  close(): void {
    this.#isClosed = true;
    this.#client.close();
  }

  #checkOpen(): void {
    if (!this.#isClosed) return;
    throw new OctavoError(`the client for ${this.address} is closed; make a new one`, status.CANCELLED);
  }

  [Symbol.dispose](): void {
    this.close();
  }

  #start(request: GenerateRequest, controls: CallControls): GenerationStream {
    const builder = new OutputBuilder(request);
    const resumption = new Resumption(request, builder, {
      timeoutMs: controls.timeoutMs,
      resumeTimeoutMs: this.options.resumeTimeoutMs ?? DEFAULT_RESUME_TIMEOUT_MS,
      waitForServer: this.options.waitForServer ?? false,
    });
    const start = (message: GenerateRequest, timeoutMs: number | undefined) => {
      this.#checkOpen();
      return this.#client.makeServerStreamRequest<GenerateRequest, GenerateResponse>(
        pathOf(InferenceService.method.generate),
        (value) => Buffer.from(toBinary(GenerateRequestSchema, value)),
        (bytes) => fromBinary(GenerateResponseSchema, bytes),
        message,
        this.#metadata,
        callOptions(timeoutMs),
      );
    };
    return new GenerationStream(start, builder, resumption, this.address, controls.signal);
  }

  #call<M extends DescMethod>(
    method: M,
    request: MessageInitShape<M["input"]>,
    controls: CallControls,
  ): Promise<MessageShape<M["output"]>> {
    const { signal } = controls;
    return new Promise((resolve, reject) => {
      this.#checkOpen();
      if (signal?.aborted) return reject(signal.reason);
      const call = this.#client.makeUnaryRequest<MessageShape<M["input"]>, MessageShape<M["output"]>>(
        pathOf(method),
        (value) => Buffer.from(toBinary(method.input, value)),
        (bytes) => fromBinary(method.output, bytes) as MessageShape<M["output"]>,
        create(method.input, request) as MessageShape<M["input"]>,
        this.#metadata,
        callOptions(controls.timeoutMs),
        (error: ServiceError | null, response) => {
          signal?.removeEventListener("abort", cancel);
          if (signal?.aborted) reject(signal.reason);
          else if (error) reject(errorOf(error, this.address));
          else resolve(response as MessageShape<M["output"]>);
        },
      );
      const cancel = (): void => call.cancel();
      signal?.addEventListener("abort", cancel, { once: true });
    });
  }
}

/** The message to send. A resume needs the prompt's token ids, so they are asked for where they are not given. */
function prepared(request: GenerateInit, finalOnly: boolean): GenerateRequest {
  // A copy: what the caller holds stays as it is.
  const message = clone(GenerateRequestSchema, create(GenerateRequestSchema, request));
  message.output ??= create(OutputOptionsSchema);
  message.output.finalOnly = finalOnly;
  message.output.returnPromptTokenIds = message.prompt.case !== "tokenIds";
  return message;
}

function callOptions(timeoutMs: number | undefined): CallOptions {
  return timeoutMs === undefined ? {} : { deadline: Date.now() + timeoutMs };
}

function pathOf(method: DescMethod): string {
  return `/${method.parent.typeName}/${method.name}`;
}
