import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { explain } from "../api/errors";
import { Dialog } from "../app/Dialog";
import type { Artifact } from "../gen/omni_grpc/v1/media_pb";
import { cancel, editTask, remove, repeat, sendToForm, settingsOf, applySettings } from "../state/actions";
import { titleOf } from "../state/announcer";
import { useCell } from "../state/cell";
import { ended, type JobView } from "../state/job";
import { usePage } from "../state/page";
import { Download, Media } from "./Media";
import { Params, rowsOf } from "./Params";
import { Glimpses, Progress } from "./Progress";
import { Do } from "./Tasks";

/** One job, at an address of its own. */
export function JobDialog({ id }: { id: string }): JSX.Element {
  const page = usePage();
  const job = useCell(page.book.cell(id));
  const listed = useCell(page.watcher.listed);
  const session = useCell(page.api.session);
  const [missing, setMissing] = useState("");
  const close = (): void => page.router.go({ view: "create" });
  useEffect(() => {
    if (!listed) return;
    setMissing("");
    page.watcher.include(id).catch((error: unknown) => setMissing(explain(error).message));
  }, [id, listed, session, page]);
  return (
    <Dialog label={job ? titleOf(job) : "Job"} onClose={close} class="wide">
      {job ? <Content job={job} onClose={close} /> : <p role="status">{missing || "Asking the server"}</p>}
    </Dialog>
  );
}

function Content({ job, onClose }: { job: JobView; onClose: () => void }): JSX.Element {
  const page = usePage();
  const name = titleOf(job);
  const { values, complete } = settingsOf(page, job);
  const open = async (seed: "same" | "new"): Promise<void> => {
    page.router.go({ view: "job", id: await repeat(page, job, seed) });
  };
  return (
    <>
      {!ended(job) && <Glimpses job={job} name={name} />}
      {!ended(job) && <Progress job={job} name={name} />}
      {job.artifacts.map((artifact) => (
        <Output key={artifact.artifactId} artifact={artifact} name={name} />
      ))}
      {job.phase === "cancelled" && <p>Cancelled: {job.note || "on request"}</p>}
      {job.problem && <p class="problem">{job.problem.message}</p>}
      {job.retryable && <p class="soft">The same request may succeed later, unchanged.</p>}
      <div class="buttons">
        {!ended(job) && <Do label="Cancel" action={() => cancel(page, job.id)} />}
        {ended(job) && <Do label={job.phase === "done" ? "Again" : "Try again"} action={() => open("same")} />}
        {ended(job) && <Do label="Vary" action={() => open("new")} />}
        <button type="button" onClick={() => applySettings(page, job)}>
          Settings into the form
        </button>
        {isSecureContext && <Do label="Copy the link" action={() => navigator.clipboard.writeText(location.href)} />}
        <Do
          label="Delete"
          action={async () => {
            await remove(page, job);
            onClose();
          }}
        />
      </div>
      {!complete && (
        <p class="soft">
          This browser did not make it, so the settings are those that the server tells: of the prompt, the beginning.
        </p>
      )}
      {values.prompt && <p class="prompt">{values.prompt}</p>}
      {job.warnings.length > 0 && (
        <ul class="warnings" aria-label="Warnings">
          {job.warnings.map((warning, index) => (
            <li key={index}>
              <strong>{warning.code}</strong> {warning.message}
            </li>
          ))}
        </ul>
      )}
      <Params rows={rowsOf(job)} label="What was done" />
    </>
  );
}

function Output({ artifact, name }: { artifact: Artifact; name: string }): JSX.Element {
  const page = usePage();
  const label = `${name}, output ${artifact.index + 1}`;
  return (
    <figure class="output">
      <Media artifact={artifact} label={label} />
      <figcaption class="buttons">
        {artifact.seed !== undefined && <span>seed {String(artifact.seed)}</span>}
        {artifact.layer !== undefined && <span>layer {artifact.layer + 1}</span>}
        <Download artifact={artifact} />
        {editTask(page, artifact) && (
          <button type="button" onClick={() => sendToForm(page, artifact)}>
            Use as an input
          </button>
        )}
      </figcaption>
    </figure>
  );
}
