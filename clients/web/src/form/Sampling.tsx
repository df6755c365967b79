import type { JSX } from "preact";
import { GuidanceKind } from "../gen/omni_grpc/v1/model_pb";
import { GuidanceNorm } from "../gen/omni_grpc/v1/sampling_pb";
import { randomSeed } from "../state/actions";
import { short } from "../text";
import { Field, NumberField, SelectField, useForm } from "./Field";
import { guides, takes, TASKS, usesCfg } from "./values";

/** Steps, seed, number of outputs. */
export function Basics(): JSX.Element {
  const { values, model, change } = useForm();
  const { limits, defaults } = model;
  return (
    <div class="row">
      <NumberField
        path="sampling.steps"
        name="steps"
        label="Steps"
        min={1}
        max={limits?.maxSteps || 1000}
        standard={defaults?.steps}
      />
      <Field path="sampling.seed" label="Seed" hint="empty: random">
        {(control) => (
          <span class="joined">
            <input
              {...control}
              inputMode="numeric"
              value={values.seed}
              placeholder="random"
              onInput={(event) => change({ seed: event.currentTarget.value })}
            />
            <button type="button" class="small" aria-label="New seed" onClick={() => change({ seed: randomSeed() })}>
              New
            </button>
          </span>
        )}
      </Field>
      {(limits?.maxOutputs ?? 1) > 1 && (
        <NumberField
          path="sampling.num_outputs"
          name="outputs"
          label="Outputs"
          min={1}
          max={limits?.maxOutputs ?? 1}
          standard={defaults?.numOutputs ?? 1}
        />
      )}
    </div>
  );
}

export function Guidance(): JSX.Element | null {
  const { model } = useForm();
  const { limits, defaults } = model;
  const standard = defaults?.guidance;
  const [cfg, embedded] = [usesCfg(model), guides(model, GuidanceKind.EMBEDDED)];
  if (!cfg && !embedded) return null;
  return (
    <div class="row">
      {embedded && (
        <NumberField
          path="sampling.guidance.scale"
          name="scale"
          label="Guidance"
          min={limits?.guidanceScale?.min ?? 0}
          max={limits?.guidanceScale?.max ?? 100}
          step="any"
          standard={standard?.scale}
        />
      )}
      {cfg && (
        <NumberField
          path="sampling.guidance.true_cfg_scale"
          name="cfg"
          label="CFG scale"
          min={limits?.trueCfgScale?.min ?? 0}
          max={limits?.trueCfgScale?.max ?? 100}
          step="any"
          standard={standard?.trueCfgScale}
        />
      )}
      {cfg && standard?.scaleLowNoise !== undefined && (
        <NumberField
          path="sampling.guidance.scale_low_noise"
          name="cfgLow"
          label="CFG, low noise"
          min={limits?.trueCfgScale?.min ?? 0}
          max={limits?.trueCfgScale?.max ?? 100}
          step="any"
          standard={standard.scaleLowNoise}
        />
      )}
    </div>
  );
}

const NORMS: readonly (readonly [string, string])[] = [
  ["", "model's own"],
  [String(GuidanceNorm.NONE), "none"],
  [String(GuidanceNorm.RENORM), "renorm"],
  [String(GuidanceNorm.RENORM_CLIPPED), "renorm, clipped"],
];

/** What few change: schedule, how guidance is applied. */
export function Advanced(): JSX.Element {
  const { model } = useForm();
  const standard = model.defaults?.guidance;
  const has = (path: string): boolean => takes(model, path) && takes(model, "sampling.guidance");
  return (
    <>
      <div class="row">
        {model.schedulers.length > 0 && (
          <SelectField
            path="sampling.scheduler"
            name="scheduler"
            label="Scheduler"
            options={[
              ["", `model's own (${model.schedulers[0]})`],
              ...model.schedulers.map((name) => [name, name] as const),
            ]}
          />
        )}
        {takes(model, "options.priority") && (
          <NumberField path="options.priority" name="priority" label="Priority" min={-100} max={100} standard={0} />
        )}
      </div>
      {usesCfg(model) && (
        <div class="row">
          {has("sampling.guidance.norm") && standard?.norm !== undefined && (
            <SelectField path="sampling.guidance.norm" name="norm" label="Norm of guidance" options={NORMS} />
          )}
          {standard?.rescale !== undefined && (
            <NumberField
              path="sampling.guidance.rescale"
              name="rescale"
              label="Rescale"
              min={0}
              max={1}
              step="any"
              standard={standard.rescale}
            />
          )}
          {standard?.intervalStart !== undefined && (
            <NumberField
              path="sampling.guidance.interval_start"
              name="intervalStart"
              label="Guided from"
              min={0}
              max={1}
              step="any"
              standard={standard.intervalStart}
            />
          )}
          {standard?.intervalEnd !== undefined && (
            <NumberField
              path="sampling.guidance.interval_end"
              name="intervalEnd"
              label="Guided until"
              min={0}
              max={1}
              step="any"
              standard={standard.intervalEnd}
            />
          )}
        </div>
      )}
    </>
  );
}

const CACHES: Readonly<Record<string, string>> = {
  off: "off",
  tea_cache: "TeaCache",
  cache_dit: "DBCache",
  mag_cache: "MagCache",
  sea_cache: "SeaCache",
};

/** Of the caches that the model has: the server's setting, none, or a method. */
export function Cache(): JSX.Element | null {
  const { values, model } = useForm();
  const methods = model.cacheMethods.filter((name) => takes(model, `sampling.cache.${name}`));
  if (!methods.length) return null;
  const own = model.defaults?.cache?.kind;
  const threshold = own?.case === "teaCache" ? own.value.relL1Thresh : undefined;
  const named = own?.case === "teaCache" ? "TeaCache" : (own?.case ?? "off");
  const off = takes(model, "sampling.cache.off") ? [["off", "off"] as const] : [];
  return (
    <div class="row">
      <SelectField
        path="sampling.cache"
        name="cache"
        label="Step cache"
        options={[
          ["", `server's own (${named})`],
          ...off,
          ...methods.map((name) => [name, CACHES[name] ?? name] as const),
        ]}
      />
      {values.cache === "tea_cache" && (
        <NumberField
          path="sampling.cache.tea_cache.rel_l1_thresh"
          name="cacheThreshold"
          label="Threshold"
          min={0}
          step="any"
          standard={threshold === undefined ? undefined : Number(short(threshold))}
          hint="0: never reuse"
        />
      )}
    </div>
  );
}

export function Loras(): JSX.Element | null {
  const { values, model, change } = useForm();
  const most = model.limits?.maxLoras ?? 0;
  if (!model.loras.length || !most) return null;
  const range = model.limits?.loraScale;
  const put = (index: number, part: { id?: string; scale?: string }): void =>
    change({ loras: values.loras.map((lora, at) => (at === index ? { ...lora, ...part } : lora)) });
  return (
    <fieldset>
      <legend>LoRA adapters</legend>
      {values.loras.map((lora, index) => (
        <div class="row" key={index}>
          <Field path={`sampling.loras[${index}].lora_id`} label={`Adapter ${index + 1}`}>
            {(control) => (
              <select {...control} value={lora.id} onChange={(event) => put(index, { id: event.currentTarget.value })}>
                {model.loras.map((id) => (
                  <option key={id}>{id}</option>
                ))}
              </select>
            )}
          </Field>
          <Field path={`sampling.loras[${index}].scale`} label="Scale">
            {(control) => (
              <input
                {...control}
                type="number"
                step="any"
                min={range?.min}
                max={range?.max}
                value={lora.scale}
                placeholder="1"
                onInput={(event) => put(index, { scale: event.currentTarget.value })}
              />
            )}
          </Field>
          <button
            type="button"
            class="small low"
            aria-label={`Remove adapter ${index + 1}`}
            onClick={() => change({ loras: values.loras.filter((_, at) => at !== index) })}
          >
            Remove
          </button>
        </div>
      ))}
      {values.loras.length < most && (
        <button
          type="button"
          class="small"
          onClick={() => change({ loras: [...values.loras, { id: model.loras[0] ?? "", scale: "" }] })}
        >
          Add an adapter
        </button>
      )}
    </fieldset>
  );
}

/** What belongs to one task: strength, frames, playing time, layers. */
export function OfTask(): JSX.Element | null {
  const { values, model } = useForm();
  const task = TASKS[values.task];
  const { limits } = model;
  if (!task || !limits) return null;
  const video = task.call === "generateVideo";
  const sound = task.call === "generateAudio";
  const changes = task.slots.includes("images") || task.slots.includes("source_video");
  const { strength, fps, frameMultiple, frameOffset, minFrames, maxFrames } = limits;
  return (
    <div class="row">
      {changes && strength && takes(model, "strength") && (
        <NumberField
          path="strength"
          name="strength"
          label="Strength"
          min={strength.min}
          max={strength.max}
          step={0.05}
        />
      )}
      {values.layers !== undefined && task.label.startsWith("Layers") && takes(model, "layers") && (
        <NumberField path="layers" name="layers" label="Layers" min={1} />
      )}
      {video && takes(model, "num_frames") && (
        <NumberField
          path="num_frames"
          name="frames"
          label="Frames"
          min={minFrames}
          max={maxFrames}
          step={frameMultiple || 1}
          standard={limits.defaultFrames}
          hint={`${minFrames} to ${maxFrames}${frameMultiple > 1 ? `, ${frameMultiple}k + ${frameOffset}` : ""}`}
        />
      )}
      {video && fps && takes(model, "fps") && (
        <NumberField
          path="fps"
          name="fps"
          label="Frames per second"
          min={fps.min}
          max={fps.max}
          step="any"
          standard={limits.defaultFps}
        />
      )}
      {sound && takes(model, "duration") && (
        <NumberField
          path="duration"
          name="duration"
          label="Seconds"
          min={0}
          step="any"
          {...(limits.maxAudio ? { max: Number(limits.maxAudio.seconds) } : {})}
        />
      )}
    </div>
  );
}
