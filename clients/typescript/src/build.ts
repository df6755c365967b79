import { create, type DescEnum, type DescMessage, ScalarType } from "@bufbuild/protobuf";
import { type Duration, durationFromMs } from "@bufbuild/protobuf/wkt";
import { refused } from "./error.js";
import {
  EditImageRequestSchema,
  GenerateAudioRequestSchema,
  GenerateImageRequestSchema,
  GenerateVideoRequestSchema,
} from "./gen/omni_grpc/v1/generation_pb.js";
import type { CreateJobRequest } from "./gen/omni_grpc/v1/job_pb.js";
import {
  AudioFormatSchema,
  ImageFormatSchema,
  type MediaInput,
  VideoFormatSchema,
} from "./gen/omni_grpc/v1/media_pb.js";
import { type ArtifactDelivery, JobOptionsSchema, PreviewMethod } from "./gen/omni_grpc/v1/options_pb.js";
import { SamplingParamsSchema, TaskSchema } from "./gen/omni_grpc/v1/sampling_pb.js";
import { type MediaSource, mediaInput } from "./media.js";
import { named } from "./names.js";
import type { CommonOptions, TaskName, TaskOptions } from "./request.js";

type Values = Record<string, unknown>;
export type TaskRequest = CreateJobRequest["task"] & { case: string };

const SCHEMAS: Record<TaskName, { kind: string; schema: DescMessage; formats: DescEnum }> = {
  image: { kind: "generateImage", schema: GenerateImageRequestSchema, formats: ImageFormatSchema },
  edit: { kind: "editImage", schema: EditImageRequestSchema, formats: ImageFormatSchema },
  video: { kind: "generateVideo", schema: GenerateVideoRequestSchema, formats: VideoFormatSchema },
  audio: { kind: "generateAudio", schema: GenerateAudioRequestSchema, formats: AudioFormatSchema },
};
const MEDIA = "omni_grpc.v1.MediaInput";
const INTEGERS = new Map<ScalarType, [bigint, bigint]>([
  [ScalarType.UINT32, [0n, 2n ** 32n - 1n]],
  [ScalarType.INT32, [-(2n ** 31n), 2n ** 31n - 1n]],
  [ScalarType.UINT64, [0n, 2n ** 64n - 1n]],
]);

/** A request and the media that it carries. Throws INVALID_ARGUMENT, by field, for what cannot be sent. */
export async function build<T extends TaskName>(
  task: T,
  prompt: string,
  given: TaskOptions[T],
  delivery: ArtifactDelivery,
): Promise<{ request: TaskRequest; media: MediaInput[] }> {
  const { kind, schema, formats } = SCHEMAS[task];
  const values: Values = { prompt, sampling: sampling(given), options: jobOptions(given, delivery) };
  const media: MediaInput[] = [];
  if (given.outputFormat !== undefined) values["outputFormat"] = named("output_format", formats, given.outputFormat);
  const special = new Set(["prompt", "sampling", "options", "outputFormat"]);
  for (const field of schema.fields) {
    const value = (given as Values)[field.localName];
    if (value === undefined || special.has(field.localName)) continue;
    let sent: unknown = value;
    if (field.enum) sent = named(field.name, TaskSchema, value as string | number);
    else if (field.message?.typeName === MEDIA)
      sent = await mediaOf(field.name, value, field.fieldKind === "list", media);
    else if (field.message?.typeName === "google.protobuf.Duration") sent = duration(field.name, value as number);
    else if (field.scalar) sent = scalar(field.name, field.scalar, value);
    if (field.oneof) values[field.oneof.localName] = { case: field.localName, value: sent };
    else values[field.localName] = sent;
  }
  const request = { case: kind, value: create(schema, values) } as unknown as TaskRequest;
  return { request, media };
}

async function mediaOf(field: string, value: unknown, isList: boolean, all: MediaInput[]): Promise<unknown> {
  if (!isList) {
    const found = await mediaInput(field, value as MediaSource);
    all.push(found);
    return found;
  }
  if (!Array.isArray(value)) throw refused(field, "is no list");
  const found = await Promise.all(value.map((one, i) => mediaInput(`${field}[${i}]`, one as MediaSource)));
  all.push(...found);
  return found;
}

function sampling(given: CommonOptions) {
  const { guidanceScale: scale, trueCfgScale } = given;
  const guidance = set({ ...given.sampling?.guidance, ...set({ scale, trueCfgScale }) });
  const { steps, seed, seeds, numOutputs, scheduler, preset } = given;
  const own: Values = set({ steps, seed, seeds, numOutputs, scheduler, preset });
  for (const field of SamplingParamsSchema.fields) {
    const value = own[field.localName];
    if (value === undefined || !field.scalar) continue;
    own[field.localName] = scalar(field.name, field.scalar, value);
  }
  if (seeds) own["seeds"] = seeds.map((one) => scalar("seeds", ScalarType.UINT64, one));
  const withGuidance = Object.keys(guidance).length > 0 ? { guidance } : {};
  return create(SamplingParamsSchema, { ...given.sampling, ...own, ...withGuidance } as Values);
}

function jobOptions(given: CommonOptions, delivery: ArtifactDelivery) {
  const { previewEverySteps, previewMaxEdgePx: maxEdgePx, labels, embedParameters } = given;
  const everySteps = whole("preview_every_steps", ScalarType.UINT32, previewEverySteps);
  const preview = set({ everySteps, maxEdgePx: whole("preview_max_edge_px", ScalarType.UINT32, maxEdgePx) });
  const own: Values = set({
    labels,
    embedParameters,
    priority: whole("priority", ScalarType.INT32, given.priority),
    queueTimeout: duration("queue_timeout", given.queueTimeout),
    runTimeout: duration("run_timeout", given.runTimeout),
    retention: duration("retention", given.retention),
  });
  if (Object.keys(preview).length > 0) {
    own["preview"] = { method: PreviewMethod.LATENT_RGB, ...given.options?.preview, ...preview };
  }
  const requestId = given.requestId ?? (given.options?.requestId || uuid4());
  return create(JobOptionsSchema, { delivery, ...given.options, ...own, requestId });
}

/** Without what is undefined: those fields stay unset. */
function set(values: Values): Values {
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined));
}

function duration(field: string, seconds: number | undefined): Duration | undefined {
  if (seconds === undefined) return undefined;
  if (!Number.isFinite(seconds)) throw refused(field, `${seconds} is no number of seconds`);
  return durationFromMs(Math.round(seconds * 1000));
}

function whole(field: string, type: ScalarType, value: number | undefined): unknown {
  return value === undefined ? undefined : scalar(field, type, value);
}

/** The value as its field takes it. A number beyond 2^53 is refused: it is no longer the one that was written. */
function scalar(field: string, type: ScalarType, value: unknown): unknown {
  const range = INTEGERS.get(type);
  if (!range) return value;
  const isWhole = typeof value === "bigint" || Number.isSafeInteger(value);
  const exact = isWhole ? BigInt(value as number | bigint) : undefined;
  if (exact === undefined || exact < range[0] || exact > range[1]) {
    const hint = type === ScalarType.UINT64 ? "; above 2^53 give a bigint" : "";
    throw refused(field, `${value} is no whole number from ${range[0]} to ${range[1]}${hint}`);
  }
  return type === ScalarType.UINT64 ? exact : Number(exact);
}

/** crypto.randomUUID is there on secure origins alone, crypto.getRandomValues everywhere but in Node 18. */
function uuid4(): string {
  const bytes = new Uint8Array(16);
  if (globalThis.crypto) globalThis.crypto.getRandomValues(bytes);
  else for (let i = 0; i < bytes.length; i++) bytes[i] = Math.floor(Math.random() * 256);
  bytes[6] = ((bytes[6] as number) & 0x0f) | 0x40;
  bytes[8] = ((bytes[8] as number) & 0x3f) | 0x80;
  const digits = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return digits.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, "$1-$2-$3-$4-$5");
}
