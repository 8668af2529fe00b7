// Whether and when a request whose server went away is sent again, and what is sent then.
//
// A server that took a request on and is gone leaves its caller with what came so far. The request goes on behind that,
// on the server that is found at the same address within a time; see "Resume" in docs/api.md. Does no I/O.

import { clone, create } from "@bufbuild/protobuf";

import type { OctavoError } from "./errors.js";
import {
  type GenerateRequest,
  GenerateRequestSchema,
  TokenIdsSchema,
} from "./gen/octavo/v1/inference_pb.js";
import { OutputOptionsSchema } from "./gen/octavo/v1/sampling_pb.js";
import type { OutputBuilder } from "./output.js";

export const DEFAULT_RESUME_TIMEOUT_MS = 60_000;

const FIRST_DELAY_MS = 50;
const MAX_DELAY_MS = 1_000;

export interface ResumptionOptions {
  /** For the whole request, over all tries. Undefined: as long as it takes. */
  timeoutMs: number | undefined;
  /** From a loss until it is given up. */
  resumeTimeoutMs: number;
  /** Whether the first server that is not reached is waited for as one that went away is. */
  waitForServer: boolean;
  /** Milliseconds that only grow. */
  clock?: () => number;
}

/** One request's tries. `request` and `remainingMs` are for the next call, also for the first one. */
export class Resumption {
  readonly #clock: () => number;
  readonly #deadline: number | undefined;
  readonly #resumeTimeoutMs: number;
  #mayResume: boolean;
  #givesUpAt: number | undefined;
  #delayMs = FIRST_DELAY_MS;

  constructor(
    private readonly original: GenerateRequest,
    private readonly builder: OutputBuilder,
    options: ResumptionOptions,
  ) {
    this.#clock = options.clock ?? (() => performance.now());
    this.#deadline = options.timeoutMs === undefined ? undefined : this.#clock() + options.timeoutMs;
    this.#resumeTimeoutMs = options.resumeTimeoutMs;
    this.#mayResume = options.waitForServer;
  }

  /** What is left of the request's time. */
  get remainingMs(): number | undefined {
    return this.#deadline === undefined ? undefined : Math.max(0, this.#deadline - this.#clock());
  }

  /** The request, going on behind what has come of it. */
  request(): GenerateRequest {
    const resume = this.builder.resume();
    if (resume === undefined) return this.original;
    const again = clone(GenerateRequestSchema, this.original);
    again.requestId = this.builder.requestId;
    // The prompt as it was rendered: a template that knows the date may render another one now.
    again.prompt = { case: "tokenIds", value: create(TokenIdsSchema, { ids: resume.promptTokenIds }) };
    again.output ??= create(OutputOptionsSchema);
    again.output.returnPromptTokenIds = false;
    again.resume = resume;
    return again;
  }

  /** A response has come: the server is there, and a loss from now on is another one. */
  progressed(): void {
    this.#mayResume = true;
    this.#givesUpAt = undefined;
    this.#delayMs = FIRST_DELAY_MS;
  }

  /**
   * Milliseconds until the next try after a call that failed; undefined where the error is the request's end.
   * accepted: whether the server had taken the call on. A full queue is waited for only by a request that was.
   */
  delayAfter(error: OctavoError, accepted: boolean): number | undefined {
    this.#mayResume ||= accepted;
    if (!this.#mayResume || !(error.isUnavailable || error.isOverloaded)) return undefined;
    const now = this.#clock();
    let delay: number;
    if (error.retryAfterMs !== undefined) {
      if (this.#givesUpAt === undefined) return undefined;
      delay = error.retryAfterMs;
    } else {
      // Many callers lose one server at the same moment; they should not come back at the same one.
      delay = this.#delayMs * (0.5 + Math.random() / 2);
      this.#delayMs = Math.min(2 * this.#delayMs, MAX_DELAY_MS);
    }
    this.#givesUpAt ??= now + this.#resumeTimeoutMs;
    if (now >= this.#givesUpAt) return undefined;
    return Math.min(delay, this.#givesUpAt - now, this.remainingMs ?? Infinity);
  }
}
