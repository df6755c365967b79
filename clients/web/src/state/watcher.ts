import { Code, ConnectError } from "@connectrpc/connect";
import { JobState } from "../gen/omni_grpc/v1/event_pb";
import type { Job } from "../gen/omni_grpc/v1/job_pb";
import type { Api } from "../api/clients";
import { explain, type Problem } from "../api/errors";
import { Cell } from "./cell";
import type { JobBook } from "./jobs";

/** Carried by every job of a page: one watch has them all, also those that come. */
export const LABELS: Readonly<Record<string, string>> = { omni_grpc_page: "1" };
export const PAGE_SIZE = 50;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;
/** Heartbeats come every 15 s unless the operator says otherwise; without any for so long, the connection is dead. */
const SILENCE_MS = 60_000;
const QUEUE_EVERY_MS = 2000;

export type Connection =
  | { state: "connecting" }
  | { state: "live" }
  | { state: "refused"; problem: Problem }
  | { state: "lost"; problem: Problem; retryAt: number };

/**
 * Keeps the book of jobs as the server has it: lists what is there, then follows all of it on one stream. A stream that
 * breaks is taken up again from the last seq of each job, after growing pauses.
 */
export class Watcher {
  readonly connection = new Cell<Connection>({ state: "connecting" });
  /** Where the next page of older jobs begins; "" where there are no more. */
  readonly older = new Cell<string>("");
  /** Whether the server has been asked what is there, so that what is missing is not there. */
  readonly listed = new Cell<boolean>(false);
  private abort = new AbortController();
  private wake: (() => void) | null = null;
  private named = new Set<string>();
  private followed = new Map<string, bigint>();

  constructor(
    private readonly api: Api,
    private readonly book: JobBook,
    private readonly queueEveryMs = QUEUE_EVERY_MS,
  ) {}

  /** Follows until the page is closed. */
  async run(): Promise<never> {
    void this.followQueue();
    let wait = FIRST_WAIT_MS;
    for (;;) {
      this.abort = new AbortController();
      const { signal } = this.abort;
      const begun = Date.now();
      let restart = false;
      try {
        await this.list();
        this.connection.value = { state: "live" };
        await this.follow(signal);
        this.lost(new ConnectError("the server ended the stream", Code.Unavailable), wait);
      } catch (error) {
        restart = signal.aborted && signal.reason === "again";
        if (!restart) this.lost(error, wait);
      }
      if (restart || Date.now() - begun > LONGEST_WAIT_MS) wait = FIRST_WAIT_MS;
      if (!restart) {
        await this.pause(wait * (0.75 + Math.random() / 2));
        wait = Math.min(wait * 2, LONGEST_WAIT_MS);
      }
    }
  }

  /** Tries now, not after the pause. */
  now(): void {
    this.wake?.();
  }

  /** Lists and follows anew: as another caller, or with another job beside those of the page. */
  again(): void {
    this.abort.abort("again");
    this.wake?.();
  }

  /** Follows this job, too, whoever made it. Raises ConnectError where there is none. */
  async include(jobId: string): Promise<void> {
    if (this.book.get(jobId)) return;
    const { job } = await this.api.jobs.getJob({ jobId });
    if (!job) return;
    this.book.snapshot(job);
    // those of the page are in the watch anyway
    if (!isOver(job) && !isOfPage(job)) this.again();
  }

  /** Lists older jobs. */
  async loadOlder(): Promise<void> {
    const answer = await this.api.jobs.listJobs({ pageSize: PAGE_SIZE, pageToken: this.older.value });
    for (const job of answer.jobs) this.book.snapshot(job);
    this.older.value = answer.nextPageToken;
  }

  private async list(): Promise<void> {
    const answer = await this.api.jobs.listJobs({ pageSize: PAGE_SIZE });
    if (!this.listed.value) this.older.value = answer.nextPageToken;
    const found = new Map(answer.jobs.map((job) => [job.jobId, job]));
    // those that the page believes to go on, and that are older than the list reaches
    for (const id of this.book.active.value) {
      if (found.has(id)) continue;
      try {
        const { job } = await this.api.jobs.getJob({ jobId: id });
        if (job) found.set(id, job);
      } catch (error) {
        if (ConnectError.from(error).code !== Code.NotFound) throw error;
        // the server kept jobs in memory, and is another one now
        this.book.remove(id);
      }
    }
    for (const job of found.values()) this.book.snapshot(job);
    this.followed = new Map();
    for (const job of found.values()) {
      // a job that is named need not be among the newest; ended ones are known, and not sent again
      if (!isOver(job)) this.named.add(job.jobId);
      else if (isOfPage(job)) this.followed.set(job.jobId, job.lastSeq);
    }
    this.listed.value = true;
  }

  private async follow(signal: AbortSignal): Promise<void> {
    const jobIds = this.book.active.value.filter((id) => this.named.has(id));
    this.named = new Set(jobIds);
    const afterSeq: Record<string, bigint> = Object.fromEntries(this.followed);
    // from what was seen last; of a job that was never followed, all that is kept
    for (const id of jobIds) afterSeq[id] = this.book.get(id)?.seq ?? 0n;
    const stream = this.api.jobs.watchJobs({ jobIds, labelSelector: { ...LABELS }, afterSeq }, { signal });
    const alive = this.watchdog();
    try {
      for await (const { update } of stream) {
        alive.sign();
        if (update.case === "event") this.book.event(update.value);
        else if (update.case === "snapshot") this.book.snapshot(update.value, { whole: true });
      }
    } finally {
      alive.stop();
    }
  }

  private watchdog(): { sign: () => void; stop: () => void } {
    const bark = (): void => this.abort.abort("silence");
    let timer = setTimeout(bark, SILENCE_MS);
    const stop = (): void => clearTimeout(timer);
    const sign = (): void => {
      stop();
      timer = setTimeout(bark, SILENCE_MS);
    };
    return { sign, stop };
  }

  /** Places in the queue change without an event: they are asked for while there are jobs that wait. */
  private async followQueue(): Promise<never> {
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, this.queueEveryMs));
      const waits = this.book.active.value.some((id) => this.book.get(id)?.phase === "waiting");
      if (!waits || this.connection.value.state !== "live") continue;
      try {
        const { jobs } = await this.api.jobs.listJobs({ pageSize: PAGE_SIZE, states: [JobState.QUEUED] });
        for (const job of jobs) if (this.book.get(job.jobId)?.phase === "waiting") this.book.snapshot(job);
      } catch (error) {
        // the stream tells of a lost server, and tries again
        console.warn("places in the queue", error);
      }
    }
  }

  private lost(error: unknown, wait: number): void {
    const problem = explain(error);
    if (problem.code === Code.Unauthenticated || problem.code === Code.PermissionDenied) {
      this.connection.value = { state: "refused", problem };
    } else {
      this.connection.value = { state: "lost", problem, retryAt: Date.now() + wait };
    }
  }

  private async pause(wait: number): Promise<void> {
    const refused = this.connection.value.state === "refused";
    await new Promise<void>((resolve) => {
      // a refusal ends with another token, not with time
      const timer = refused ? undefined : setTimeout(resolve, wait);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
    this.wake = null;
  }
}

function isOver(job: Job): boolean {
  return [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED].includes(job.state);
}

function isOfPage(job: Job): boolean {
  return Object.entries(LABELS).every(([name, value]) => job.labels[name] === value);
}
