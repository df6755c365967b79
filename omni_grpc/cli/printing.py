"""What commands print: messages as JSON, and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message


def as_dict(message: Message) -> dict[str, Any]:
    """As protobuf's JSON has it, with the names of the proto files."""
    return MessageToDict(message, preserving_proto_field_name=True)


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
