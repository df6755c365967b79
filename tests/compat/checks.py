"""What a row of the table can be checked by: `<verb> <argument>`, each of which raises where it does not hold.

serve FLAGS        the server's command line takes them, and they change its configuration
takes FLAGS        it takes them, and they need not change anything
env NAME=VALUE     the same for a variable
cli COMMAND ...    the client's command line takes it
help               the server's help is printed
settle MODEL FLAGS a tiny checkpoint is opened with them, up to where weights would be loaded
make MODEL COMMAND ...  the command makes a file with a tiny checkpoint, in this process
remote COMMAND ...      the command makes a file with a real server
client CODE        Python with `client`, a Client of that server
snippet CODE       Python with `Omni`, `EngineConfig` and `tiny(MODEL)`, the folder of a tiny checkpoint
import MODULE:NAME the name is there, through attributes and fields
ctor MODULE:NAME PARAMETER ...  it takes these parameters
file PATH          the file or folder is there
proven PATH::TEST  that test is there (it runs with its own file)
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
import shlex
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omni_grpc import EngineConfig, Omni
from omni_grpc.checkpoint.registry import open_model
from omni_grpc.cli import main as cli
from omni_grpc.client import Client
from omni_grpc.config.settings import settings
from omni_grpc.resolve.settings import apply_settings

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES: Mapping[str, str] = {"generate": "png", "edit": "png", "video": "mp4", "audio": "wav"}


class Checks:
    """Runs checks. `tiny` gives the folder of a tiny checkpoint, `address` that of a running server."""

    def __init__(self, folder: Path, tiny: Callable[[str], Path], address: Callable[[], str]) -> None:
        self.folder, self.tiny, self.address = folder, tiny, address

    def run(self, check: str) -> None:
        """Raises where the check does not hold, and ValueError for a verb that there is not."""
        verb, _, argument = check.partition(" ")
        method = getattr(self, f"check_{verb}", None)
        if method is None:
            raise ValueError(f"no check is called {verb!r}")
        method(argument)

    def check_serve(self, argument: str) -> None:
        assert _settings(*shlex.split(argument)) != _settings(), "the flags change nothing"

    def check_takes(self, argument: str) -> None:
        _settings(*shlex.split(argument))

    def check_env(self, argument: str) -> None:
        name, _, value = argument.partition("=")
        assert _settings(environ={name: value}) != _settings(), "the variable changes nothing"

    def check_cli(self, argument: str) -> None:
        cli._parser().parse_args(shlex.split(argument))

    def check_help(self, argument: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            _settings("--help")
        assert "--max-num-seqs" in printed.getvalue()

    def check_settle(self, argument: str) -> None:
        model, *flags = shlex.split(argument)
        config = _settings("--model", str(self.tiny(model)), "--device", "cpu", *flags)
        open_model(config.model, apply=lambda found: apply_settings(config, found))

    def check_make(self, argument: str) -> None:
        model, command, *flags = shlex.split(argument)
        self._write(command, "--model", str(self.tiny(model)), "--device", "cpu", *flags)

    def check_remote(self, argument: str) -> None:
        command, prompt, *flags = shlex.split(argument)
        self._write(command, "--server", self.address(), *flags, prompt=prompt)

    def _write(self, command: str, *flags: str, prompt: str = "a red circle") -> None:
        out = self.folder / f"{uuid.uuid4()}.{SUFFIXES[command]}"
        assert cli.main([command, prompt, "--quiet", "--out", str(out), *flags]) == 0
        assert out.stat().st_size

    def check_client(self, argument: str) -> None:
        with Client(self.address()) as client:
            exec(argument, {"client": client})

    def check_snippet(self, argument: str) -> None:
        exec(argument, {"Omni": Omni, "EngineConfig": EngineConfig, "tiny": lambda model: str(self.tiny(model))})

    def check_import(self, argument: str) -> None:
        _imported(argument)

    def check_ctor(self, argument: str) -> None:
        name, *parameters = argument.split()
        assert set(parameters) <= inspect.signature(_imported(name)).parameters.keys()

    def check_file(self, argument: str) -> None:
        assert (ROOT / argument).exists(), f"no {argument}"

    def check_proven(self, argument: str) -> None:
        path, test = argument.split("::")
        assert re.search(rf"\bdef {test}\(", (ROOT / path).read_text(encoding="utf-8")), f"no {argument}"


def _settings(*flags: str, environ: Mapping[str, str] | None = None) -> EngineConfig:
    named = () if "--model" in flags else ("--model", "plain")
    return settings([*named, *flags], environ or {}, prog="serve", description="")


def _imported(argument: str) -> Any:
    module, _, path = argument.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split(".") if path else ():
        fields = getattr(found, "__dataclass_fields__", {})
        found = fields[name] if name in fields and not hasattr(found, name) else getattr(found, name)
    return found
