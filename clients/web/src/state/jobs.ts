import type { JobEvent } from "../gen/omni_grpc/v1/event_pb";
import type { Job } from "../gen/omni_grpc/v1/job_pb";
import { Cell } from "./cell";
import { afterEvent, ended, fromSnapshot, type JobView } from "./job";

/** All jobs that the page knows, each in a cell of its own: a step of one draws no other again. */
export class JobBook {
  /** Ids, newest first. */
  readonly order = new Cell<readonly string[]>([]);
  /** Ids of those that have not ended, newest first. */
  readonly active = new Cell<readonly string[]>([]);
  private readonly cells = new Map<string, Cell<JobView | undefined>>();
  private readonly listeners = new Set<(now: JobView, before: JobView | undefined) => void>();

  cell(id: string): Cell<JobView | undefined> {
    let cell = this.cells.get(id);
    if (!cell) {
      cell = new Cell<JobView | undefined>(undefined);
      this.cells.set(id, cell);
    }
    return cell;
  }

  get(id: string): JobView | undefined {
    return this.cells.get(id)?.value;
  }

  all(): JobView[] {
    return this.order.value.flatMap((id) => this.get(id) ?? []);
  }

  /** Calls `listener` at each change of a job until the function that it returns is called. */
  listen(listener: (now: JobView, before: JobView | undefined) => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  snapshot(job: Job, { whole = false } = {}): void {
    const before = this.get(job.jobId);
    // an answer that was overtaken by the events of the stream
    if (before && job.lastSeq < before.seq) return;
    const now = fromSnapshot(job, before);
    // a watch without a cursor goes on right after its snapshot
    this.put(whole && job.lastSeq > now.seq ? { ...now, seq: job.lastSeq } : now, before);
  }

  event(event: JobEvent): void {
    const before = this.get(event.jobId);
    if (before) this.put(afterEvent(before, event), before);
  }

  remove(id: string): void {
    const cell = this.cells.get(id);
    if (cell) cell.value = undefined;
    this.cells.delete(id);
    this.order.value = this.order.value.filter((other) => other !== id);
    this.active.value = this.active.value.filter((other) => other !== id);
  }

  /** Forgets all of them: another caller sees others. */
  clear(): void {
    for (const id of this.order.value) this.remove(id);
  }

  private put(now: JobView, before: JobView | undefined): void {
    if (now === before) return;
    this.cell(now.id).value = now;
    if (!before) this.order.value = this.with(this.order.value, now);
    if (!before || ended(now) !== ended(before)) {
      const others = this.active.value.filter((id) => id !== now.id);
      this.active.value = ended(now) ? others : this.with(others, now);
    }
    for (const listener of this.listeners) listener(now, before);
  }

  /** The ids, newest first, with one more. */
  private with(ids: readonly string[], job: JobView): string[] {
    const at = ids.findIndex((id) => (this.get(id)?.created ?? 0) < job.created);
    return at < 0 ? [...ids, job.id] : [...ids.slice(0, at), job.id, ...ids.slice(at)];
  }
}
