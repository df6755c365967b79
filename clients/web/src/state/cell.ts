import { useEffect, useReducer } from "preact/hooks";

/** A value that tells those who look at it when it is another one. */
export class Cell<T> {
  private readonly watchers = new Set<(value: T) => void>();

  constructor(private current: T) {}

  get value(): T {
    return this.current;
  }

  set value(next: T) {
    if (Object.is(next, this.current)) return;
    this.current = next;
    for (const watcher of [...this.watchers]) watcher(next);
  }

  /** Calls `watcher` at each change until the function that it returns is called. */
  subscribe(watcher: (value: T) => void): () => void {
    this.watchers.add(watcher);
    return () => this.watchers.delete(watcher);
  }
}

/** The value of a cell, in a component that is drawn again whenever it changes. */
export function useCell<T>(cell: Cell<T>): T {
  const [, redraw] = useReducer((count: number) => count + 1, 0);
  useEffect(() => {
    const drawn = cell.value;
    const stop = cell.subscribe(() => redraw(undefined));
    // it may have changed between the first drawing and this effect
    if (!Object.is(drawn, cell.value)) redraw(undefined);
    return stop;
  }, [cell]);
  return cell.value;
}
