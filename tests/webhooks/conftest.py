"""A receiver on a real port, and the file of the secret that it knows."""

import pytest

from tests.outbound.web import web
from tests.webhooks.hooks import OTHER, SECRET


@pytest.fixture
async def site(tmp_path):
    async with web(tmp_path, names=("hooks.test", "*.hooks.test")) as running:
        yield running


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secrets.yaml"
    path.write_text(f"- {{name: studio, tenants: [studio], secret: [{SECRET}, '{OTHER}']}}\n", encoding="utf-8")
    path.chmod(0o600)
    return path
