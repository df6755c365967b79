"""A real S3 server over HTTP: that of moto."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "not/a+real/secret"}
PAGE = 50
"""Objects that the server lists in one answer."""


@dataclasses.dataclass
class S3Server:
    """`client` is boto3's. `bucket()` makes one and gives its name, `url(bucket)` its address for this server."""

    endpoint: str
    client: Any
    numbers: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))

    def bucket(self) -> str:
        name = f"outputs-{next(self.numbers)}"
        self.client.create_bucket(Bucket=name)
        return name

    def url(self, bucket: str, prefix: str = "pre/fix") -> str:
        return f"s3://{bucket}/{prefix}?endpoint={self.endpoint}&region=us-east-1&allow_http=true"

    def unfinished_uploads(self, bucket: str) -> list[str]:
        return [one["Key"] for one in self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", ())]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        if os.environ.get("TESTS_REQUIRE_S3") == "1":
            pytest.fail("TESTS_REQUIRE_S3=1, and moto[server] is not installed")
        pytest.skip("moto[server] is not installed: there is no S3 server to test with")
    import boto3

    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    environment = os.environ | {"MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            said = ""
            for line in process.stderr:
                said += line
                if "Running on http://" in line:
                    break
            else:
                pytest.fail(f"the S3 server does not start:\n{said}")
            # it goes on to log each request
            threading.Thread(target=process.stderr.read, daemon=True).start()
            endpoint = "http://" + line.rpartition("http://")[2].strip()
            keys = {
                "aws_access_key_id": KEYS["AWS_ACCESS_KEY_ID"],
                "aws_secret_access_key": KEYS["AWS_SECRET_ACCESS_KEY"],
            }
            yield S3Server(endpoint, boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys))
        finally:
            process.terminate()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with credentials in the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return s3_server
