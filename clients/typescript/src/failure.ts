import { durationMs } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError } from "@connectrpc/connect";
import { CODES, type ErrorCode, OmniError } from "./error.js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import type { Status } from "./gen/google/rpc/status_pb.js";

/** What a stream that broke off in between is told as by Connect, in a browser and in Node. */
const BROKEN = /missing EndStreamResponse|incomplete envelope|premature|unexpected end of|terminated|aborted/i;
/** What TLS says of a certificate that this client does not trust. */
const CERTIFICATE = /CERT|SELF_SIGNED|UNABLE_TO_|ERR_TLS_|ERR_SSL_|HOSTNAME_MISMATCH/;

/** How a call ended. */
export interface CallFailure {
  error: OmniError;
  /** The server sent it; else the connection or this client's own deadline ended the call. */
  fromServer: boolean;
  /** The connection was lost, so the job may still run. */
  lost: boolean;
  timedOut: boolean;
  /** Another attempt would fail in the same way. */
  permanent: boolean;
}

/** How a call to `url` failed. */
export function fromCall(thrown: unknown, url: string): CallFailure {
  if (thrown instanceof OmniError) return ended(thrown, true);
  const error = ConnectError.from(thrown);
  const known = decode(error);
  if (error.details.length > 0) return ended(known, true);
  if (known.code === "DEADLINE_EXCEEDED") {
    const message = `the server at ${url} did not answer before the deadline of the call`;
    return ended(known.with({ reason: "CALL_DEADLINE", message }), false);
  }
  const codes = systemCodes(error);
  if (known.code === "UNAVAILABLE" || isNetwork(error, codes)) {
    const why = codes.length > 0 ? `${error.rawMessage} (${codes.join(", ")})` : error.rawMessage;
    const message = `cannot reach the server at ${url}: ${why}`;
    const away = known.with({ code: "UNAVAILABLE", reason: "SERVER_UNREACHABLE", message });
    return { ...ended(away, false), permanent: codes.some((code) => CERTIFICATE.test(code)) };
  }
  return ended(known, false);
}

/** Why a job failed, from the status that it carries. */
export function fromStatus(status: Status | undefined): OmniError {
  const error = new ConnectError(status?.message ?? "", (status?.code ?? Code.Unknown) as Code);
  const details = status?.details ?? [];
  error.details = details.map(({ typeUrl, value }) => ({ type: typeUrl.split("/").at(-1) ?? "", value }));
  return decode(error);
}

/** The call ended without an error before its job did. */
export function endedEarly(): CallFailure {
  const message = "the stream ended before the job did";
  return ended(new OmniError({ code: "UNAVAILABLE", reason: "STREAM_ENDED", message }), false);
}

/** Nothing came for longer than the server's heartbeats are apart. */
export function silent(seconds: number): CallFailure {
  const message = `nothing came from the server for ${seconds} s`;
  return ended(new OmniError({ code: "UNAVAILABLE", reason: "SERVER_UNREACHABLE", message }), false);
}

function ended(error: OmniError, fromServer: boolean): CallFailure {
  const lost = error.code === "UNAVAILABLE";
  return { error, fromServer, lost, timedOut: !fromServer && error.code === "DEADLINE_EXCEEDED", permanent: false };
}

/** Details of kinds that are not known here are passed over. */
function decode(error: ConnectError): OmniError {
  const code: ErrorCode = CODES[error.code] ?? "UNKNOWN";
  const info = error.findDetails(ErrorInfoSchema)[0];
  const delay = error.findDetails(RetryInfoSchema)[0]?.retryDelay;
  const violations = error.findDetails(BadRequestSchema).flatMap((detail) => detail.fieldViolations);
  return new OmniError({
    code,
    reason: info?.reason,
    message: error.rawMessage || code,
    violations: violations.map(({ field, description }) => ({ field, description })),
    retryAfter: delay && durationMs(delay) / 1000,
    metadata: { ...info?.metadata },
    cause: error,
  });
}

function isNetwork(error: ConnectError, codes: readonly string[]): boolean {
  if (codes.length > 0) return true;
  // fetch says TypeError for all that it cannot reach, each browser in words of its own
  return causes(error).some((cause) => cause instanceof TypeError) || BROKEN.test(error.rawMessage);
}

/** The codes of Node's errors below this one: ECONNREFUSED, UND_ERR_SOCKET, SELF_SIGNED_CERT_IN_CHAIN... */
function systemCodes(error: ConnectError): string[] {
  return causes(error)
    .map((cause) => (cause as { code?: unknown }).code)
    .filter((code): code is string => typeof code === "string");
}

function causes(error: Error): Error[] {
  const found: Error[] = [];
  for (let next: unknown = error.cause; next instanceof Error && !found.includes(next); next = next.cause) {
    found.push(next);
  }
  return found;
}
