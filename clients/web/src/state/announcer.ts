import { plural } from "../text";
import { Cell } from "./cell";
import { ended, type JobView, percent } from "./job";
import type { JobBook } from "./jobs";
import type { PreferenceBook } from "./preferences";

const STEP_PERCENT = 25;

export function titleOf(job: JobView): string {
  return job.labels["title"] || `job ${job.id.slice(0, 8)}`;
}

/** Says what becomes of the jobs that were seen running: to screen readers, in the tab's title, and as notifications. */
export class Announcer {
  /** What a screen reader says next. */
  readonly said = new Cell<string>("");
  private readonly heard = new Map<string, number>();

  constructor(
    private readonly book: JobBook,
    private readonly preferences: PreferenceBook,
  ) {
    book.listen((now, before) => this.hear(now, before));
    book.active.subscribe(() => this.showTitle());
  }

  private hear(now: JobView, before: JobView | undefined): void {
    this.showTitle();
    if (!before || (ended(before) && ended(now))) return;
    const name = titleOf(now);
    if (ended(now)) {
      this.heard.delete(now.id);
      this.finish(now, name);
      return;
    }
    const part = Math.floor(percent(now) / STEP_PERCENT) * STEP_PERCENT;
    if (now.phase !== before.phase && now.phase === "waiting" && now.position !== null) {
      this.say(`${name}: waiting, ${plural(now.position, "job")} before it`);
    } else if (part > (this.heard.get(now.id) ?? 0)) {
      this.heard.set(now.id, part);
      this.say(`${name}: ${part} percent`);
    }
  }

  private finish(now: JobView, name: string): void {
    const failed = now.phase === "failed" ? `failed: ${now.problem?.message ?? "no reason given"}` : now.phase;
    this.say(`${name}: ${failed}`);
    const { notify } = this.preferences.cell.value;
    if (notify && document.hidden && "Notification" in window && Notification.permission === "granted") {
      new Notification(name, { body: failed, tag: now.id });
    }
  }

  private say(text: string): void {
    this.said.value = text;
  }

  private showTitle(): void {
    const active = this.book.active.value.flatMap((id) => this.book.get(id) ?? []);
    const mean = active.reduce((sum, job) => sum + percent(job), 0) / Math.max(active.length, 1);
    const title = active.length ? `${Math.floor(mean)} % - omni_grpc` : "omni_grpc";
    if (document.title !== title) document.title = title;
  }
}
