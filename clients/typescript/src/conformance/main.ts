/** This client's program of the shared list of behaviors: clients/conformance/README.md. */
import { readFile } from "node:fs/promises";
import { text } from "node:stream/consumers";
import {
  Client,
  type ClientOptions,
  hex,
  type JobEvent,
  type JobStream,
  OmniError,
  type Result,
  sha256,
} from "../index.js";
import { tlsFetch } from "../node.js";

type Values = Record<string, unknown>;

interface Asked {
  behaviour: string;
  url: string;
  ca?: string;
  token?: string;
  model: string;
  prompt: string;
  width?: number;
  height?: number;
  steps?: number;
  seed?: number;
  image: string;
  file: string;
  artifact_id: string;
  job_id: string;
  after_seq: number;
  run_timeout: number;
  timeout: number;
  output_format: string;
  request_id: string;
  other_prompt: string;
  tokens: string[];
  other_ca: string;
}

function client(asked: Asked, changes: ClientOptions = {}, ca = asked.ca): Client {
  const tls = ca === undefined ? {} : { fetch: tlsFetch({ ca }) };
  const token = asked.token === undefined ? {} : { token: asked.token };
  return new Client(asked.url, { ...tls, ...token, ...changes });
}

function settings<T extends Values>(asked: Asked, changes: T = {} as T) {
  const { model, width, height, steps, seed } = asked;
  const given = Object.entries({ width, height, steps, seed }).filter(([, value]) => value !== undefined);
  return {
    model,
    ...(Object.fromEntries(given) as Partial<Pick<Asked, "width" | "height" | "steps" | "seed">>),
    ...changes,
  };
}

const snake = (name = "") => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
const digest = (data: Uint8Array) => hex(sha256(data));

function outputs(result: Result): Values[] {
  return result.artifacts.map(({ mimeType, seed }, i) => ({
    mime_type: mimeType,
    sha256: digest(result.files[i] as Uint8Array),
    seed: Number(seed),
  }));
}

/** The error that a call ends with. */
async function refusal(call: () => unknown): Promise<Values> {
  try {
    await call();
  } catch (error) {
    if (!(error instanceof OmniError)) throw error;
    return {
      code: error.code,
      reason: error.reason,
      fields: Object.fromEntries(error.violations.map(({ field, description }) => [field, description])),
      retry_after: error.retryAfter ?? null,
      job_id: error.jobId,
    };
  }
  throw new Error("the call succeeded");
}

async function failed(asked: Asked, changes: Values = {}): Promise<Values> {
  return { error: await refusal(() => client(asked).generateImage(asked.prompt, settings(asked, changes))) };
}

async function watched(stream: JobStream): Promise<Values> {
  const events: JobEvent[] = [];
  for await (const event of stream) events.push(event);
  return {
    seqs: events.map(({ seq }) => Number(seq)),
    kinds: events.map(({ event }) => snake(event.case)),
    outputs: outputs(await stream.result()),
  };
}

async function models(server: Client): Promise<string[]> {
  return (await server.listModels()).map(({ name }) => name);
}

async function download(asked: Asked): Promise<Values> {
  const data = await client(asked).download(asked.artifact_id);
  return { sha256: digest(data), size_bytes: data.length };
}

const BEHAVIOURS: Record<string, (asked: Asked) => Promise<Values>> = {
  async generate(asked) {
    const result = await client(asked).generateImage(asked.prompt, settings(asked));
    const { steps, width } = result.effective ?? {};
    return { job_id: result.jobId, outputs: outputs(result), steps, width, warnings: result.warnings.length };
  },
  async progress(asked) {
    const kinds: string[] = [];
    const steps: number[][] = [];
    await client(asked).generateImage(asked.prompt, {
      ...settings(asked),
      onEvent: ({ event }) => kinds.push(snake(event.case)),
      onStep: ({ step, totalSteps }) => steps.push([step, totalSteps]),
    });
    return { kinds, steps };
  },
  async previews(asked) {
    const previews: Values[] = [];
    await client(asked).generateImage(asked.prompt, {
      ...settings(asked, { previewEverySteps: 1 }),
      onPreview: ({ mimeType, data }, { step }) => previews.push({ step, mime_type: mimeType, sha256: digest(data) }),
    });
    return { previews };
  },
  async unset(asked) {
    const server = client(asked);
    const results: Result[] = [];
    for (const seed of [{}, { seed: 0 }, { seed: 0 }]) {
      results.push(await server.generateImage(asked.prompt, settings(asked, seed)));
    }
    const [, first, second] = results.map(({ files }) => digest(files[0] as Uint8Array));
    return { seeds: results.map(({ seeds }) => Number(seeds[0])), same: first === second };
  },
  async edit(asked) {
    const server = client(asked);
    const stored = await server.upload(await readFile(asked.image));
    const result = await server.editImage(asked.prompt, settings(asked, { images: [stored] }));
    return { asset_id: stored.assetId, outputs: outputs(result) };
  },
  async upload(asked) {
    const stored = await client(asked).upload(await readFile(asked.file));
    return { asset_id: stored.assetId, size_bytes: Number(stored.sizeBytes), sha256: hex(stored.sha256) };
  },
  download,
  corrupt: async (asked) => ({ error: await refusal(() => download(asked)) }),
  resume: async (asked) => watched(await client(asked).stream("image", asked.prompt, settings(asked))),
  watch: (asked) => watched(client(asked).watchJob(asked.job_id, { afterSeq: asked.after_seq })),
  async cancel(asked) {
    const abort = new AbortController();
    const error = await refusal(() =>
      client(asked).generateImage(asked.prompt, {
        ...settings(asked),
        signal: abort.signal,
        onStep: () => abort.abort(),
      }),
    );
    return { job_id: error["job_id"] };
  },
  cancelled: (asked) => failed(asked),
  failure: (asked) => failed(asked, { runTimeout: asked.run_timeout }),
  fields: (asked) => failed(asked),
  names: (asked) => failed(asked, { outputFormat: asked.output_format }),
  deadline: (asked) => failed(asked, { timeout: asked.timeout }),
  async idempotent(asked) {
    const server = client(asked);
    const options = settings(asked, { requestId: asked.request_id });
    const made = [await server.createJob("image", asked.prompt, options)];
    made.push(await server.createJob("image", asked.prompt, options));
    const error = await refusal(() => server.createJob("image", asked.other_prompt, options));
    return { job_ids: made.map(({ jobId }) => jobId), error };
  },
  retry: async (asked) => ({ models: await models(client(asked)) }),
  async retry_info(asked) {
    return { job_id: (await client(asked).createJob("image", asked.prompt, settings(asked))).jobId };
  },
  async token(asked) {
    const tokens = asked.tokens.values();
    const server = client(asked, { token: () => tokens.next().value ?? "" });
    return { error: await refusal(() => server.listModels()), models: await models(server) };
  },
  async tls(asked) {
    return {
      models: await models(client(asked)),
      error: await refusal(() => models(client(asked, {}, asked.other_ca))),
      refused: await refusal(() => new Client("http://server.example:50051", { token: "secret" })),
    };
  },
};

const asked = JSON.parse(await text(process.stdin)) as Asked;
const behaviour = BEHAVIOURS[asked.behaviour];
if (!behaviour) throw new Error(`there is no behavior ${asked.behaviour}`);
process.stdout.write(JSON.stringify(await behaviour(asked)));
