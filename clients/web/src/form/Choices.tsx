import type { JSX } from "preact";
import { AudioFormat, ImageFormat, VideoFormat } from "../gen/omni_grpc/v1/media_pb";
import { type Model, ModelState } from "../gen/omni_grpc/v1/model_pb";
import { PreviewMethod } from "../gen/omni_grpc/v1/options_pb";
import { useCell } from "../state/cell";
import { usePage } from "../state/page";
import { words } from "../text";
import { Field, SelectField, useForm } from "./Field";
import { fitting, takes, TASKS, tasksOf } from "./values";

export function ModelField({ models }: { models: readonly Model[] }): JSX.Element {
  const page = usePage();
  const { values, model } = useForm();
  const state = (one: Model): string =>
    one.state === ModelState.READY ? "" : ` (${words(ModelState[one.state] ?? "unknown")})`;
  const about = [
    model.dtype,
    ...Object.entries(model.quantizedLayers).map(([scheme, count]) => `${count} layers ${scheme}`),
  ];
  return (
    <Field path="model" label="Model" hint={model.error?.message ?? about.filter(Boolean).join(", ")}>
      {(control) => (
        <select
          {...control}
          value={model.name}
          onChange={(event) => {
            const chosen = models.find(({ name }) => name === event.currentTarget.value);
            if (chosen) page.values.value = fitting(values, chosen);
          }}
        >
          {models.map((one) => (
            <option key={one.name} value={one.name}>
              {one.name + state(one)}
            </option>
          ))}
        </select>
      )}
    </Field>
  );
}

export function TaskField(): JSX.Element {
  const { values, model, change } = useForm();
  const tasks = tasksOf(model);
  return (
    <Field path="task" label="Make">
      {(control) => (
        <select
          {...control}
          value={String(values.task)}
          onChange={(event) => change({ task: Number(event.currentTarget.value), format: "" })}
        >
          {tasks.map((task) => (
            <option key={task} value={String(task)}>
              {TASKS[task]?.label}
            </option>
          ))}
        </select>
      )}
    </Field>
  );
}

/** The formats that the model writes and a browser shows. */
export function FormatField(): JSX.Element | null {
  const { values, model } = useForm();
  const call = TASKS[values.task]?.call;
  const names: (readonly [number, string])[] =
    call === "generateVideo"
      ? model.videoFormats.map((format) => [format, words(VideoFormat[format] ?? "")])
      : call === "generateAudio"
        ? model.audioFormats.map((format) => [format, words(AudioFormat[format] ?? "")])
        : model.imageFormats
            .filter((format) => format !== ImageFormat.RAW_RGB8)
            .map((format) => [format, words(ImageFormat[format] ?? "")]);
  if (names.length < 2) return null;
  return (
    <SelectField
      path="output_format"
      name="format"
      label="File format"
      options={[["", "default"], ...names.map(([format, name]) => [String(format), name] as const)]}
    />
  );
}

/** Arguments of a pipeline by name, as the model's schema has them. */
export function ExtraField(): JSX.Element | null {
  const { values, model, change } = useForm();
  const schema = model.extraParamsSchema;
  if (!schema) return null;
  const properties = schema["properties"];
  const names = typeof properties === "object" && properties !== null ? Object.keys(properties).join(", ") : "";
  return (
    <Field path="sampling.extra" label="Extra parameters (JSON)" hint={names && `of this model: ${names}`}>
      {(control) => (
        <textarea
          {...control}
          rows={3}
          spellcheck={false}
          value={values.extra}
          onInput={(event) => change({ extra: event.currentTarget.value })}
        />
      )}
    </Field>
  );
}

/** What the page does with each job. */
export function Wishes(): JSX.Element {
  const page = usePage();
  const { model } = useForm();
  const { previews, embed, notify } = useCell(page.preferences.cell);
  const askToNotify = async (wanted: boolean): Promise<void> => {
    const allowed = wanted && "Notification" in window && (await Notification.requestPermission()) === "granted";
    page.preferences.change({ notify: allowed });
  };
  return (
    <div class="stack">
      {model.previewMethods.includes(PreviewMethod.LATENT_RGB) && (
        <label class="check">
          <input
            type="checkbox"
            checked={previews}
            onChange={(event) => page.preferences.change({ previews: event.currentTarget.checked })}
          />
          Preview of every step
        </label>
      )}
      {takes(model, "options.embed_parameters") && (
        <label class="check">
          <input
            type="checkbox"
            checked={embed}
            onChange={(event) => page.preferences.change({ embed: event.currentTarget.checked })}
          />
          Write prompt and settings into the files
        </label>
      )}
      {"Notification" in window && isSecureContext && (
        <label class="check">
          <input type="checkbox" checked={notify} onChange={(event) => void askToNotify(event.currentTarget.checked)} />
          Notify me at the end, while this tab is in the background
        </label>
      )}
    </div>
  );
}
