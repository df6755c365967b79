import { Code, ConnectError } from "@connectrpc/connect";
import { explain, isAway } from "../api/errors";
import { requestOf } from "../form/request";
import { BLANK, fitting, type Medium, type Slot, type Values } from "../form/values";
import type { Artifact } from "../gen/omni_grpc/v1/media_pb";
import { Task } from "../gen/omni_grpc/v1/sampling_pb";
import { ended, type JobView } from "./job";
import type { Page } from "./page";

const SECOND_TRY_MS = 1000;

/** Random, also where the page came over plain HTTP and the browser keeps crypto.randomUUID from it. */
export function randomId(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** From 0 to 2^53 - 1, as the server takes seeds. */
export function randomSeed(): string {
  const [high = 0, low = 0] = crypto.getRandomValues(new Uint32Array(2));
  return String((high & 0x1fffff) * 2 ** 32 + low);
}

/** Makes a job. Raises Unfit, or ConnectError. */
export async function submit(
  page: Page,
  values: Values,
  labels: Readonly<Record<string, string>> = {},
): Promise<string> {
  const model = page.models.named(values.model);
  if (!model) throw new ConnectError("choose a model first: the server lists none of that name", Code.InvalidArgument);
  const { previews, embed } = page.preferences.cell.value;
  const durable = page.info.value.storage?.durable ?? false;
  const wishes = { previews, embed, durable, labels, requestId: randomId() };
  const send = async (asked: Values): Promise<string> => {
    const { job } = await page.api.jobs.createJob(requestOf(asked, model, wishes));
    if (!job) throw new ConnectError("the server answered without a job", Code.Internal);
    page.remembered.keep(job.jobId, asked);
    page.book.snapshot(job);
    return job.jobId;
  };
  try {
    return await send(values);
  } catch (error) {
    if (isAway(error)) {
      // the request has an id: what had arrived is found, and not made twice
      await new Promise((resolve) => setTimeout(resolve, SECOND_TRY_MS));
      return send(values);
    }
    if (explain(error).reason !== "ASSET_NOT_FOUND") throw error;
    const fresh = await uploadAgain(page, values);
    if (!fresh) throw error;
    return send(fresh);
  }
}

/** The values with media that the server forgot uploaded again; null where this page has their bytes no more. */
async function uploadAgain(page: Page, values: Values): Promise<Values | null> {
  const media: Partial<Record<Slot, readonly Medium[]>> = {};
  for (const [slot, list] of Object.entries(values.media) as [Slot, readonly Medium[]][]) {
    media[slot] = await Promise.all(
      list.map(async (medium) =>
        medium.blob ? { ...medium, assetId: (await page.api.files.upload(medium.blob)).assetId } : medium,
      ),
    );
  }
  const again = Object.values(media).some((list) => list.some((medium) => medium.blob));
  if (!again) return null;
  page.change({ media });
  return { ...values, media };
}

/** What was asked of a job, with the seed that it had. `complete`: this browser knows all of it. */
export function settingsOf(page: Page, job: JobView): { values: Values; complete: boolean } {
  const seed = String(job.seeds[0] ?? "");
  const kept = page.remembered.of(job.id);
  if (kept) return { values: { ...kept, seed }, complete: true };
  const { effective } = job;
  const known: Partial<Values> = { model: job.model, task: job.task, prompt: job.labels["title"] ?? "", seed };
  if (effective) {
    known.width = effective.width ? String(effective.width) : "";
    known.height = effective.height ? String(effective.height) : "";
    known.steps = String(effective.steps);
    known.frames = effective.numFrames > 1 ? String(effective.numFrames) : "";
    known.outputs = effective.seeds.length > 1 ? String(effective.seeds.length) : "";
    known.scheduler = effective.scheduler;
    known.scale = effective.guidance?.scale === undefined ? "" : String(effective.guidance.scale);
    known.cfg = effective.guidance?.trueCfgScale === undefined ? "" : String(effective.guidance.trueCfgScale);
    known.loras = effective.loras.map(({ loraId, scale }) => ({ id: loraId, scale: String(scale) }));
  }
  return { values: { ...BLANK, ...known }, complete: false };
}

/** The same again, with its seed or another one. Raises Unfit, or ConnectError. */
export async function repeat(page: Page, job: JobView, seed: "same" | "new"): Promise<string> {
  const { values } = settingsOf(page, job);
  return submit(page, seed === "same" ? values : { ...values, seed: randomSeed() });
}

export async function cancel(page: Page, id: string): Promise<void> {
  const { job } = await page.api.jobs.cancelJob({ jobId: id, reason: "cancelled on the page" });
  if (job) page.book.snapshot(job);
}

export async function cancelAll(page: Page): Promise<void> {
  await Promise.all(page.book.active.value.map((id) => cancel(page, id)));
}

/** Deletes a job and its outputs; one that goes on is cancelled first. */
export async function remove(page: Page, job: JobView): Promise<void> {
  if (!ended(job)) await cancel(page, job.id);
  try {
    await page.api.jobs.deleteJob({ jobId: job.id });
  } catch (error) {
    if (ConnectError.from(error).code !== Code.NotFound) throw error;
  }
  page.book.remove(job.id);
  page.remembered.forget(job.id);
}

/** Which task of the page's model an output can be sent to; null where there is none. */
export function editTask(page: Page, artifact: Artifact): { task: Task; slot: Slot } | null {
  const tasks = page.models.named(page.values.value.model)?.tasks ?? [];
  const wanted: [Task, Slot][] = artifact.mimeType.startsWith("image/")
    ? [
        [Task.IMAGE_EDIT, "images"],
        [Task.INPAINT, "images"],
        [Task.IMAGE_TO_IMAGE, "images"],
        [Task.IMAGE_TO_VIDEO, "first_frame"],
        [Task.LAYERED, "images"],
      ]
    : artifact.mimeType.startsWith("video/")
      ? [
          [Task.VIDEO_TO_VIDEO, "source_video"],
          [Task.VIDEO_EDIT, "source_video"],
        ]
      : [[Task.AUDIO_TO_VIDEO, "audio"]];
  const found = wanted.find(([task]) => tasks.includes(task));
  return found ? { task: found[0], slot: found[1] } : null;
}

/** Puts an output into the form as an input. */
export function sendToForm(page: Page, artifact: Artifact): void {
  const target = editTask(page, artifact);
  if (!target) return;
  const medium: Medium = {
    assetId: artifact.artifactId,
    mime: artifact.mimeType,
    name: `output ${artifact.index + 1}`,
    artifact: true,
  };
  page.change({ task: target.task, media: { [target.slot]: [medium] } });
  page.router.go({ view: "create" });
}

/** Puts the settings of a job into the form. */
export function applySettings(page: Page, job: JobView): boolean {
  const { values, complete } = settingsOf(page, job);
  const model = page.models.named(values.model) ?? page.models.list.value[0];
  page.values.value = model ? fitting(values, model) : values;
  page.router.go({ view: "create" });
  return complete;
}
