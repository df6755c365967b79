import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { cancelAll } from "../state/actions";
import { useCell } from "../state/cell";
import { usePage } from "../state/page";
import { plural } from "../text";
import { JobCard } from "./JobCard";
import { Do } from "./Tasks";

const SHOWN_AT_FIRST = 24;

/** What goes on now. */
export function Going(): JSX.Element | null {
  const page = usePage();
  const active = useCell(page.book.active);
  if (!active.length) return null;
  return (
    <section class="panel" aria-label="In progress">
      <header>
        <h2>In progress</h2>
        <span class="soft">{plural(active.length, "job")}</span>
        <Do label="Cancel all" class="small" action={() => cancelAll(page)} />
      </header>
      <div class="cards">
        {active.map((id) => (
          <JobCard key={id} id={id} />
        ))}
      </div>
    </section>
  );
}

/** What has ended, newest first. */
export function Gallery(): JSX.Element {
  const page = usePage();
  const order = useCell(page.book.order);
  const active = new Set(useCell(page.book.active));
  const older = useCell(page.watcher.older);
  const listed = useCell(page.watcher.listed);
  const [shown, setShown] = useState(SHOWN_AT_FIRST);
  const over = order.filter((id) => !active.has(id));
  const more = async (): Promise<void> => {
    setShown(shown + SHOWN_AT_FIRST);
    if (over.length <= shown + SHOWN_AT_FIRST && older) await page.watcher.loadOlder();
  };
  return (
    <section class="panel" id="results" tabIndex={-1} aria-label="Results">
      <header>
        <h2>Results</h2>
        <span class="soft">{over.length > 0 && plural(over.length, "job")}</span>
      </header>
      {over.length === 0 && listed && <p class="soft">What you make is shown here.</p>}
      <div class="cards">
        {over.slice(0, shown).map((id) => (
          <JobCard key={id} id={id} />
        ))}
      </div>
      {(over.length > shown || older) && <Do label="Show more" action={more} />}
    </section>
  );
}
