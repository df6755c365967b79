"""The commands that need no grpc, and no more than what they look at: `doctor` must be able to say what is missing."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

COMMANDS: Mapping[str, str] = {
    "doctor": "omni_grpc.cli.doctor",
    "pull": "omni_grpc.cli.pull",
    "token": "omni_grpc.cli.token",
    "convert": "omni_grpc.loading.convert",
    "lora": "omni_grpc.cli.lora",
}
"""The module with the `main` of each: by name, since `convert` imports torch, which the other commands do not."""


LORA_OF_SERVER = ("load", "list", "unload")
"""The commands of `lora` that talk to a server."""


def is_alone(arguments: Sequence[str]) -> bool:
    """Whether a command line is one of these."""
    command, inner = [*arguments[:2], "", ""][:2]
    return command in COMMANDS and not (command == "lora" and inner in LORA_OF_SERVER)


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs one of them and returns its exit code."""
    code: int = importlib.import_module(COMMANDS[command]).main(arguments)
    return code
