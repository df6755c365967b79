import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { explain } from "../api/errors";
import { usePage } from "../state/page";
import { plural } from "../text";
import { controlId, problemOf, useForm } from "./Field";
import { MaskPainter } from "./MaskPainter";
import { type Medium, type Slot, SLOT_LABELS, takes, TASKS } from "./values";

const SEVERAL: readonly Slot[] = ["images", "reference_images"];

function accepts(slot: Slot): string {
  if (slot.endsWith("video")) return "video/*";
  return slot === "audio" || slot === "reference" ? "audio/*" : "image/*";
}

/** The media that the task takes. */
export function Inputs(): JSX.Element | null {
  const { values, model } = useForm();
  const slots = (TASKS[values.task]?.slots ?? []).filter((slot) => takes(model, slot));
  if (!slots.length) return null;
  return (
    <fieldset class="inputs">
      <legend>Inputs</legend>
      {slots.map((slot) => (slot === "mask" ? <MaskInput key={slot} /> : <SlotInput key={slot} slot={slot} />))}
    </fieldset>
  );
}

/** Uploads files, and puts them into a slot of the form. */
export function useUpload(): (slot: Slot, files: readonly File[], most: number) => Promise<void> {
  const page = usePage();
  return async (slot, files, most) => {
    const stored = await Promise.all(
      files.map(async (file): Promise<Medium> => {
        const { assetId } = await page.api.files.upload(file);
        return { assetId, mime: file.type, name: file.name, artifact: false, blob: file };
      }),
    );
    const { media } = page.values.value;
    // a mask of another image would not fit
    const rest = slot === "images" ? { mask: [] } : {};
    const list = most === 1 ? stored.slice(0, 1) : [...(media[slot] ?? []), ...stored].slice(0, most);
    page.change({ media: { ...media, ...rest, [slot]: list } });
  };
}

function SlotInput({ slot }: { slot: Slot }): JSX.Element {
  const { values, model, change, problems } = useForm();
  const upload = useUpload();
  const [busy, setBusy] = useState(false);
  const [failed, setFailed] = useState("");
  const [over, setOver] = useState(false);
  const most = SEVERAL.includes(slot) ? Math.max(model.limits?.maxInputImages ?? 1, 1) : 1;
  const media = values.media[slot] ?? [];
  const needed = TASKS[values.task]?.needs.includes(slot);
  const problem = failed || problemOf(problems, slot);
  const id = controlId(slot);
  const add = async (files: readonly File[]): Promise<void> => {
    if (!files.length) return;
    setBusy(true);
    setFailed("");
    try {
      await upload(slot, files, most);
    } catch (error) {
      setFailed(explain(error).message);
    } finally {
      setBusy(false);
    }
  };
  const drop = (event: DragEvent): void => {
    event.preventDefault();
    event.stopPropagation();
    setOver(false);
    void add([...(event.dataTransfer?.files ?? [])]);
  };
  return (
    <div
      class={`slot ${over ? "over" : ""}`}
      data-path={slot}
      onDragOver={(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={() => setOver(false)}
      onDrop={drop}
    >
      <label for={id}>
        {SLOT_LABELS[slot]}
        <span class="soft"> {needed ? "(needed)" : "(optional)"}</span>
      </label>
      <input
        id={id}
        type="file"
        accept={accepts(slot)}
        multiple={most > 1}
        aria-invalid={problem !== ""}
        aria-describedby={`${id}-hint${problem ? ` ${id}-problem` : ""}`}
        onChange={(event) => {
          void add([...(event.currentTarget.files ?? [])]);
          event.currentTarget.value = "";
        }}
      />
      <small class="hint" id={`${id}-hint`}>
        {busy ? "uploading" : `Choose, drop or paste; at most ${plural(most, "file")}`}
      </small>
      {problem && (
        <small class="problem" id={`${id}-problem`} role="alert">
          {problem}
        </small>
      )}
      <Chosen
        media={media}
        label={SLOT_LABELS[slot]}
        onRemove={(at) => change({ media: { ...values.media, [slot]: media.filter((_, index) => index !== at) } })}
      />
    </div>
  );
}

function Chosen(props: {
  media: readonly Medium[];
  label: string;
  onRemove: (at: number) => void;
}): JSX.Element | null {
  if (!props.media.length) return null;
  return (
    <ul class="chosen">
      {props.media.map((medium, index) => (
        <li key={medium.assetId}>
          <Thumbnail medium={medium} />
          <span class="name">{medium.name}</span>
          <button
            type="button"
            class="small"
            aria-label={`Remove ${medium.name} from ${props.label}`}
            onClick={() => props.onRemove(index)}
          >
            Remove
          </button>
        </li>
      ))}
    </ul>
  );
}

/** An address of a medium's bytes in this page; null while, and where, there is none. */
export function useMediumUrl(medium: Medium | undefined): string | null {
  const page = usePage();
  const [url, setUrl] = useState<string | null>(null);
  useEffect(() => {
    setUrl(null);
    if (!medium) return undefined;
    if (medium.blob) {
      const made = URL.createObjectURL(medium.blob);
      setUrl(made);
      return () => URL.revokeObjectURL(made);
    }
    let here = true;
    if (medium.artifact) {
      page.api.files.address(medium.assetId).then(
        (address) => here && setUrl(address),
        (error: unknown) => console.warn("an input cannot be shown", error),
      );
    }
    return () => {
      here = false;
    };
  }, [medium, page]);
  return url;
}

function Thumbnail({ medium }: { medium: Medium }): JSX.Element {
  const url = useMediumUrl(medium);
  const label = medium.name;
  if (!url) return <span class="thumb">{medium.mime.split("/")[0]}</span>;
  if (medium.mime.startsWith("image/")) return <img class="thumb" src={url} alt={label} />;
  if (medium.mime.startsWith("video/"))
    return <video class="thumb" src={url} muted preload="metadata" aria-label={label} />;
  return <span class="thumb">sound</span>;
}

/** The mask: painted over the first image. Uploaded when the painter is closed. */
function MaskInput(): JSX.Element {
  const { values, change, problems } = useForm();
  const page = usePage();
  const image = values.media.images?.[0];
  const mask = values.media.mask?.[0];
  const url = useMediumUrl(image);
  const [painting, setPainting] = useState(false);
  const [failed, setFailed] = useState("");
  const opener = useRef<HTMLButtonElement>(null);
  const problem = failed || problemOf(problems, "mask");
  const save = async (blob: Blob): Promise<void> => {
    setPainting(false);
    opener.current?.focus();
    try {
      const { assetId } = await page.api.files.upload(blob);
      const painted: Medium = { assetId, mime: blob.type, name: "painted mask", artifact: false, blob };
      change({ media: { ...page.values.value.media, mask: [painted] } });
      setFailed("");
    } catch (error) {
      setFailed(explain(error).message);
    }
  };
  return (
    <div class="slot" data-path="mask">
      <span class="label" id={`${controlId("mask")}-label`}>
        Mask <span class="soft">(white is made anew)</span>
      </span>
      <button
        ref={opener}
        id={controlId("mask")}
        type="button"
        disabled={!url}
        aria-describedby={`${controlId("mask")}-label${problem ? ` ${controlId("mask")}-problem` : ""}`}
        onClick={() => setPainting(true)}
      >
        {mask ? "Paint the mask again" : "Paint the mask"}
      </button>
      {!image && <small class="hint">Add an input image first</small>}
      {image && !url && <small class="hint">To paint over it, choose the input image again</small>}
      {problem && (
        <small class="problem" id={`${controlId("mask")}-problem`} role="alert">
          {problem}
        </small>
      )}
      <Chosen
        media={mask ? [mask] : []}
        label="Mask"
        onRemove={() => change({ media: { ...values.media, mask: [] } })}
      />
      {painting && url && <MaskPainter image={url} onSave={save} onClose={() => setPainting(false)} />}
    </div>
  );
}
