import type { JsonObject, MessageInitShape } from "@bufbuild/protobuf";
import type { Duration } from "@bufbuild/protobuf/wkt";
import type { GenerateVideoRequestSchema } from "../gen/omni_grpc/v1/generation_pb";
import type { CreateJobRequestSchema } from "../gen/omni_grpc/v1/job_pb";
import { ImageFormat, type MediaInputSchema } from "../gen/omni_grpc/v1/media_pb";
import type { Model } from "../gen/omni_grpc/v1/model_pb";
import { type JobOptionsSchema, PreviewMethod, RestartPolicy } from "../gen/omni_grpc/v1/options_pb";
import {
  type GuidanceNorm,
  type CacheOptionsSchema,
  type SamplingParamsSchema,
  Task,
} from "../gen/omni_grpc/v1/sampling_pb";
import { LABELS } from "../state/watcher";
import { type Slot, takes, TASKS, type Values } from "./values";

type RequestInit = MessageInitShape<typeof CreateJobRequestSchema>;

/** Values that are no request yet: field path -> what is wrong. What only the server can know, it says itself. */
export class Unfit extends Error {
  constructor(readonly fields: ReadonlyMap<string, string>) {
    super([...fields.values()].join("; "));
  }
}

export interface Wishes {
  previews: boolean;
  embed: boolean;
  /** The server has a store that outlives it, so what it was at can be started over. */
  durable: boolean;
  requestId: string;
  labels: Readonly<Record<string, string>>;
}

const TITLE_CHARS = 128;

/** The request that the values ask for. Raises Unfit. */
export function requestOf(values: Values, model: Model, wishes: Wishes): RequestInit {
  const reader = new Reader();
  const task = TASKS[values.task] ?? TASKS[Task.TEXT_TO_IMAGE];
  if (!task) throw new Unfit(new Map([["task", "is none that this page knows"]]));
  const common = {
    model: values.model,
    prompt: values.prompt,
    negativePrompt: values.useNegative ? values.negative : undefined,
    sampling: sampling(values, model, reader),
    outputFormat: reader.whole("output_format", values.format),
    options: options(values, model, wishes, task.call === "generateAudio", reader),
  };
  const size = { width: reader.whole("width", values.width), height: reader.whole("height", values.height) };
  const media = (slot: Slot): MessageInitShape<typeof MediaInputSchema>[] =>
    task.slots.includes(slot) ? mediaOf(values, slot) : [];
  const strength = reader.number("strength", values.strength);
  const request = ((): RequestInit["task"] => {
    switch (task.call) {
      case "generateImage":
        return { case: "generateImage", value: { ...common, ...size } };
      case "editImage": {
        const layers = values.task === Task.LAYERED ? reader.whole("layers", values.layers) : undefined;
        const part = { images: media("images"), mask: media("mask")[0], layers, strength, task: values.task };
        return { case: "editImage", value: { ...common, ...size, ...part } };
      }
      case "generateVideo":
        return { case: "generateVideo", value: { ...common, ...size, ...video(values, media, strength, reader) } };
      default: {
        const duration = reader.duration("duration", values.duration);
        const part = { text: values.text, reference: media("reference")[0], strength, duration };
        return { case: "generateAudio", value: { ...common, ...part } };
      }
    }
  })();
  reader.check();
  return { task: request };
}

type MediaReader = (slot: Slot) => MessageInitShape<typeof MediaInputSchema>[];
type VideoInit = Extract<MessageInitShape<typeof GenerateVideoRequestSchema>, { $typeName?: undefined }>;

function video(values: Values, media: MediaReader, strength: number | undefined, reader: Reader): VideoInit {
  const frames = reader.whole("num_frames", values.frames);
  return {
    task: values.task,
    firstFrame: media("first_frame")[0],
    lastFrame: media("last_frame")[0],
    sourceVideo: media("source_video")[0],
    referenceImages: media("reference_images"),
    controlVideo: media("control_video")[0],
    maskVideo: media("mask_video")[0],
    audio: media("audio")[0],
    strength: media("source_video").length ? strength : undefined,
    length: frames === undefined ? { case: undefined } : { case: "numFrames", value: frames },
    fps: reader.number("fps", values.fps),
  };
}

function mediaOf(values: Values, slot: Slot): MessageInitShape<typeof MediaInputSchema>[] {
  const media = values.media[slot] ?? [];
  return media.map(({ assetId, mime }) => ({ source: { case: "assetId", value: assetId }, mimeType: mime }));
}

function sampling(values: Values, model: Model, reader: Reader): MessageInitShape<typeof SamplingParamsSchema> {
  const guidance = {
    scale: reader.number("sampling.guidance.scale", values.scale),
    trueCfgScale: reader.number("sampling.guidance.true_cfg_scale", values.cfg),
    scaleLowNoise: reader.number("sampling.guidance.scale_low_noise", values.cfgLow),
    norm: reader.whole("sampling.guidance.norm", values.norm) as GuidanceNorm | undefined,
    rescale: reader.number("sampling.guidance.rescale", values.rescale),
    intervalStart: reader.number("sampling.guidance.interval_start", values.intervalStart),
    intervalEnd: reader.number("sampling.guidance.interval_end", values.intervalEnd),
  };
  const guided = Object.values(guidance).some((value) => value !== undefined);
  return {
    steps: reader.whole("sampling.steps", values.steps),
    seed: reader.seed("sampling.seed", values.seed),
    numOutputs: reader.whole("sampling.num_outputs", values.outputs),
    guidance: guided ? guidance : undefined,
    scheduler: values.scheduler,
    loras: values.loras.map(({ id, scale }, index) => ({
      loraId: id,
      scale: reader.number(`sampling.loras[${index}].scale`, scale),
    })),
    cache: cache(values, reader),
    extra: model.extraParamsSchema ? reader.json("sampling.extra", values.extra) : undefined,
  };
}

function cache(values: Values, reader: Reader): MessageInitShape<typeof CacheOptionsSchema> | undefined {
  const threshold = reader.number("sampling.cache.tea_cache.rel_l1_thresh", values.cacheThreshold);
  switch (values.cache) {
    case "off":
      return { kind: { case: "off", value: {} } };
    case "tea_cache":
      return { kind: { case: "teaCache", value: { relL1Thresh: threshold } } };
    case "cache_dit":
      return { kind: { case: "cacheDit", value: {} } };
    case "mag_cache":
      return { kind: { case: "magCache", value: {} } };
    case "sea_cache":
      return { kind: { case: "seaCache", value: {} } };
    default:
      return undefined;
  }
}

function options(
  values: Values,
  model: Model,
  wishes: Wishes,
  sound: boolean,
  reader: Reader,
): MessageInitShape<typeof JobOptionsSchema> {
  const previews = wishes.previews && !sound && model.previewMethods.includes(PreviewMethod.LATENT_RGB);
  return {
    requestId: wishes.requestId,
    priority: reader.whole("options.priority", values.priority),
    preview: previews ? { method: PreviewMethod.LATENT_RGB, everySteps: 1, format: ImageFormat.WEBP } : undefined,
    onServerRestart: wishes.durable ? RestartPolicy.REQUEUE : RestartPolicy.UNSPECIFIED,
    embedParameters: wishes.embed && takes(model, "options.embed_parameters"),
    labels: { ...LABELS, ...titleOf(values), ...wishes.labels },
  };
}

/** What other browsers show of the job: the beginning of its prompt. */
function titleOf(values: Values): Record<string, string> {
  const title = values.prompt.trim().slice(0, TITLE_CHARS);
  return title ? { title } : {};
}

/** Reads what was typed, and keeps what cannot be read, by field. */
class Reader {
  private readonly wrong = new Map<string, string>();

  number(path: string, text: string): number | undefined {
    if (text.trim() === "") return undefined;
    const value = Number(text);
    if (!Number.isFinite(value)) this.wrong.set(path, `${text} is not a number`);
    return value;
  }

  whole(path: string, text: string): number | undefined {
    const value = this.number(path, text);
    if (value === undefined) return undefined;
    if (!Number.isInteger(value)) this.wrong.set(path, `${text} is not a whole number`);
    else if (value < 0 && path !== "options.priority") this.wrong.set(path, `${text} is below 0`);
    else if (Math.abs(value) > 0x7fffffff) this.wrong.set(path, `${text} is too large`);
    return value;
  }

  seed(path: string, text: string): bigint | undefined {
    if (text.trim() === "") return undefined;
    if (!/^\d{1,19}$/.test(text.trim())) {
      this.wrong.set(path, `${text} is not a whole number from 0 to ${Number.MAX_SAFE_INTEGER}`);
      return undefined;
    }
    return BigInt(text.trim());
  }

  duration(path: string, text: string): Pick<Duration, "seconds" | "nanos"> | undefined {
    const value = this.number(path, text);
    if (value === undefined) return undefined;
    const whole = Math.floor(value);
    return { seconds: BigInt(whole), nanos: Math.round((value - whole) * 1e9) };
  }

  json(path: string, text: string): JsonObject | undefined {
    if (text.trim() === "") return undefined;
    try {
      const value: unknown = JSON.parse(text);
      if (typeof value === "object" && value !== null && !Array.isArray(value)) return value as JsonObject;
      this.wrong.set(path, 'is no JSON object; expected one such as {"name": 1}');
    } catch (error) {
      this.wrong.set(path, `is no JSON: ${error instanceof Error ? error.message : String(error)}`);
    }
    return undefined;
  }

  check(): void {
    // NaN and fractions are no numbers of the wire, so they are refused here, in the words of the server
    if (this.wrong.size) throw new Unfit(this.wrong);
  }
}
