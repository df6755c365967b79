"""What an import loads, seen in a process of its own, and the guards around the models symlink."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from .source import ROOT, git

HEAVY = {"torch", "diffusers", "transformers", "accelerate", "safetensors"}
SHARED_ROOMS = ("types", "config", "checkpoint", "feature_rules", "resolve")
OUTSIDE = ("config/settings.py", "config/yaml_text.py", "checkpoint/hub.py")
"""What reads YAML, and what downloads: loaded by their callers when they are needed."""
CONTROL = (
    "omni_grpc",
    "omni_grpc.server",
    "omni_grpc.client",
    "omni_grpc.metadata.remuxing",
    "omni_grpc.engine",
    "omni_grpc.identity",
    "omni_grpc.store",
    "omni_grpc.serve",
    "omni_grpc.cli.main",
    "omni_grpc.checkpoint.hub",
    "omni_grpc.media_in.inputs",
    "omni_grpc.media_in",
    "omni_grpc.media_in.fetch",
    "omni_grpc.outbound",
    "omni_grpc.webhooks",
    "omni_grpc.web",
    "omni_grpc.fleet",
    "omni_grpc.cli.generate",
    "omni_grpc.compat",
    "omni_grpc.cli.bench.command",
    "omni_grpc.scenes.judge",
)
SYMLINK_HOOK = "models-symlink"


def shared_modules() -> list[str]:
    """Every module of the shared rooms, such as "types.plan"."""
    package = ROOT / "omni_grpc"
    found = [path.relative_to(package) for room in SHARED_ROOMS for path in sorted((package / room).glob("*.py"))]
    inside = [path for path in found if path.name != "__init__.py" and path.as_posix() not in OUTSIDE]
    assert len(inside) > len(SHARED_ROOMS)
    return [".".join(path.with_suffix("").parts) for path in inside]


def run_python(code: str, *, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def loaded_by(code: str, *, folder: Path = ROOT) -> set[str]:
    """The top-level modules that `code` loads, apart from those that the interpreter starts with."""
    # __mp_main__ is the name that multiprocessing gives __main__
    report = "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before} - {'__mp_main__'}))"
    result = run_python(f"import sys\nbefore = set(sys.modules)\n{code}\n{report}", folder=folder)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("module", CONTROL)
def test_the_control_tower_loads_no_torch(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert "omni_grpc" in loaded
    assert not loaded & HEAVY


def test_the_package_loads_no_grpc() -> None:
    assert "grpc" not in loaded_by("import omni_grpc")


def test_a_server_without_a_database_loads_none() -> None:
    """What SQLAlchemy and pydantic take to load is a third of a second."""
    databases = {"sqlalchemy", "alembic", "pydantic", "asyncpg"}
    assert not loaded_by("import omni_grpc.store.memory, omni_grpc.server, omni_grpc.serve") & databases
    assert {"sqlalchemy", "pydantic", "asyncpg"} <= loaded_by("import omni_grpc.store.sql")


def test_tokens_are_managed_without_grpc() -> None:
    assert "grpc" not in loaded_by("from omni_grpc.cli import token")


def test_reading_the_model_specs_loads_no_torch() -> None:
    loaded = loaded_by("from omni_grpc.checkpoint.registry import specs\nassert specs()")
    assert not loaded & HEAVY


def test_what_is_loaded_is_seen(tmp_path: Path) -> None:
    tmp_path.joinpath("torch.py").write_text("", encoding="utf-8")
    tmp_path.joinpath("sample.py").write_text("def f():\n    import torch\nf()\n", encoding="utf-8")
    assert loaded_by("import sample", folder=tmp_path) & HEAVY == {"torch"}


@pytest.mark.parametrize("leaf", shared_modules())
def test_a_shared_module_loads_the_standard_library_alone(leaf: str) -> None:
    # a bare package in place of omni_grpc/__init__.py, which loads more than the leaf asks for
    bare = "import types\npackage = sys.modules['omni_grpc'] = types.ModuleType('omni_grpc')\n"
    loaded = loaded_by(f"{bare}package.__path__ = ['omni_grpc']\nimport omni_grpc.{leaf}")
    assert loaded - set(sys.stdlib_module_names) == {"omni_grpc"}


def test_models_has_one_import_name() -> None:
    result = run_python("import models")
    assert result.returncode != 0
    assert "ImportError: import omni_grpc.models, not models" in result.stderr
    assert run_python("import omni_grpc.models").returncode == 0


def test_models_is_a_symlink_here_and_in_git() -> None:
    link = ROOT / "omni_grpc" / "models"
    assert link.is_symlink()
    assert os.readlink(link) == os.path.join("..", "models")
    assert git("ls-files", "--stage", "omni_grpc/models").startswith("120000 ")


def test_the_tools_see_models_under_the_right_names() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert "^models/" in tools["mypy"]["exclude"]
    assert tools["coverage"]["run"]["source"] == ["omni_grpc", "models"]


def test_pre_commit_refuses_a_broken_symlink(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (hook,) = (hook for repo in config["repos"] for hook in repo["hooks"] if hook["id"] == SYMLINK_HOOK)
    assert hook["always_run"]

    def passes() -> bool:
        command = [*hook["entry"].split(), *hook["args"]]
        return subprocess.run(command, cwd=tmp_path, check=False, capture_output=True).returncode == 0

    package = tmp_path / "omni_grpc"
    package.mkdir()
    assert not passes()
    package.joinpath("models").write_text("../models", encoding="utf-8")  # what a checkout without symlinks leaves
    assert not passes()
    package.joinpath("models").unlink()
    package.joinpath("models").symlink_to("../models")
    assert not passes()  # the target is missing
    tmp_path.joinpath("models").mkdir()
    assert passes()
