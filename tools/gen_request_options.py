"""Generates the typed keywords of the client and of `Omni` from the table of request options, or with --check says that
they are stale.

    python tools/gen_request_options.py            write omni_grpc/client/options.py
    python tools/gen_request_options.py --check    exit 1 where that file differs
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from omni_grpc.config.command_line import Parser
from omni_grpc.types.request_options import ALL, OPTIONS, RequestOption

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "omni_grpc" / "client" / "options.py"
KINDS = {"image": "Image", "edit": "Edit", "video": "Video", "audio": "Audio"}
KIND_DOC = {"image": "an image", "edit": "an edit of images", "video": "a video", "audio": "a sound"}
PARAMETERS = ("images",)
"""Options that are parameters of their own where they are needed at all."""

HEAD = '''# generated from omni_grpc/types/request_options.py by tools/gen_request_options.py; do not edit
"""The keywords of `Client` and `Omni`: what a generation may ask for besides its prompt. None is the same as not given.

`*Sampling` is what both have, `*Options` adds what only a server knows: jobs and previews.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from omni_grpc.types.media import AudioFormat, ImageFormat, VideoFormat
from omni_grpc.types.request import GuidanceNorm, RestartPolicy, Task

if TYPE_CHECKING:
    from omni_grpc.client.media import MediaSource
'''


def main() -> int:
    parser = Parser(description="Generates the typed keywords from the table of request options.")
    parser.add_argument("--check", action="store_true", help="compare with the committed file instead of writing it")
    check = parser.parse_args().check
    text = generate()
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    if check:
        print(f"{TARGET.relative_to(ROOT)} is stale. Run: python tools/gen_request_options.py", file=sys.stderr)
        return 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"{TARGET.relative_to(ROOT)}: written")
    return 0


def generate() -> str:
    """The text of the file."""
    options = [option for option in OPTIONS if option.name not in PARAMETERS]
    shared = [option for option in options if option.of == ALL]
    parts = [
        _class("Sampling", "TypedDict, total=False", "What every generation has.", _of(shared, job=False)),
        _class(
            "JobOptions",
            "TypedDict, total=False",
            "How a server treats the job of a generation.",
            _of(shared, job=True),
        ),
    ]
    for kind, name in KINDS.items():
        own = [option for option in options if kind in option.of and option.of != ALL]
        parts.append(
            _class(
                f"{name}Sampling", "Sampling, total=False", f"What {KIND_DOC[kind]} has besides.", _of(own, job=False)
            )
        )
        doc = f"{KIND_DOC[kind].capitalize()} made by a server."
        parts.append(_class(f"{name}Options", f"{name}Sampling, JobOptions, total=False", doc, _of(own, job=True)))
    return HEAD + "".join(parts)


def _of(options: Iterable[RequestOption], *, job: bool) -> Iterator[RequestOption]:
    return (option for option in options if option.needs_server == job)


def _class(name: str, bases: str, doc: str, options: Iterable[RequestOption]) -> str:
    lines = [f"\n\nclass {name}({bases}):", f'    """{doc}"""']
    for number, option in enumerate(options):
        lines += ([""] if number == 0 else []) + [f"    {option.name}: {option.type.annotation} | None"]
        lines += textwrap.wrap(f'"""{option.doc}"""', 120, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
