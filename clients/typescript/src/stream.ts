// A running generation: iterated over for what is new, and resumed by itself when its server goes away.

import { setTimeout as sleep } from "node:timers/promises";

import { type ClientReadableStream, type ServiceError, status } from "@grpc/grpc-js";

import { errorOf, OctavoError } from "./errors.js";
import type { GenerateRequest, GenerateResponse, SampleDelta } from "./gen/octavo/v1/inference_pb.js";
import { type Output, OutputBuilder } from "./output.js";
import type { Resumption } from "./resumption.js";

const ACCEPTED_KEY = "octavo-accepted";

/** Starts a call with what is left of the request's time. */
export type Start = (
  request: GenerateRequest,
  timeoutMs: number | undefined,
) => ClientReadableStream<GenerateResponse>;

/**
 * Iterate for the deltas of all samples, or read `output` for all that has come so far.
 *
 * Goes on behind what has come where its server goes away and comes back. `close`, leaving a `for await` early, and the
 * abort signal that the request was given cancel it on the server.
 */
export class GenerationStream implements AsyncIterable<SampleDelta>, AsyncDisposable {
  readonly #builder: OutputBuilder;
  readonly #closed = new AbortController();
  readonly #deltas: AsyncGenerator<SampleDelta, void, void>;
  #call: ClientReadableStream<GenerateResponse> | undefined;

  constructor(
    private readonly start: Start,
    builder: OutputBuilder,
    private readonly resumption: Resumption,
    private readonly address: string,
    private readonly signal: AbortSignal | undefined,
  ) {
    this.#builder = builder;
    this.#deltas = this.#read();
    signal?.addEventListener("abort", this.#onAbort, { once: true });
    if (signal?.aborted) this.close();
    else this.#open();
  }

  /** The answer as far as it has come. */
  get output(): Output {
    return this.#builder.output();
  }

  [Symbol.asyncIterator](): AsyncGenerator<SampleDelta, void, void> {
    return this.#deltas;
  }

  /** Cancels the request if it still runs. Idempotent. */
  close(): void {
    this.#closed.abort();
    this.#call?.cancel();
    this.signal?.removeEventListener("abort", this.#onAbort);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.close();
  }

  readonly #onAbort = (): void => this.close();

  #open(): void {
    this.#call = this.start(this.resumption.request(), this.resumption.remainingMs);
    // Whoever iterates hears of it; an error before that must not end the process.
    this.#call.on("error", () => {});
  }

  async *#read(): AsyncGenerator<SampleDelta, void, void> {
    try {
      while (!this.#closed.signal.aborted) {
        const error = yield* this.#readCall();
        if (error === undefined || this.#builder.isFinished) break; // what was lost then is but the status
        await this.#recover(error.error, error.accepted);
      }
      if (!this.#closed.signal.aborted && !this.#builder.isFinished) {
        const name = this.#builder.requestId;
        throw new OctavoError(`the server ended the stream of request ${name} without a last response`, status.INTERNAL);
      }
      this.signal?.throwIfAborted();
    } finally {
      this.close();
    }
  }

  /** One call's deltas. Returns what ended it, if that was an error. */
  async *#readCall(): AsyncGenerator<SampleDelta, { error: ServiceError; accepted: boolean } | undefined, void> {
    const call = this.#call;
    if (call === undefined) return undefined;
    let accepted = false;
    call.on("metadata", (metadata) => {
      accepted = metadata.get(ACCEPTED_KEY).length > 0;
    });
    try {
      for await (const response of call as AsyncIterable<GenerateResponse>) {
        this.resumption.progressed();
        this.#builder.add(response);
        for (const delta of response.deltas) {
          if (this.#closed.signal.aborted) return undefined;
          yield delta;
        }
      }
    } catch (error) {
      if (this.#closed.signal.aborted) return undefined;
      return { error: error as ServiceError, accepted };
    }
    return undefined;
  }

  /** Sends the request again when it is time for that. Throws the error where it is the request's end. */
  async #recover(error: ServiceError, accepted: boolean): Promise<void> {
    const failure = errorOf(error, this.address);
    const delay = this.resumption.delayAfter(failure, accepted);
    if (delay === undefined) throw failure;
    try {
      await sleep(delay, undefined, { signal: this.#closed.signal });
    } catch {
      return; // closed meanwhile
    }
    this.#open();
  }
}
