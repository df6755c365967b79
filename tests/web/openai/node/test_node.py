"""The official client for Node.js against a real server: `make test-openai` installs it first."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from omni_grpc.engine.scheduler import Lane
from tests.server.process import ROOT
from tests.server.service import until
from tests.server.studio import serving_studio

from ..conftest import ANYTHING, code

pytestmark = pytest.mark.service
HERE = Path(__file__).parent
CHECKS = ["models", "pictures", "edits", "streams", "videos", "leaving"]


async def test_the_example_on_the_page(tmp_path):
    (example,) = code((ROOT / "docs" / "openai.md").read_text(encoding="utf-8"), "js")
    (tmp_path / "node_modules").symlink_to(HERE / "node_modules")
    async with serving_studio(http_port=0) as service:
        (tmp_path / "example.mjs").write_text(example.replace("http://localhost:8080", service.http))
        node = await asyncio.create_subprocess_exec(
            *("node", "example.mjs"),
            cwd=tmp_path,
            env=os.environ | {"OPENAI_API_KEY": ANYTHING},
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await node.communicate()
    assert (node.returncode, printed.decode().split()[1:]) == (0, ["[]"])


async def test_the_client_for_node():
    assert (HERE / "node_modules" / "openai").is_dir(), "make test-openai installs it"
    async with serving_studio(http_port=0) as service:
        node = await asyncio.create_subprocess_exec(
            *("node", "client.mjs", service.http + "/v1"),
            cwd=HERE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert node.stdout is not None
        passed = []
        async with asyncio.timeout(120):
            while line := await node.stdout.readline():
                passed.append(line.decode().strip())
                if passed[-1] == "videos":
                    service.executor.gates[Lane.STEP].close()
                    node.stdin.write(b"go\n")
            _, errors = await node.communicate()
        assert passed == CHECKS, errors.decode()
        (left,) = service.engine.jobs.newest(labels={"user": "leaves"})
        await until(lambda: left.state == "CANCELLED")
