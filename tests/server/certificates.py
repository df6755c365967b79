"""Certificates of an authority that tests make, as files."""

from __future__ import annotations

import dataclasses
import datetime
import os
from pathlib import Path

import trustme


@dataclasses.dataclass
class Authority:
    """Writes certificates into a folder."""

    folder: Path
    ca: trustme.CA = dataclasses.field(default_factory=trustme.CA)

    @property
    def file(self) -> str:
        """The authority's own certificate."""
        path = self.folder / "ca.pem"
        path.write_bytes(self.ca.cert_pem.bytes())
        return str(path)

    def issue(
        self, name: str, *names: str, common_name: str | None = None, until: datetime.datetime | None = None
    ) -> tuple[str, str]:
        """Writes NAME.pem and NAME.key, each at once, and returns their paths."""
        made = self.ca.issue_cert(*names, common_name=common_name, not_after=until)
        chain = b"".join(part.bytes() for part in made.cert_chain_pems)
        return self.replace(f"{name}.pem", chain), self.replace(f"{name}.key", made.private_key_pem.bytes())

    def replace(self, name: str, data: bytes) -> str:
        """Writes a file at once, and returns its path."""
        path, beside = self.folder / name, self.folder / f".{name}"
        beside.write_bytes(data)
        beside.chmod(0o600)
        os.replace(beside, path)
        return str(path)

    def server(self, **settings: object) -> dict[str, object]:
        """The settings of a server with a certificate of this authority."""
        cert, key = self.issue("server", "localhost", "127.0.0.1")
        return {"tls_cert": cert, "tls_key": key} | settings
