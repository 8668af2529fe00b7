// Puts a stream of GenerateResponse together: one `Output` for those who wait, and what a resume needs. Does no I/O.

import { create, type MessageInitShape } from "@bufbuild/protobuf";

import {
  FinishReason,
  type GenerateRequest,
  type GenerateResponse,
  type PromptInfo,
  type Resume,
  ResumeSchema,
  type SampleDelta,
  type TokenLogprobs,
  type Usage,
} from "./gen/octavo/v1/inference_pb.js";

/** A call of a tool that a sample made. */
export interface ToolCallOutput {
  id: string;
  name: string;
  argumentsJson: string;
}

/** One sample, as far as it has come. */
export interface SampleOutput {
  index: number;
  text: string;
  tokenIds: number[];
  /** One entry for each token, if asked for. */
  logprobs: TokenLogprobs[];
  /** UNSPECIFIED while it runs. */
  finishReason: FinishReason;
  /** The stop string or the token that stopped it. */
  matched: SampleDelta["matched"];
  /** Sum over the sample's tokens, once it has ended. */
  cumulativeLogprob: number;
  /** With tools: the text without the calls. */
  content: string;
  /** With tools: the calls. */
  toolCalls: ToolCallOutput[];
}

/** One request's answer, as far as it has come. */
export interface Output {
  requestId: string;
  model: string;
  /** What the router made of the prompt; undefined until it has said so. */
  prompt: PromptInfo | undefined;
  /** In order of their index. */
  samples: SampleOutput[];
  /** Undefined until the request has finished. */
  usage: Usage | undefined;
}

interface Sample extends SampleOutput {
  logprobSum: number;
}

/** Collects the responses to one request. One that was resumed goes on in the same builder. */
export class OutputBuilder {
  #requestId: string;
  #model = "";
  #prompt: PromptInfo | undefined;
  #promptTokenIds: number[] | undefined;
  #samples = new Map<number, Sample>();
  #usage: Usage | undefined;

  constructor(request: GenerateRequest) {
    this.#requestId = request.requestId;
    if (request.prompt.case === "tokenIds") this.#promptTokenIds = request.prompt.value.ids;
  }

  /** The request's name: the server's, once it has said one. */
  get requestId(): string {
    return this.#requestId;
  }

  /** Whether the last response has come. */
  get isFinished(): boolean {
    return this.#usage !== undefined;
  }

  /** Takes the next response. */
  add(response: GenerateResponse): void {
    this.#requestId = response.requestId || this.#requestId;
    this.#model = response.model || this.#model;
    if (response.prompt !== undefined) {
      this.#prompt ??= response.prompt;
      if (response.prompt.tokenIds.length > 0) this.#promptTokenIds = response.prompt.tokenIds;
    }
    for (const delta of response.deltas) this.#take(delta);
    this.#usage = response.usage ?? this.#usage;
  }

  /** The answer as far as it has come. */
  output(): Output {
    const samples = [...this.#samples.values()].sort((one, other) => one.index - other.index);
    return {
      requestId: this.#requestId,
      model: this.#model,
      prompt: this.#prompt,
      samples: samples.map(({ logprobSum: _, ...sample }) => ({
        ...sample,
        tokenIds: [...sample.tokenIds],
        logprobs: [...sample.logprobs],
        toolCalls: sample.toolCalls.map((call) => ({ ...call })),
      })),
      usage: this.#usage,
    };
  }

  /** What a server needs to go on behind what has come; undefined before it has told what it made of the prompt. */
  resume(): Resume | undefined {
    if (this.#prompt === undefined || this.#promptTokenIds === undefined) return undefined;
    const samples: MessageInitShape<typeof ResumeSchema>["samples"] = [...this.#samples.values()].map((sample) => ({
      sampleIndex: sample.index,
      tokenIds: sample.tokenIds,
      textByteCount: Buffer.byteLength(sample.text),
      finishReason: sample.finishReason,
      cumulativeLogprob: sample.logprobSum,
    }));
    const { seed, modelDigest } = this.#prompt;
    return create(ResumeSchema, { promptTokenIds: this.#promptTokenIds, seed, modelDigest, samples });
  }

  #take(delta: SampleDelta): void {
    const sample = this.#sampleOf(delta.sampleIndex);
    sample.text += delta.text;
    sample.tokenIds.push(...delta.tokenIds);
    sample.logprobs.push(...delta.logprobs);
    for (const entry of delta.logprobs) sample.logprobSum += entry.logprob; // one by one, as the server adds them up
    sample.content += delta.parsed?.content ?? "";
    for (const gained of delta.parsed?.toolCalls ?? []) {
      const call = (sample.toolCalls[gained.index] ??= { id: "", name: "", argumentsJson: "" });
      call.id ||= gained.id;
      call.name ||= gained.name;
      call.argumentsJson += gained.argumentsJson;
    }
    if (delta.finishReason !== FinishReason.UNSPECIFIED) {
      sample.finishReason = delta.finishReason;
      sample.matched = delta.matched;
      sample.cumulativeLogprob = delta.cumulativeLogprob;
    }
  }

  #sampleOf(index: number): Sample {
    let sample = this.#samples.get(index);
    if (sample === undefined) {
      sample = {
        index,
        text: "",
        tokenIds: [],
        logprobs: [],
        finishReason: FinishReason.UNSPECIFIED,
        matched: { case: undefined },
        cumulativeLogprob: 0,
        content: "",
        toolCalls: [],
        logprobSum: 0,
      };
      this.#samples.set(index, sample);
    }
    return sample;
  }
}
