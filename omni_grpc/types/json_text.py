"""JSON that others wrote."""

from __future__ import annotations

import json
from typing import Any


def read_json(text: str | bytes) -> Any:
    """What the text holds. Raises ValueError for every text that is no JSON or cannot be read: the parser of Python
    answers brackets that are nested too deep with RecursionError, which nobody expects of a text.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deep") from None
