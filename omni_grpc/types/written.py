"""Values as a user writes them, in a flag, in YAML or in a request: never as Python shows them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any


def written(value: Any) -> str:
    """The value as text: true, 4, 0.5, "a,b" or a JSON object; "" for None."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case float():
            return repr(value)
        case str() | int() | PurePath():
            return str(value)
        case Mapping():
            return json.dumps(value, default=written)
        case list() | tuple():
            return ",".join(map(written, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return json.dumps(dataclasses.asdict(value), default=written)
    raise TypeError(f"no text for a {type(value).__name__}")
