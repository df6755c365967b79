import { Cell } from "./cell";
import type { Store } from "./storage";

const KEY = "preferences";

export type Theme = "auto" | "light" | "dark";

export interface Preferences {
  theme: Theme;
  previews: boolean;
  embed: boolean;
  notify: boolean;
}

const DEFAULTS: Preferences = { theme: "auto", previews: true, embed: false, notify: false };

/** What the user of this browser chose. */
export class PreferenceBook {
  readonly cell: Cell<Preferences>;

  constructor(private readonly store: Store) {
    this.cell = new Cell({ ...DEFAULTS, ...store.read<Partial<Preferences>>(KEY, {}) });
    this.show();
  }

  change(part: Partial<Preferences>): void {
    this.cell.value = { ...this.cell.value, ...part };
    this.store.write(KEY, this.cell.value);
    this.show();
  }

  private show(): void {
    const { theme } = this.cell.value;
    const root = document.documentElement;
    if (theme === "auto") delete root.dataset["theme"];
    else root.dataset["theme"] = theme;
  }
}
