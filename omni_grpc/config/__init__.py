"""Configuration: every setting of a server, how it is read, and the attention backends and roles that settings name."""

from omni_grpc.config.fleet import FleetConfig
from omni_grpc.config.http import HttpConfig
from omni_grpc.config.keeping import JobsConfig, KeepingLimits, StoreConfig
from omni_grpc.config.logs import LogConfig, start_logging
from omni_grpc.config.metrics import MetricsConfig
from omni_grpc.config.options import ENVIRONMENT_PREFIX, Option, unknown_settings
from omni_grpc.config.parallel import ParallelConfig
from omni_grpc.config.sections import (
    BUNDLED,
    DIFFUSERS_CACHES,
    NATIVE_CACHES,
    QUANTIZATIONS,
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    LimitsConfig,
    LoraConfig,
    ModelConfig,
    OffloadConfig,
    ProfilerConfig,
    QuantizationConfig,
    RecipeConfig,
    SchedulerConfig,
    WorkerConfig,
    model_of,
    options,
)
from omni_grpc.config.service_sections import (
    AuditConfig,
    IdentityConfig,
    OutboundConfig,
    ServerConfig,
    TlsConfig,
    WebhooksConfig,
)
from omni_grpc.config.traces import TracesConfig

__all__ = [
    "BUNDLED",
    "DIFFUSERS_CACHES",
    "ENVIRONMENT_PREFIX",
    "NATIVE_CACHES",
    "QUANTIZATIONS",
    "AdapterConfig",
    "AuditConfig",
    "CacheConfig",
    "EngineConfig",
    "FleetConfig",
    "HttpConfig",
    "IdentityConfig",
    "JobsConfig",
    "KeepingLimits",
    "LimitsConfig",
    "LogConfig",
    "LoraConfig",
    "MetricsConfig",
    "ModelConfig",
    "OffloadConfig",
    "Option",
    "OutboundConfig",
    "ParallelConfig",
    "ProfilerConfig",
    "QuantizationConfig",
    "RecipeConfig",
    "SchedulerConfig",
    "ServerConfig",
    "StoreConfig",
    "TlsConfig",
    "TracesConfig",
    "WebhooksConfig",
    "WorkerConfig",
    "model_of",
    "options",
    "start_logging",
    "unknown_settings",
]
