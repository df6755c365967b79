"""The model card of the bundled model, with the figures of its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_grpc.scenes.shapes import COLOURS, SHAPES
from omni_grpc.scenes.wish import RELATIONS

KINDS: Mapping[str, str] = {
    "one": "one object, some with a size or a position",
    "relation": "two objects with a relation",
    "pair": "two objects",
    "count": "two or three objects of one kind",
    "three": "three objects",
    "ground": "the background, for captions that name one",
}

COMPONENTS = ("transformer", "text_encoder", "vae")

TEXT = """\
---
license: apache-2.0
pipeline_tag: text-to-image
library_name: diffusers
---

# Shapes: the bundled model of omni_grpc

A small text-to-image model in the exact layout of Qwen-Image: the same pipeline class, the same components and the same
weight names, with {parameters} million parameters. It exists so that a server can be tried, tested and measured on any
machine, with images that anyone, or a few lines of arithmetic, can check against their prompts.

## What it draws

Scenes of simple shapes: {shapes}.
Colors: {colours}.
One object with a size (small, large) and a position (top left, center, ...), two or three objects of one kind, two
objects of which one is {relations} the other, or two or three
different objects; on a background of one color or a gradient between two.
The captions have many wordings, all in English; `known_words` in `tokenizer/tokenizer_config.json` lists every
training word.

It draws nothing else. It was trained at sizes from 128 x 128 to 256 x 256.

```
python -m omni_grpc generate "a red circle left of a blue square" --out circle.png
```

Or load it with `diffusers.QwenImagePipeline.from_pretrained(FOLDER, dtype=torch.float32)`.

## How it was trained

From scratch, on scenes that `omni_grpc/scenes` draws, with `tools/train_demo` of the omni_grpc repository. It contains
no images or text of anyone else. The VAE was trained first, then the transformer and the text encoder together, with
flow matching.

| | |
|---|---|
{training}

## Prompt accuracy

Captions with combinations of colors, shapes and positions that were held out of training,
{sampling}, judged by `omni_grpc.scenes.judge`: colors, shapes, numbers, positions and relations
must all be correct.

| captions | correct |
|---|---|
{accuracy}

`python -m omni_grpc bench prompt-accuracy` measures it again.

## License

Apache-2.0.
"""


def text(
    log: Mapping[str, Any], defaults: Mapping[str, Any], parameters: Mapping[str, int], psnr: Mapping[str, float]
) -> str:
    """`log` is what tools.train_demo.run wrote; what it lacks is said to be not measured. `psnr` is that of the VAE on
    scenes, by the precision of its weights.
    """
    records = log.get("denoiser") or []
    training = [("GPU", log.get("card")), ("training steps of the denoiser", log.get("step"))]
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
