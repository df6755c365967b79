import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";

interface DialogProps {
  label: string;
  onClose: () => void;
  children: ComponentChildren;
  class?: string;
}

/** A modal dialog: the browser keeps the focus in it, closes it with Esc, and gives the focus back. */
export function Dialog({ label, onClose, children, ...rest }: DialogProps): JSX.Element {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const before = document.activeElement;
    dialog.current?.showModal();
    return () => focusAgain(before);
  }, []);
  return (
    <dialog
      ref={dialog}
      class={rest.class}
      aria-label={label}
      onCancel={(event) => {
        event.preventDefault();
        onClose();
      }}
      onClick={(event) => {
        // on the dark beside it
        if (event.target === dialog.current) onClose();
      }}
    >
      <div class="dialog-body">
        <header>
          <h2>{label}</h2>
          <button type="button" class="small" onClick={onClose}>
            Close
          </button>
        </header>
        {children}
      </div>
    </dialog>
  );
}

/** Puts the focus back to where it was. A card may have moved meanwhile, from what goes on to what is done. */
function focusAgain(before: Element | null): void {
  const moved = before instanceof HTMLAnchorElement ? `a[href="${CSS.escape(before.getAttribute("href") ?? "")}"]` : "";
  const now = before?.isConnected ? before : document.querySelector(moved || "#results");
  if (now instanceof HTMLElement) now.focus();
}
