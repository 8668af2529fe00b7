// Octavo's Node client: `Client`, what it gives and throws, and the contract's messages.

export { DEFAULT_ADDRESS, type Access, type TlsFiles } from "./channel.js";
export { Client, type CallControls, type ClientOptions, type GenerateInit } from "./client.js";
export { OctavoError } from "./errors.js";
export type { Output, SampleOutput, ToolCallOutput } from "./output.js";
export { GenerationStream } from "./stream.js";
export * from "./gen/octavo/v1/admin_pb.js";
export * from "./gen/octavo/v1/inference_pb.js";
export * from "./gen/octavo/v1/sampling_pb.js";
export { status } from "@grpc/grpc-js";
