import { type Model, GuidanceKind } from "../gen/omni_grpc/v1/model_pb";
import { Task } from "../gen/omni_grpc/v1/sampling_pb";

/** The fields of a request that take media. */
export type Slot =
  | "images"
  | "mask"
  | "first_frame"
  | "last_frame"
  | "source_video"
  | "reference_images"
  | "control_video"
  | "mask_video"
  | "audio"
  | "reference";

/** A medium that was uploaded, or an output of an earlier job. `blob`: what to upload again once the server forgot it. */
export interface Medium {
  assetId: string;
  mime: string;
  name: string;
  /** An artifact is not uploaded, and its bytes are fetched to be shown. */
  artifact: boolean;
  blob?: Blob;
}

export interface Adapter {
  id: string;
  scale: string;
}

/** What is in the form, as it was typed: "" is "not given", which gets the model's default. */
export interface Values {
  model: string;
  task: Task;
  prompt: string;
  useNegative: boolean;
  negative: string;
  width: string;
  height: string;
  steps: string;
  seed: string;
  outputs: string;
  scale: string;
  cfg: string;
  cfgLow: string;
  norm: string;
  rescale: string;
  intervalStart: string;
  intervalEnd: string;
  scheduler: string;
  loras: readonly Adapter[];
  /** "", "off", or the name of a method. */
  cache: string;
  cacheThreshold: string;
  strength: string;
  layers: string;
  frames: string;
  fps: string;
  text: string;
  duration: string;
  format: string;
  extra: string;
  priority: string;
  media: Readonly<Partial<Record<Slot, readonly Medium[]>>>;
}

export type Text = {
  [K in keyof Values]: Values[K] extends string ? (string extends Values[K] ? K : never) : never;
}[keyof Values];

export const BLANK: Values = {
  model: "",
  task: Task.TEXT_TO_IMAGE,
  prompt: "",
  useNegative: false,
  negative: "",
  width: "",
  height: "",
  steps: "",
  seed: "",
  outputs: "",
  scale: "",
  cfg: "",
  cfgLow: "",
  norm: "",
  rescale: "",
  intervalStart: "",
  intervalEnd: "",
  scheduler: "",
  loras: [],
  cache: "",
  cacheThreshold: "",
  strength: "",
  layers: "",
  frames: "",
  fps: "",
  text: "",
  duration: "",
  format: "",
  extra: "",
  priority: "",
  media: {},
};

export type Call = "generateImage" | "editImage" | "generateVideo" | "generateAudio";

export interface TaskForm {
  call: Call;
  label: string;
  slots: readonly Slot[];
  /** Slots without which the task cannot be. */
  needs: readonly Slot[];
}

export const TASKS: Readonly<Partial<Record<Task, TaskForm>>> = {
  [Task.TEXT_TO_IMAGE]: { call: "generateImage", label: "Image from text", slots: [], needs: [] },
  [Task.IMAGE_EDIT]: { call: "editImage", label: "Edit images", slots: ["images"], needs: ["images"] },
  [Task.INPAINT]: { call: "editImage", label: "Inpaint (mask)", slots: ["images", "mask"], needs: ["images", "mask"] },
  [Task.IMAGE_TO_IMAGE]: { call: "editImage", label: "Image from image", slots: ["images"], needs: ["images"] },
  [Task.LAYERED]: { call: "editImage", label: "Layers of an image", slots: ["images"], needs: ["images"] },
  [Task.TEXT_TO_VIDEO]: { call: "generateVideo", label: "Video from text", slots: [], needs: [] },
  [Task.IMAGE_TO_VIDEO]: {
    call: "generateVideo",
    label: "Video from images",
    slots: ["first_frame", "last_frame", "reference_images"],
    needs: [],
  },
  [Task.VIDEO_TO_VIDEO]: {
    call: "generateVideo",
    label: "Video from video",
    slots: ["source_video"],
    needs: ["source_video"],
  },
  [Task.VIDEO_EDIT]: {
    call: "generateVideo",
    label: "Edit a video",
    slots: ["source_video", "mask_video", "control_video", "reference_images"],
    needs: [],
  },
  [Task.AUDIO_TO_VIDEO]: {
    call: "generateVideo",
    label: "Video from sound",
    slots: ["audio", "first_frame", "reference_images"],
    needs: ["audio"],
  },
  [Task.TEXT_TO_AUDIO_VIDEO]: {
    call: "generateVideo",
    label: "Video with sound",
    slots: ["first_frame"],
    needs: [],
  },
  [Task.TEXT_TO_AUDIO]: { call: "generateAudio", label: "Sound from text", slots: ["reference"], needs: [] },
};

export const SLOT_LABELS: Readonly<Record<Slot, string>> = {
  images: "Input images",
  mask: "Mask",
  first_frame: "First frame",
  last_frame: "Last frame",
  source_video: "Source video",
  reference_images: "Reference images",
  control_video: "Control video",
  mask_video: "Mask video",
  audio: "Sound",
  reference: "Reference sound",
};

/** Whether a request to the model may have this field, by its path; what the model refuses, it lists. */
export function takes(model: Model, path: string): boolean {
  return !model.refusals.some(({ feature }) => feature === path || path.startsWith(`${feature}.`));
}

export function guides(model: Model, kind: GuidanceKind): boolean {
  return model.guidanceKinds.includes(kind);
}

export function usesCfg(model: Model): boolean {
  return guides(model, GuidanceKind.TRUE_CFG);
}

/** The tasks of a model that the page has a form for. */
export function tasksOf(model: Model): Task[] {
  return model.tasks.filter((task) => TASKS[task]);
}

/** Values that this model can be asked for: what it has no field for is blank, a task that it lacks is its first. */
export function fitting(values: Values, model: Model): Values {
  const tasks = tasksOf(model);
  const task = tasks.includes(values.task) ? values.task : (tasks[0] ?? values.task);
  return {
    ...values,
    model: model.name,
    task,
    scheduler: model.schedulers.includes(values.scheduler) ? values.scheduler : "",
    loras: values.loras.filter(({ id }) => model.loras.includes(id)),
    cache: values.cache === "off" || model.cacheMethods.includes(values.cache) ? values.cache : "",
    cfg: usesCfg(model) ? values.cfg : "",
    scale: guides(model, GuidanceKind.EMBEDDED) ? values.scale : "",
    useNegative: usesCfg(model) && values.useNegative,
    extra: model.extraParamsSchema ? values.extra : "",
  };
}
