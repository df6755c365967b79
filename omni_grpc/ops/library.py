"""The compiled library: where it is, and which ops it has kernels for.

It registers kernels for the dispatch keys CPU and CUDA of ops that Python declares, see `ops.declare`. Where it is
missing, the references serve.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from omni_grpc.types.os_errors import plain

NAMESPACE = "omni_grpc"
LIBRARY_PATH = Path(__file__).resolve().parent.parent / "_native.so"
KERNEL_KEYS = ("CPU", "CUDA")


@dataclasses.dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The compiled library as this process found it. `problem` is empty exactly where the library is loaded.

    cuda_archs: what its CUDA kernels were compiled for, such as ("90a",); empty where it has none.
    """

    path: Path
    present: bool
    problem: str = ""
    cuda_archs: tuple[str, ...] = ()

    @property
    def loaded(self) -> bool:
        return not self.problem

    @property
    def broken(self) -> bool:
        """True where the file is there and does not load: a defect, unlike a library that was never built."""
        return self.present and not self.loaded

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether the CUDA kernels run on a GPU of this compute capability: the same generation, not an older member.

        An "a" in an architecture ties it to exactly that capability
        (https://docs.nvidia.com/cuda/cuda-c-programming-guide, "compute capability").
        """
        for arch in self.cuda_archs:
            built = divmod(int(arch.rstrip("af")), 10)
            if capability == built or (arch.isdigit() and capability[0] == built[0] and capability[1] >= built[1]):
                return True
        return False


@functools.cache
def load_native() -> NativeLibrary:
    """Loads the compiled library, once per process. Warns where it is present and does not load."""
    if not LIBRARY_PATH.is_file():
        return NativeLibrary(LIBRARY_PATH, present=False, problem="not built; run `make setup` with a C++ compiler")
    try:
        torch.ops.load_library(str(LIBRARY_PATH))
    except (OSError, RuntimeError) as error:
        problem = plain(error)
        message = f"{LIBRARY_PATH} does not load, so the ops run on their references: {problem}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return NativeLibrary(LIBRARY_PATH, present=True, problem=problem)
    return NativeLibrary(LIBRARY_PATH, present=True, cuda_archs=_cuda_archs(LIBRARY_PATH))


def _cuda_archs(path: Path) -> tuple[str, ...]:
    first = ctypes.c_char.in_dll(ctypes.CDLL(str(path)), "omni_grpc_cuda_archs")
    return tuple(ctypes.string_at(ctypes.addressof(first)).decode().split(",")) if first.value != b"\0" else ()


def kernels() -> Mapping[str, tuple[str, ...]]:
    """The dispatch keys that have a kernel, for each declared op; an empty tuple where the reference serves."""
    prefix = f"{NAMESPACE}::"
    names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix))
    return {
        name.removeprefix(prefix): tuple(
            key for key in KERNEL_KEYS if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        )
        for name in names
    }


def kernels_on(device: str) -> frozenset[str]:
    """The declared ops that have a kernel on a type of device."""
    return frozenset(op for op, keys in kernels().items() if device.upper() in keys)
