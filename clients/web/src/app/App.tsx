import type { JSX } from "preact";
import { CompareDialog } from "../compare/CompareDialog";
import { GenerateForm } from "../form/GenerateForm";
import { JobDialog } from "../jobs/JobDialog";
import { Gallery, Going } from "../jobs/JobLists";
import { ServerTab } from "../server/ServerTab";
import { useCell } from "../state/cell";
import { usePage } from "../state/page";
import type { Theme } from "../state/preferences";
import { address, type Route } from "../state/route";
import { Banner } from "./Banner";
import { Login } from "./Login";

const THEMES: readonly Theme[] = ["auto", "light", "dark"];

export function App(): JSX.Element {
  const page = usePage();
  const route = useCell(page.router.route);
  const { needed } = useCell(page.api.session);
  return (
    <>
      <a class="skip" href="#results" onClick={skip}>
        Skip to the results
      </a>
      <Header route={route} />
      <Banner />
      <Said />
      <main>
        <Login />
        {needed === null && (route.view === "server" ? <ServerTab /> : <Create />)}
      </main>
      {needed === null && route.view === "job" && <JobDialog key={route.id} id={route.id} />}
      {needed === null && route.view === "compare" && (
        <CompareDialog key={`${route.a}/${route.b}`} a={route.a} b={route.b} />
      )}
    </>
  );
}

/** The part behind "#" is the page's own address, so the link moves the focus itself. */
function skip(event: Event): void {
  event.preventDefault();
  document.getElementById("results")?.focus();
}

function Create(): JSX.Element {
  return (
    <div class="columns">
      <GenerateForm />
      <div class="jobs">
        <Going />
        <Gallery />
      </div>
    </div>
  );
}

function Header({ route }: { route: Route }): JSX.Element {
  const page = usePage();
  const { token, needed } = useCell(page.api.session);
  const { theme } = useCell(page.preferences.cell);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length] ?? "auto";
  const server = route.view === "server";
  return (
    <header class="top">
      <h1>omni_grpc</h1>
      <nav aria-label="Views">
        <a href={address({ view: "create" })} aria-current={server ? undefined : "page"}>
          Create
        </a>
        <a href={address({ view: "server" })} aria-current={server ? "page" : undefined}>
          Server
        </a>
      </nav>
      <button
        type="button"
        class="small"
        aria-label={`Theme: ${theme}. Change to ${next}`}
        onClick={() => page.preferences.change({ theme: next })}
      >
        Theme: {theme}
      </button>
      {token && needed === null && (
        <button type="button" class="small" onClick={() => page.api.signOut()}>
          Sign out
        </button>
      )}
    </header>
  );
}

/** What screen readers say of the jobs, one thing after the other, once they have said what they are at. */
function Said(): JSX.Element {
  const page = usePage();
  const said = useCell(page.announcer.said);
  return (
    <div class="said" role="status" aria-live="polite">
      {said}
    </div>
  );
}
