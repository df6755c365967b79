import type { JSX } from "preact";
import { useCell } from "../state/cell";
import { usePage } from "../state/page";

/** Whether the page still hears of its jobs. */
export function Banner(): JSX.Element | null {
  const page = usePage();
  const connection = useCell(page.watcher.connection);
  useCell(page.now);
  const { needed } = useCell(page.api.session);
  // the form that asks for a token says it already
  if (needed !== null || connection.state === "live" || connection.state === "connecting") return null;
  if (connection.state === "refused") {
    return (
      <div class="banner" role="alert">
        Jobs cannot be followed: {connection.problem.message}
      </div>
    );
  }
  const wait = Math.max(Math.ceil((connection.retryAt - Date.now()) / 1000), 0);
  return (
    <div class="banner" role="alert">
      <span>Connection lost: {connection.problem.message}. The jobs go on.</span>{" "}
      <span aria-hidden="true">Trying again{wait ? ` in ${wait} s` : ""}.</span>{" "}
      <button type="button" class="small" onClick={() => page.watcher.now()}>
        Try now
      </button>
    </div>
  );
}
