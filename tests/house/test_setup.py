"""What `make setup` decides. That it works is proved by CI, which begins with it on a clean clone."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup_env

from .source import ROOT

CPU_BUILD = f"torch=={setup_env.CPU_TORCH}+cpu"


@pytest.mark.parametrize(
    ("asked", "gpu", "platform", "choices"),
    [
        (None, False, "linux", [[CPU_BUILD], ["--index-url", setup_env.CPU_INDEX, CPU_BUILD]]),
        (None, False, "darwin", [[f"torch=={setup_env.CPU_TORCH}"]]),
        (None, True, "linux", [["torch>=2.11,<2.15"]]),
        ("torch==2.12.*", False, "linux", [["torch==2.12.*"]]),
        ("torch==2.12.*", True, "linux", [["torch==2.12.*"]]),
    ],
)
def test_the_torch_that_suits_the_machine(
    asked: str | None, gpu: bool, platform: str, choices: list[list[str]]
) -> None:
    assert setup_env.torch_choices(asked, gpu=gpu, platform=platform)[1] == choices


class FailingPip(setup_env.Pip):
    """A pip that fails with one complaint, whatever it is asked for."""

    def __init__(self, complaint: str) -> None:
        super().__init__(Path(sys.executable))
        self.complaint = complaint
        self.asked: list[tuple[str, ...]] = []

    def try_install(self, *arguments: str) -> str:
        self.asked.append(arguments)
        return self.complaint


@pytest.mark.parametrize(
    "complaint", ["ERROR: No matching distribution found for torch", "ERROR: ResolutionImpossible: for help visit"]
)
def test_the_second_index_is_asked_where_the_first_lacks_the_build(
    monkeypatch: pytest.MonkeyPatch, complaint: str
) -> None:
    monkeypatch.setattr(setup_env, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    pip = FailingPip(complaint)
    with pytest.raises(setup_env.SetupError, match="TORCH="):
        setup_env.install_torch(pip, None)
    assert [arguments[-1] for arguments in pip.asked] == [CPU_BUILD, CPU_BUILD]


def test_any_other_failure_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    pip = FailingPip("ERROR: No space left on device")
    with pytest.raises(setup_env.SetupError, match="No space left"):
        setup_env.install_torch(pip, None)
    assert len(pip.asked) == 1


def test_setup_goes_on_without_cutlass_and_says_what_that_costs(capsys: pytest.CaptureFixture[str]) -> None:
    pip = FailingPip("ERROR: no network\nERROR: No matching distribution found for nvidia-cutlass")
    setup_env.install_cutlass(pip, "nvidia-cutlass==4.2.0.0")
    assert pip.asked == [("--no-deps", "nvidia-cutlass==4.2.0.0")]
    said = capsys.readouterr().out
    assert "cuda-check fails: ERROR: No matching distribution found" in said


def test_a_python_without_ensurepip_is_told_what_to_install() -> None:
    script = str(ROOT / "tools" / "setup_env.py")
    code = f"""
import runpy, sys
sys.modules["ensurepip"] = None
sys.argv = [{script!r}]
runpy.run_path({script!r}, run_name="__main__")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "apt install python3-venv" in result.stderr


def test_the_digest_sees_contents_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    first, second = tmp_path / "a.cu", tmp_path / "b.cu"
    first.write_text("1", encoding="utf-8")
    one = setup_env.digest([first, second])
    first.write_text("2", encoding="utf-8")
    changed = setup_env.digest([first, second])
    first.rename(second)
    assert len({one, changed, setup_env.digest([first, second])}) == 3
