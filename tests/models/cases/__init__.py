"""The models under test, by pipeline class; a class with several kinds of checkpoints has an entry for each, under
"Class-kind". A module here exports its ENTRIES and is found by itself; docs/adding-a-model.md says what follows.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from tests.models.cases.ask import LONG, NEGATIVE, SHORT, ask
from tests.models.model import Entry

__all__ = ["ENTRIES", "LONG", "NEGATIVE", "SHORT", "ask", "pipeline_of"]

_FAMILIES = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]

ENTRIES: Mapping[str, Entry] = {
    name: entry for family in _FAMILIES for name, entry in vars(family).get("ENTRIES", {}).items()
}


def pipeline_of(name: str) -> str:
    """The pipeline class of an entry."""
    return name.partition("-")[0]
