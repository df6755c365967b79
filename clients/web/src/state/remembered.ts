import { BLANK, type Medium, type Slot, type Values } from "../form/values";
import type { Store } from "./storage";

const JOBS = "jobs";
const DRAFT = "draft";
const MOST = 200;

/** What was asked of each job, kept by this browser: a Job does not carry its prompt. */
export class Remembered {
  /** What the storage has, read once and after another tab has written. */
  private jobs: Record<string, Values> | null = null;

  constructor(private readonly store: Store) {
    addEventListener("storage", () => {
      this.jobs = null;
    });
  }

  of(jobId: string): Values | undefined {
    this.jobs ??= this.store.read<Record<string, Values>>(JOBS, {});
    const kept = this.jobs[jobId];
    return kept && { ...BLANK, ...kept };
  }

  keep(jobId: string, values: Values): void {
    const { [jobId]: _, ...others } = this.store.read<Record<string, Values>>(JOBS, {});
    const newest = Object.entries(others).slice(-(MOST - 1));
    this.put(Object.fromEntries([...newest, [jobId, plain(values)]]));
  }

  forget(jobId: string): void {
    const { [jobId]: _, ...others } = this.store.read<Record<string, Values>>(JOBS, {});
    this.put(others);
  }

  private put(jobs: Record<string, Values>): void {
    this.jobs = jobs;
    this.store.write(JOBS, jobs);
  }

  draft(): Values {
    return { ...BLANK, ...this.store.read<Partial<Values>>(DRAFT, {}) };
  }

  keepDraft(values: Values): void {
    this.store.write(DRAFT, plain(values));
  }
}

/** Without the bytes of media, which no storage has room for: the server has them under their ids. */
function plain(values: Values): Values {
  const media: Partial<Record<Slot, readonly Medium[]>> = {};
  for (const [slot, list] of Object.entries(values.media) as [Slot, readonly Medium[]][]) {
    media[slot] = list.map(({ blob: _, ...rest }) => rest);
  }
  return { ...values, media };
}
