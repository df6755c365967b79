"""The engine: jobs and their events, what runs next, and the worker that runs it. No torch, no grpc."""

from omni_grpc.engine.adapter_book import AdapterBook, AdapterState, Wanted
from omni_grpc.engine.engine import Engine
from omni_grpc.engine.executor import Executor, HubExecutor, LocalExecutor, ProcessExecutor
from omni_grpc.engine.fairness import Share, ShareOf
from omni_grpc.engine.status import EngineState, EngineStats, ReplicaStats, TenantStats
from omni_grpc.engine.submission import Submission
from omni_grpc.store.job import Job
from omni_grpc.store.records import Entry, JobState

__all__ = [
    "AdapterBook",
    "AdapterState",
    "Engine",
    "EngineState",
    "EngineStats",
    "Entry",
    "Executor",
    "HubExecutor",
    "Job",
    "JobState",
    "LocalExecutor",
    "ProcessExecutor",
    "ReplicaStats",
    "Share",
    "ShareOf",
    "Submission",
    "TenantStats",
    "Wanted",
]
