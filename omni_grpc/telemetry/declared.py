"""Every metric: its name, kind, labels and help. `tools/metrics_table.py` makes a table of it, in docs/metrics.md."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

CALL_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
STAGE_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LAG_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
SIZES = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)


class Kind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """`bound`: how many series there can be at most, in words; "" where there is one. `when`: where it is there at all,
    "" everywhere. `buckets` are upper bounds.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bound: str = ""
    when: str = ""
    buckets: tuple[float, ...] = ()


def _counter(name: str, help: str, *labels: str, bound: str = "", when: str = "") -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, help=help, labels=labels, bound=bound, when=when)


def _gauge(name: str, help: str, *labels: str, bound: str = "", when: str = "") -> Metric:
    return Metric(name=name, kind=Kind.GAUGE, help=help, labels=labels, bound=bound, when=when)


def _histogram(name: str, help: str, *labels: str, buckets: tuple[float, ...], bound: str = "") -> Metric:
    return Metric(name=name, kind=Kind.HISTOGRAM, help=help, labels=labels, bound=bound, buckets=buckets)


MODELS = "models"
MODELS_KEPT = 64
"""Models that have figures of their own, those that were unloaded included; the others count as "other"."""
REASONS_KEPT = 200
"""The same of reasons of refusals and failures."""
REPLICAS = "models x replicas"
PROCESSES = "models x replicas x ranks"
CUDA, LORA = "on CUDA devices", "with LoRA adapters"

# --- calls ------------------------------------------------------------------------------------------------------------

RPCS = _counter(
    "omni_grpc_rpcs_total",
    "Calls that ended, by the status code; GONE where the client left. Other HTTP requests count as the method that "
    "they come nearest to.",
    *("stack", "method", "code"),
    bound="5 stacks x methods of the API x 18 codes",
)
RPC_SECONDS = _histogram(
    "omni_grpc_rpc_duration_seconds",
    "Time from the start of a call to its end; a stream lasts as long as it is open.",
    *("stack", "method"),
    buckets=CALL_SECONDS,
    bound="5 stacks x methods of the API",
)
REFUSALS = _counter(
    "omni_grpc_refusals_total",
    "Calls that ended with an error, by its reason.",
    "reason",
    bound=f"{REASONS_KEPT} reasons, then `other`",
)
OPEN_CALLS = _gauge("omni_grpc_open_calls", "Calls that have not ended.")
OPEN_STREAMS = _gauge("omni_grpc_open_streams", "Server-streaming calls that have not ended.")

# --- jobs -------------------------------------------------------------------------------------------------------------

JOBS = _counter(
    "omni_grpc_jobs_total",
    "Jobs that ended, by their last state and for a failure its reason.",
    *("model", "task", "state", "reason"),
    bound=f"models x tasks x (2 + {REASONS_KEPT} reasons, then `other`)",
)
STAGE_TIMES = _histogram(
    "omni_grpc_job_stage_seconds",
    "Time that a job which succeeded spent in a stage: queue, encode, denoise, decode, encode_media, store, total.",
    *("model", "stage"),
    buckets=STAGE_SECONDS,
    bound="models x 6",
)
OUTPUTS = _counter(
    "omni_grpc_outputs_total", "Outputs of jobs that succeeded.", "model", "kind", bound="models x image, video, audio"
)
FRAMES = _counter("omni_grpc_output_frames_total", "Frames of these outputs; an image is one.", "model", bound=MODELS)
OUTPUT_BYTES = _counter("omni_grpc_output_bytes_total", "Bytes of these outputs.", "model", bound=MODELS)
LORA_JOBS = _counter(
    "omni_grpc_lora_jobs_total",
    "Jobs that ended, by the adapters that they used.",
    *("model", "adapter"),
    bound="models x adapters that are loaded",
    when=LORA,
)

LORA_LOADS = _counter(
    "omni_grpc_lora_loads_total",
    "Adapters that workers loaded on order, or could not: each replica counts, and each start of a worker.",
    *("model", "outcome"),
    bound="models x ok, failed",
    when=LORA,
)

# --- queue ------------------------------------------------------------------------------------------------------------

QUEUED = _gauge("omni_grpc_queue_jobs", "Jobs that wait.", "model", bound=MODELS)
QUEUE_LIMIT = _gauge("omni_grpc_queue_limit_jobs", "Jobs that may wait (--max-queue).", "model", bound=MODELS)
QUEUE_DELAY = _gauge(
    "omni_grpc_queue_delay_seconds",
    "Predicted time that a job made now would wait; missing until steps were measured.",
    "model",
    bound=MODELS,
)
WORK = _gauge(
    "omni_grpc_work_seconds", "Predicted time of all steps that jobs have still to take.", "model", bound=MODELS
)
RUNNING = _gauge("omni_grpc_running_jobs", "Jobs that have left the queue.", "model", bound=MODELS)
RUNNING_ROWS = _gauge(
    "omni_grpc_running_rows", "Rows of the jobs that share steps: one for each image and branch.", "model", bound=MODELS
)
TENANT_JOBS = _gauge(
    "omni_grpc_tenant_jobs",
    "Jobs of a tenant, over all models, by state: queued or running. The tenant is empty without identities.",
    *("tenant", "state"),
    bound="2 x --metrics-tenants with the most jobs, then `other`",
)

# --- steps ------------------------------------------------------------------------------------------------------------

STEP_TIMES = _histogram(
    "omni_grpc_step_duration_seconds",
    "Time of one forward of the denoiser with all that belongs to it.",
    "model",
    buckets=STEP_SECONDS,
    bound=MODELS,
)
STEP_REQUESTS = _histogram(
    "omni_grpc_step_requests", "Requests that share a forward.", "model", buckets=SIZES, bound=MODELS
)
STEP_ROWS = _histogram("omni_grpc_step_rows", "Rows of a forward.", "model", buckets=SIZES, bound=MODELS)
STEPS = _counter("omni_grpc_steps_total", "Steps, counted for each request.", "model", bound=MODELS)
TOKENS = _counter("omni_grpc_step_tokens_total", "Tokens of all rows, counted in each forward.", "model", bound=MODELS)
PIXELS = _counter(
    "omni_grpc_step_pixels_total",
    "Width x height x frames x outputs, counted in each step of a request.",
    "model",
    bound=MODELS,
)
PREDICTED = _counter(
    "omni_grpc_step_predicted_seconds_total",
    "What the cost model predicted for forwards, before it was corrected by what was measured.",
    "model",
    bound=MODELS,
)
MEASURED = _counter("omni_grpc_step_measured_seconds_total", "What these forwards took.", "model", bound=MODELS)
COST_ERROR = _gauge(
    "omni_grpc_step_cost_ratio",
    "Measured over predicted time of a forward, a running mean.",
    *("model", "replica"),
    bound=REPLICAS,
)
BROKEN = _counter(
    "omni_grpc_broken_requests_total",
    "Requests that failed in a phase: prepare, step or decode.",
    *("model", "phase"),
    bound="models x 3",
)
CACHED = _counter(
    "omni_grpc_step_cache_rows_total",
    "Evaluations of rows under a step cache, by the component and whether it served them (hit) or they were computed "
    "(miss).",
    *("model", "component", "result"),
    bound="models x components x 2",
    when="with a step cache",
)

# --- workers ----------------------------------------------------------------------------------------------------------

RESTARTS = _counter(
    "omni_grpc_worker_restarts_total",
    "Starts of a worker after its first, by the reason of the failure before, or WORKER_DRAINED.",
    *("model", "cause"),
    bound=f"models x {REASONS_KEPT} reasons, then `other`",
)
REPLICA_STATE = _gauge(
    "omni_grpc_replica_state",
    "1 for the state that a replica is in, 0 for the others.",
    *("model", "replica", "state"),
    bound="models x replicas x 7",
)
REPLICA_JOBS = _gauge("omni_grpc_replica_running_jobs", "Jobs that a replica has.", "model", "replica", bound=REPLICAS)
GRAPH_CAPTURES = _counter(
    "omni_grpc_cuda_graph_captures_total",
    "CUDA graphs that were captured since the model was loaded.",
    *("model", "replica", "rank"),
    bound=PROCESSES,
    when=CUDA,
)
GRAPH_REPLAYS = _counter(
    "omni_grpc_cuda_graph_replays_total",
    "Launches of CUDA graphs since the model was loaded.",
    *("model", "replica", "rank"),
    bound=PROCESSES,
    when=CUDA,
)
KERNELS = _gauge(
    "omni_grpc_kernel_info",
    "1 for each kernel that was chosen for an op which has several.",
    *("model", "op", "kernel"),
    bound="models x kernels of the op library",
    when=CUDA,
)

# --- models -----------------------------------------------------------------------------------------------------------

MODEL_STATE = _gauge(
    "omni_grpc_model_state",
    "1 for the state that a model is in, 0 for the others.",
    *("model", "state"),
    bound="models x 7",
)
LOAD_PHASE = _gauge(
    "omni_grpc_model_load_phase",
    "1 for the phase of loading that a model is in, 0 for the others; missing once it is loaded.",
    *("model", "phase"),
    bound="models x 3",
    when="while a model is loaded",
)
DOWNLOADED = _gauge(
    "omni_grpc_model_downloaded_bytes",
    "Bytes of the weights that have come from the hub; missing once it is loaded.",
    "model",
    bound=MODELS,
    when="while a model is downloaded",
)
DOWNLOAD_SIZE = _gauge(
    "omni_grpc_model_download_size_bytes",
    "Bytes of all weights that come from the hub; missing once it is loaded.",
    "model",
    bound=MODELS,
    when="while a model is downloaded",
)
LOAD_SECONDS = _gauge(
    "omni_grpc_model_load_seconds", "Time that the worker took to load the model.", "model", bound=MODELS
)
MODEL_INFO = _gauge(
    "omni_grpc_model_info",
    "1, with how the model is executed.",
    *("model", "device", "dtype", "attention", "quantization", "residency"),
    bound=MODELS,
)
LORA_LOADED = _gauge(
    "omni_grpc_lora_loaded",
    "1 for each adapter that is loaded.",
    *("model", "adapter"),
    bound="models x adapters that are loaded",
    when=LORA,
)

LORA_BYTES = _gauge(
    "omni_grpc_lora_bytes",
    "Bytes of the adapters that are loaded, as a worker keeps them in its caches.",
    "model",
    bound=MODELS,
    when=LORA,
)

LORA_CACHE = _gauge(
    "omni_grpc_lora_cache_bytes",
    "What adapters have of a memory of a worker: host, device, or merged (weights with adapters merged into them).",
    *("model", "replica", "rank", "cache"),
    bound="models x replicas x ranks x 3",
    when=LORA,
)
LORA_CACHE_LIMIT = _gauge(
    "omni_grpc_lora_cache_limit_bytes",
    "The most that adapters may have of it (--lora-host-cache, --lora-device-cache, --lora-merged-cache).",
    *("model", "replica", "rank", "cache"),
    bound="models x replicas x ranks x 3",
    when=LORA,
)
LORA_EVICTIONS = _counter(
    "omni_grpc_lora_evictions_total",
    "Adapters, or merged weights, that made room for others since the model was loaded.",
    *("model", "replica", "rank", "cache"),
    bound="models x replicas x ranks x 3",
    when=LORA,
)

# --- memory -----------------------------------------------------------------------------------------------------------

DEVICE_USED = _gauge(
    "omni_grpc_device_memory_used_bytes",
    "Memory that is taken on the device of a worker, by whichever process; for a CPU, of the host or its container.",
    *("model", "replica", "rank", "device"),
    bound=PROCESSES,
)
DEVICE_SIZE = _gauge(
    "omni_grpc_device_memory_size_bytes",
    "All memory of that device.",
    *("model", "replica", "rank", "device"),
    bound=PROCESSES,
)
WEIGHTS = _gauge(
    "omni_grpc_model_device_weights_bytes",
    "Of the weights of one replica, what is on the device while it is awake.",
    "model",
    bound=MODELS,
)
WORKER_RESIDENT = _gauge(
    "omni_grpc_worker_resident_memory_bytes",
    "Host memory of a worker's process.",
    *("model", "replica", "rank"),
    bound=PROCESSES,
)
SHARED_BLOCKS = _gauge(
    "omni_grpc_shared_memory_blocks", "Blocks of this server in /dev/shm: inputs and outputs on their way."
)
SHARED_BYTES = _gauge("omni_grpc_shared_memory_bytes", "Bytes of these blocks.")
INPUT_BYTES = _gauge("omni_grpc_input_bytes", "Decoded inputs of jobs that wait.")
INPUT_BUDGET = _gauge("omni_grpc_input_budget_bytes", "What these may take (--input-budget).")

# --- store ------------------------------------------------------------------------------------------------------------

STORE_BYTES = _gauge("omni_grpc_store_bytes", "Bytes that are kept: artifacts and assets.", "kind", bound="2")
STORE_BUDGET = _gauge(
    "omni_grpc_store_budget_bytes", "What these may take (--artifact-budget, --asset-budget).", "kind", bound="2"
)
STORE_ROWS = _gauge(
    "omni_grpc_store_rows",
    "Rows of the store, those of other servers included; 15 seconds old at most.",
    "kind",
    bound="3",
)
STORE_WRITABLE = _gauge("omni_grpc_store_writable", "0 while what happens to jobs cannot be written, else 1.")
UNWRITTEN = _gauge("omni_grpc_store_unwritten_jobs", "Jobs of which something is still to be written.")

# --- watchers and webhooks --------------------------------------------------------------------------------------------

WATCH_LAG = _histogram(
    "omni_grpc_watch_lag_seconds",
    "Time from an event to its being handed to a watcher that was there; what its own pace holds back does not count.",
    buckets=LAG_SECONDS,
)
WATCH_EVENTS = _counter("omni_grpc_watch_events_total", "Events that were handed to watchers.")
COALESCED = _counter(
    "omni_grpc_watch_coalesced_events_total", "Progress events that watchers did not get, because newer ones came."
)
WEBHOOK_ATTEMPTS = _counter(
    "omni_grpc_webhook_attempts_total",
    "Attempts to deliver a webhook: delivered, failed, or given_up for the last one.",
    "outcome",
    bound="3",
)
WEBHOOKS_OWED = _gauge("omni_grpc_webhooks_owed", "Webhooks that are still to be delivered; 15 seconds old at most.")

# --- server -----------------------------------------------------------------------------------------------------------

BUILD = _gauge("omni_grpc_build_info", "1, with the versions.", "version", "python", bound="1")
SERVER_STATE = _gauge(
    "omni_grpc_server_state", "1 for the state that the server is in, 0 for the others.", "state", bound="7"
)
LOOP_LAG = _histogram(
    "omni_grpc_event_loop_lag_seconds",
    "How late the event loop wakes a task that sleeps; looked at four times a second.",
    buckets=LAG_SECONDS,
)

GROUPS: Mapping[str, tuple[Metric, ...]] = {
    "Calls": (RPCS, RPC_SECONDS, REFUSALS, OPEN_CALLS, OPEN_STREAMS),
    "Jobs": (JOBS, STAGE_TIMES, OUTPUTS, FRAMES, OUTPUT_BYTES, LORA_JOBS, LORA_LOADS),
    "Queue": (QUEUED, QUEUE_LIMIT, QUEUE_DELAY, WORK, RUNNING, RUNNING_ROWS, TENANT_JOBS),
    "Steps": (
        *(STEP_TIMES, STEP_REQUESTS, STEP_ROWS, STEPS, TOKENS, PIXELS),
        *(PREDICTED, MEASURED, COST_ERROR, BROKEN, CACHED),
    ),
    "Workers": (RESTARTS, REPLICA_STATE, REPLICA_JOBS, GRAPH_CAPTURES, GRAPH_REPLAYS, KERNELS),
    "Models": (MODEL_STATE, LOAD_PHASE, DOWNLOADED, DOWNLOAD_SIZE, LOAD_SECONDS, MODEL_INFO, LORA_LOADED, LORA_BYTES),
    "Memory": (
        *(DEVICE_USED, DEVICE_SIZE, WEIGHTS, WORKER_RESIDENT),
        *(SHARED_BLOCKS, SHARED_BYTES, INPUT_BYTES, INPUT_BUDGET),
        *(LORA_CACHE, LORA_CACHE_LIMIT, LORA_EVICTIONS),
    ),
    "Store": (STORE_BYTES, STORE_BUDGET, STORE_ROWS, STORE_WRITABLE, UNWRITTEN),
    "Watchers and webhooks": (WATCH_LAG, WATCH_EVENTS, COALESCED, WEBHOOK_ATTEMPTS, WEBHOOKS_OWED),
    "Server": (BUILD, SERVER_STATE, LOOP_LAG),
}
METRICS = tuple(metric for group in GROUPS.values() for metric in group)
OF_THE_PROCESS = (
    "process_cpu_seconds_total", "process_resident_memory_bytes", "process_virtual_memory_bytes",
    "process_start_time_seconds", "process_open_fds", "process_max_fds",
)  # fmt: skip
"""What prometheus-client's ProcessCollector adds, for the process of the server."""
