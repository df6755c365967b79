import { OmniError } from "./error.js";

/** How a lost stream is resumed. After `attempts` in a row without a message it counts as lost (STREAM_LOST). */
export interface Reconnect {
  attempts: number;
  /** Seconds. */
  firstDelay: number;
  longestDelay: number;
}

/** How a call is repeated that the server has no room for (RESOURCE_EXHAUSTED with RetryInfo). `attempts: 0`: not. */
export interface Retry {
  attempts: number;
  /** Seconds; where the server says more, the call fails at once. */
  longest: number;
}

export const RECONNECT: Reconnect = { attempts: 8, firstDelay: 0.2, longestDelay: 5 };
export const RETRY: Retry = { attempts: 5, longest: 60 };

/** Timeout of a call with one answer, in seconds, including its repetitions. */
export const UNARY_TIMEOUT = 30;
/** Seconds that leaving a stream waits for the server to accept the cancellation, and again for the job to stop. */
export const CANCEL_TIMEOUT = 5;
/** Seconds for which a server that cannot be reached is asked again, before its first message. */
const UNREACHABLE = 5;

/** Seconds before an attempt, counted from 0; random, so that clients of a restarted server do not all come at once. */
export function backoff(policy: Reconnect, attempt: number): number {
  return Math.min(policy.longestDelay, policy.firstDelay * 2 ** attempt) * (0.5 + Math.random() / 2);
}

/** The deadline of one method, shared by all the calls that it makes. */
export class Deadline {
  private readonly end: number | undefined;

  /** `timeout`: seconds; undefined: no deadline. */
  constructor(timeout: number | undefined) {
    this.end = timeout === undefined ? undefined : performance.now() + timeout * 1000;
  }

  /** Milliseconds, as calls take them; undefined without a deadline. */
  remainingMs(): number | undefined {
    return this.end === undefined ? undefined : Math.max(1, Math.ceil(this.end - performance.now()));
  }

  /** `seconds`, or less if the deadline comes first. */
  within(seconds: number): number {
    return this.end === undefined ? seconds : Math.max(0, Math.min(seconds, (this.end - performance.now()) / 1000));
  }
}

/** Decides whether a call is made again that failed before its first message. One for each call. */
export class Starting {
  private readonly began = performance.now();
  private unreached = 0;
  private refusals = 0;

  constructor(
    private readonly retry: Retry,
    private readonly deadline: Deadline,
  ) {}

  /** Seconds until it is made again; undefined where it is not. `permanent`: waiting changes nothing. */
  pause(error: OmniError, permanent: boolean): number | undefined {
    if (error.code === "UNAVAILABLE" && !permanent) {
      const pause = Math.max(backoff(RECONNECT, this.unreached), error.retryAfter ?? 0);
      if ((performance.now() - this.began) / 1000 + pause > UNREACHABLE || !this.allows(pause)) return undefined;
      this.unreached += 1;
      return pause;
    }
    if (error.code !== "RESOURCE_EXHAUSTED" || error.retryAfter === undefined) return undefined;
    // up to a tenth more than the server says, so that not all come at once
    const pause = error.retryAfter * (1 + Math.random() / 10);
    if (this.refusals >= this.retry.attempts || error.retryAfter > this.retry.longest || !this.allows(pause)) {
      return undefined;
    }
    this.refusals += 1;
    return pause;
  }

  private allows(pause: number): boolean {
    return this.deadline.within(pause) >= pause;
  }
}

/** Waits. Rejects with CANCELLED (CALL_ABORTED) once `signal` is aborted. */
export function sleep(seconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(aborted(signal));
    const stop = () => {
      clearTimeout(timer);
      reject(aborted(signal));
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, seconds * 1000);
    signal?.addEventListener("abort", stop, { once: true });
  });
}

export function aborted(signal?: AbortSignal, jobId = ""): OmniError {
  return new OmniError({
    code: "CANCELLED",
    reason: "CALL_ABORTED",
    message: "the call was aborted by its signal",
    metadata: jobId ? { job_id: jobId } : {},
    cause: signal?.reason,
  });
}
