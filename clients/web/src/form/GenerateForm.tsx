import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { explain } from "../api/errors";
import { type Model, ModelState } from "../gen/omni_grpc/v1/model_pb";
import { randomId, randomSeed, submit } from "../state/actions";
import { useCell } from "../state/cell";
import { type Page, usePage } from "../state/page";
import { CompareWith, type Rival, rivalValues } from "./CompareWith";
import { covers, FormContext } from "./Field";
import { Inputs } from "./Inputs";
import { ExtraField, FormatField, ModelField, TaskField, Wishes } from "./Choices";
import { Prompt } from "./Prompt";
import { Unfit } from "./request";
import { Advanced, Basics, Cache, Guidance, Loras, OfTask } from "./Sampling";
import { Size } from "./Size";
import { BLANK, fitting, type Values } from "./values";
import { useIntake } from "./intake";

const NONE: ReadonlyMap<string, string> = new Map();

interface Refusal {
  message: string;
  fields: ReadonlyMap<string, string>;
}

/** Makes the job, or the two jobs, that the form asks for, and shows them. Raises Unfit, or ConnectError. */
async function generate(page: Page, values: Values, rival: Rival | null): Promise<void> {
  if (!rival) {
    await submit(page, values);
    return;
  }
  const first = { ...values, seed: values.seed.trim() || randomSeed() };
  const second = rivalValues(first, rival);
  const model = page.models.named(second.model);
  const labels = { compare: randomId() };
  const a = await submit(page, first, labels);
  const b = await submit(page, model ? fitting(second, model) : second, labels);
  page.router.go({ view: "compare", a, b });
}

function refusalOf(error: unknown): Refusal {
  if (error instanceof Unfit) return { message: error.message, fields: error.fields };
  const { message, fields } = explain(error);
  return { message, fields };
}

export function GenerateForm(): JSX.Element {
  const page = usePage();
  const models = useCell(page.models.list);
  const values = useCell(page.values);
  const trouble = useCell(page.models.problem);
  const model = models.find(({ name }) => name === values.model) ?? models[0];
  useEffect(() => {
    if (!model) return;
    const fit = fitting(page.values.value, model);
    if (fit.model !== page.values.value.model || fit.task !== page.values.value.task) page.values.value = fit;
  }, [model, page]);
  if (!model) return <Missing message={trouble?.message ?? "Asking the server for its models"} />;
  return <FormOf model={model} models={models} values={values} />;
}

function Missing({ message }: { message: string }): JSX.Element {
  return (
    <section class="panel" aria-label="Generate">
      <h2>Generate</h2>
      <p role="status">{message}</p>
    </section>
  );
}

function FormOf({ model, models, values }: { model: Model; models: readonly Model[]; values: Values }): JSX.Element {
  const page = usePage();
  const [refusal, setRefusal] = useState<Refusal | null>(null);
  const [busy, setBusy] = useState(false);
  const [rival, setRival] = useState<Rival | null>(null);
  const form = useRef<HTMLFormElement>(null);
  const problems = refusal?.fields ?? NONE;
  useIntake(model);

  const send = async (): Promise<void> => {
    if (busy) return;
    setBusy(true);
    setRefusal(null);
    try {
      await generate(page, page.values.value, rival);
    } catch (error) {
      setRefusal(refusalOf(error));
    } finally {
      setBusy(false);
    }
  };
  useEffect(() => {
    if (refusal) focusFirst(form.current, refusal.fields);
  }, [refusal]);
  const change = (part: Partial<Values>): void => page.change(part);

  return (
    <FormContext.Provider value={{ values, model, change, problems }}>
      <form
        ref={form}
        class="panel form"
        aria-label="Generate"
        noValidate
        onSubmit={(event) => {
          event.preventDefault();
          void send();
        }}
        onKeyDown={(event) => {
          if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
            event.preventDefault();
            void send();
          }
        }}
      >
        <h2>Generate</h2>
        <div class="row">
          <ModelField models={models} />
          <TaskField />
        </div>
        <Prompt />
        <Inputs />
        <Size />
        <Basics />
        <Guidance />
        <OfTask />
        <Loras />
        <Cache />
        <details open={[...problems.keys()].some((field) => ADVANCED.some((path) => covers(path, field)))}>
          <summary>More settings</summary>
          <Advanced />
          <FormatField />
          <ExtraField />
          <Wishes />
        </details>
        <details>
          <summary>Compare two settings</summary>
          <CompareWith rival={rival} onChange={setRival} />
        </details>
        <Unplaced form={form.current} refusal={refusal} />
        <div class="buttons submit">
          <button type="submit" class="primary" aria-disabled={busy} aria-keyshortcuts="Control+Enter">
            {rival ? "Generate both" : "Generate"}
          </button>
          <button type="button" onClick={() => (page.values.value = fitting(BLANK, model))}>
            Reset
          </button>
          <small class="soft">Ctrl+Enter</small>
          {model.state !== ModelState.READY && <small class="soft">the model is not ready</small>}
        </div>
      </form>
    </FormContext.Provider>
  );
}

const ADVANCED = ["sampling.scheduler", "options", "sampling.guidance", "output_format", "sampling.extra"];

/** Puts the focus on the first control that something is wrong with. */
function focusFirst(form: HTMLFormElement | null, fields: ReadonlyMap<string, string>): void {
  for (const part of form?.querySelectorAll<HTMLElement>("[data-path]") ?? []) {
    if ([...fields.keys()].some((field) => covers(part.dataset["path"] ?? "", field))) {
      part.querySelector<HTMLElement>("input, select, textarea, button")?.focus();
      return;
    }
  }
}

/** What was refused and has no control of its own. */
function Unplaced({ form, refusal }: { form: HTMLFormElement | null; refusal: Refusal | null }): JSX.Element | null {
  if (!refusal) return null;
  const paths = [...(form?.querySelectorAll<HTMLElement>("[data-path]") ?? [])].map(
    (part) => part.dataset["path"] ?? "",
  );
  const left = [...refusal.fields].filter(([field]) => !paths.some((path) => covers(path, field)));
  const count = refusal.fields.size - left.length;
  const texts = refusal.fields.size ? left.map(([field, text]) => `${field}: ${text}`) : [refusal.message];
  return (
    <div class="problem" role="alert">
      {count > 0 && <p>{count === 1 ? "One field needs" : `${count} fields need`} another value.</p>}
      {texts.map((text) => (
        <p key={text}>{text}</p>
      ))}
    </div>
  );
}
