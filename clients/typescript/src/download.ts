import { create } from "@bufbuild/protobuf";
import { OmniError } from "./error.js";
import type { CallFailure } from "./failure.js";
import {
  type DownloadArtifactRequest,
  DownloadArtifactRequestSchema,
  type DownloadArtifactResponse,
} from "./gen/omni_grpc/v1/artifact_pb.js";
import { backoff, type Reconnect } from "./pace.js";
import { PartialArtifact } from "./partial.js";

/** The bytes of one artifact so far; `partial` has those that came another way before. Does no I/O. */
export class DownloadState {
  /** Whether a message has come. */
  connected = false;
  private attempt = 0;

  constructor(
    private readonly reconnect: Reconnect,
    private readonly artifactId: string,
    private partial?: PartialArtifact,
  ) {}

  /** Asks for the bytes that are still missing. */
  request(): DownloadArtifactRequest {
    const offset = BigInt(this.partial?.offset ?? 0);
    return create(DownloadArtifactRequestSchema, { artifactId: this.artifactId, offset });
  }

  /** Takes the next message. Throws for one that does not fit the bytes so far. */
  accept(message: DownloadArtifactResponse): void {
    this.connected = true;
    this.attempt = 0;
    const { payload } = message;
    if (payload.case === "chunk") this.finished().add(payload.value);
    else if (payload.case === "metadata") {
      if (this.partial) this.partial.checkResumed(payload.value);
      else this.partial = new PartialArtifact(payload.value);
    }
  }

  /** The artifact, once the call has ended without an error. */
  finished(): PartialArtifact {
    if (this.partial) return this.partial;
    const message = `the download of artifact ${this.artifactId} did not start with its metadata`;
    throw new OmniError({ code: "INTERNAL", reason: "PROTOCOL_ERROR", message });
  }

  /** Seconds to wait before the next call. Throws where the server refused it, or after too many attempts in a row. */
  lost(ended: CallFailure): number {
    if (!this.connected) throw ended.error;
    if (!ended.lost || ended.permanent || this.attempt >= this.reconnect.attempts) {
      const at = `artifact ${this.artifactId}, at byte ${this.partial?.offset ?? 0}`;
      throw ended.error.with({ message: `${at}: ${ended.error.message}` });
    }
    this.attempt += 1;
    return backoff(this.reconnect, this.attempt - 1);
  }
}
