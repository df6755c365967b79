import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { explain } from "../api/errors";
import { Dialog } from "../app/Dialog";
import type { Artifact } from "../gen/omni_grpc/v1/media_pb";
import { useAddress } from "../jobs/Media";
import { rowsOf } from "../jobs/Params";
import { Glimpses, Progress } from "../jobs/Progress";
import { titleOf } from "../state/announcer";
import { useCell } from "../state/cell";
import { ended, type JobView } from "../state/job";
import { usePage } from "../state/page";
import { pixelsOf, psnr } from "./psnr";

/** Two jobs side by side: their pictures under one slider, how far they differ, and which settings do. */
export function CompareDialog({ a, b }: { a: string; b: string }): JSX.Element {
  const page = usePage();
  const first = useCell(page.book.cell(a));
  const second = useCell(page.book.cell(b));
  const listed = useCell(page.watcher.listed);
  const [missing, setMissing] = useState("");
  useEffect(() => {
    if (!listed) return;
    Promise.all([page.watcher.include(a), page.watcher.include(b)]).catch((error: unknown) =>
      setMissing(explain(error).message),
    );
  }, [a, b, listed, page]);
  return (
    <Dialog label="Compare" onClose={() => page.router.go({ view: "create" })} class="wide">
      {first && second ? <Both a={first} b={second} /> : <p role="status">{missing || "Asking the server"}</p>}
    </Dialog>
  );
}

function picture(job: JobView, index: number): Artifact | undefined {
  return job.artifacts.find((artifact) => artifact.index === index && artifact.mimeType.startsWith("image/"));
}

function Both({ a, b }: { a: JobView; b: JobView }): JSX.Element {
  const [index, setIndex] = useState(0);
  const [first, second] = [picture(a, index), picture(b, index)];
  const count = Math.min(a.artifacts.length, b.artifacts.length);
  return (
    <>
      {!(ended(a) && ended(b)) && (
        <div class="cards">
          {[a, b].map((job, at) => (
            <div key={job.id} class="card">
              <h3>{at === 0 ? "A" : "B"}</h3>
              <Glimpses job={job} name={titleOf(job)} />
              {job.phase === "done" ? <p>done</p> : <Progress job={job} name={titleOf(job)} />}
            </div>
          ))}
        </div>
      )}
      {[a, b].map((job, at) => job.problem && <p key={at} class="problem">{`${"AB"[at]}: ${job.problem.message}`}</p>)}
      {first && second && <Slider key={index} first={first} second={second} />}
      {count > 1 && (
        <label class="field">
          Output
          <select value={String(index)} onChange={(event) => setIndex(Number(event.currentTarget.value))}>
            {Array.from({ length: count }, (_, at) => (
              <option key={at} value={String(at)}>
                {at + 1}
              </option>
            ))}
          </select>
        </label>
      )}
      {ended(a) && ended(b) && <Differences a={a} b={b} />}
    </>
  );
}

function Slider({ first, second }: { first: Artifact; second: Artifact }): JSX.Element {
  const [left, right] = [useAddress(first.artifactId), useAddress(second.artifactId)];
  const over = useRef<HTMLImageElement>(null);
  const line = useRef<HTMLSpanElement>(null);
  const cut = (percent: number): void => {
    // by script: a style in the markup is not allowed by the page's policy
    over.current?.style.setProperty("clip-path", `inset(0 0 0 ${percent}%)`);
    line.current?.style.setProperty("left", `${percent}%`);
  };
  useEffect(() => cut(50), [left.url, right.url]);
  const problem = left.problem || right.problem;
  if (problem) return <p class="problem">{problem}</p>;
  if (!left.url || !right.url) return <span class="placeholder" aria-hidden="true" />;
  return (
    <figure class="compare">
      <div class="pair">
        <img src={left.url} alt="A" width={first.width} height={first.height} />
        <img ref={over} class="over" src={right.url} alt="B" width={second.width} height={second.height} />
        <span ref={line} class="line" aria-hidden="true" />
        <span class="tag a" aria-hidden="true">
          A
        </span>
        <span class="tag b" aria-hidden="true">
          B
        </span>
      </div>
      <input
        type="range"
        min={0}
        max={100}
        step={0.5}
        defaultValue="50"
        aria-label="How much of A is shown, in percent"
        onInput={(event) => cut(event.currentTarget.valueAsNumber)}
      />
      <figcaption>
        <Distance first={first} second={second} />
      </figcaption>
    </figure>
  );
}

/** How far two pictures are apart, computed here from their pixels. */
function Distance({ first, second }: { first: Artifact; second: Artifact }): JSX.Element {
  const page = usePage();
  const [text, setText] = useState("computing the PSNR");
  useEffect(() => {
    const measure = async (): Promise<string> => {
      const blobs = await Promise.all([first, second].map(({ artifactId }) => page.api.files.bytes(artifactId)));
      const [a, b] = await Promise.all(blobs.map(pixelsOf));
      const value = a && b ? psnr(a, b) : null;
      if (value === null) return "The sizes differ, so there is no PSNR";
      return value === Number.POSITIVE_INFINITY
        ? "PSNR: infinite, the pixels are equal"
        : `PSNR: ${value.toFixed(2)} dB`;
    };
    measure().then(setText, (error: unknown) => setText(`No PSNR: ${explain(error).message}`));
  }, [first, second, page]);
  return (
    <strong class="psnr" role="status">
      {text}
    </strong>
  );
}

/** What differs between any two jobs, and what the values themselves say. */
const OF_EVERY_JOB = new Set(["made", "kept until", "job", "defaults used"]);

function Differences({ a, b }: { a: JobView; b: JobView }): JSX.Element {
  const [left, right] = [new Map(rowsOf(a)), new Map(rowsOf(b))];
  const names = [...new Set([...left.keys(), ...right.keys()])];
  const differ = names.filter((name) => !OF_EVERY_JOB.has(name) && left.get(name) !== right.get(name));
  if (!differ.length) return <p class="soft">No setting differs.</p>;
  return (
    <table class="params" aria-label="What differs">
      <thead>
        <tr>
          <td />
          <th scope="col">A</th>
          <th scope="col">B</th>
        </tr>
      </thead>
      <tbody>
        {differ.map((name) => (
          <tr key={name}>
            <th scope="row">{name}</th>
            <td>{left.get(name) ?? ""}</td>
            <td>{right.get(name) ?? ""}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
