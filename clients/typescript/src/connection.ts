import { fromJson, type JsonValue } from "@bufbuild/protobuf";
import { type CallOptions, Code, ConnectError, createClient, type Transport } from "@connectrpc/connect";
import { codeFromHttpStatus, errorFromJson } from "@connectrpc/connect/protocol-connect";
import { createConnectTransport } from "@connectrpc/connect-web";
import { OmniError, refused } from "./error.js";
import { type CallFailure, fromCall } from "./failure.js";
import {
  ArtifactService,
  type UploadAssetResponse,
  UploadAssetResponseSchema,
} from "./gen/omni_grpc/v1/artifact_pb.js";
import { GenerationService } from "./gen/omni_grpc/v1/generation_pb.js";
import { JobService } from "./gen/omni_grpc/v1/job_pb.js";
import { ModelService } from "./gen/omni_grpc/v1/model_pb.js";
import { aborted, type Deadline, RECONNECT, type Reconnect, RETRY, type Retry, sleep, Starting } from "./pace.js";
import { DownloadState } from "./download.js";
import type { PartialArtifact } from "./partial.js";
import { hex, sha256 } from "./sha256.js";

/** A token, or a function that is asked for one at every call. */
export type TokenSource = string | (() => string | Promise<string>);

export interface ClientOptions {
  token?: TokenSource;
  /** Send the token without TLS to another machine, too. */
  insecure?: boolean;
  reconnect?: Partial<Reconnect>;
  retry?: Partial<Retry>;
  /** Seconds without a message after which a stream counts as lost; more than the server's heartbeats are apart. */
  silence?: number;
  /** What sends requests; `omni-grpc-client/node` has one for TLS with an own CA. */
  fetch?: typeof globalThis.fetch;
}

export interface CallLimits {
  signal?: AbortSignal | undefined;
  /** Seconds for everything that the method does. */
  timeout?: number | undefined;
}

const LOCAL = /^(localhost|.+\.localhost|127(\.\d+){3}|\[::1\])$/;

/** Node's fetch may wait forever for a connection that was reset: a call with a deadline is made anew, twice. */
const ATTEMPT_MS = 4000;

/** How one server is spoken to. */
export class Connection {
  readonly url: string;
  readonly reconnect: Reconnect;
  readonly silence: number;
  readonly jobs;
  readonly generation;
  readonly artifacts;
  readonly models;
  private readonly retry: Retry;
  private readonly token: TokenSource | undefined;
  private readonly fetch: typeof globalThis.fetch;

  constructor(address: string, options: ClientOptions) {
    this.url = checked(address, options);
    this.reconnect = { ...RECONNECT, ...options.reconnect };
    this.retry = { ...RETRY, ...options.retry };
    this.silence = options.silence ?? 60;
    this.token = options.token;
    // bound: browsers refuse to call it as somebody else's method
    this.fetch = options.fetch ?? globalThis.fetch.bind(globalThis);
    const fetch = this.fetch;
    const transport: Transport = createConnectTransport({ baseUrl: this.url, useBinaryFormat: true, fetch });
    this.jobs = createClient(JobService, transport);
    this.generation = createClient(GenerationService, transport);
    this.artifacts = createClient(ArtifactService, transport);
    this.models = createClient(ModelService, transport);
  }

  /** What every call is sent with. */
  async options(deadline: Deadline, signal?: AbortSignal): Promise<CallOptions> {
    const timeoutMs = deadline.remainingMs();
    const limits = timeoutMs === undefined ? {} : { timeoutMs };
    return { headers: await this.headers(), ...limits, ...(signal ? { signal } : {}) };
  }

  starting(deadline: Deadline): Starting {
    return new Starting(this.retry, deadline);
  }

  /** The answer to one request, which is made again where the server cannot be reached or has no room. */
  async unary<T>(call: (options: CallOptions) => Promise<T>, deadline: Deadline, signal?: AbortSignal): Promise<T> {
    const starting = this.starting(deadline);
    let cuts = 2;
    while (true) {
      const options = await this.options(deadline, signal);
      const isCut = cuts > 0 && (options.timeoutMs ?? 0) > ATTEMPT_MS;
      try {
        return await call(isCut ? { ...options, timeoutMs: ATTEMPT_MS } : options);
      } catch (thrown) {
        const ended = this.failure(thrown, signal);
        if (isCut && ended.timedOut) cuts -= 1;
        else await this.again(starting, ended, signal);
      }
    }
  }

  /** How a call failed. Throws where the caller's signal ended it. */
  failure(thrown: unknown, signal?: AbortSignal): CallFailure {
    if (signal?.aborted) throw aborted(signal);
    return fromCall(thrown, this.url);
  }

  /** Waits before a call is made again that has had no message. Throws its error where it is not. */
  async again(starting: Starting, ended: CallFailure, signal?: AbortSignal): Promise<void> {
    const pause = starting.pause(ended.error, ended.permanent);
    if (pause === undefined) throw ended.error;
    await sleep(pause, signal);
  }

  /** All bytes of an artifact, after those in `partial`. Goes on where the connection was lost. */
  async download(id: string, deadline: Deadline, signal?: AbortSignal, partial?: PartialArtifact) {
    const state = new DownloadState(this.reconnect, id, partial);
    const starting = this.starting(deadline);
    while (true) {
      try {
        const options = await this.options(deadline, signal);
        for await (const message of this.artifacts.downloadArtifact(state.request(), options)) state.accept(message);
        return state.finished();
      } catch (thrown) {
        if (thrown instanceof OmniError) throw thrown;
        const ended = this.failure(thrown, signal);
        if (!state.connected) await this.again(starting, ended, signal);
        else await sleep(deadline.within(state.lost(ended)), signal);
      }
    }
  }

  /** Stores input media, as a file: browsers cannot stream a request. */
  async upload(data: Uint8Array, mimeType: string, deadline: Deadline, signal?: AbortSignal) {
    const stored = await this.unary(
      (options) => this.post(data, mimeType, { ...options, timeoutMs: deadline.remainingMs() }),
      deadline,
      signal,
    );
    const [sent, kept] = [hex(sha256(data)), hex(stored.sha256)];
    if (sent === kept) return stored;
    const message = `the SHA-256 of the upload is ${sent}, but the server has ${kept}; upload it again`;
    throw new OmniError({ code: "INTERNAL", reason: "ARTIFACT_CORRUPT", message });
  }

  private async post(data: Uint8Array, mimeType: string, options: CallOptions): Promise<UploadAssetResponse> {
    const stop = new AbortController();
    const abort = () => stop.abort();
    options.signal?.addEventListener("abort", abort, { once: true });
    const timer = options.timeoutMs === undefined ? undefined : setTimeout(abort, options.timeoutMs);
    try {
      const headers = new Headers(options.headers);
      headers.set("Content-Type", mimeType || "application/octet-stream");
      const body = data as Uint8Array<ArrayBuffer>;
      const answer = await this.fetch(`${this.url}/files/assets`, {
        method: "POST",
        headers,
        body,
        signal: stop.signal,
      });
      if (!answer.ok) throw await httpError(answer);
      return fromJson(UploadAssetResponseSchema, (await answer.json()) as JsonValue, { ignoreUnknownFields: true });
    } catch (thrown) {
      if (!stop.signal.aborted || options.signal?.aborted) throw thrown;
      throw new ConnectError("the deadline of the upload passed", Code.DeadlineExceeded);
    } finally {
      clearTimeout(timer);
      options.signal?.removeEventListener("abort", abort);
    }
  }

  private async headers(): Promise<Record<string, string>> {
    if (this.token === undefined) return {};
    const given = typeof this.token === "string" ? this.token : await this.token();
    const token = given.trim();
    if (!/^[!-~]+$/.test(token)) throw refused("token", "is empty, or has characters that no token has");
    return { Authorization: `Bearer ${token}` };
  }
}

/** The address without a slash at its end. Throws INVALID_ARGUMENT for what is none, and TOKEN_NEEDS_TLS. */
function checked(address: string, options: ClientOptions): string {
  let url: URL;
  try {
    url = new URL(address);
  } catch {
    throw refused("url", `${JSON.stringify(address)} is no address: expected http://HOST:PORT or https://HOST:PORT`);
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") {
    throw refused("url", `${JSON.stringify(address)} begins with neither http:// nor https://`);
  }
  if (options.token !== undefined && !options.insecure && url.protocol === "http:" && !LOCAL.test(url.hostname)) {
    const message = `the token would go to ${url.host} unencrypted, where anybody on the way can take it`;
    throw refused("token", `${message}: use https:// or insecure: true`, "TOKEN_NEEDS_TLS");
  }
  return address.replace(/\/+$/, "");
}

async function httpError(answer: Response): Promise<ConnectError> {
  const fallback = new ConnectError(`HTTP ${answer.status}`, codeFromHttpStatus(answer.status));
  const text = await answer.text();
  let body: JsonValue;
  try {
    body = JSON.parse(text) as JsonValue;
  } catch {
    // not the server's own answer, but that of a proxy in between
    return fallback;
  }
  return errorFromJson(body, answer.headers, fallback);
}
