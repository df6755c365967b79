import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { useCell } from "../state/cell";
import { ended, type Glimpse, type JobView, percent } from "../state/job";
import { usePage } from "../state/page";
import { plural, short, span } from "../text";

/** How far a job is: phase, steps, noise level, time left, cache hits. */
export function Progress({ job, name }: { job: JobView; name: string }): JSX.Element {
  const done = percent(job);
  return (
    <div class="progress">
      <progress max={100} value={done} aria-label={`${name}: progress`}>
        {done} %
      </progress>
      <p class="facts">
        <strong class="phase">{job.cancelling ? "cancelling" : job.phase}</strong>
        <span class="percent">{done} %</span>
        {facts(job).map((fact) => (
          <span key={fact.replace(/\d+/g, "")}>{fact}</span>
        ))}
        <TimeLeft job={job} />
      </p>
    </div>
  );
}

function facts(job: JobView): string[] {
  const list: string[] = [];
  if (job.position !== null)
    list.push(job.position === 0 ? "next in the queue" : `${plural(job.position, "job")} before it`);
  if (job.step > 0) list.push(`step ${job.step} of ${job.steps}`);
  if (job.segment) list.push(job.segment);
  if (job.sigma !== null) list.push(`noise ${short(job.sigma)}`);
  if (job.stepSeconds !== null) list.push(`${span(job.stepSeconds)} a step`);
  if (job.rowsReused > 0) list.push(`cache ${job.rowsReused} of ${job.rows}`);
  if (job.note) list.push(job.note);
  return list;
}

function TimeLeft({ job }: { job: JobView }): JSX.Element | null {
  const page = usePage();
  useCell(page.now);
  if (job.due === null || ended(job) || job.phase === "decoding") return null;
  return <span>{span(Math.max(job.due - Date.now(), 0) / 1000)} left</span>;
}

/** The newest pictures of the half-made outputs. */
export function Glimpses({ job, name }: { job: JobView; name: string }): JSX.Element | null {
  if (!job.glimpses.length) return null;
  return (
    <div class="glimpses">
      {job.glimpses.map((glimpse, index) => (
        <GlimpseImage key={index} glimpse={glimpse} label={`${name}: preview ${index + 1}`} />
      ))}
    </div>
  );
}

/** Drawn to a canvas: an <img> with a new address for every step would flicker, and keep each in a cache. */
function GlimpseImage({ glimpse, label }: { glimpse: Glimpse; label: string }): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  const newest = useRef(glimpse);
  newest.current = glimpse;
  useEffect(() => {
    void draw(canvas, glimpse, () => newest.current === glimpse);
  }, [glimpse]);
  return <canvas ref={canvas} width={glimpse.width} height={glimpse.height} role="img" aria-label={label} />;
}

async function draw(
  target: { current: HTMLCanvasElement | null },
  glimpse: Glimpse,
  isNewest: () => boolean,
): Promise<void> {
  try {
    const picture = await createImageBitmap(new Blob([new Uint8Array(glimpse.data)], { type: glimpse.mime }));
    const pen = target.current?.getContext("2d");
    // a newer one may have been decoded first
    if (pen && isNewest()) {
      pen.drawImage(picture, 0, 0, pen.canvas.width, pen.canvas.height);
      // for who measures how late it is
      pen.canvas.dispatchEvent(new CustomEvent("drawn", { bubbles: true, detail: glimpse.time }));
    }
    picture.close();
  } catch (error) {
    // the next step brings another one
    console.warn("a preview cannot be shown", error);
  }
}
