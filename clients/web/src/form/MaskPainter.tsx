import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Dialog } from "../app/Dialog";

interface PainterProps {
  /** Address of the image that is painted over. */
  image: string;
  onSave: (mask: Blob) => void;
  onClose: () => void;
}

interface Point {
  x: number;
  y: number;
}

const KEY_STEP = 0.02;
const MOVES: Readonly<Record<string, Point>> = {
  ArrowLeft: { x: -KEY_STEP, y: 0 },
  ArrowRight: { x: KEY_STEP, y: 0 },
  ArrowUp: { x: 0, y: -KEY_STEP },
  ArrowDown: { x: 0, y: KEY_STEP },
};

/** Paints a mask of the size of an image: white where it was painted, black elsewhere. By pointer or by keys. */
export function MaskPainter({ image, onSave, onClose }: PainterProps): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [brush, setBrush] = useState(12);
  const [erase, setErase] = useState(false);
  const [cursor, setCursor] = useState<Point | null>(null);
  const last = useRef<Point | null>(null);

  const stroke = (from: Point, to: Point): void => {
    const target = canvas.current;
    const pen = target?.getContext("2d");
    if (!target || !pen) return;
    pen.globalCompositeOperation = erase ? "destination-out" : "source-over";
    pen.strokeStyle = "#fff";
    pen.lineCap = "round";
    pen.lineWidth = (brush / 100) * Math.min(target.width, target.height);
    pen.beginPath();
    pen.moveTo(from.x * target.width, from.y * target.height);
    pen.lineTo(to.x * target.width, to.y * target.height);
    pen.stroke();
  };
  const place = (event: PointerEvent): Point => {
    const box = (event.currentTarget as HTMLElement).getBoundingClientRect();
    return { x: (event.clientX - box.left) / box.width, y: (event.clientY - box.top) / box.height };
  };
  const onKeyDown = (event: KeyboardEvent): void => {
    const at = cursor ?? { x: 0.5, y: 0.5 };
    const move = MOVES[event.key];
    if (move) {
      setCursor({ x: Math.min(Math.max(at.x + move.x, 0), 1), y: Math.min(Math.max(at.y + move.y, 0), 1) });
    } else if (event.key === " ") {
      setCursor(at);
      stroke(at, at);
    } else return;
    event.preventDefault();
  };
  const fill = (invert: boolean): void => repaint(canvas.current, invert);

  return (
    <Dialog label="Paint the mask" onClose={onClose} class="wide">
      <p class="soft" id="painter-help">
        Paint what is to be made anew. With the keyboard: arrows move the brush, the space bar paints.
      </p>
      <div class="painter">
        <img src={image} alt="What is painted over" onLoad={(event) => fit(canvas.current, event.currentTarget)} />
        <canvas
          ref={canvas}
          tabIndex={0}
          role="application"
          aria-label="Mask"
          aria-describedby="painter-help"
          onKeyDown={onKeyDown}
          onPointerDown={(event) => {
            event.currentTarget.setPointerCapture(event.pointerId);
            last.current = place(event);
            stroke(last.current, last.current);
          }}
          onPointerMove={(event) => {
            const here = place(event);
            setCursor(here);
            if (!last.current) return;
            stroke(last.current, here);
            last.current = here;
          }}
          onPointerUp={() => {
            last.current = null;
          }}
        />
        {cursor && <Ring at={cursor} brush={brush} canvas={canvas.current} />}
      </div>
      <div class="buttons">
        <label class="inline">
          Brush
          <input
            type="range"
            min={2}
            max={50}
            value={brush}
            onInput={(event) => setBrush(event.currentTarget.valueAsNumber)}
          />
        </label>
        <label class="check">
          <input type="checkbox" checked={erase} onChange={(event) => setErase(event.currentTarget.checked)} />
          Erase
        </label>
        <button type="button" onClick={() => fill(false)}>
          Clear
        </button>
        <button type="button" onClick={() => fill(true)}>
          Invert
        </button>
        <button type="button" class="primary" onClick={() => save(canvas.current, onSave)}>
          Use this mask
        </button>
      </div>
    </Dialog>
  );
}

/** Where the brush is. Placed by script: a style in the markup is not allowed by the page's policy. */
function Ring({ at, brush, canvas }: { at: Point; brush: number; canvas: HTMLCanvasElement | null }): JSX.Element {
  const ring = useRef<HTMLSpanElement>(null);
  useEffect(() => {
    if (!ring.current || !canvas) return;
    const { clientWidth: width, clientHeight: height } = canvas;
    const size = (brush / 100) * Math.min(width, height);
    const { style } = ring.current;
    style.setProperty("width", `${size}px`);
    style.setProperty("height", `${size}px`);
    style.setProperty("left", `${at.x * width - size / 2}px`);
    style.setProperty("top", `${at.y * height - size / 2}px`);
  });
  return <span class="ring" ref={ring} aria-hidden="true" />;
}

function fit(canvas: HTMLCanvasElement | null, image: HTMLImageElement): void {
  if (!canvas || canvas.width === image.naturalWidth) return;
  canvas.width = image.naturalWidth;
  canvas.height = image.naturalHeight;
  canvas.focus();
}

function repaint(canvas: HTMLCanvasElement | null, invert: boolean): void {
  const pen = canvas?.getContext("2d");
  if (!canvas || !pen) return;
  pen.globalCompositeOperation = invert ? "xor" : "destination-out";
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
}

function save(canvas: HTMLCanvasElement | null, onSave: (mask: Blob) => void): void {
  const mask = document.createElement("canvas");
  const pen = mask.getContext("2d");
  if (!canvas || !pen) return;
  mask.width = canvas.width;
  mask.height = canvas.height;
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, mask.width, mask.height);
  pen.drawImage(canvas, 0, 0);
  mask.toBlob((blob) => blob && onSave(blob), "image/png");
}
