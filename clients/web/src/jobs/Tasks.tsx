import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { explain } from "../api/errors";
import { Unfit } from "../form/request";

interface DoProps {
  label: string;
  /** What a screen reader says, where `label` says too little. */
  name?: string;
  class?: string;
  action: () => Promise<unknown>;
}

/** A button that asks something of the server, and says beside it what went wrong. */
export function Do({ label, name, action, ...rest }: DoProps): JSX.Element {
  const [busy, setBusy] = useState(false);
  const [failed, setFailed] = useState("");
  const run = async (): Promise<void> => {
    if (busy) return;
    setBusy(true);
    setFailed("");
    try {
      await action();
    } catch (error) {
      setFailed(error instanceof Unfit ? error.message : explain(error).message);
    } finally {
      setBusy(false);
    }
  };
  return (
    <>
      <button type="button" class={rest.class} aria-label={name} aria-disabled={busy} onClick={() => void run()}>
        {label}
      </button>
      {failed && (
        <small class="problem" role="alert">
          {failed}
        </small>
      )}
    </>
  );
}
