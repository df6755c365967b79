"""A file of tokens, one for each tenant."""

from __future__ import annotations

import hashlib
from pathlib import Path

import yaml


def token_file(folder: Path, **tenants: list[str]) -> tuple[str, dict[str, str]]:
    """Writes it, and returns its path and the token of each tenant, who has these scopes."""
    tokens = {tenant: "omni_" + hashlib.sha256(tenant.encode()).hexdigest()[:43] for tenant in tenants}
    records = [
        {"name": tenant, "tenant": tenant, "scopes": scopes, "sha256": hashlib.sha256(token.encode()).hexdigest()}
        for (tenant, scopes), token in zip(tenants.items(), tokens.values(), strict=True)
    ]
    path = folder / "tokens.yaml"
    path.write_text(yaml.safe_dump(records))
    path.chmod(0o600)
    return str(path), tokens
