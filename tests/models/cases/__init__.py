"""The models under test, by pipeline class; a class with several kinds of checkpoints has an entry for each, under
"Class-kind". Adding a model adds a file here; docs/adding-a-model.md says what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.models.cases import flux, qwen_image
from tests.models.cases.ask import LONG, NEGATIVE, SHORT, ask
from tests.models.model import Entry

__all__ = ["ENTRIES", "LONG", "NEGATIVE", "SHORT", "ask", "pipeline_of"]

ENTRIES: Mapping[str, Entry] = {**flux.ENTRIES, **qwen_image.ENTRIES}


def pipeline_of(name: str) -> str:
    """The pipeline class of an entry."""
    return name.partition("-")[0]
