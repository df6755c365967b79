/** The codes of gRPC, by their numbers. */
export const CODES = [
  "OK",
  "CANCELLED",
  "UNKNOWN",
  "INVALID_ARGUMENT",
  "DEADLINE_EXCEEDED",
  "NOT_FOUND",
  "ALREADY_EXISTS",
  "PERMISSION_DENIED",
  "RESOURCE_EXHAUSTED",
  "FAILED_PRECONDITION",
  "ABORTED",
  "OUT_OF_RANGE",
  "UNIMPLEMENTED",
  "INTERNAL",
  "UNAVAILABLE",
  "DATA_LOSS",
  "UNAUTHENTICATED",
] as const;

export type ErrorCode = (typeof CODES)[number];

/** A field of the request and what is wrong with it. */
export interface Violation {
  field: string;
  description: string;
}

export interface Failure {
  code: ErrorCode;
  message: string;
  /** What went wrong, for programs: of ErrorInfo, or one of this client's own. */
  reason?: string | undefined;
  violations?: readonly Violation[] | undefined;
  /** Seconds after which the server may have room. */
  retryAfter?: number | undefined;
  metadata?: Readonly<Record<string, string>> | undefined;
  cause?: unknown;
}

/** Why a call or a job failed. The one error of this package. */
export class OmniError extends Error {
  readonly code: ErrorCode;
  readonly reason: string;
  readonly violations: readonly Violation[];
  /** Seconds after which the server may have room; undefined where it did not say. */
  readonly retryAfter: number | undefined;
  readonly metadata: Readonly<Record<string, string>>;

  constructor(failure: Failure) {
    super(failure.message, failure.cause === undefined ? undefined : { cause: failure.cause });
    this.name = "OmniError";
    this.code = failure.code;
    this.reason = failure.reason || failure.code;
    this.violations = failure.violations ?? [];
    this.retryAfter = failure.retryAfter;
    this.metadata = failure.metadata ?? {};
  }

  /** The job that ended so; "" where there is none. */
  get jobId(): string {
    return this.metadata["job_id"] ?? "";
  }

  /** The same with other values. */
  with(changes: Partial<Failure>): OmniError {
    const { code, message, reason, violations, retryAfter, metadata, cause } = this;
    return new OmniError({ code, message, reason, violations, retryAfter, metadata, cause, ...changes });
  }
}

/** A field that cannot be sent. */
export function refused(field: string, description: string, reason?: string): OmniError {
  return new OmniError({
    code: "INVALID_ARGUMENT",
    reason,
    message: `${field}: ${description}`,
    violations: [{ field, description }],
  });
}
