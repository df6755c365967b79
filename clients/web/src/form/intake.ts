import { useEffect } from "preact/hooks";
import type { Model } from "../gen/omni_grpc/v1/model_pb";
import { Task } from "../gen/omni_grpc/v1/sampling_pb";
import { usePage } from "../state/page";
import { explain } from "../api/errors";
import { settingsIn } from "./embedded";
import { useUpload } from "./Inputs";
import { fitting, type Slot, TASKS } from "./values";

const IMAGE_TASKS: readonly (readonly [Task, Slot])[] = [
  [Task.IMAGE_EDIT, "images"],
  [Task.INPAINT, "images"],
  [Task.IMAGE_TO_IMAGE, "images"],
  [Task.IMAGE_TO_VIDEO, "first_frame"],
  [Task.LAYERED, "images"],
];

/**
 * Takes in what is pasted or dropped anywhere on the page: a file of the server fills the form with the settings that it
 * carries, any other image becomes an input.
 */
export function useIntake(model: Model): void {
  const page = usePage();
  const upload = useUpload();
  useEffect(() => {
    const take = async (files: readonly File[]): Promise<void> => {
      const image = files.find((file) => file.type.startsWith("image/"));
      if (!image) return;
      try {
        const settings = await settingsIn(image);
        if (settings) {
          page.values.value = fitting(settings, page.models.named(settings.model) ?? model);
          page.announcer.said.value = `Took the settings of ${image.name}`;
          return;
        }
        const { values } = page;
        const slots = TASKS[values.value.task]?.slots ?? [];
        const target =
          IMAGE_TASKS.find(([task, slot]) => slots.includes(slot) && model.tasks.includes(task)) ??
          IMAGE_TASKS.find(([task]) => model.tasks.includes(task));
        if (!target) {
          page.announcer.said.value = `${model.name} takes no images`;
          return;
        }
        if (!slots.includes(target[1])) page.change({ task: target[0] });
        await upload(target[1], [image], target[1] === "images" ? Math.max(model.limits?.maxInputImages ?? 1, 1) : 1);
        page.announcer.said.value = `${image.name} is an input now`;
      } catch (error) {
        page.announcer.said.value = `${image.name}: ${explain(error).message}`;
      }
    };
    const paste = (event: ClipboardEvent): void => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (!files.length) return;
      event.preventDefault();
      void take(files);
    };
    const over = (event: DragEvent): void => event.preventDefault();
    const drop = (event: DragEvent): void => {
      event.preventDefault();
      void take([...(event.dataTransfer?.files ?? [])]);
    };
    document.addEventListener("paste", paste);
    document.addEventListener("dragover", over);
    document.addEventListener("drop", drop);
    return () => {
      document.removeEventListener("paste", paste);
      document.removeEventListener("dragover", over);
      document.removeEventListener("drop", drop);
    };
  }, [model, page]);
}
