import type { JSX } from "preact";
import { Task } from "../gen/omni_grpc/v1/sampling_pb";
import { Field, useForm } from "./Field";
import { usesCfg } from "./values";

export function Prompt(): JSX.Element {
  const { values, model, change } = useForm();
  const most = model.limits?.maxPromptChars ?? 0;
  const over = most && values.prompt.length > most ? `${values.prompt.length} of ${most} characters` : undefined;
  const sound = values.task === Task.TEXT_TO_AUDIO;
  return (
    <>
      <Field path="prompt" label="Prompt" hint={over}>
        {(control) => (
          <textarea
            {...control}
            rows={4}
            value={values.prompt}
            placeholder="What to make"
            onInput={(event) => change({ prompt: event.currentTarget.value })}
          />
        )}
      </Field>
      {sound && (
        <Field path="text" label="Words to be sung or spoken">
          {(control) => (
            <textarea
              {...control}
              rows={2}
              value={values.text}
              onInput={(event) => change({ text: event.currentTarget.value })}
            />
          )}
        </Field>
      )}
      {usesCfg(model) && <Negative />}
    </>
  );
}

/** Unset and "" differ, so it is a switch and a text: unset is the model's default, "" the empty prompt. */
function Negative(): JSX.Element {
  const { values, change } = useForm();
  return (
    <div class="stack">
      <label class="check">
        <input
          type="checkbox"
          checked={values.useNegative}
          onChange={(event) => change({ useNegative: event.currentTarget.checked })}
        />
        Negative prompt of my own
      </label>
      {values.useNegative && (
        <Field path="negative_prompt" label="Negative prompt">
          {(control) => (
            <textarea
              {...control}
              rows={2}
              value={values.negative}
              placeholder="What to steer away from; may stay empty"
              onInput={(event) => change({ negative: event.currentTarget.value })}
            />
          )}
        </Field>
      )}
    </div>
  );
}
