"""How the compiled library is found, and what is said where it does not load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_grpc import ops
from omni_grpc.cli import doctor
from omni_grpc.ops import library
from omni_grpc.ops.library import NativeLibrary


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Lets a test load another file, and forgets it afterwards."""
    library.load_native.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    library.load_native.cache_clear()


def test_loads_once() -> None:
    assert ops.load_native() is ops.load_native()


def test_a_missing_library_is_no_defect(at: pytest.MonkeyPatch, tmp_path: Path) -> None:
    at.setattr(library, "LIBRARY_PATH", tmp_path / "_native.so")
    found = library.load_native()
    assert not found.loaded
    assert not found.broken
    assert "make setup" in found.problem


def test_a_library_that_does_not_load_is_reported(
    at: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "_native.so"
    bad.write_bytes(b"\x7fELF and no more")
    at.setattr(library, "LIBRARY_PATH", bad)
    with pytest.warns(RuntimeWarning, match="does not load, so the ops run on their references"):
        assert library.load_native().broken
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert str(bad) in said
    assert "broken: library" in said


def test_doctor_names_versions_devices_and_ops(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() == 0
    rows = {finding.name: finding.value for finding in doctor.report()}
    assert {"python", "torch", "diffusers", "transformers", "grpcio", "protobuf", "nvcc", "cpu"} <= rows.keys()
    expected = ", ".join(f"{key.lower()} kernel" for key in ops.kernels()["norm_modulate"]) or "reference only"
    assert rows["norm_modulate"] == expected
    assert expected in capsys.readouterr().out


def test_doctor_names_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package",))
    (row,) = [finding for finding in doctor.report() if finding.name == "no-such-package"]
    assert row.broken
    assert "pip install no-such-package" in row.value


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (("90a",), (9, 0), True),
        (("90a",), (10, 0), False),
        (("90a",), (9, 1), False),
        (("80",), (8, 6), True),
        (("86",), (8, 0), False),
        (("80", "100a"), (10, 0), True),
        (("80",), (9, 0), False),
        ((), (9, 0), False),
    ],
)
def test_which_gpus_the_kernels_run_on(archs: tuple[str, ...], capability: tuple[int, int], runs: bool) -> None:
    assert NativeLibrary(Path("_native.so"), present=True, cuda_archs=archs).runs_on(capability) is runs
