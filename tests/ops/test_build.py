"""The built library, and what setup.py does where a compiler, or torch, is missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from omni_grpc import ops

ROOT = Path(__file__).resolve().parents[2]
HAS_COMPILER = shutil.which("c++") is not None
BUNDLED = ("omni_grpc/demo/model_index.json", "omni_grpc/demo/vae/diffusion_pytorch_model.safetensors")
CLIENT_ROOMS = ("client", "metadata", "types", "v1", "wire")
LIBRARY = ops.load_native().path


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    spec = importlib.util.spec_from_file_location("omni_grpc_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the build needs of this checkout, without what was built here. The package is cut to its ops."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    (copy / "README.md").write_text("omni_grpc\n")
    (copy / "LICENSE").write_text("see the project\n")
    # it lists what the other distribution has of the package, which this one's wheel leaves out
    (copy / "clients" / "python").mkdir(parents=True)
    shutil.copy(ROOT / "clients/python/pyproject.toml", copy / "clients" / "python")
    for room in CLIENT_ROOMS:
        (copy / "omni_grpc" / room).mkdir(parents=True, exist_ok=True)
        (copy / "omni_grpc" / room / "__init__.py").write_text("")
    shutil.copy(ROOT / "omni_grpc" / "py.typed", copy / "omni_grpc")
    shutil.copytree(ROOT / "csrc", copy / "csrc")
    shutil.copytree(ROOT / "omni_grpc" / "ops", copy / "omni_grpc" / "ops")
    needed = ("version", "errors", "os_errors", "json_text", "output_files")
    for file in (*(f"types/{name}.py" for name in needed), "config/backends.py"):
        (copy / "omni_grpc" / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "omni_grpc" / file, copy / "omni_grpc" / file)
        (copy / "omni_grpc" / file).with_name("__init__.py").write_text("")
    (copy / "omni_grpc" / "__init__.py").write_text("")
    for file in BUNDLED:
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        (copy / file).write_text("{}")
    return copy


def run(tree: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs this Python in the tree. CXX is unset: PATH alone decides about the compiler."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("CXX", "OMNI_GRPC_BUILD", "MAX_JOBS")
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler, so no library")
def test_library_is_bound_to_no_python() -> None:
    undefined = subprocess.run(
        ["nm", "-D", "--undefined-only", LIBRARY], capture_output=True, text=True, check=True
    ).stdout
    symbols = [line.split()[-1] for line in undefined.splitlines()]
    assert any(symbol.startswith("aoti_torch_") for symbol in symbols)
    assert not [symbol for symbol in symbols if symbol.startswith(("Py", "_Py"))]
    needed = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
    assert "libtorch.so" in needed
    assert "python" not in needed
    assert "libcudart" not in needed


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler, so no library")
def test_library_stays_in_the_stable_abi() -> None:
    """A C++ symbol of c10 or at would tie the file to one torch; the stable ABI is C functions alone."""
    undefined = subprocess.run(
        ["nm", "-D", "-C", "--undefined-only", LIBRARY], capture_output=True, text=True, check=True
    ).stdout
    assert not [line for line in undefined.splitlines() if "c10::" in line or "at::" in line]


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler, so no library")
def test_library_does_not_say_where_it_was_built() -> None:
    assert str(ROOT).encode() not in LIBRARY.read_bytes()


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
def test_build_repeats_nothing(tree: Path) -> None:
    build = ("setup.py", "build_ext", "--inplace")
    first = run(tree, *build, OMNI_GRPC_BUILD="cpu")
    assert first.returncode == 0, first.stderr
    library = tree / "omni_grpc" / "_native.so"
    made = library.stat().st_mtime_ns

    again = run(tree, *build, OMNI_GRPC_BUILD="cpu")
    assert again.returncode == 0, again.stderr
    assert "norm.cpp" in first.stdout
    assert "norm.cpp" not in again.stdout
    assert library.stat().st_mtime_ns == made

    os.utime(tree / "csrc" / "cpu" / "norm.cpp")
    changed = run(tree, *build, OMNI_GRPC_BUILD="cpu")
    assert "norm.cpp" in changed.stdout
    assert "bind/norm.cpp" not in changed.stdout
    assert library.stat().st_mtime_ns > made

    ask = "from omni_grpc import ops; print(ops.kernels()['norm_modulate'], ops.load_native().cuda_archs)"
    answer = run(tree, "-c", ask)
    assert answer.stdout.strip() == "('CPU',) ()", answer.stderr


def test_installs_without_a_compiler(tree: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    built = run(tree, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path), PATH=str(empty))
    assert built.returncode == 0, built.stderr
    said = [line for line in built.stderr.splitlines() if "omni_grpc goes without its op library" in line]
    assert len(said) == 1
    assert "no C++ compiler was found" in said[0]

    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert "omni_grpc/ops/norm.py" in archive.namelist()
        assert "omni_grpc/_native.so" not in archive.namelist()
        assert not [name for name in archive.namelist() if name.startswith(("omni_grpc/client/", "omni_grpc/types/"))]
        assert set(BUNDLED) <= set(archive.namelist())
        archive.extractall(tmp_path / "site")
    # and that of omni-grpc-client beside it
    for name in ("__init__.py", *CLIENT_ROOMS):
        shutil.move(tree / "omni_grpc" / name, tmp_path / "site" / "omni_grpc" / name)
    ask = "from omni_grpc import ops; print(ops.kernels()['norm_modulate'], ops.load_native().problem)"
    answer = run(tmp_path / "site", "-c", ask)
    assert answer.stdout.startswith("() not built"), answer.stderr


def test_the_source_distribution_has_the_bundled_model(tree: Path, tmp_path: Path) -> None:
    built = run(tree, "setup.py", "-q", "sdist", "-d", str(tmp_path))
    assert built.returncode == 0, built.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert set(BUNDLED) <= names


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
def test_says_what_to_do_where_torch_is_missing(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('raise ModuleNotFoundError("No module named torch", name="torch")\n')
    built = run(tree, "setup.py", "build_ext", "--inplace", PYTHONPATH=str(tmp_path))
    assert built.returncode != 0
    assert "pip install --no-build-isolation" in built.stderr
    assert "Traceback" not in built.stderr


def test_cuda_archs(setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMNI_GRPC_CUDA_ARCHS", raising=False)
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_py.cuda_archs() == ("90a",)
    smi.write_text("#!/bin/sh\necho 10.0\necho 8.6\necho 9.0\necho 9.0\n")
    smi.chmod(0o755)
    assert setup_py.cuda_archs() == ("86", "90a", "100a")
    monkeypatch.setenv("OMNI_GRPC_CUDA_ARCHS", "80, 90a")
    assert setup_py.cuda_archs() == ("80", "90a")
    monkeypatch.setenv("OMNI_GRPC_CUDA_ARCHS", "sm_90")
    with pytest.raises(SystemExit, match="'sm_90' is no architecture"):
        setup_py.cuda_archs()


def test_build_mode(setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup_py, "find_cuda", lambda: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("OMNI_GRPC_CUDA_ARCHS", raising=False)
    monkeypatch.setenv("OMNI_GRPC_BUILD", "auto")
    assert setup_py.wanted_cuda() is None, "there is no GPU, and nobody asked for kernels"
    monkeypatch.setenv("OMNI_GRPC_CUDA_ARCHS", "90a")
    assert setup_py.wanted_cuda() == tmp_path
    monkeypatch.setenv("OMNI_GRPC_BUILD", "cpu")
    assert setup_py.wanted_cuda() is None
    monkeypatch.setenv("OMNI_GRPC_BUILD", "gpu")
    with pytest.raises(SystemExit, match="none of auto, cpu and none"):
        setup_py.wanted_cuda()


def test_jobs_fit_cores_and_memory(setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "7")
    assert setup_py.max_jobs() == 7
    monkeypatch.delenv("MAX_JOBS")
    assert 1 <= setup_py.max_jobs() <= len(os.sched_getaffinity(0))
    monkeypatch.setattr(setup_py, "GIB_PER_JOB", 1e9)
    assert setup_py.max_jobs() == 1


def test_kernels_of_a_generation_are_compiled_for_it_alone_and_with_cutlass(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    monkeypatch.setattr(setup_py.importlib.util, "find_spec", lambda name: None)
    names = ("norm.cu", "gemm_fp8_sm90.cu", "gemm_int8_sm80.cu")
    of_any, of_hopper, of_ampere = (ROOT / "csrc" / "kernels" / name for name in names)
    assert {of_any, of_hopper, of_ampere} <= set(setup_py.kernel_sources())
    assert setup_py.find_cutlass() is None
    assert setup_py.nvcc_command(Path("/cuda"), of_hopper, ("90a",), None) is None
    assert of_hopper not in setup_py.kernel_commands(Path("/cuda"), ("90a",))
    assert "gemm_fp8_sm90.cu" in setup_py.missing_cutlass(("90a",))
    assert "--no-deps nvidia-cutlass==" in setup_py.missing_cutlass(("90a",))
    assert "gemm_fp8_sm90.cu" not in setup_py.missing_cutlass(("80", "100a"))

    header = tmp_path / "include" / "cutlass" / "cutlass.h"
    header.parent.mkdir(parents=True)
    header.write_text("")
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    assert not setup_py.missing_cutlass(("90a",))
    commands = setup_py.kernel_commands(Path("/cuda"), ("80", "90a"))
    targets = {
        source: [word for word in commands[source] if word.startswith("-gencode")] for source in (of_any, of_hopper)
    }
    assert setup_py.archs_of(of_ampere, ("75", "80", "90a", "100a")) == ("80", "90a", "100a")
    hopper = "-gencode=arch=compute_90a,code=sm_90a"
    assert targets == {of_any: ["-gencode=arch=compute_80,code=sm_80", hopper], of_hopper: [hopper]}
    assert f"-isystem={tmp_path}/include" in commands[of_hopper]
    assert not any("isystem" in word for word in commands[of_any])
    assert of_hopper not in setup_py.kernel_commands(Path("/cuda"), ("80",))
