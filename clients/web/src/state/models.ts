import type { Model } from "../gen/omni_grpc/v1/model_pb";
import { ModelState } from "../gen/omni_grpc/v1/model_pb";
import type { Api } from "../api/clients";
import { explain, type Problem } from "../api/errors";
import { Cell } from "./cell";

const SETTLED_MS = 30_000;
const UNSETTLED_MS = 1500;

/** The models of the server, asked for again and again: they load, fall asleep, fail. */
export class Models {
  readonly list = new Cell<readonly Model[]>([]);
  readonly problem = new Cell<Problem | null>(null);
  private wake: (() => void) | null = null;

  constructor(private readonly api: Api) {}

  async run(): Promise<never> {
    for (;;) {
      try {
        const { models } = await this.api.models.listModels({});
        this.list.value = models;
        this.problem.value = null;
      } catch (error) {
        this.problem.value = explain(error);
      }
      const settled = this.list.value.some((model) => model.state === ModelState.READY) && !this.problem.value;
      await new Promise<void>((resolve) => {
        const timer = setTimeout(resolve, settled ? SETTLED_MS : UNSETTLED_MS);
        this.wake = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    }
  }

  again(): void {
    this.wake?.();
  }

  named(name: string): Model | undefined {
    return this.list.value.find((model) => model.name === name);
  }
}
