import { Cell } from "./cell";

export type Route =
  | { view: "create" }
  | { view: "server" }
  | { view: "job"; id: string }
  | { view: "compare"; a: string; b: string };

export function parse(hash: string): Route {
  const [view, first, second] = hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  if (view === "jobs" && first) return { view: "job", id: first };
  if (view === "compare" && first && second) return { view: "compare", a: first, b: second };
  if (view === "server") return { view: "server" };
  return { view: "create" };
}

export function address(route: Route): string {
  switch (route.view) {
    case "job":
      return `#/jobs/${encodeURIComponent(route.id)}`;
    case "compare":
      return `#/compare/${encodeURIComponent(route.a)}/${encodeURIComponent(route.b)}`;
    case "server":
      return "#/server";
    default:
      return "#/";
  }
}

/** Where in the page the user is: the part of the address behind "#". */
export class Router {
  readonly route = new Cell<Route>(parse(location.hash));

  constructor() {
    addEventListener("hashchange", () => {
      this.route.value = parse(location.hash);
    });
  }

  go(route: Route): void {
    location.hash = address(route);
  }
}
