import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useCell } from "../state/cell";
import { usePage } from "../state/page";

/** Asks for a token once the server asked who calls. */
export function Login(): JSX.Element | null {
  const page = usePage();
  const { needed, token } = useCell(page.api.session);
  const [typed, setTyped] = useState("");
  const [keep, setKeep] = useState(false);
  if (needed === null) return null;
  return (
    <form
      class="panel login"
      aria-label="Sign in"
      onSubmit={(event) => {
        event.preventDefault();
        page.api.signIn(typed.trim(), keep);
        setTyped("");
      }}
    >
      <h2>Sign in</h2>
      <p role="alert" class={token ? "problem" : ""} id="login-problem">
        {needed}
      </p>
      <label for="token">Token</label>
      <input
        id="token"
        type="password"
        autocomplete="off"
        required
        autofocus
        value={typed}
        aria-describedby="login-problem"
        onInput={(event) => setTyped(event.currentTarget.value)}
      />
      <label class="check">
        <input type="checkbox" checked={keep} onChange={(event) => setKeep(event.currentTarget.checked)} />
        Keep it in this browser, after the tab is closed, too
      </label>
      <button type="submit" class="primary">
        Sign in
      </button>
    </form>
  );
}
