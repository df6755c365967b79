import type { JSX } from "preact";
import type { ModelLimits } from "../gen/omni_grpc/v1/model_pb";
import { NumberField, useForm } from "./Field";
import { TASKS } from "./values";

const RATIOS: readonly (readonly [string, number])[] = [
  ["1:1", 1],
  ["4:3", 4 / 3],
  ["3:4", 3 / 4],
  ["16:9", 16 / 9],
  ["9:16", 9 / 16],
];

/** Width and height of a ratio with about as many pixels as the model's own size, in legal multiples. */
export function sizeOf(ratio: number, limits: ModelLimits): [number, number] {
  const multiple = Math.max(limits.sizeMultiple, 1);
  const pixels = Math.max(limits.defaultWidth * limits.defaultHeight, multiple * multiple);
  const legal = (side: number, least: number, most: number): number => {
    const rounded = Math.round(side / multiple) * multiple;
    return Math.min(Math.max(rounded, least || multiple), most || rounded);
  };
  const height = Math.sqrt(pixels / ratio);
  return [legal(height * ratio, limits.minWidth, limits.maxWidth), legal(height, limits.minHeight, limits.maxHeight)];
}

export function Size(): JSX.Element | null {
  const { values, model, change } = useForm();
  const { limits } = model;
  const task = TASKS[values.task];
  if (!limits || !task || task.call === "generateAudio") return null;
  const follows = task.slots.length > 0;
  const hint = `${limits.minWidth} to ${limits.maxWidth}, in steps of ${limits.sizeMultiple}`;
  const standard = (value: number): number | undefined => (follows || !value ? undefined : value);
  return (
    <fieldset>
      <legend>Size {follows && <span class="soft">(empty: as the input)</span>}</legend>
      <div class="row">
        <NumberField
          path="width"
          name="width"
          label="Width"
          min={limits.minWidth}
          max={limits.maxWidth}
          step={limits.sizeMultiple}
          standard={standard(limits.defaultWidth)}
          hint={hint}
        />
        <NumberField
          path="height"
          name="height"
          label="Height"
          min={limits.minHeight}
          max={limits.maxHeight}
          step={limits.sizeMultiple}
          standard={standard(limits.defaultHeight)}
          hint={hint}
        />
      </div>
      <div class="buttons" role="group" aria-label="Aspect ratio">
        {RATIOS.map(([name, ratio]) => (
          <button
            key={name}
            type="button"
            class="small"
            onClick={() => {
              const [width, height] = sizeOf(ratio, limits);
              change({ width: String(width), height: String(height) });
            }}
          >
            {name}
          </button>
        ))}
        <button type="button" class="small" onClick={() => change({ width: values.height, height: values.width })}>
          Swap
        </button>
        <button type="button" class="small" onClick={() => change({ width: "", height: "" })}>
          Default
        </button>
      </div>
    </fieldset>
  );
}
