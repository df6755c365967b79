import { OmniError } from "./error.js";
import type { EffectiveParams, GenerationStats, Warning } from "./gen/omni_grpc/v1/event_pb.js";
import type { Artifact } from "./gen/omni_grpc/v1/media_pb.js";
import type { WatchState } from "./watch.js";

/** What a job made. */
export interface Result {
  jobId: string;
  /** The encoded outputs, checked against the SHA-256 that the server announced. */
  files: Uint8Array[];
  /** What the server says of each of them. */
  artifacts: Artifact[];
  /** The seed of each; undefined where none was involved. */
  seeds: (bigint | undefined)[];
  /** The values that were used, with those that the request left unset. */
  effective: EffectiveParams | undefined;
  warnings: Warning[];
  stats: GenerationStats | undefined;
}

/** The result of a job that has succeeded and whose bytes are complete. Throws ARTIFACT_CORRUPT. */
export function resultOf(watch: WatchState): Result {
  const done = watch.completed();
  if (!done) {
    const message = `the stream of job ${watch.jobId} was left before the job ended`;
    throw new OmniError({ code: "FAILED_PRECONDITION", reason: "STREAM_LEFT", message });
  }
  return {
    jobId: watch.jobId,
    files: watch.outputs().map((output) => output.data()),
    artifacts: done.artifacts,
    seeds: done.artifacts.map(({ seed }) => seed),
    effective: done.effective,
    warnings: done.warnings,
    stats: done.stats,
  };
}
