import { type ComponentChildren, createContext, type JSX } from "preact";
import { useContext } from "preact/hooks";
import type { Model } from "../gen/omni_grpc/v1/model_pb";
import type { Text, Values } from "./values";

/** What the parts of the form share. */
export interface Form {
  values: Values;
  model: Model;
  change: (part: Partial<Values>) => void;
  /** Request field, as a path -> what is wrong with it. */
  problems: ReadonlyMap<string, string>;
}

export const FormContext = createContext<Form | null>(null);

export function useForm(): Form {
  const form = useContext(FormContext);
  if (!form) throw new Error("a field is outside of the form");
  return form;
}

export function controlId(path: string): string {
  return `f-${path.replace(/\W+/g, "-")}`;
}

/** Whether what is said of `field` belongs to the control of `path`: itself, a part of it, or one of several names. */
export function covers(path: string, field: string): boolean {
  return field.split(", ").some((name) => name === path || name.startsWith(`${path}.`) || name.startsWith(`${path}[`));
}

export function problemOf(problems: ReadonlyMap<string, string>, path: string): string {
  return [...problems].flatMap(([field, text]) => (covers(path, field) ? [text] : [])).join("; ");
}

interface FieldProps {
  path: string;
  label: string;
  hint?: string;
  class?: string;
  children: (control: {
    id: string;
    "aria-invalid": boolean;
    "aria-describedby": string | undefined;
  }) => ComponentChildren;
}

/** A label, a control, and what is wrong with it. */
export function Field({ path, label, hint, children, ...rest }: FieldProps): JSX.Element {
  const { problems } = useForm();
  const [id, problem] = [controlId(path), problemOf(problems, path)];
  const described = [hint && `${id}-hint`, problem && `${id}-problem`].filter(Boolean).join(" ");
  return (
    <div class={`field ${rest.class ?? ""}`} data-path={path}>
      <label for={id}>{label}</label>
      {children({ id, "aria-invalid": problem !== "", "aria-describedby": described || undefined })}
      {hint && (
        <small class="hint" id={`${id}-hint`}>
          {hint}
        </small>
      )}
      {problem && (
        <small class="problem" id={`${id}-problem`}>
          {problem}
        </small>
      )}
    </div>
  );
}

interface NumberProps {
  path: string;
  name: Text;
  label: string;
  min?: number;
  max?: number;
  step?: number | "any";
  /** What the model does where nothing is given. */
  standard?: number | undefined;
  hint?: string;
  class?: string;
}

export function NumberField({
  path,
  name,
  label,
  min,
  max,
  step = 1,
  standard,
  hint,
  ...rest
}: NumberProps): JSX.Element {
  const { values, change } = useForm();
  const range = min !== undefined && max !== undefined ? `${min} to ${max}` : undefined;
  return (
    <Field path={path} label={label} hint={hint ?? range} class={rest.class ?? ""}>
      {(control) => (
        <input
          {...control}
          type="number"
          inputMode={step === 1 ? "numeric" : "decimal"}
          min={min}
          max={max}
          step={step}
          value={values[name]}
          placeholder={standard === undefined ? "" : String(standard)}
          onInput={(event) => change({ [name]: event.currentTarget.value })}
        />
      )}
    </Field>
  );
}

interface SelectProps {
  path: string;
  name: Text;
  label: string;
  options: readonly (readonly [value: string, label: string])[];
  hint?: string;
}

export function SelectField({ path, name, label, options, hint }: SelectProps): JSX.Element {
  const { values, change } = useForm();
  return (
    <Field path={path} label={label} hint={hint}>
      {(control) => (
        <select {...control} value={values[name]} onChange={(event) => change({ [name]: event.currentTarget.value })}>
          {options.map(([value, text]) => (
            <option key={value} value={value}>
              {text}
            </option>
          ))}
        </select>
      )}
    </Field>
  );
}
