"""The programs of the clients in other languages, and what they are asked: clients/conformance/README.md."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "clients"
LANGUAGES = ("python", "typescript", "go", "cpp", "java")
REQUIRED = "TESTS_REQUIRE_CLIENTS"
PROMPT = "a red circle left of a blue square"
SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Program:
    """A client's program of the shared list of behaviours."""

    language: str

    @property
    def command(self) -> list[str]:
        return [str(CLIENTS / self.language / "build" / "conformance")]

    @property
    def built(self) -> bool:
        return Path(self.command[-1]).exists()

    async def start(self, behaviour: str, **values: Any) -> asyncio.subprocess.Process:
        """Asks it for a behaviour; `answer` has what comes of it."""
        process = await asyncio.create_subprocess_exec(
            *self.command,
            cwd=CLIENTS / self.language,
            env={name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        asked = {"behaviour": behaviour, "prompt": PROMPT, **values}
        process.stdin.write(json.dumps(asked).encode())
        process.stdin.close()
        return process

    async def run(self, behaviour: str, **values: Any) -> dict[str, Any]:
        return await answer(await self.start(behaviour, **values))


async def answer(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """What a program says."""
    try:
        async with asyncio.timeout(SECONDS):
            said, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, errors.decode()
    found: dict[str, Any] = json.loads(said)
    return found


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
