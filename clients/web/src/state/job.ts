import type { Artifact } from "../gen/omni_grpc/v1/media_pb";
import {
  type EffectiveParams,
  type GenerationStats,
  type JobEvent,
  JobState,
  type Warning,
} from "../gen/omni_grpc/v1/event_pb";
import type { Job } from "../gen/omni_grpc/v1/job_pb";
import type { Task } from "../gen/omni_grpc/v1/sampling_pb";
import { explainStatus, type Problem } from "../api/errors";
import { millis, seconds } from "../text";

export type Phase = "waiting" | "encoding" | "denoising" | "decoding" | "set aside" | "done" | "failed" | "cancelled";

/** A half-made output. */
export interface Glimpse {
  mime: string;
  data: Uint8Array;
  width: number;
  height: number;
  /** When its step happened, by the server's clock, in milliseconds since 1970. */
  time: number;
}

/** A job as the page shows it. A new object at each change. */
export interface JobView {
  readonly id: string;
  readonly model: string;
  readonly task: Task;
  readonly labels: Readonly<Record<string, string>>;
  readonly created: number;
  readonly phase: Phase;
  /** seq of the newest event that is in here. */
  readonly seq: bigint;
  readonly position: number | null;
  readonly step: number;
  readonly steps: number;
  readonly sigma: number | null;
  readonly stepSeconds: number | null;
  /** When the last step is done, by prediction: by the clock of this page, in milliseconds. */
  readonly due: number | null;
  readonly decoded: number;
  readonly segment: string;
  readonly rows: number;
  readonly rowsReused: number;
  readonly seeds: readonly bigint[];
  readonly size: string;
  readonly glimpses: readonly Glimpse[];
  readonly artifacts: readonly Artifact[];
  readonly warnings: readonly Warning[];
  readonly effective: EffectiveParams | null;
  readonly stats: GenerationStats | null;
  readonly problem: Problem | null;
  readonly retryable: boolean;
  readonly cancelling: boolean;
  readonly note: string;
}

type Change = { -readonly [K in keyof JobView]?: JobView[K] };

const PHASES: Readonly<Record<JobState, Phase>> = {
  [JobState.UNSPECIFIED]: "waiting",
  [JobState.QUEUED]: "waiting",
  [JobState.RUNNING]: "encoding",
  [JobState.PREEMPTED]: "set aside",
  [JobState.SUCCEEDED]: "done",
  [JobState.FAILED]: "failed",
  [JobState.CANCELLED]: "cancelled",
};

export function ended(view: JobView): boolean {
  return view.phase === "done" || view.phase === "failed" || view.phase === "cancelled";
}

/** How far a job is, from 0 to 100. 100 is for what has ended alone: decoding takes time, too. */
export function percent(view: JobView): number {
  if (ended(view)) return 100;
  if (!view.steps) return 0;
  return Math.floor((view.step / view.steps) * 95 + view.decoded * 4);
}

const EMPTY: Omit<JobView, "id" | "model" | "task" | "labels" | "created"> = {
  phase: "waiting",
  seq: 0n,
  position: null,
  step: 0,
  steps: 0,
  sigma: null,
  stepSeconds: null,
  due: null,
  decoded: 0,
  segment: "",
  rows: 0,
  rowsReused: 0,
  seeds: [],
  size: "",
  glimpses: [],
  artifacts: [],
  warnings: [],
  effective: null,
  stats: null,
  problem: null,
  retryable: false,
  cancelling: false,
  note: "",
};

/** What a snapshot says; what only events say is taken from `before`. */
export function fromSnapshot(job: Job, before: JobView | undefined): JobView {
  const queued = job.state === JobState.QUEUED;
  const running = job.state === JobState.RUNNING;
  const phase = running ? (job.step > 0 ? "denoising" : "encoding") : PHASES[job.state];
  const keepsPhase = before !== undefined && running && (before.phase === "decoding" || before.phase === "denoising");
  return {
    ...EMPTY,
    ...before,
    id: job.jobId,
    model: job.model,
    task: job.task,
    labels: job.labels,
    created: job.createTime ? millis(job.createTime) : (before?.created ?? Date.now()),
    phase: keepsPhase ? before.phase : phase,
    position: queued ? job.queuePosition : null,
    step: Math.max(job.step, before && !queued ? before.step : 0),
    steps: job.totalSteps || (before?.steps ?? 0),
    due: job.eta ? Date.now() + seconds(job.eta) * 1000 : null,
    glimpses: job.endTime ? [] : (before?.glimpses ?? []),
    artifacts: job.artifacts,
    seeds: job.effective?.seeds ?? before?.seeds ?? [],
    warnings: job.warnings,
    effective: job.effective ?? null,
    stats: job.stats ?? null,
    problem: job.error ? explainStatus(job.error) : null,
    retryable: job.retryable,
    cancelling: job.cancelRequested,
  };
}

/** The job after an event. What the page has seen already changes nothing. */
export function afterEvent(view: JobView, event: JobEvent): JobView {
  if (event.seq !== 0n && event.seq <= view.seq) return view;
  const change = changeOf(view, event);
  return { ...view, ...change, seq: event.seq === 0n ? view.seq : event.seq };
}

function changeOf(view: JobView, { event, time }: JobEvent): Change {
  switch (event.case) {
    case "queued":
      return { phase: "waiting", position: event.value.position };
    case "started": {
      const { width, height, numFrames, seeds, totalSteps, warnings } = event.value;
      const size = width ? `${width} x ${height}${numFrames > 1 ? `, ${numFrames} frames` : ""}` : "";
      const again = { step: 0, rows: 0, rowsReused: 0, decoded: 0 };
      return { ...again, phase: "encoding", position: null, size, seeds, steps: totalSteps, warnings, note: "" };
    }
    case "encodeDone":
      return { phase: "denoising", note: event.value.promptCacheHit ? "prompt from cache" : "" };
    case "stepProgress":
      return stepOf(view, event.value, time ? millis(time) : 0);
    case "decodeProgress": {
      const { doneUnits, totalUnits } = event.value;
      const last = view.step >= view.steps;
      return { decoded: last && totalUnits ? doneUnits / totalUnits : 0, ...(last ? { phase: "decoding" } : {}) };
    }
    case "artifactReady":
      return event.value.artifact ? { artifacts: withArtifact(view.artifacts, event.value.artifact) } : {};
    case "warning":
      return { warnings: [...view.warnings, event.value] };
    case "preempted":
      return { phase: "set aside", position: event.value.position, note: event.value.reason };
    case "resumed":
      return { phase: event.value.completedSteps ? "denoising" : "encoding", position: null, note: "" };
    case "retrying":
      return { phase: "waiting", note: `trying again: ${event.value.status?.message ?? ""}` };
    default:
      return endOf(view, event);
  }
}

type Step = Extract<JobEvent["event"], { case: "stepProgress" }>["value"];

function stepOf(view: JobView, step: Step, time: number): Change {
  const glimpses = [...view.glimpses];
  for (const { index, mimeType, data, width, height } of step.previews) {
    glimpses[index] = { mime: mimeType, data, width, height, time };
  }
  return {
    phase: step.step >= step.totalSteps ? "decoding" : "denoising",
    step: step.step,
    steps: step.totalSteps,
    sigma: step.sigma,
    stepSeconds: step.stepTime ? seconds(step.stepTime) : view.stepSeconds,
    due: step.eta ? Date.now() + seconds(step.eta) * 1000 : null,
    rows: view.rows + step.rowsTotal,
    rowsReused: view.rowsReused + step.rowsReused,
    segment: step.totalSegments ? `chunk ${step.segment + 1} of ${step.totalSegments}` : step.stage,
    glimpses,
  };
}

function endOf(view: JobView, event: JobEvent["event"]): Change {
  const over: Change = { position: null, due: null, glimpses: [], cancelling: false, note: "" };
  switch (event.case) {
    case "completed": {
      const { artifacts, effective, stats, warnings } = event.value;
      const seeds = effective?.seeds ?? view.seeds;
      return { ...over, phase: "done", artifacts, effective, stats: stats ?? null, warnings, seeds };
    }
    case "failed": {
      const { status, stats, retryable } = event.value;
      return {
        ...over,
        phase: "failed",
        problem: status ? explainStatus(status) : null,
        stats: stats ?? null,
        retryable,
      };
    }
    case "cancelled":
      return { ...over, phase: "cancelled", note: event.value.reason, stats: event.value.stats ?? null };
    default:
      // of a newer server: noted by its seq, and passed over
      return {};
  }
}

function withArtifact(artifacts: readonly Artifact[], artifact: Artifact): Artifact[] {
  return [...artifacts.filter((other) => other.artifactId !== artifact.artifactId), artifact];
}
