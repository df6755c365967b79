"""Compares native models with diffusers and prints a Markdown table of the differences.

    python -m tools.parity_table [CHECKPOINT ...]

Without a checkpoint, each model is compared on its tiny one. Both run in float32 on the CPU, from the same seeds; the
requests are those of tests/models/cases.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config.command_line import Parser
from tests.models.cases import ENTRIES
from tests.models.model import Model

HEADER = """
| size | prompt tokens | CFG | images | steps | latents, max abs diff | pixels, max diff of 255 |
|---|---|---|---|---|---|---|"""


def rows(model: Model) -> Iterator[str]:
    """One line of the table for each request of the model's entry."""
    for draft in model.entry.drafts:
        (mine,) = model.run(draft)
        latents, pixels = mine.differs_from(model.oracle(draft))
        request = model.request(draft)
        cells = (
            f"{request.width}x{request.height}",
            mine.prompt_tokens,
            "off" if request.negative_prompt is None else f"{request.guidance.true_cfg_scale:g}",
            request.num_outputs,
            request.steps,
            f"{latents:.1e}",
            pixels,
        )
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("checkpoints", type=Path, nargs="*", metavar="CHECKPOINT")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        given = [(open_checkpoint(folder).spec.name, folder) for folder in args.checkpoints]
        for name, folder in given or [(name, entry.build(Path(scratch) / name)) for name, entry in ENTRIES.items()]:
            print(f"\n{name}\n{HEADER}")
            for row in rows(Model(ENTRIES[name], folder, threads=None)):
                print(row, flush=True)


if __name__ == "__main__":
    main()
