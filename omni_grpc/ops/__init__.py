"""Custom ops: each a Python function that defines it, and kernels for CPU and CUDA. docs/adding-an-op.md shows how."""

import importlib
import pkgutil

from omni_grpc.ops import compile_cache
from omni_grpc.ops.library import NativeLibrary, kernels, load_native

# before the first module that imports torch's compiler
compile_cache.ensure()
for _module in pkgutil.iter_modules(__path__):
    # the ops have to be declared before the library registers kernels for them
    importlib.import_module(f"{__name__}.{_module.name}")
load_native()

__all__ = ["NativeLibrary", "kernels", "load_native"]
