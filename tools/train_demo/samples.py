"""Draws the pictures of the documentation with the bundled model.

    python -m tools.train_demo.samples [MODEL]

Writes docs/images/samples.webp (four, for the README) and docs/images/bundled-model.webp (sixteen), each with its
prompts and below 150 kB. Seeds are fixed and no picture is chosen: what the model gets wrong is shown wrong.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from omni_grpc import Omni
from omni_grpc.config.command_line import Parser

ROOT = Path(__file__).resolve().parents[2]
LARGEST = 150_000
EDGE, GAP, FONT, LINES = 128, 12, 12, 3
"""Pixels of a picture and between two, and of the letters below, in so many lines."""
LETTERS = 21

README = (
    "a red circle left of a blue square",
    "two green stars on a yellow background",
    "a small pink heart at the top right",
    "a white ring, an orange triangle and a black cross",
)
DOCS = (
    *README,
    "a large purple diamond in the center",
    "a blue heart inside a yellow circle",
    "three orange crosses on black",
    "a gray square above a green ring",
    "a red star on a gradient from white to blue",
    "a black triangle below a pink circle",
    "two blue donuts on a gray background",
    "a little yellow dot in the bottom left corner",
    "a purple star with a green square",
    "please draw a huge white heart on red",
    "a pink cross right of an orange diamond",
    "a green box, a red ring and a white star",
)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a checkpoint folder (default: the bundled model)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", metavar="FOLDER")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with Omni(args.model, device="cpu") as omni:
        pictures = [omni.generate(prompt, width=EDGE, height=EDGE, seed=1).images[0] for prompt in DOCS]
    for name, prompts in (("samples", README), ("bundled-model", DOCS)):
        file = args.out / f"{name}.webp"
        sheet(pictures[: len(prompts)], prompts).save(file, quality=90, method=6)
        size = file.stat().st_size
        print(f"{file}: {size} bytes")
        if size > LARGEST:
            raise SystemExit(f"{file} has more than {LARGEST} bytes")


def sheet(pictures: Sequence[PIL.Image.Image], prompts: Sequence[str], columns: int = 4) -> PIL.Image.Image:
    """A grid of pictures with their prompts below them."""
    wide, high = EDGE + GAP, EDGE + GAP + LINES * (FONT + 3) + GAP // 2
    rows = -(-len(pictures) // columns)
    made = PIL.Image.new("RGB", (columns * wide + GAP, rows * high + GAP), "white")
    draw, font = PIL.ImageDraw.Draw(made), PIL.ImageFont.load_default(FONT)
    for place, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
        row, column = divmod(place, columns)
        x, y = GAP + column * wide, GAP + row * high
        made.paste(picture, (x, y))
        # a white picture on white has an edge, too
        draw.rectangle((x - 1, y - 1, x + EDGE, y + EDGE), outline=(200, 200, 200))
        text = "\n".join(textwrap.wrap(prompt, LETTERS))
        draw.multiline_text((x, y + EDGE + 4), text, fill=(40, 40, 40), font=font, spacing=3)
    return made


if __name__ == "__main__":
    main()
