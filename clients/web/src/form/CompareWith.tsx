import type { JSX } from "preact";
import type { Model } from "../gen/omni_grpc/v1/model_pb";
import { usePage } from "../state/page";
import { useCell } from "../state/cell";
import { useForm } from "./Field";
import { takes, usesCfg, type Values } from "./values";

export type Rival = Partial<Pick<Values, "model" | "cache" | "steps" | "cfg" | "scale" | "scheduler">> & {
  withoutLoras?: boolean;
};

interface CompareProps {
  rival: Rival | null;
  onChange: (rival: Rival | null) => void;
}

/** What the second of two jobs with one seed has otherwise. */
export function CompareWith({ rival, onChange }: CompareProps): JSX.Element {
  const page = usePage();
  const { values, model: own } = useForm();
  const models = useCell(page.models.list);
  const model = models.find(({ name }) => name === rival?.model) ?? own;
  const put = (part: Rival): void => onChange({ ...rival, ...part });
  return (
    <div class="stack">
      <label class="check">
        <input
          type="checkbox"
          checked={rival !== null}
          onChange={(event) => onChange(event.currentTarget.checked ? {} : null)}
        />
        Make a second one with the same seed, to compare
      </label>
      {rival && (
        <fieldset>
          <legend>The second has otherwise</legend>
          <div class="row">
            {models.length > 1 && (
              <Choice
                label="Model"
                value={rival.model ?? ""}
                options={[["", "the same"], ...models.map(({ name }) => [name, name] as const)]}
                onChange={(name) => put({ model: name || undefined })}
              />
            )}
            {model.cacheMethods.length > 0 && (
              <Choice
                label="Step cache"
                value={rival.cache ?? "same"}
                options={cacheChoices(model)}
                onChange={(cache) => put({ cache: cache === "same" ? undefined : cache })}
              />
            )}
            {model.schedulers.length > 1 && (
              <Choice
                label="Scheduler"
                value={rival.scheduler ?? ""}
                options={[["", "the same"], ...model.schedulers.map((name) => [name, name] as const)]}
                onChange={(scheduler) => put({ scheduler: scheduler || undefined })}
              />
            )}
            <Amount label="Steps" value={rival.steps} onChange={(steps) => put({ steps })} />
            {usesCfg(model) ? (
              <Amount label="CFG scale" value={rival.cfg} onChange={(cfg) => put({ cfg })} />
            ) : (
              <Amount label="Guidance" value={rival.scale} onChange={(scale) => put({ scale })} />
            )}
          </div>
          {values.loras.length > 0 && (
            <label class="check">
              <input
                type="checkbox"
                checked={rival.withoutLoras ?? false}
                onChange={(event) => put({ withoutLoras: event.currentTarget.checked })}
              />
              Without LoRA adapters
            </label>
          )}
        </fieldset>
      )}
    </div>
  );
}

function cacheChoices(model: Model): (readonly [string, string])[] {
  const off = takes(model, "sampling.cache.off") ? [["off", "off"] as const] : [];
  return [
    ["same", "the same"],
    ["", "server's own"],
    ...off,
    ...model.cacheMethods.map((name) => [name, name] as const),
  ];
}

/** The values of the second job. */
export function rivalValues(values: Values, { withoutLoras, ...part }: Rival): Values {
  const given = Object.fromEntries(Object.entries(part).filter(([, value]) => value !== undefined));
  return { ...values, ...given, ...(withoutLoras ? { loras: [] } : {}) };
}

interface ChoiceProps {
  label: string;
  value: string;
  options: readonly (readonly [string, string])[];
  onChange: (value: string) => void;
}

function Choice({ label, value, options, onChange }: ChoiceProps): JSX.Element {
  return (
    <label class="field">
      {label}
      <select value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {options.map(([name, text]) => (
          <option key={name} value={name}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

interface AmountProps {
  label: string;
  value: string | undefined;
  onChange: (value: string | undefined) => void;
}

function Amount({ label, value, onChange }: AmountProps): JSX.Element {
  return (
    <label class="field">
      {label}
      <input
        type="number"
        step="any"
        value={value ?? ""}
        placeholder="the same"
        onInput={(event) => onChange(event.currentTarget.value || undefined)}
      />
    </label>
  );
}
