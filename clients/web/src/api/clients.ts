import { type Client, Code, ConnectError, createClient, type Interceptor, type Transport } from "@connectrpc/connect";
import { createConnectTransport } from "@connectrpc/connect-web";
import { AdminService } from "../gen/omni_grpc/v1/admin_pb";
import { ArtifactService } from "../gen/omni_grpc/v1/artifact_pb";
import { JobService } from "../gen/omni_grpc/v1/job_pb";
import { ModelService } from "../gen/omni_grpc/v1/model_pb";
import { Cell } from "../state/cell";
import type { Store } from "../state/storage";
import { Files } from "./files";

const TOKEN = "token";

/** What the server wants to know of the caller. `needed`: it asked for a token, and why. */
export interface Session {
  token: string;
  needed: string | null;
}

/** All that the page asks of its server, on its one origin. */
export class Api {
  readonly session: Cell<Session>;
  readonly jobs: Client<typeof JobService>;
  readonly models: Client<typeof ModelService>;
  readonly artifacts: Client<typeof ArtifactService>;
  readonly admin: Client<typeof AdminService>;
  readonly files: Files;

  constructor(private readonly store: Store) {
    this.session = new Cell<Session>({ token: store.session(TOKEN) ?? store.read(TOKEN, "") ?? "", needed: null });
    const base = new URL(".", document.baseURI).href.replace(/\/$/, "");
    const transport: Transport = createConnectTransport({
      baseUrl: base,
      useBinaryFormat: true,
      interceptors: [this.identified()],
    });
    this.jobs = createClient(JobService, transport);
    this.models = createClient(ModelService, transport);
    this.artifacts = createClient(ArtifactService, transport);
    this.admin = createClient(AdminService, transport);
    this.files = new Files(base, () => this.session.value.token);
  }

  /** Uses a token from now on. `keep`: after this tab is closed, too. */
  signIn(token: string, keep: boolean): void {
    this.store.sessionWrite(TOKEN, token);
    if (keep) this.store.write(TOKEN, token);
    else this.store.remove(TOKEN);
    this.session.value = { token, needed: null };
  }

  signOut(): void {
    this.store.sessionRemove(TOKEN);
    this.store.remove(TOKEN);
    this.session.value = { token: "", needed: "Signed out." };
  }

  /** Notes that the server asked who calls; whoever shows the page asks for a token then. */
  noteRefusal(error: unknown, sent: string): void {
    const { token } = this.session.value;
    // one that was on its way with an older token says nothing of this one
    if (ConnectError.from(error).code === Code.Unauthenticated && sent === token) {
      this.session.value = { token, needed: ConnectError.from(error).rawMessage };
    }
  }

  private identified(): Interceptor {
    return (next) => async (request) => {
      const { token } = this.session.value;
      if (token) request.header.set("Authorization", `Bearer ${token}`);
      try {
        return await next(request);
      } catch (error) {
        this.noteRefusal(error, token);
        throw error;
      }
    };
  }
}
