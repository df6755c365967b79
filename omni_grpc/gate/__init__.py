"""The gate: what callers may do, whatever stack they come through. No grpc, no protobuf, no torch."""

from omni_grpc.engine import AdapterState, EngineState, EngineStats, Job, JobState, ReplicaStats
from omni_grpc.gate.adapters import LoraAsk, LoraView
from omni_grpc.gate.ask import Ask, Delivery, JobOptions, Medium
from omni_grpc.gate.files import Chunk, Found, UploadHeader
from omni_grpc.gate.follow import Update
from omni_grpc.gate.gate import Gate
from omni_grpc.gate.intake import Accepted
from omni_grpc.gate.jobs import Shown, Watch
from omni_grpc.gate.models import ModelView
from omni_grpc.gate.operation import LoadView, ModelLoad, ServerView
from omni_grpc.gate.pages import PageRequest
from omni_grpc.gate.profiles import ProfileAsk
from omni_grpc.store.records import Asset
from omni_grpc.webhooks import AskedWebhook

__all__ = [
    "Accepted",
    "AdapterState",
    "Ask",
    "AskedWebhook",
    "Asset",
    "Chunk",
    "Delivery",
    "EngineState",
    "EngineStats",
    "Found",
    "Gate",
    "Job",
    "JobOptions",
    "JobState",
    "LoadView",
    "LoraAsk",
    "LoraView",
    "Medium",
    "ModelLoad",
    "ModelView",
    "PageRequest",
    "ProfileAsk",
    "ReplicaStats",
    "ServerView",
    "Shown",
    "Update",
    "UploadHeader",
    "Watch",
]
