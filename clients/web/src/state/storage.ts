const PREFIX = "omni_grpc.";

/**
 * What the browser keeps for the page. Where it keeps nothing (private windows, full storage, storage turned off), the
 * page works and forgets: reads give the fallback, and `lost` says why a write did not last.
 */
export class Store {
  lost: string | null = null;

  read<T>(key: string, fallback: T): T {
    const text = this.attempt(() => localStorage.getItem(PREFIX + key));
    if (!text) return fallback;
    try {
      return JSON.parse(text) as T;
    } catch (error) {
      // of another version of the page: not worth more than a word in the console
      console.warn(`what was kept as ${key} cannot be read`, error);
      return fallback;
    }
  }

  write<T>(key: string, value: T): void {
    this.attempt(() => localStorage.setItem(PREFIX + key, JSON.stringify(value)));
  }

  remove(key: string): void {
    this.attempt(() => localStorage.removeItem(PREFIX + key));
  }

  session(key: string): string | null {
    return this.attempt(() => sessionStorage.getItem(PREFIX + key)) ?? null;
  }

  sessionWrite(key: string, value: string): void {
    this.attempt(() => sessionStorage.setItem(PREFIX + key, value));
  }

  sessionRemove(key: string): void {
    this.attempt(() => sessionStorage.removeItem(PREFIX + key));
  }

  private attempt<T>(action: () => T): T | undefined {
    try {
      return action();
    } catch (error) {
      this.lost = error instanceof Error ? error.message : String(error);
      return undefined;
    }
  }
}
