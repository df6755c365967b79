"""The commands of docs/generate-a-client.md, each with the toolchain that is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.programs import REQUIRED, ROOT

PAGE = (ROOT / "docs" / "generate-a-client.md").read_text(encoding="utf-8")
COMMANDS = dict(re.findall(r"```sh (\w+)\n(.+?)\n```", PAGE, re.DOTALL))
PLUGINS = {
    "go": ("protoc", "protoc-gen-go", "protoc-gen-go-grpc"),
    "java": ("protoc", "grpc_java_plugin"),
    "cpp": ("protoc", "grpc_cpp_plugin"),
    "csharp": ("protoc",),
    "ruby": ("protoc", "grpc_ruby_plugin"),
    "php": ("protoc", "grpc_php_plugin"),
    "python": (),
    "typescript": ("protoc", "npm"),
}
LANDS = {
    "go": "github.com/omni-grpc/omni_grpc/clients/go/v1/generation_grpc.pb.go",
    "java": "io/github/omnigrpc/v1/GenerateImageRequest.java",
    "cpp": "omni_grpc/v1/generation.grpc.pb.h",
    "csharp": "OmniGrpc/V1/Generation.cs",
    "ruby": "omni_grpc/v1/generation_services_pb.rb",
    "php": "Omni_grpc/V1/GenerationServiceClient.php",
    "python": "omni_grpc/v1/generation_pb2_grpc.py",
    "typescript": "omni_grpc/v1/generation_pb.ts",
}


def test_every_command_is_run() -> None:
    assert COMMANDS.keys() == PLUGINS.keys() == LANDS.keys()


@pytest.mark.parametrize("language", COMMANDS)
def test_stubs_come_of_the_command(language: str, tmp_path: Path) -> None:
    missing = [name for name in PLUGINS[language] if shutil.which(name) is None]
    if missing:
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1, and {', '.join(missing)} is not installed")
        pytest.skip(f"{', '.join(missing)} is not installed")
    (tmp_path / "proto").symlink_to(ROOT / "proto")
    (tmp_path / "gen").mkdir()
    if language == "typescript":
        modules = ROOT / "clients" / "web" / "node_modules"
        if not modules.is_dir():
            pytest.skip("npm ci in clients/web brings protoc-gen-es: make test-clients")
        (tmp_path / "node_modules").symlink_to(modules)
    path = os.environ["PATH"]
    if language == "python":
        path = f"{ROOT / '.venv' / 'gen' / 'bin'}:{Path(sys.executable).parent}:{path}"
    script = "PROTOS=$(cd proto && find omni_grpc google -name '*.proto')\n" + COMMANDS[language]
    made = subprocess.run(
        ["bash", "-euc", script], cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "gen" / LANDS[language]).is_file()
    files = [file.as_posix().lower() for file in (tmp_path / "gen").rglob("*")]
    if language != "go":
        assert any("errordetails" in file.replace("_", "") or "badrequest" in file for file in files)
