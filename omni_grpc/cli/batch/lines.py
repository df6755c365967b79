"""The lines of a batch file: read and checked as a whole, before any work, and given the names that stay theirs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omni_grpc.client.media import URLS
from omni_grpc.config.command_line import meant
from omni_grpc.resolve.rules import OUTPUT_FORMATS
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.json_text import read_json
from omni_grpc.types.media import Modality, OutputFormat
from omni_grpc.types.os_errors import plain
from omni_grpc.types.request_options import (
    ALL,
    AUDIO,
    EDIT,
    IMAGE,
    VIDEO,
    RequestOption,
    exclusive_faults,
    normalized,
    options_of,
)

_FORMATS: Mapping[str, OutputFormat] = {
    IMAGE: OUTPUT_FORMATS[Modality.IMAGE],
    EDIT: OUTPUT_FORMATS[Modality.IMAGE],
    VIDEO: OUTPUT_FORMATS[Modality.VIDEO],
    AUDIO: OUTPUT_FORMATS[Modality.AUDIO],
}
_OWN = ("prompt", "kind")
"""What a line says beside the options."""

Fault = tuple[str, str]
"""A field, and what is wrong with it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One request of a batch. `number` is that of the line in the file; `options` have a seed and an output format in
    any case; `key` stands for the content, the number and the model.
    """

    number: int
    kind: str
    prompt: str
    options: Mapping[str, Any]
    key: str

    def request_id(self, attempt: int) -> str:
        """The idempotency key: the same for the same line, so that a server that has made it knows it again."""
        return f"batch-{self.key[:32]}" + (f"-{attempt}" if attempt else "")


def read_lines(
    text: str, where: str, model: str, shared: Mapping[str, Any], check: Callable[[str, str, Mapping[str, Any]], Any]
) -> list[BatchLine]:
    """The requests of a batch in JSON lines. `shared`: what a line gets where it does not say it itself. `check`:
    called with kind, prompt and options of each line for more faults.

    Raises ConfigError (BATCH_INVALID) that names every line and field that is wrong.
    """
    lines, faults = [], []
    for number, row in enumerate(rows(text), start=1):
        if not row.strip():
            continue
        try:
            record = read_json(row)
        except ValueError as error:
            faults.append(Violation(f"line {number}", f"is not JSON ({error}); plain prompts need --text"))
            continue
        if not isinstance(record, dict):
            faults.append(Violation(f"line {number}", f"is {row.strip()[:40]}, expected a JSON object; see --text"))
            continue
        line, wrong = _read(number, {**shared, **record}, model)
        wrong = wrong or list(check(line.kind, line.prompt, line.options))
        faults += [Violation(f"line {number}: {field}", why) for field, why in wrong]
        lines.append(line)
    if not lines and not faults:
        faults.append(Violation(where, "has no lines"))
    if faults:
        count = len({fault.field.partition(":")[0] for fault in faults})
        message = f"{where}: {count} of its lines {'is' if count == 1 else 'are'} wrong, and nothing was begun"
        raise ConfigError(message, reason="BATCH_INVALID", violations=tuple(faults))
    return lines


def prompts_as_json(text: str) -> str:
    """Plain lines, each a prompt, as JSON lines with the same numbers."""
    return "\n".join(json.dumps({"prompt": line.strip()}) if line.strip() else "" for line in rows(text))


def rows(text: str) -> list[str]:
    """The lines of a text, as an editor numbers them: JSON may hold other characters that Python takes for ends."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")


def _read(number: int, record: Mapping[str, Any], model: str) -> tuple[BatchLine, list[Fault]]:
    """A line, and what is wrong with it."""
    kind = record.get("kind", IMAGE)
    if kind not in ALL:
        nobody = BatchLine(number=number, kind=IMAGE, prompt="", options={}, key="")
        return nobody, [("kind", f"is {kind!r}, expected one of {', '.join(ALL)}")]
    known = {option.name: option for option in options_of(kind) if option.name != "request_id"}
    wrong = [
        (name, f"is no option of {kind}{meant(name, (*known, *_OWN))}")
        for name in record
        if name not in known and name not in _OWN
    ]
    prompt = record.get("prompt")
    if not isinstance(prompt, str):
        wrong.append(("prompt", f"is {'missing' if prompt is None else repr(prompt)}, expected text"))
    given = {name: value for name, value in record.items() if name in known}
    faults: dict[str, str] = {}
    options = normalized(kind, given, faults)
    faults |= exclusive_faults(kind, options)
    paths = {option.path: name for name, option in known.items()}
    wrong += [(", ".join(paths.get(p, p) for p in path.split(", ")), fault) for path, fault in faults.items()]
    media, unread = _media(options, known)
    wrong += unread
    if kind == EDIT and not options.get("images"):
        wrong.append(("images", "is missing, expected a list of files to edit"))
    options.setdefault("output_format", _FORMATS[kind])
    # plain as JSON has it, with what is in the files instead of their names
    content = {name: value for name, value in options.items() if name not in media} | media
    key = _digest({"line": number, "model": model, "kind": kind, "prompt": prompt, **content})
    if "seed" not in options and "seeds" not in options:
        options["seed"] = int(key[:12], 16)  # 48 bits: the same at every run, and another for every line
    return BatchLine(number=number, kind=kind, prompt=str(prompt), options=options, key=key), wrong


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _media(options: Mapping[str, Any], known: Mapping[str, RequestOption]) -> tuple[dict[str, list[str]], list[Fault]]:
    """Option -> what is in its files, or the URL; and what cannot be read."""
    found: dict[str, list[str]] = {}
    wrong = []
    for name, value in options.items():
        if known[name].type.name not in ("MEDIA", "MEDIA_LIST"):
            continue
        several = known[name].type.name == "MEDIA_LIST"
        values = value if several and isinstance(value, list) else [value]
        if (several and not isinstance(value, list)) or not all(isinstance(one, str) for one in values):
            wrong.append((name, f"is {value!r}, expected {'a list of paths or URLs' if several else 'a path or URL'}"))
            continue
        found[name] = []
        for one in values:
            try:
                url = one.lower().startswith(URLS)
                found[name].append(one if url else hashlib.sha256(Path(one).read_bytes()).hexdigest())
            except OSError as error:
                wrong.append((name, plain(error)))
    return found, wrong
