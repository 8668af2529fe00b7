// What goes wrong, as one class: the server's status with its details taken apart.

import { fromBinary } from "@bufbuild/protobuf";
import { anyUnpack } from "@bufbuild/protobuf/wkt";
import { status, type ServiceError } from "@grpc/grpc-js";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "./gen/google/rpc/status_pb.js";

const ERROR_DOMAIN = "octavo.v1";
const DETAILS_KEY = "grpc-status-details-bin";
const DEFAULT_RETRY_AFTER_MS = 1000;

/** A call that failed. `message` is written for people: it names the value and the remedy. */
export class OctavoError extends Error {
  override readonly name = "OctavoError";

  constructor(
    message: string,
    /** The canonical gRPC code, a value of `status` of @grpc/grpc-js. */
    readonly code: status,
    /** google.rpc.ErrorInfo.reason, such as "CONTEXT_LENGTH_EXCEEDED". Empty: the error is not the server's own. */
    readonly reason: string = "",
    /** The field of the request that is wrong, such as "sampling.temperature". Empty: none. */
    readonly field: string = "",
    /** When another try makes sense, with RESOURCE_EXHAUSTED of a full queue. */
    readonly retryAfterMs: number | undefined = undefined,
  ) {
    super(message);
  }

  /** Whether the server was not reached, went away or is stopping. */
  get isUnavailable(): boolean {
    return this.code === status.UNAVAILABLE;
  }

  /** Whether a queue was full. */
  get isOverloaded(): boolean {
    return this.retryAfterMs !== undefined;
  }
}

/** The error for a call that failed; `address` is where it went, for the message. */
export function errorOf(error: ServiceError, address: string): OctavoError {
  let reason = "";
  let field = "";
  let retryAfterMs: number | undefined;
  for (const detail of detailsOf(error)) {
    const info = anyUnpack(detail, ErrorInfoSchema);
    if (info?.domain === ERROR_DOMAIN) {
      reason = info.reason;
      field ||= info.metadata["field"] ?? "";
    }
    field = anyUnpack(detail, BadRequestSchema)?.fieldViolations[0]?.field ?? field;
    const delay = anyUnpack(detail, RetryInfoSchema)?.retryDelay;
    if (delay !== undefined) retryAfterMs = Number(delay.seconds) * 1000 + delay.nanos / 1e6;
  }
  if (reason === "" && isLostConnection(error)) {
    const message = `cannot reach an Octavo server at ${address}: is \`octavo serve\` running there? (${error.details})`;
    return new OctavoError(message, status.UNAVAILABLE);
  }
  if (reason === "OVERLOADED") retryAfterMs ??= DEFAULT_RETRY_AFTER_MS;
  return new OctavoError(error.details || error.message, error.code, reason, field, retryAfterMs);
}

/** grpc-js tells a connection that broke in the middle of a call by UNAVAILABLE, or by INTERNAL and a reset stream. */
function isLostConnection(error: ServiceError): boolean {
  if (error.code === status.UNAVAILABLE) return true;
  return error.code === status.INTERNAL && /^Received RST_STREAM|^read ECONN|^write EPIPE/.test(error.details);
}

function detailsOf(error: ServiceError) {
  const [bytes] = error.metadata?.get(DETAILS_KEY) ?? [];
  if (!(bytes instanceof Buffer)) return [];
  try {
    return fromBinary(StatusSchema, bytes).details;
  } catch {
    return []; // another program's idea of details
  }
}
