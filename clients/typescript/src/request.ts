import type { MessageInitShape } from "@bufbuild/protobuf";
import type { JobOptionsSchema } from "./gen/omni_grpc/v1/options_pb.js";
import type { SamplingParamsSchema } from "./gen/omni_grpc/v1/sampling_pb.js";
import type { MediaSource } from "./media.js";

/** What all tasks take. What is left out stays unset, so that the model's defaults apply. */
export interface CommonOptions {
  model?: string;
  /** Unset and "" differ: "" turns classifier-free guidance on. */
  negativePrompt?: string;
  steps?: number;
  seed?: number | bigint;
  seeds?: (number | bigint)[];
  numOutputs?: number;
  scheduler?: string;
  /** Settings that belong together, by the name that the model has for them. */
  preset?: string;
  guidanceScale?: number;
  trueCfgScale?: number;
  /** A name such as "png", or a value of the enum. */
  outputFormat?: string | number;
  /** The idempotency key; a UUID4 unless given. */
  requestId?: string;
  labels?: Record<string, string>;
  priority?: number;
  /** Seconds, as `runTimeout` and `retention`. */
  queueTimeout?: number;
  runTimeout?: number;
  retention?: number;
  previewEverySteps?: number;
  previewMaxEdgePx?: number;
  embedParameters?: boolean;
  /** The rest of the API's messages; the options above win. */
  sampling?: MessageInitShape<typeof SamplingParamsSchema>;
  options?: MessageInitShape<typeof JobOptionsSchema>;
}

interface Sized {
  width?: number;
  height?: number;
}

export interface ImageOptions extends CommonOptions, Sized {}

export interface EditOptions extends CommonOptions, Sized {
  images: MediaSource[];
  mask?: MediaSource;
  strength?: number;
  layers?: number;
  task?: string | number;
}

export interface VideoOptions extends CommonOptions, Sized {
  numFrames?: number;
  /** Seconds, instead of `numFrames`. */
  duration?: number;
  fps?: number;
  outputFps?: number;
  withAudio?: boolean;
  strength?: number;
  firstFrame?: MediaSource;
  lastFrame?: MediaSource;
  sourceVideo?: MediaSource;
  controlVideo?: MediaSource;
  maskVideo?: MediaSource;
  audio?: MediaSource;
  referenceImages?: MediaSource[];
  task?: string | number;
  interpolation?: { exp?: number; scale?: number; model?: string };
}

export interface AudioOptions extends CommonOptions {
  text?: string;
  reference?: MediaSource;
  strength?: number;
  /** Seconds, as `end` and `duration`. */
  start?: number;
  end?: number;
  duration?: number;
  sampleRateHz?: number;
}

/** The options of each task. */
export interface TaskOptions {
  image: ImageOptions;
  edit: EditOptions;
  video: VideoOptions;
  audio: AudioOptions;
}

export type TaskName = keyof TaskOptions;
