"""Turns an exception into the failure that the user sees."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable

import torch

from omni_grpc.config import EngineConfig
from omni_grpc.resolve.memory_hints import out_of_memory
from omni_grpc.resolve.settings import Placement
from omni_grpc.types.errors import Code, Failure, OmniError
from omni_grpc.types.os_errors import plain
from omni_grpc.types.plan import Broken, Died, Report, Stepped
from omni_grpc.types.spec import Checkpoint

logger = logging.getLogger(__name__)

_OURS = "omni_grpc: out of memory"
_ALLOCATION = re.compile(rf"DefaultCPUAllocator|CUDA error: out of memory|\w+_STATUS_ALLOC_FAILED|{_OURS}")
"""Messages of plain RuntimeErrors with which torch, the libraries below it and our op library report out of memory."""


def failure(error: BaseException, doing: str) -> Failure:
    """RESOURCE_EXHAUSTED if memory ran out, also as the cause of another error; the failure of an OmniError as it is;
    INTERNAL for anything else, which is also logged.
    """
    if ran_out_of_memory(error) or ran_out_of_memory(error.__cause__):
        return Failure(code=Code.RESOURCE_EXHAUSTED, reason="OUT_OF_MEMORY", message=f"out of memory while {doing}")
    if isinstance(error, OmniError):
        return error.failure
    logger.error("unexpected error while %s", doing, exc_info=error)
    message = f"{type(error).__name__} while {doing}: {plain(error)}"
    return Failure(code=Code.INTERNAL, reason="WORKER_ERROR", message=message)


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device or the host ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    found = _ALLOCATION.search(str(error)) if isinstance(error, RuntimeError) else None
    # our library reports a failed allocation without its cause, which may be an earlier error of the device
    return found is not None and not (found[0] == _OURS and device_lost() is not None)


def device_lost() -> Failure | None:
    """DEVICE_LOST if an earlier error of a kernel (an illegal address, a failed assertion) has broken the CUDA context
    of this process: every later call fails until the process ends. None if the device works, or there is none.

    The question does not wait for the device, so another thread may be capturing a graph.
    """
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.mem_get_info()
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        message = f"the GPU is lost to this process ({said}); CUDA_LAUNCH_BLOCKING=1 tells which call it was"
        return Failure(code=Code.UNAVAILABLE, reason="DEVICE_LOST", message=message)
    return None


def advised(report: Report, config: EngineConfig, checkpoint: Checkpoint, placed: Callable[[], Placement]) -> Report:
    """The report; an out-of-memory failure also names settings of this server that would save memory."""

    def advise(failure: Failure, phase: str) -> Failure:
        if failure.reason != "OUT_OF_MEMORY":
            return failure
        return out_of_memory(failure, phase, config, checkpoint, placed())

    match report:
        case Died():
            return dataclasses.replace(report, failure=advise(report.failure, "load"))
        case Broken():
            return dataclasses.replace(report, failure=advise(report.failure, report.phase))
        case Stepped(broken=broken) if broken:
            told = tuple(dataclasses.replace(one, failure=advise(one.failure, one.phase)) for one in broken)
            return dataclasses.replace(report, broken=told)
    return report
