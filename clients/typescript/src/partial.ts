import { OmniError } from "./error.js";
import type { Artifact, ArtifactChunk } from "./gen/omni_grpc/v1/media_pb.js";
import { hex, sha256 } from "./sha256.js";

/** The bytes of one artifact as they arrive. Offsets are checked as chunks arrive, the SHA-256 at the end. */
export class PartialArtifact {
  private readonly chunks: Uint8Array[] = [];
  private received = 0;

  constructor(readonly artifact: Artifact) {}

  /** Bytes received so far, which is where a download goes on. */
  get offset(): number {
    return this.received;
  }

  get complete(): boolean {
    return this.received === Number(this.artifact.sizeBytes);
  }

  /** Throws ARTIFACT_CORRUPT for bytes that do not follow those received. */
  add(chunk: ArtifactChunk): void {
    if (Number(chunk.offset) !== this.received) {
      throw this.corrupt(`a chunk starts at byte ${chunk.offset}, expected ${this.received}`);
    }
    this.chunks.push(chunk.data);
    this.received += chunk.data.length;
    if (this.received > Number(this.artifact.sizeBytes)) {
      throw this.corrupt(`${this.received} bytes arrived, but ${this.artifact.sizeBytes} were announced`);
    }
  }

  /** Checks that a resumed download is of the artifact whose first bytes arrived. */
  checkResumed(artifact: Artifact): void {
    const same = artifact.artifactId === this.artifact.artifactId && hex(artifact.sha256) === hex(this.artifact.sha256);
    if (!same) throw this.corrupt("it is a different artifact than the one whose first bytes arrived");
  }

  /** All bytes, checked. */
  data(): Uint8Array {
    if (!this.complete) throw this.corrupt(`${this.received} of ${this.artifact.sizeBytes} bytes arrived`);
    const data = new Uint8Array(this.received);
    let at = 0;
    for (const chunk of this.chunks) {
      data.set(chunk, at);
      at += chunk.length;
    }
    const [found, announced] = [hex(sha256(data)), hex(this.artifact.sha256)];
    if (found !== announced) throw this.corrupt(`its SHA-256 is ${found}, but ${announced} was announced`);
    return data;
  }

  private corrupt(what: string): OmniError {
    return new OmniError({
      code: "INTERNAL",
      reason: "ARTIFACT_CORRUPT",
      message: `artifact ${this.artifact.artifactId}: ${what}; download it again`,
      metadata: { artifact_id: this.artifact.artifactId },
    });
  }
}
