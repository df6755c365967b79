"""From an exception to what the user is told."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable

import torch

from omni_grpc.config import EngineConfig
from omni_grpc.errors import Code, Failure, OmniError
from omni_grpc.plan import Broken, Died, Report, Stepped
from omni_grpc.remedies import out_of_memory
from omni_grpc.settle import Placement
from omni_grpc.spec import Checkpoint

logger = logging.getLogger(__name__)

_ALLOCATION = re.compile(
    r"DefaultCPUAllocator|CUDA error: out of memory|\w+_STATUS_ALLOC_FAILED|omni_grpc: out of memory"
)
"""What torch, the libraries below it and our op library say in a RuntimeError of no class of its own."""


def failure(error: BaseException, doing: str) -> Failure:
    """Running out of memory has a code, also where it is the cause of another error; errors that were raised on purpose
    keep theirs; the rest are ours, and are logged.
    """
    if ran_out_of_memory(error) or ran_out_of_memory(error.__cause__):
        return Failure(code=Code.RESOURCE_EXHAUSTED, reason="OUT_OF_MEMORY", message=f"out of memory while {doing}")
    if isinstance(error, OmniError):
        return error.failure
    logger.error("unexpected error while %s", doing, exc_info=error)
    message = f"{type(error).__name__} while {doing}: {error}"
    return Failure(code=Code.INTERNAL, reason="WORKER_ERROR", message=message)


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Of the device or of the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _ALLOCATION.search(str(error)) is not None


def advised(report: Report, config: EngineConfig, checkpoint: Checkpoint, placed: Callable[[], Placement]) -> Report:
    """The report, in which a failure for lack of memory also says what would save some on this server."""

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
