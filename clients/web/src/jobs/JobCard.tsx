import type { JSX } from "preact";
import { cancel, remove, repeat } from "../state/actions";
import { titleOf } from "../state/announcer";
import { useCell } from "../state/cell";
import { ended, type JobView } from "../state/job";
import { usePage } from "../state/page";
import { address } from "../state/route";
import { plural, span, seconds } from "../text";
import { Media } from "./Media";
import { Glimpses, Progress } from "./Progress";
import { Do } from "./Tasks";

export function JobCard({ id }: { id: string }): JSX.Element | null {
  const page = usePage();
  const job = useCell(page.book.cell(id));
  if (!job) return null;
  const name = titleOf(job);
  return (
    <article class={`card ${job.phase.replace(" ", "-")}`} aria-label={name} data-job={id} data-phase={job.phase}>
      <h3>
        <a href={address({ view: "job", id })}>{name}</a>
      </h3>
      {ended(job) ? <Ended job={job} name={name} /> : <Going job={job} name={name} />}
    </article>
  );
}

function Going({ job, name }: { job: JobView; name: string }): JSX.Element {
  const page = usePage();
  return (
    <>
      <Glimpses job={job} name={name} />
      <Progress job={job} name={name} />
      <div class="buttons">
        <Do label="Cancel" name={`Cancel ${name}`} class="small" action={() => cancel(page, job.id)} />
      </div>
    </>
  );
}

function Ended({ job, name }: { job: JobView; name: string }): JSX.Element {
  const page = usePage();
  const picked = useCell(page.picked);
  const images = job.artifacts.filter(({ mimeType }) => mimeType.startsWith("image/"));
  const compare = (): void => {
    if (picked === null) page.picked.value = job.id;
    else if (picked === job.id) page.picked.value = null;
    else {
      page.picked.value = null;
      page.router.go({ view: "compare", a: picked, b: job.id });
    }
  };
  return (
    <>
      {job.artifacts.length > 0 && (
        <a class="shots" href={address({ view: "job", id: job.id })} aria-label={`Open ${name}`}>
          {job.artifacts.slice(0, 4).map((artifact) => (
            <Media
              key={artifact.artifactId}
              artifact={artifact}
              label={`${name}, output ${artifact.index + 1}`}
              small
            />
          ))}
        </a>
      )}
      {job.problem && <p class="problem">{job.problem.message}</p>}
      <p class="facts">
        {job.phase !== "done" && <strong class="phase">{job.phase}</strong>}
        {job.note && <span>{job.note}</span>}
        {job.seeds[0] !== undefined && <span>seed {String(job.seeds[0])}</span>}
        {job.artifacts.length > 1 && <span>{plural(job.artifacts.length, "output")}</span>}
        {job.stats?.total && <span>{span(seconds(job.stats.total))}</span>}
        {job.warnings.length > 0 && <span>{plural(job.warnings.length, "warning")}</span>}
      </p>
      <div class="buttons">
        <Do label="Again" name={`Again: ${name}`} class="small" action={() => repeat(page, job, "same")} />
        <Do label="Vary" name={`Vary: ${name}`} class="small" action={() => repeat(page, job, "new")} />
        {images.length > 0 && (
          <button
            type="button"
            class="small"
            aria-label={`Compare ${name}`}
            aria-pressed={picked === job.id}
            onClick={compare}
          >
            {picked === null ? "Compare" : picked === job.id ? "Compare: pick another" : "Compare with this"}
          </button>
        )}
        <Do label="Delete" name={`Delete ${name}`} class="small" action={() => remove(page, job)} />
      </div>
    </>
  );
}
