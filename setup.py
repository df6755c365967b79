"""Builds the op library `omni_grpc/_native.so`: the C++ sources always, CUDA kernels where nvcc and a GPU are found.

torch must be installed first and the build must see it, `pip install --no-build-isolation -e .`, since an isolated
build would download a CUDA torch. Without a C++ compiler the package installs without the library: its ops run on their
references.

Environment:
    OMNI_GRPC_BUILD       auto (default); cpu: leave nvcc out; none: install without the library
    OMNI_GRPC_CUDA_ARCHS  such as 90a or 90a,100a: builds kernels for these, GPU or not (default: the visible GPUs')
    MAX_JOBS              compilers at a time (default: one for each core, as far as memory allows)
    CUDA_HOME, CXX        where the compilers are
    CUTLASS_PATH          a checkout of CUTLASS 4, instead of the package nvidia-cutlass
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError, CompileError, LinkError

if int(setuptools.__version__.partition(".")[0]) < 77:
    # A new venv brings an older one, and --no-build-isolation builds with what is there.
    raise SystemExit(
        f"omni_grpc: setuptools {setuptools.__version__} is too old; pip install 'setuptools>=77' wheel ninja"
    )

from setuptools.command.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
TORCH_TARGET = "0x020b000000000000"
"""torch 2.11: the oldest torch that the library loads on."""

BUILD_LOG = ROOT / "build" / "native" / "build.log"
DEFAULT_ARCHS = ("90a",)
GIB_PER_JOB = 4
"""A CUTLASS translation unit takes 3.5 to 6 GiB; plain kernels take a tenth of that."""

GENERATION = re.compile(r"_sm(\d+)$")
"""How the name of a kernel ends that is written with CUTLASS for one generation of GPUs, or from it on."""

CUTLASS_FLAGS = ("--expt-relaxed-constexpr", "-DNDEBUG", "-DCUTLASS_ENABLE_GDC_FOR_SM90")
"""An assert is a call, and around calls wgmma waits for each of its own (ptxas: C7510). GDC: a kernel may be launched
while the one before it ends (https://docs.nvidia.com/cuda/cuda-c-programming-guide, "programmatic dependent launch").
"""

NVCC_FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden")
CXX_FLAGS = ("-O3", "-g0", "-fvisibility=hidden", "-fopenmp-simd", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}")


# --- the machine -----------------------------------------------------------------------------------------------------


def why_not() -> str:
    """Why there can be no library here; empty where there can."""
    if os.environ.get("OMNI_GRPC_BUILD") == "none":
        return "OMNI_GRPC_BUILD=none"
    if sys.platform != "linux":
        return f"it is built on Linux alone, this is {sys.platform}"
    if shutil.which(shlex.split(os.environ.get("CXX", "c++"))[0]) is None:
        return "no C++ compiler was found (c++ or $CXX)"
    return ""


def find_cuda() -> Path | None:
    """The root of the CUDA toolkit: a folder with bin/nvcc and the static runtime."""
    on_path = shutil.which("nvcc")
    candidates = (
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        Path(on_path).resolve().parent.parent if on_path else None,
        "/usr/local/cuda",
    )
    for root in candidates:
        if root and (Path(root) / "bin" / "nvcc").is_file() and find_cudart(Path(root)):
            return Path(root)
    return None


def find_cudart(root: Path) -> Path | None:
    name = "libcudart_static.a"
    return next((path for path in (*root.glob(f"lib*/{name}"), *root.glob(f"targets/*/lib/{name}"))), None)


def wanted_cuda() -> Path | None:
    mode = os.environ.get("OMNI_GRPC_BUILD", "auto")
    if mode not in ("auto", "cpu"):
        raise SystemExit(f"OMNI_GRPC_BUILD={mode!r} is none of auto, cpu and none")
    # kernels that nothing here runs take minutes to compile; who builds for another machine says for which
    needed = os.environ.get("OMNI_GRPC_CUDA_ARCHS") or visible_archs()
    return find_cuda() if mode == "auto" and needed else None


def cuda_archs() -> tuple[str, ...]:
    """What to compile for. The variable comes first: who sets it knows better than this machine."""
    if asked := os.environ.get("OMNI_GRPC_CUDA_ARCHS"):
        archs = tuple(re.split(r"[,; ]+", asked.strip()))
        if bad := [arch for arch in archs if not re.fullmatch(r"\d{2,3}[af]?", arch)]:
            raise SystemExit(f"OMNI_GRPC_CUDA_ARCHS={asked!r}: {bad[0]!r} is no architecture; write 90a or 90a,100a")
        return archs
    return visible_archs() or DEFAULT_ARCHS


def visible_archs() -> tuple[str, ...]:
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    capabilities = sorted({tuple(map(int, pair)) for pair in re.findall(r"(\d+)\.(\d+)", answer)})
    # "a" opens the instructions of that generation alone, which start with Hopper (wgmma and its successors).
    return tuple(f"{major}{minor}" + ("a" if major >= 9 else "") for major, minor in capabilities)


def max_jobs() -> int:
    if asked := os.environ.get("MAX_JOBS"):
        return max(1, int(asked))
    available = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    gib = int(available[1]) / 2**20 if available else GIB_PER_JOB
    return max(1, min(len(os.sched_getaffinity(0)), int(gib / GIB_PER_JOB)))


def find_cutlass() -> Path | None:
    """The root of CUTLASS, whose headers the kernels of one generation are made from."""
    package = importlib.util.find_spec("cutlass_library")
    of_package = Path(package.origin).parent / "source" if package and package.origin else None
    for root in (os.environ.get("CUTLASS_PATH"), of_package):
        if root and (Path(root) / "include" / "cutlass" / "cutlass.h").is_file():
            return Path(root)
    return None


def kernel_sources() -> list[Path]:
    return sorted((CSRC / "kernels").glob("*.cu"))


def needs_cutlass(source: Path) -> bool:
    return bool(GENERATION.search(source.stem))


def archs_of(source: Path, archs: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `archs` that a kernel is for: gemm_fp8_sm90.cu is for 90a, gemm_int8_sm80.cu for 80 and all later."""
    generation = GENERATION.search(source.stem)
    if generation is None:
        return archs
    if generation[1] == "90":
        return tuple(arch for arch in archs if arch == "90a")
    return tuple(arch for arch in archs if int(arch.rstrip("af")) >= int(generation[1]))


def nvcc_command(cuda: Path, source: Path, archs: tuple[str, ...], cutlass: Path | None) -> list[str] | None:
    """Compiles `source` for those of `archs` that it is for; None where that is none of them, or CUTLASS is missing."""
    wanted = archs_of(source, archs)
    if not wanted or (needs_cutlass(source) and cutlass is None):
        return None
    command = [str(cuda / "bin" / "nvcc"), *NVCC_FLAGS]
    command += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in wanted]
    if needs_cutlass(source):
        # system headers: their warnings are not ours
        command += [*CUTLASS_FLAGS, *(f"-isystem={cutlass}/{folder}" for folder in ("include", "tools/util/include"))]
    return command


def kernel_commands(cuda: Path | None, archs: tuple[str, ...]) -> dict[Path, list[str]]:
    """What compiles each kernel that can be compiled here."""
    if cuda is None:
        return {}
    cutlass = find_cutlass()
    commands = {source: nvcc_command(cuda, source, archs, cutlass) for source in kernel_sources()}
    return {source: command for source, command in commands.items() if command is not None}


def missing_cutlass(archs: tuple[str, ...]) -> str:
    """What is left out for want of CUTLASS, in words; empty where nothing is."""
    left = [source.name for source in kernel_sources() if needs_cutlass(source) and archs_of(source, archs)]
    if not left or find_cutlass() is not None:
        return ""
    return f"{', '.join(left)} need CUTLASS and are left out: pip install --no-deps {cutlass_requirement()}"


# --- the build -------------------------------------------------------------------------------------------------------


class NativeFile:
    """The library is no Python module, so its name carries no Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"


class BuildNative(NativeFile, build_ext):
    """Builds with torch's own build_ext, or says why the package goes without the library."""

    def run(self) -> None:
        if reason := why_not():
            self.warn(f"omni_grpc goes without its op library, so its ops run on their references: {reason}")
            self.extensions = []
            if self.inplace or self.editable_mode:
                # one that other sources were built into would still be loaded
                (ROOT / "omni_grpc" / "_native.so").unlink(missing_ok=True)
            return
        try:
            builder = compiling_command()(self.distribution)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise SystemExit(
                "omni_grpc: the op library is built against torch, and this build sees none. Install torch first, then "
                "build without isolation:\n    pip install 'torch>=2.11' ninja setuptools wheel\n"
                "    pip install --no-build-isolation -e ."
            ) from None
        builder.inplace, builder.editable_mode, builder.build_lib = self.inplace, self.editable_mode, self.build_lib
        builder.ensure_finalized()
        with explained(BUILD_LOG):
            builder.run()


@contextlib.contextmanager
def explained(log: Path) -> Iterator[None]:
    """Copies what the compilers print into `log`. Raises SystemExit with the first error in it if the build fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    tee = subprocess.Popen(["tee", str(log)], stdin=subprocess.PIPE, stdout=kept[0], stderr=kept[1])
    assert tee.stdin is not None
    for descriptor in (1, 2):
        os.dup2(tee.stdin.fileno(), descriptor)
    failure: Exception | None = None
    try:
        yield
    except (RuntimeError, OSError, subprocess.SubprocessError, BaseError, CompileError, LinkError) as error:
        failure = error
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, original in zip((1, 2), kept, strict=True):
            os.dup2(original, descriptor)
            os.close(original)
        tee.stdin.close()
        tee.wait()
    if failure is not None:
        raise SystemExit(
            f"omni_grpc: the op library does not build: {first_error(log.read_text(errors='replace')) or failure}\n"
            f"omni_grpc: the log of the build is {log}\n"
            "omni_grpc: to go on without the library, on the slower reference ops: OMNI_GRPC_BUILD=none make setup"
        ) from failure


def first_error(log: str) -> str:
    """The first line in which a compiler, the linker or ninja says what is wrong; empty where none does."""
    signs = (r"\berror(?: #\S+)?: ", r"undefined reference to|cannot find -l|No such file or directory", r"^FAILED:")
    found = (re.search(f"^.*(?:{sign}).*$", log, re.MULTILINE) for sign in signs)
    return next((match[0].strip() for match in found if match), "")


def compiling_command() -> type[build_ext]:
    """torch's build_ext, taught to compile CUDA under a CPU torch, which it refuses by itself. Imports torch."""
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    class Compile(NativeFile, BuildExtension):  # type: ignore[misc]
        def finalize_options(self) -> None:
            put_ninja_on_path()
            os.environ["MAX_JOBS"] = str(max_jobs())
            os.environ.setdefault("CXX", "c++")
            self.cuda = wanted_cuda()
            self.archs = cuda_archs() if self.cuda else ()
            self.kernels = kernel_commands(self.cuda, self.archs)
            left = missing_cutlass(self.archs) if self.cuda else ""
            if left:
                self.warn(left)
            self.distribution.ext_modules = [
                self._extension(placeholder) for placeholder in self.distribution.ext_modules
            ]
            super().finalize_options()
            # One folder for each way to build, outside of pip's temporary ones: what is current is not compiled again.
            kind = "-".join(self.archs) or "cpu"
            kind += "-without-cutlass" if left else ""
            self.build_temp = str(ROOT / "build" / "native" / f"torch{torch.__version__}-{kind}")

        def _extension(self, placeholder: Extension) -> Extension:
            # Messages name a source file, not where it lay on the machine that compiled it.
            folders = (ROOT, Path(torch.__file__).resolve().parent.parent)
            flags = [*CXX_FLAGS, *(f"-ffile-prefix-map={folder}/=" for folder in folders)]
            if self.cuda:
                flags.append(f'-DOMNI_GRPC_CUDA_ARCHS="{",".join(self.archs)}"')
            # bind/gemm.cpp names the files that there are
            names = [found[1] for source in self.kernels if (found := GENERATION.search(source.stem))]
            flags += [f"-DOMNI_GRPC_GEMM_SM{number}" for number in sorted(set(names))]
            return CppExtension(
                placeholder.name,
                placeholder.sources,
                depends=placeholder.depends,
                py_limited_api=True,
                # csrc/host calls the CUDA runtime
                include_dirs=[str(self.cuda / "include")] if self.cuda else [],
                extra_compile_args=flags,
                # -ltorch again, so that it stays where the linker drops what it sees no need for: the libtorch of a
                # CUDA torch brings libtorch_cuda, where the stream comes from.
                extra_link_args=["-pthread", "-Wl,-s", "-Wl,--exclude-libs,ALL", "-Wl,--no-as-needed", "-ltorch"],
            )

        def build_extension(self, extension: Extension) -> None:
            target = Path(self.get_ext_fullpath(extension.name))
            build_lib, self.build_lib = self.build_lib, str(Path(self.build_temp) / "lib")
            if self.cuda:
                extension.extra_objects = [
                    *compile_kernels(self.kernels, Path(self.build_temp)),
                    str(find_cudart(self.cuda)),
                ]
                extension.libraries += ["dl", "rt", "pthread"]
            # Force copying, not linking: what was asked for now may be older than what lies at the target.
            self.force = False
            super().build_extension(extension)
            self.force = True
            built, self.build_lib = self.get_ext_fullpath(extension.name), build_lib
            self.mkpath(str(target.parent))
            self.copy_file(built, str(target))

    return Compile


def compile_kernels(commands: dict[Path, list[str]], build_temp: Path) -> list[str]:
    """Compiles kernels with ninja; returns the objects."""
    folder = build_temp.relative_to(ROOT) / "kernels"
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    objects = {source: str(folder / f"{source.stem}.o") for source in commands}
    # Relative paths, which a device assert prints.
    rules = [
        f"builddir = {folder}",
        "rule nvcc",
        "  command = $compile -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        *(
            f"build {made}: nvcc {source.relative_to(ROOT)}\n  compile = {shlex.join(commands[source])}"
            for source, made in objects.items()
        ),
    ]
    (ROOT / folder / "build.ninja").write_text("\n".join(rules) + "\n")
    subprocess.run(["ninja", "-f", f"{folder}/build.ninja", "-j", str(max_jobs())], check=True, cwd=ROOT)
    return [str(ROOT / made) for made in objects.values()]


def cutlass_requirement() -> str:
    """Installed without its dependencies, which are those of its Python tools."""
    requirement: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["omni-grpc"][
        "cutlass"
    ]
    return requirement


def put_ninja_on_path() -> None:
    """The one beside the interpreter wins: another version of ninja does not read its log, and compiles all again."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if shutil.which("ninja") is None:
        raise SystemExit("omni_grpc: the op library is built with ninja, and there is none: pip install ninja")


class WithoutClient(build_py):
    """Leaves out of a wheel what the distribution omni-grpc-client has, which this one depends on: no file belongs to
    both. An editable install has all of it.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        built = Path(self.build_lib) / "omni_grpc"
        settings = (ROOT / "clients" / "python" / "pyproject.toml").read_text(encoding="utf-8")
        shared = tomllib.loads(settings)["tool"]["omni-grpc-client"]
        for room in shared["rooms"]:
            shutil.rmtree(built / room)
        for name in shared["files"]:
            (built / name).unlink()


class NativeWheel(bdist_wheel):
    """One wheel for every Python 3: the library has no CPython symbol in it."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def native_extension() -> Extension:
    sources = [path for folder in ("bind", "cpu", "host") for path in CSRC.glob(f"{folder}/*.cpp")]
    depends = [path for path in CSRC.rglob("*") if path.suffix in {".cpp", ".h", ".cu", ".cuh"}]
    relative: Any = lambda paths: sorted(str(path.relative_to(ROOT)) for path in paths)  # noqa: E731
    return Extension("omni_grpc._native", relative(sources), depends=[*relative(depends), "setup.py"])


if __name__ == "__main__":
    setup(
        ext_modules=[native_extension()],
        cmdclass={"build_py": WithoutClient, "build_ext": BuildNative, "bdist_wheel": NativeWheel},
    )
