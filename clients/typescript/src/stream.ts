import type { CallOptions } from "@connectrpc/connect";
import type { Connection } from "./connection.js";
import { OmniError } from "./error.js";
import { type CallFailure, endedEarly, silent } from "./failure.js";
import type { JobEvent } from "./gen/omni_grpc/v1/event_pb.js";
import type { Job } from "./gen/omni_grpc/v1/job_pb.js";
import { ArtifactDelivery } from "./gen/omni_grpc/v1/options_pb.js";
import { aborted, CANCEL_TIMEOUT, Deadline, sleep, UNARY_TIMEOUT } from "./pace.js";
import { type Result, resultOf } from "./result.js";
import { WatchState } from "./watch.js";

type Call = (options: CallOptions) => AsyncIterable<{ event?: JobEvent | undefined }>;

/**
 * The events of one job, each once and in order, even if the connection is lost in between.
 *
 * That of a generation cancels its job when it is left early, aborted, or past its timeout, and throws the error that
 * ended the job. That of a job that is watched does neither; `error` says why it has no result.
 */
export class JobStream implements AsyncIterableIterator<JobEvent> {
  private readonly events: AsyncGenerator<JobEvent, undefined>;
  private readonly stop = new AbortController();
  private buffered: JobEvent[] = [];
  private cancelling: Promise<void> | undefined;
  private patience: ReturnType<typeof setTimeout> | undefined;
  private readonly onAbort = () => this.abort();

  /** Use `Client.stream` and `Client.watchJob`. `call` is the first of its calls. */
  constructor(
    private readonly connection: Connection,
    private readonly call: Call,
    private readonly watch: WatchState,
    private readonly deadline: Deadline,
    private readonly owner: boolean,
    private readonly signal?: AbortSignal,
  ) {
    this.events = this.follow();
    if (signal?.aborted) this.stop.abort();
    signal?.addEventListener("abort", this.onAbort, { once: true });
  }

  get jobId(): string {
    return this.watch.jobId;
  }

  /** The seq of the last event that was seen. */
  get afterSeq(): bigint {
    return this.watch.afterSeq;
  }

  /** Why the job has no result; undefined if it succeeded or has not ended. */
  get error(): OmniError | undefined {
    return this.watch.error();
  }

  /** Waits for the first event: a refusal is thrown here, and `jobId` is known afterwards. */
  async open(): Promise<this> {
    const first = await this.next();
    if (!first.done) this.buffered.push(first.value);
    return this;
  }

  async next(): Promise<IteratorResult<JobEvent, undefined>> {
    const buffered = this.buffered.shift();
    if (buffered && !this.signal?.aborted) return { done: false, value: buffered };
    try {
      const found = await this.events.next();
      if (found.done) this.forget();
      return found;
    } catch (thrown) {
      this.forget();
      const lost = thrown instanceof OmniError && (thrown.reason === "STREAM_LOST" || thrown.reason === "JOB_LOST");
      if (lost) throw thrown;
      throw await this.cancelAfter(thrown);
    }
  }

  /** Leaves the stream, as `break` in `for await` does: the job of a generation is cancelled. */
  async return(): Promise<IteratorResult<JobEvent, undefined>> {
    this.forget();
    this.stop.abort();
    await this.events.return(undefined);
    await this.cancelOwned("the client left the stream");
    return { done: true, value: undefined };
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  /** Asks the server to stop the job. The event `cancelled` tells when it has stopped. */
  async cancel(reason = ""): Promise<Job | undefined> {
    const request = { jobId: this.jobId, reason };
    const deadline = new Deadline(UNARY_TIMEOUT);
    return (await this.connection.unary((options) => this.connection.jobs.cancelJob(request, options), deadline)).job;
  }

  /** Follows the job to its end and fetches missing output bytes. Throws the error that ended the job. */
  async result(): Promise<Result> {
    for await (const _ of this) {
      // the state keeps what the result needs
    }
    const failed = this.watch.error();
    if (failed) throw failed;
    for (const partial of this.watch.outputs()) {
      if (partial.complete) continue;
      await this.connection.download(partial.artifact.artifactId, this.deadline, this.signal, partial);
    }
    return resultOf(this.watch);
  }

  private async *follow(): AsyncGenerator<JobEvent, undefined> {
    const starting = this.connection.starting(this.deadline);
    let call = this.call;
    while (true) {
      const ended = yield* this.once(call);
      if (this.watch.last) break;
      if (this.stop.signal.aborted) throw aborted(this.signal, this.jobId);
      if (!this.watch.connected && ended.error.reason !== "STREAM_ENDED") {
        await this.connection.again(starting, ended, this.signal);
        continue;
      }
      await sleep(this.deadline.within(this.watch.lost(ended)), this.stop.signal);
      call = (options) => this.connection.jobs.watchJob(this.watch.request(), options);
    }
    const failed = this.watch.error();
    if (this.owner && failed) throw failed;
    return undefined;
  }

  /** The events of one call, and how it ended. */
  private async *once(call: Call): AsyncGenerator<JobEvent, CallFailure> {
    const own = new AbortController();
    const stop = () => own.abort();
    let quiet: ReturnType<typeof setTimeout> | undefined;
    let isSilent = false;
    const heard = () => {
      clearTimeout(quiet);
      if (this.connection.silence <= 0) return;
      quiet = setTimeout(() => {
        isSilent = true;
        own.abort();
      }, this.connection.silence * 1000);
    };
    if (this.stop.signal.aborted) stop();
    this.stop.signal.addEventListener("abort", stop, { once: true });
    try {
      const options = await this.connection.options(this.deadline, own.signal);
      heard();
      for await (const message of call(options)) {
        heard();
        const isNew = message.event !== undefined && this.watch.accept(message.event);
        if (this.owner && this.signal?.aborted) throw aborted(this.signal, this.jobId);
        if (isNew && message.event) yield message.event;
      }
      return endedEarly();
    } catch (thrown) {
      if (thrown instanceof OmniError) throw thrown;
      return isSilent ? silent(this.connection.silence) : this.connection.failure(thrown);
    } finally {
      clearTimeout(quiet);
      this.stop.signal.removeEventListener("abort", stop);
      own.abort();
    }
  }

  private abort(): void {
    if (this.owner && !this.jobId) {
      // the first event comes at once and names the job, which can then be cancelled
      this.patience = setTimeout(() => this.stop.abort(), CANCEL_TIMEOUT * 1000);
      return;
    }
    this.stop.abort();
    // at once, even where nobody asks for the next event; whoever does gets its error
    this.cancelOwned("the client aborted the call").catch(() => undefined);
  }

  private forget(): void {
    clearTimeout(this.patience);
    this.signal?.removeEventListener("abort", this.onAbort);
  }

  /** The error to throw, once the job of this stream has been cancelled because of it. */
  private async cancelAfter(thrown: unknown): Promise<unknown> {
    const error = this.signal?.aborted ? aborted(this.signal, this.jobId) : thrown;
    try {
      await this.cancelOwned("the client left the stream");
    } catch (failed) {
      if (!(error instanceof OmniError)) return error;
      const message = `${error.message}; job ${this.jobId} could not be cancelled: ${failed}`;
      return error.with({ message });
    }
    return error;
  }

  private cancelOwned(reason: string): Promise<void> {
    if (!this.owner || this.watch.last || !this.jobId) return Promise.resolve();
    this.cancelling ??= cancelAndWait(this.connection, this.jobId, this.afterSeq, reason);
    return this.cancelling;
  }
}

/** Cancels a job, and waits until it has stopped. */
async function cancelAndWait(connection: Connection, jobId: string, afterSeq: bigint, reason: string): Promise<void> {
  const { jobs } = connection;
  await connection.unary((options) => jobs.cancelJob({ jobId, reason }, options), new Deadline(CANCEL_TIMEOUT));
  try {
    for await (const _ of watchJob(connection, jobId, afterSeq, new Deadline(CANCEL_TIMEOUT))) {
      // until its last event
    }
  } catch (error) {
    // running out of time here is no error: the server has accepted the cancellation
    if (!(error instanceof OmniError && error.code === "DEADLINE_EXCEEDED")) throw error;
  }
}

/** The events of an existing job after `afterSeq`. */
export function watchJob(
  connection: Connection,
  jobId: string,
  afterSeq: bigint,
  deadline: Deadline,
  signal?: AbortSignal,
): JobStream {
  const watch = new WatchState(connection.reconnect, ArtifactDelivery.REFERENCE, jobId, afterSeq);
  const call: Call = (options) => connection.jobs.watchJob(watch.request(), options);
  return new JobStream(connection, call, watch, deadline, false, signal);
}
