import { Code, ConnectError } from "@connectrpc/connect";
import { codeFromHttpStatus, errorFromJson } from "@connectrpc/connect/protocol-connect";
import type { JsonValue } from "@bufbuild/protobuf";

const MARGIN_MS = 60_000;

export interface Uploaded {
  assetId: string;
  /** Milliseconds since 1970. */
  expires: number;
}

interface Address {
  url: string;
  until: number;
}

/** The bytes of outputs and uploads, over plain HTTP. */
export class Files {
  private readonly addresses = new Map<string, Promise<Address>>();

  constructor(
    private readonly base: string,
    private readonly token: () => string,
  ) {}

  /** Stores input media. Raises ConnectError. */
  async upload(file: Blob): Promise<Uploaded> {
    const answer = await this.ask("/files/assets", { method: "POST", body: file }, { "Content-Type": file.type });
    const stored = (await answer.json()) as { assetId: string; expireTime?: string };
    return { assetId: stored.assetId, expires: stored.expireTime ? Date.parse(stored.expireTime) : Infinity };
  }

  /** An address of an output that an <img> or <video> can load without a token. Raises ConnectError. */
  async address(artifactId: string): Promise<string> {
    const known = await this.addresses.get(artifactId);
    if (known && known.until > Date.now() + MARGIN_MS) return known.url;
    const asked = this.askAddress(artifactId);
    this.addresses.set(artifactId, asked);
    try {
      return (await asked).url;
    } catch (error) {
      this.addresses.delete(artifactId);
      throw error;
    }
  }

  /** Asks for another address the next time. */
  forget(artifactId: string): void {
    this.addresses.delete(artifactId);
  }

  /** The bytes of an output. Raises ConnectError. */
  async bytes(artifactId: string): Promise<Blob> {
    return (await this.ask(`/files/${encodeURIComponent(artifactId)}`, {})).blob();
  }

  private async askAddress(artifactId: string): Promise<Address> {
    const answer = await this.ask(`/files/${encodeURIComponent(artifactId)}/address`, {});
    const { url } = (await answer.json()) as { url: string };
    const expires = new URL(url, this.base).searchParams.get("expires");
    // by the origin of this page: its policy lets it load nothing from the address that others know the server by
    return { url: this.base + url.slice(url.indexOf("/files/")), until: expires ? Number(expires) * 1000 : Infinity };
  }

  private async ask(path: string, init: RequestInit, headers: Record<string, string> = {}): Promise<Response> {
    const token = this.token();
    if (token) headers["Authorization"] = `Bearer ${token}`;
    let answer: Response;
    try {
      answer = await fetch(this.base + path, { ...init, headers });
    } catch (error) {
      throw new ConnectError(
        error instanceof Error ? error.message : String(error),
        Code.Unknown,
        undefined,
        [],
        error,
      );
    }
    if (answer.ok) return answer;
    const fallback = new ConnectError(`${path}: HTTP ${answer.status}`, codeFromHttpStatus(answer.status));
    let body: JsonValue;
    try {
      body = (await answer.json()) as JsonValue;
    } catch {
      throw fallback;
    }
    throw errorFromJson(body, answer.headers, fallback);
  }
}
