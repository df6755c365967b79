import { create } from "@bufbuild/protobuf";
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import { Api } from "../api/clients";
import {
  type ServerStats,
  type GetServerInfoResponse,
  GetServerInfoResponseSchema,
} from "../gen/omni_grpc/v1/admin_pb";
import type { Values } from "../form/values";
import { Announcer } from "./announcer";
import { Cell } from "./cell";
import { JobBook } from "./jobs";
import { Models } from "./models";
import { PreferenceBook } from "./preferences";
import { Remembered } from "./remembered";
import { Router } from "./route";
import { Store } from "./storage";
import { Watcher } from "./watcher";

/** Values that a chart shows. */
export const CHART_VALUES = 120;

/** Everything that the components of the page share. */
export class Page {
  readonly store = new Store();
  readonly api = new Api(this.store);
  readonly book = new JobBook();
  readonly watcher = new Watcher(this.api, this.book);
  readonly models = new Models(this.api);
  readonly preferences = new PreferenceBook(this.store);
  readonly remembered = new Remembered(this.store);
  readonly router = new Router();
  readonly announcer = new Announcer(this.book, this.preferences);
  /** What is in the form. */
  readonly values: Cell<Values>;
  /** What the server is; empty for callers who may not know. */
  readonly info = new Cell<GetServerInfoResponse>(create(GetServerInfoResponseSchema));
  readonly stats = new Cell<readonly ServerStats[]>([]);
  /** Times of the newest steps of all jobs, in seconds, oldest first. */
  readonly stepTimes = new Cell<readonly number[]>([]);
  /** The first of two jobs to compare. */
  readonly picked = new Cell<string | null>(null);
  /** The second time of each second, for times left that count down between steps. */
  readonly now = new Cell<number>(Date.now());

  constructor() {
    this.values = new Cell(this.remembered.draft());
    this.values.subscribe((values) => this.remembered.keepDraft(values));
    this.book.listen(({ step, stepSeconds }, before) => {
      if (stepSeconds === null || step === before?.step) return;
      this.stepTimes.value = [...this.stepTimes.value, stepSeconds].slice(-CHART_VALUES);
    });
  }

  start(): void {
    void this.watcher.run();
    void this.models.run();
    void this.askInfo();
    setInterval(() => {
      this.now.value = Date.now();
    }, 1000);
    let last = this.api.session.value;
    this.api.session.subscribe((session) => {
      const before = last;
      last = session;
      // another caller has other jobs
      if (session.token !== before.token) this.book.clear();
      if (session.needed !== null) return;
      this.models.again();
      this.watcher.again();
      void this.askInfo();
    });
  }

  change(part: Partial<Values>): void {
    this.values.value = { ...this.values.value, ...part };
  }

  private async askInfo(): Promise<void> {
    try {
      this.info.value = await this.api.admin.getServerInfo({});
    } catch (error) {
      // callers without the scope make jobs all the same; the server tab says what is missing
      console.info("the server tells this caller nothing of itself", error);
    }
  }
}

export const PageContext = createContext<Page | null>(null);

export function usePage(): Page {
  const page = useContext(PageContext);
  if (!page) throw new Error("a component is outside of the page");
  return page;
}
