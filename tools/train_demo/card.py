"""The model card of the bundled model, with the figures of its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_grpc.scenes.shapes import COLOURS, SHAPES
from omni_grpc.scenes.wish import RELATIONS

KINDS: Mapping[str, str] = {
    "one": "one thing, some with a size or a place",
    "relation": "two things and where one is of the other",
    "pair": "two things",
    "count": "two or three of one kind",
    "three": "three things",
    "ground": "the background, of those captions that name one",
}

COMPONENTS = ("transformer", "text_encoder", "vae")

TEXT = """\
---
license: apache-2.0
pipeline_tag: text-to-image
library_name: diffusers
---

# Shapes: the model that comes with omni_grpc

A small text-to-image model in the exact layout of Qwen-Image: the same pipeline class, the same components, the same
names of weights, with {parameters} million parameters in all. It exists so that a server can be tried, tested and
measured on any machine, with pictures of which anyone, and a few lines of arithmetic, can tell whether they are right.

## What it draws

Scenes of simple shapes: {shapes}.
Colours: {colours}.
One thing with a size (small, large) and a place (top left, center, ...), two or three of a kind, two things of which
one is {relations} the other, or two or three unlike things; on a
background of one colour or of two that flow into each other.
In many wordings, all in English; `known_words` in `tokenizer/tokenizer_config.json` lists every word it was trained on.

It draws nothing else. It was trained at sizes from 128 x 128 to 256 x 256.

```
python -m omni_grpc generate "a red circle left of a blue square" --out circle.png
```

or with `diffusers.QwenImagePipeline.from_pretrained(FOLDER, dtype=torch.float32)`.

## How it was trained

From nothing, on scenes that `omni_grpc/scenes` draws, by `tools/train_demo` of the omni_grpc repository; no picture
and no text of anyone else is in it. First the VAE, then transformer and text encoder together, by flow matching.

| | |
|---|---|
{training}

## How right it is

Captions of combinations of colours, shapes and places that training never saw, {sampling}, judged by
`omni_grpc.scenes.judge`: colours, shapes, numbers, places and relations must all be right.

| captions | right |
|---|---|
{accuracy}

`python -m omni_grpc bench prompt-accuracy` measures it again.

## Licence

Apache-2.0.
"""


def text(
    log: Mapping[str, Any], defaults: Mapping[str, Any], parameters: Mapping[str, int], psnr: Mapping[str, float]
) -> str:
    """`log` is what tools.train_demo.run wrote; what it lacks is said to be not measured. `psnr` is that of the VAE on
    scenes, by the precision of its weights.
    """
    records = log.get("denoiser") or []
    training = [("card", log.get("card")), ("steps of the denoiser", log.get("step"))]
    training += [(f"parameters of the {name}", f"{count:,}") for name, count in parameters.items()]
    training += [("last loss of the denoiser", f"{records[-1]['loss']:.4f}" if records else None)]
    training += [(f"PSNR of the VAE on scenes, {dtype}", f"{value:.2f} dB") for dtype, value in psnr.items()]
    training += [("seed, version of the scenes", f"{log.get('seed')}, {log.get('data')}")]
    right = log.get("accuracy") or {}
    measured = [f"| {what} | {right[kind]:.1%} |" for kind, what in KINDS.items() if kind in right]
    sampling = f"{defaults['width']} x {defaults['height']}, {defaults['steps']} steps"
    return TEXT.format(
        parameters=f"{sum(parameters.values()) / 1e6:.1f}",
        shapes=", ".join(SHAPES),
        colours=", ".join(COLOURS),
        relations=", ".join(RELATIONS),
        training="\n".join(f"| {what} | {value or 'not recorded'} |" for what, value in training),
        sampling=f"{sampling}, guidance {defaults['guidance']['true_cfg_scale']:g}",
        accuracy="\n".join(measured) or "| all | not measured |",
    )
