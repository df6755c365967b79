"""Custom ops: each a Python function that defines it, and kernels for CPU and CUDA. docs/adding-an-op.md shows how."""

import importlib
import pkgutil

from omni_grpc.ops.library import NativeLibrary, kernels, load_native

for _module in pkgutil.iter_modules(__path__):
    # the ops have to be declared before the library registers kernels for them
    importlib.import_module(f"{__name__}.{_module.name}")
load_native()

__all__ = ["NativeLibrary", "kernels", "load_native"]
