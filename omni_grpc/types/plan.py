"""The messages between engine and worker: the engine sends a `Plan` or an `Order`, the worker answers with `Report`s.

A plan says what to do now in each of the three phases (prepare, step, decode) and which requests to drop. Each phase
has a lane of its own in the worker, so a plan is answered by several reports, one as each piece of work ends, in any
order: each admitted or decoded request gets Prepared, DecodedPart, Decoded or Broken, each step gets Stepped, whether
or not a request was dropped meanwhile. So a report always frees exactly one lane.

Sleep and Wake move the model itself, and come only while the worker has no request and no work: they are answered by
Slept, Woken or Unmoved. Record and EndRecording come at any time; each rank that records answers with one Recorded.

LoadAdapter and UnloadAdapter come at any time after Ready, too, and are carried out beside everything else, one after
the other. A worker that has been started anew has the adapters of its settings alone, and the engine sends the others
again; one that wakes loads them itself, before Woken. What it could not load then is told by AdapterFailed, of an
adapter that had been loaded before.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from omni_grpc.types.errors import Failure
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.lora import Adapter
from omni_grpc.types.media import PreviewImage
from omni_grpc.types.memory_model import MemoryModel
from omni_grpc.types.request import Request
from omni_grpc.types.results import RequestWarning
from omni_grpc.types.spec import Checkpoint
from omni_grpc.types.step_cache import StepReports
from omni_grpc.types.vitals import Vitals


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Work for the worker. `admit` enters the prepare phase; `step` shares one forward; `decode_parts` decodes what is
    finished of requests that go on stepping; `decode` ends a request; `drop` frees state, whatever its phase.
    """

    admit: tuple[Request, ...] = ()
    step: tuple[str, ...] = ()
    decode_parts: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.admit or self.step or self.decode_parts or self.decode or self.drop)

    @property
    def running(self) -> tuple[str, ...]:
        """The requests that the worker has and works on."""
        return (*self.step, *self.decode_parts, *self.decode)


class SleepLevel(enum.StrEnum):
    """What a sleeping worker keeps of its model: all weights in host memory, or nothing but the process."""

    KEEP_WEIGHTS = "KEEP_WEIGHTS"
    DROP_WEIGHTS = "DROP_WEIGHTS"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Give the device memory of the model back. Answered by Slept."""

    level: SleepLevel = SleepLevel.KEEP_WEIGHTS


@dataclasses.dataclass(frozen=True, slots=True)
class Wake:
    """Take the model back into device memory. Answered by Woken."""


class RecordingEnd(enum.StrEnum):
    """What ended a recording."""

    STEPS = "STEPS"
    STOPPED = "STOPPED"
    TIME_LIMIT = "TIME_LIMIT"
    JOB_ENDED = "JOB_ENDED"
    ASLEEP = "ASLEEP"


class ProfileFileKind(enum.StrEnum):
    """TRACE: a Chrome trace in gzip. OPS: a table, as text. MEMORY: a pickled snapshot in gzip."""

    TRACE = "TRACE"
    OPS = "OPS"
    MEMORY = "MEMORY"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Record steps with torch's profiler, from step `start_step` of those to come on, or of those of one job:
    `num_steps` of them, or until EndRecording (None). `activities`: "cpu", "cuda". `memory`: allocations on the device,
    too. Without `all_ranks`, the first rank does so alone. Answered by Recorded, when it has ended.
    """

    id: str
    activities: tuple[str, ...]
    job_id: str = ""
    start_step: int = 0
    num_steps: int | None = None
    with_stack: bool = False
    record_shapes: bool = False
    memory: bool = False
    all_ranks: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndRecording:
    """End a recording now; nothing where it has ended."""

    id: str
    end: RecordingEnd


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadAdapter:
    """Load an adapter from a file of this machine, so that requests may name `uid`, which no load had before: not that
    of any adapter, nor the id of one of the settings. Others of the same `id` stay.

    `sha256`: of the file, "" for whatever it has; `format`: the layout that it has to have, see Adapter.format, "" for
    any. Answered by AdapterLoaded or AdapterFailed.
    """

    id: str
    uid: str
    path: str
    sha256: str = ""
    format: str = ""
    pinned: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnloadAdapter:
    """Unload an adapter. Requests that were admitted before end with it, no other one is admitted. Answered by
    AdapterUnloaded when its last request is gone, also where there was none of that uid; where it was still to be
    loaded, by AdapterFailed (LORA_UNLOADED) before.
    """

    uid: str


Order = Sleep | Wake | Record | EndRecording | LoadAdapter | UnloadAdapter


@dataclasses.dataclass(frozen=True, slots=True)
class SharedBytes:
    """Bytes in a named shared-memory block. Whoever receives this copies them out and unlinks the block.

    `data` are the bytes themselves where there was no room for a block.
    """

    name: str
    size: int
    data: bytes | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """One encoded output of a request."""

    index: int
    data: SharedBytes
    mime_type: str
    width: int
    height: int
    seed: int
    sha256: str
    num_frames: int = 0
    fps: float = 0.0
    sample_rate: int = 0
    duration: float = 0.0
    has_alpha: bool = False
    layer: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Milliseconds of one step, from the tokens n of each of its rows: fixed + token * sum(n) + pair * sum(n^2).

    The last term is attention. The worker fits it at warm-up; a model that was never fitted says 1 ms for any step.
    """

    fixed: float = 1.0
    token: float = 0.0
    pair: float = 0.0

    def step_ms(self, rows: Sequence[int]) -> float:
        return self.fixed + self.token * sum(rows) + self.pair * sum(n * n for n in rows)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """The checkpoint is on this machine now. It replaces the engine's, and a worker begins to load it."""

    checkpoint: Checkpoint


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The pipeline is loaded and can take plans. Nothing but Loading comes before. Times in seconds, memory in bytes.

    `warnings` belong to every reply of this worker (a fallback that was allowed, for example). `checkpoint` replaces
    the engine's where only loading the model tells what it can do, as with a pipeline that is not native.
    `found` is what the worker found out while it loaded the model, for the rules of requests and for every reply.
    `device_bytes`: of the weights, what is in device memory while the worker is awake and at rest. `memory`: what
    requests take beside them.
    """

    pid: int
    device: str
    dtype: str
    load_seconds: float
    weight_bytes: int
    cost: CostModel = CostModel()
    found: WorkerFindings = dataclasses.field(default_factory=WorkerFindings)
    warnings: tuple[RequestWarning, ...] = ()
    checkpoint: Checkpoint | None = None
    device_bytes: int = 0
    memory: MemoryModel = dataclasses.field(default_factory=MemoryModel)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VisitedLevels:
    """The noise levels of a schedule, one for each step and the last one, and its time shift. None and empty: not
    known.
    """

    sigmas: tuple[float, ...] = ()
    shift: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request can be stepped. `rows` are the tokens of each of its rows; `dropped_tokens` maps a prompt field to the
    number of tokens that did not fit; `levels` are those of each part of an output.
    """

    id: str
    elapsed: float
    prompt_tokens: int
    rows: tuple[int, ...] = ()
    dropped_tokens: tuple[tuple[str, int], ...] = ()
    levels: VisitedLevels = dataclasses.field(default_factory=VisitedLevels)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestStep:
    """One request moved one step. `finished`: it is ready for decode. `evals`: forwards that the step took; the
    guidance branches of a request share one. `earlier`: seconds of those that went before the last one. `segment`: the
    part of the output that the step belongs to, of `segments`; `part_ready`: with it that part is finished.
    `reports` is what features tell of the step.
    """

    id: str
    step: int
    total: int
    sigma: float
    timestep: float
    rows: int
    reports: StepReports = dataclasses.field(default_factory=StepReports)
    evals: int = 1
    earlier: float = 0.0
    segment: int = 0
    segments: int = 1
    part_ready: bool = False
    finished: bool = False
    previews: tuple[PreviewImage, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One forward is done, for every request that shared it: in `progress` if it ended a step, in `broken` if it
    failed, in neither if the step needs another forward.
    """

    elapsed: float
    progress: tuple[RequestStep, ...] = ()
    broken: tuple[Broken, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The outputs of one request; its state in the worker is gone.

    `warnings` are about what came out differently than asked (a size that the model rounded); `steps` are those really
    taken, where that is known only now. `encoding` is the part of `elapsed` from pixels or samples to files, in
    seconds. `stage_durations` are seconds by target, where the profiler is on.
    """

    id: str
    elapsed: float
    media: tuple[Media, ...]
    peak_memory_bytes: int = 0
    warnings: tuple[RequestWarning, ...] = ()
    steps: int | None = None
    encoding: float = 0.0
    stage_durations: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodedPart:
    """The finished part of a request is decoded: `done` of `total` parts. The request goes on."""

    id: str
    elapsed: float
    done: int
    total: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """One request failed in one phase; its state in the worker is gone and its neighbours go on."""

    id: str
    phase: str
    failure: Failure


@dataclasses.dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life, sent every second by the worker process itself, with how it is. It ends in the executor."""

    vitals: Vitals | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The worker is unusable, and everything that it held is lost: it says so itself, or its executor finds it gone.

    final: no other worker could do better, so none is started.
    """

    failure: Failure
    final: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slept:
    """The model sleeps: `freed_bytes` of device memory were given back, in `elapsed` seconds."""

    freed_bytes: int
    elapsed: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Woken:
    """The model is awake again, after `elapsed` seconds. `ready`: what loading it anew has told, where its weights had
    been dropped.
    """

    elapsed: float
    ready: Ready | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unmoved:
    """An order could not be carried out; the model is as it was."""

    failure: Failure


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFile:
    """One file of a recording."""

    kind: ProfileFileKind
    data: SharedBytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A rank has ended a recording of `steps` steps. `failure`: why there is none of it."""

    id: str
    end: RecordingEnd
    steps: int = 0
    rank: int = 0
    files: tuple[RecordedFile, ...] = ()
    failure: Failure | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoaded:
    """An adapter can be used from now on, in `elapsed` seconds after its order was taken up. Of several ranks, rank 0's
    once all have it: `adapter` counts keys of the file, which are the same for all.
    """

    adapter: Adapter
    elapsed: float = 0.0
    rank: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFailed:
    """An adapter could not be loaded, or is lost. Nothing of it is left."""

    uid: str
    failure: Failure
    rank: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUnloaded:
    """Nothing of an adapter is left."""

    uid: str
    rank: int = 0


Moved = Slept | Woken | Unmoved
OfAdapter = AdapterLoaded | AdapterFailed | AdapterUnloaded
OfRequest = Prepared | Stepped | DecodedPart | Decoded | Broken
Report = Loading | Fetched | Ready | OfRequest | Died | Moved | Recorded | OfAdapter


def requests_of(report: Report) -> tuple[str, ...]:
    """The requests that a report is about."""
    match report:
        case Prepared() | DecodedPart() | Decoded() | Broken():
            return (report.id,)
        case Stepped(progress=progress, broken=broken):
            return (*(part.id for part in progress), *(part.id for part in broken))
    return ()
