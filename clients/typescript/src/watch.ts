import { create } from "@bufbuild/protobuf";
import { OmniError } from "./error.js";
import { type CallFailure, fromStatus } from "./failure.js";
import type { Completed, JobEvent } from "./gen/omni_grpc/v1/event_pb.js";
import { type WatchJobRequest, WatchJobRequestSchema } from "./gen/omni_grpc/v1/job_pb.js";
import type { Artifact } from "./gen/omni_grpc/v1/media_pb.js";
import type { ArtifactDelivery } from "./gen/omni_grpc/v1/options_pb.js";
import { backoff, type Reconnect } from "./pace.js";
import { PartialArtifact } from "./partial.js";

/** The position in one job's event stream, and the output bytes received with it. Does no I/O. */
export class WatchState {
  /** The event that ended the job. */
  last: JobEvent | undefined;
  /** Whether a message has come. */
  connected = false;
  private attempt = 0;
  private rewind = 0n;
  private readonly files = new Map<string, PartialArtifact>();

  /** `jobId` may be empty: the first event sets it. */
  constructor(
    private readonly reconnect: Reconnect,
    private readonly delivery: ArtifactDelivery,
    public jobId = "",
    public afterSeq = 0n,
  ) {}

  /** Takes the next message. True for an event that the caller has not seen: no chunk, heartbeat or unknown kind. */
  accept(event: JobEvent): boolean {
    this.jobId = event.jobId;
    this.connected = true;
    this.attempt = 0;
    const kind = event.event.case;
    if (kind === "artifactChunk") {
      const partial = this.files.get(event.event.value.artifactId);
      if (!partial) throw this.unannounced(event.event.value.artifactId);
      partial.add(event.event.value);
      return false;
    }
    if (kind === "completed" || kind === "failed" || kind === "cancelled") this.last = event;
    if (event.seq <= this.afterSeq) return false;
    this.afterSeq = event.seq;
    if (kind === "artifactReady" && event.event.value.artifact) this.partial(event.event.value.artifact);
    return kind !== undefined && kind !== "heartbeat";
  }

  /** Asks for the events after the last one that was seen. */
  request(): WatchJobRequest {
    const { jobId, delivery } = this;
    return create(WatchJobRequestSchema, { jobId, afterSeq: this.afterSeq - this.rewind, delivery });
  }

  /**
   * Seconds to wait before watching again, after a call that ended before the job did. Throws where that is pointless
   * (refused, past the deadline, job unknown), and UNAVAILABLE (STREAM_LOST) after too many attempts in a row.
   */
  lost(ended: CallFailure): number {
    const { error } = ended;
    if (!this.connected && error.reason === "STREAM_ENDED" && this.afterSeq > 0n && this.rewind === 0n) {
      // no event follows this one, so it is the job's last: ask for it again, to learn how the job ended
      this.rewind = 1n;
      return 0;
    }
    if (!this.connected) throw error;
    if (error.code === "NOT_FOUND") {
      const message = `the connection was lost, and the server no longer knows job ${this.jobId}, as it has restarted`;
      throw this.at(error, { code: "UNAVAILABLE", reason: "JOB_LOST", message: `${message}; send the request again` });
    }
    if (ended.timedOut) {
      const message = `the deadline of the call passed after event ${this.afterSeq} of job ${this.jobId}`;
      throw this.at(error, { message });
    }
    if (!ended.lost) throw this.at(error, {});
    if (ended.permanent || this.attempt >= this.reconnect.attempts) {
      const tried = `lost the stream and could not reconnect in ${this.attempt} attempts: ${error.message}`;
      const message = `${tried}; the job may still be running, resume with watchJob after event ${this.afterSeq}`;
      throw this.at(error, { code: "UNAVAILABLE", reason: "STREAM_LOST", message });
    }
    this.attempt += 1;
    return Math.max(backoff(this.reconnect, this.attempt - 1), error.retryAfter ?? 0);
  }

  /** Why the job has no result; undefined if it succeeded or has not ended. */
  error(): OmniError | undefined {
    const ended = this.last?.event;
    if (ended?.case === "failed") {
      const failure = fromStatus(ended.value.status);
      return failure.with({ metadata: { ...failure.metadata, job_id: this.jobId } });
    }
    if (ended?.case !== "cancelled") return undefined;
    const message = `job ${this.jobId} was cancelled after ${ended.value.completedSteps} steps: ${ended.value.reason}`;
    return new OmniError({ code: "CANCELLED", reason: "JOB_CANCELLED", message, metadata: { job_id: this.jobId } });
  }

  /** Of a job that succeeded. */
  completed(): Completed | undefined {
    return this.last?.event.case === "completed" ? this.last.event.value : undefined;
  }

  /** The outputs of a job that succeeded, with the bytes that have come. */
  outputs(): PartialArtifact[] {
    return (this.completed()?.artifacts ?? []).map((artifact) => this.partial(artifact));
  }

  private partial(artifact: Artifact): PartialArtifact {
    const known = this.files.get(artifact.artifactId) ?? new PartialArtifact(artifact);
    this.files.set(artifact.artifactId, known);
    return known;
  }

  private at(error: OmniError, changes: Parameters<OmniError["with"]>[0]): OmniError {
    const position = { job_id: this.jobId, after_seq: String(this.afterSeq) };
    return error.with({ ...changes, metadata: { ...error.metadata, ...position } });
  }

  private unannounced(id: string): OmniError {
    const message = `bytes of artifact ${id} arrived before the artifact was announced`;
    return new OmniError({ code: "INTERNAL", reason: "PROTOCOL_ERROR", message, metadata: { job_id: this.jobId } });
  }
}
