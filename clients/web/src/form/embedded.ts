import { BLANK, type Text, type Values } from "./values";
import { Task } from "../gen/omni_grpc/v1/sampling_pb";

const SIGNATURE = [0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a];
const MARK = "omni_grpc";
const LARGEST = 8 << 20;

/** Option of a file's parameters -> the field of the form that it fills. */
const FIELDS: Readonly<Record<string, Text>> = {
  negative_prompt: "negative",
  steps: "steps",
  guidance_scale: "scale",
  true_cfg_scale: "cfg",
  guidance_scale_low_noise: "cfgLow",
  guidance_rescale: "rescale",
  guidance_interval_start: "intervalStart",
  guidance_interval_end: "intervalEnd",
  scheduler: "scheduler",
  width: "width",
  height: "height",
  strength: "strength",
  layers: "layers",
  num_frames: "frames",
  fps: "fps",
  text: "text",
};

/** The settings that a PNG file of the server carries; null where it has none. */
export async function settingsIn(file: Blob): Promise<Values | null> {
  if (file.type !== "image/png") return null;
  const bytes = new Uint8Array(await file.slice(0, LARGEST).arrayBuffer());
  const text = textOf(bytes);
  if (!text) return null;
  let record: unknown;
  try {
    record = JSON.parse(text);
  } catch {
    return null;
  }
  return isRecord(record) ? valuesOf(record) : null;
}

type Json = Record<string, unknown>;

function isRecord(value: unknown): value is Json {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function textOf(bytes: Uint8Array): string | null {
  if (!SIGNATURE.every((byte, index) => bytes[index] === byte)) return null;
  const view = new DataView(bytes.buffer);
  for (let at = SIGNATURE.length; at + 12 <= bytes.length; at += 12 + view.getUint32(at)) {
    const [kind, length] = [latin(bytes.subarray(at + 4, at + 8)), view.getUint32(at)];
    if (kind !== "tEXt" && kind !== "iTXt") continue;
    const content = bytes.subarray(at + 8, at + 8 + length);
    const end = content.indexOf(0);
    if (latin(content.subarray(0, end)) !== MARK) continue;
    // iTXt has flags, a language and a translated key before its text: all of them empty as the server writes it
    return kind === "tEXt" ? latin(content.subarray(end + 1)) : new TextDecoder().decode(content.subarray(end + 5));
  }
  return null;
}

function latin(bytes: Uint8Array): string {
  return new TextDecoder("latin1").decode(bytes);
}

function valuesOf(record: Json): Values {
  const options = isRecord(record["options"]) ? record["options"] : {};
  const effective = isRecord(record["effective"]) ? record["effective"] : {};
  const values: Values = { ...BLANK, prompt: plain(record["prompt"]), model: plain(record["model"]) };
  values.seed = plain(record["seed"]);
  values.useNegative = typeof options["negative_prompt"] === "string";
  const task = plain(effective["task"]).toUpperCase() as keyof typeof Task;
  if (Task[task]) values.task = Task[task];
  for (const [option, field] of Object.entries(FIELDS)) values[field] = plain(options[option]);
  return values;
}

function plain(value: unknown): string {
  return typeof value === "string" || typeof value === "number" ? String(value) : "";
}
