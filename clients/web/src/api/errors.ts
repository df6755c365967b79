import { Code, ConnectError } from "@connectrpc/connect";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "../gen/google/rpc/error_details_pb";
import type { Status } from "../gen/google/rpc/status_pb";
import { seconds, span } from "../text";

/** An error in the page's own terms. */
export interface Problem {
  message: string;
  reason: string;
  code: Code;
  /** Request field, as a path -> what is wrong with it. */
  fields: ReadonlyMap<string, string>;
  metadata: Readonly<Record<string, string>>;
}

export function explain(error: unknown): Problem {
  const known = ConnectError.from(error);
  const info = known.findDetails(ErrorInfoSchema)[0];
  const retry = known.findDetails(RetryInfoSchema)[0]?.retryDelay;
  const violations = known.findDetails(BadRequestSchema).flatMap((detail) => detail.fieldViolations);
  return {
    message: inWords(known, info?.metadata ?? {}) + (retry ? ` (try again in ${span(seconds(retry))})` : ""),
    reason: info?.reason ?? "",
    code: known.code,
    fields: new Map(violations.map((violation) => [violation.field, violation.description])),
    metadata: info?.metadata ?? {},
  };
}

/** Why a job failed, from the status that it carries. */
export function explainStatus(status: Status): Problem {
  const error = new ConnectError(status.message, status.code as Code);
  error.details = status.details.map(({ typeUrl, value }) => ({ type: typeUrl.split("/").at(-1) ?? "", value }));
  return explain(error);
}

function inWords(error: ConnectError, metadata: Readonly<Record<string, string>>): string {
  if (error.code === Code.PermissionDenied && metadata["needed"]) {
    return `${error.rawMessage} (needs the scope ${metadata["needed"]})`;
  }
  if (isAway(error)) return `The server cannot be reached: ${error.rawMessage}`;
  return error.rawMessage;
}

/** Whether nobody answered, as against an answer that is an error. */
export function isAway(error: unknown): boolean {
  const known = ConnectError.from(error);
  return known.cause instanceof TypeError || (known.code === Code.Unknown && /fetch|network/i.test(known.rawMessage));
}
