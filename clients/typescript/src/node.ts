import { readFileSync } from "node:fs";
import type { IncomingMessage } from "node:http";
import { request } from "node:https";
import { Readable } from "node:stream";
import { createSecureContext } from "node:tls";
import { refused } from "./error.js";

/** Paths of PEM files. */
export interface TlsOptions {
  /** The authorities that the server's certificate must come from. Unset: those that Node trusts. */
  ca?: string;
  /** The client's own certificate and its private key (mTLS). */
  cert?: string;
  key?: string;
}

type Secrets = { [name in keyof TlsOptions]?: Buffer };

/**
 * A `fetch` for `ClientOptions` that knows an own authority or has a client certificate, for https:// addresses. Node's
 * own takes neither. Throws INVALID_ARGUMENT, by field, for files that cannot be used.
 */
export function tlsFetch(files: TlsOptions): typeof globalThis.fetch {
  const [missing, given] = files.cert === undefined ? (["cert", "key"] as const) : (["key", "cert"] as const);
  if (files[missing] === undefined && files[given] !== undefined) {
    throw refused(missing, `${given} is given without ${missing}: a client certificate needs both`);
  }
  const secrets = read(files);
  return async (input, init) => {
    const asked = new Request(input, init);
    const body = init?.body === undefined ? undefined : Buffer.from(await asked.clone().arrayBuffer());
    return answerOf(await send(asked, body, secrets));
  };
}

function read(files: TlsOptions): Secrets {
  const secrets: Secrets = {};
  for (const field of ["ca", "cert", "key"] as const) {
    const path = files[field];
    if (path === undefined) continue;
    try {
      secrets[field] = readFileSync(path);
    } catch (error) {
      throw refused(field, `${path}: ${(error as Error).message}`);
    }
    const isPem = secrets[field].includes("-----BEGIN ");
    if (!isPem) throw refused(field, `${path} is no file in PEM`);
  }
  try {
    createSecureContext(secrets);
  } catch (error) {
    const field = files.cert === undefined ? "ca" : "key";
    throw refused(field, `${files[field]} cannot be used: ${(error as Error).message}`);
  }
  return secrets;
}

function send(asked: Request, body: Buffer | undefined, secrets: Secrets): Promise<IncomingMessage> {
  return new Promise((resolve, reject) => {
    const headers = Object.fromEntries(asked.headers);
    if (body) headers["content-length"] = String(body.length);
    const sent = request(asked.url, { method: asked.method, headers, signal: asked.signal, ...secrets }, resolve);
    // as fetch has it, with what Node says as the cause
    sent.on("error", (error) => {
      reject(asked.signal.aborted ? asked.signal.reason : new TypeError("fetch failed", { cause: error }));
    });
    sent.end(body);
  });
}

function answerOf(found: IncomingMessage): Response {
  const headers = new Headers();
  for (const [name, value] of Object.entries(found.headers)) {
    for (const one of typeof value === "string" ? [value] : (value ?? [])) headers.append(name, one);
  }
  const status = found.statusCode ?? 0;
  const isEmpty = status === 204 || status === 304;
  const body = isEmpty ? null : (Readable.toWeb(found) as unknown as ReadableStream<Uint8Array>);
  if (isEmpty) found.resume();
  return new Response(body, { status, headers });
}
