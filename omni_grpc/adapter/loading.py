"""From a checkpoint folder to a pipeline on its device, as the settings say."""

from __future__ import annotations

import importlib.util
import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
import tqdm
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.hooks import apply_group_offloading
from diffusers.quantizers import PipelineQuantizationConfig

from omni_grpc.adapter import lora
from omni_grpc.adapter.lora import Adapters
from omni_grpc.adapter.parameters import Signature
from omni_grpc.config import AdapterConfig
from omni_grpc.loading.components import configure_vae, without_progress_bars
from omni_grpc.types.errors import CheckpointError, ConfigError, OmniError, Violation
from omni_grpc.types.os_errors import plain
from omni_grpc.types.plan import VisitedLevels
from omni_grpc.types.request import Request
from omni_grpc.worker.base import RunnerContext

FROM_PRETRAINED = frozenset(
    {"cache_dir", "custom_pipeline", "custom_revision", "device_map", "disable_mmap", "dtype", "force_download",
     "load_connected_pipeline", "local_files_only", "low_cpu_mem_usage", "max_memory", "offload_folder",
     "offload_state_dict", "proxies", "quantization_config", "revision", "token", "torch_dtype", "trust_remote_code",
     "use_flashpack", "use_safetensors", "variant"}
)  # fmt: skip
"""What `from_pretrained` takes besides the arguments of a pipeline's own __init__; what it does not know it ignores."""

CLASSES = ("diffusers", "transformers", "torchao.quantization")
"""Where the classes of a quantization config are looked up; one that two packages have may be named with its package.
"""


def load(setting: RunnerContext) -> tuple[DiffusionPipeline, Adapters]:
    """The pipeline, and the LoRA adapters in it.

    Raises ConfigError for a setting that cannot work here, CheckpointError for a folder that does not load.
    """
    adapter, folder = setting.config.adapter, setting.checkpoint.path
    kind = _class(setting.checkpoint.spec.name)
    arguments = _load_arguments(adapter, kind, setting)
    # the lock that its bars would make is one between processes, which this one cannot free when it ends
    tqdm.tqdm.set_lock(threading.RLock())
    try:
        with without_progress_bars():
            pipeline = DiffusionPipeline.from_pretrained(folder, **arguments)
    except OmniError:
        raise
    except Exception as error:
        # the libraries raise anything over a damaged file, or a config with other types than they know
        message = f"{kind.__name__} does not load from {folder}: {type(error).__name__}: {plain(error)}"
        raise CheckpointError(message, reason="CHECKPOINT_DOES_NOT_LOAD") from error
    pipeline.set_progress_bar_config(disable=True)
    _check_quantised(pipeline, arguments)
    if adapter.flow_shift is not None:
        _shift(pipeline, adapter.flow_shift)
    configure_vae(getattr(pipeline, "vae", None), adapter)
    # what places the weights takes theirs along
    loras = setting.config.loras
    adapters = lora.load(pipeline, (loras.lora if loras is not None else None) or {}, setting.dtype)
    _place(pipeline, setting, moved="device_map" not in arguments)
    return pipeline, adapters


def denoisers(pipeline: DiffusionPipeline) -> list[ModelMixin]:
    """The networks that predict, by diffusers' names for them."""
    found = (getattr(pipeline, name, None) for name in ("transformer", "transformer_2", "unet", "prior", "decoder"))
    return [part for part in found if isinstance(part, ModelMixin)]


def blocks(pipeline: DiffusionPipeline) -> list[torch.nn.Module]:
    """The pieces of work of everything but the denoisers: what a text encoder, a VAE or a vocoder runs one after the
    other.
    """
    parts = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    found: dict[int, torch.nn.Module] = {}
    for part in parts:
        if not any(part is denoiser for denoiser in denoisers(pipeline)):
            lists = [module for module in part.modules() if isinstance(module, torch.nn.ModuleList)]
            found |= {id(child): child for group in (part, *lists) for child in group.children()}
    return list(found.values())


def vae_dtypes(pipeline: DiffusionPipeline) -> dict[str, torch.dtype]:
    """The precision of each autoencoder that has one."""
    names = ("vae", "movq", "vqgan", "audio_vae")
    parts = {name: getattr(pipeline, name, None) for name in names}
    return {name: part.dtype for name, part in parts.items() if isinstance(part, ModelMixin)}


def schedulers(pipeline: DiffusionPipeline) -> list[Any]:
    """Each distinct scheduler of the pipeline, under whatever names it has."""
    return list({id(part): part for _, part in _schedulers(pipeline)}.values())


def loops(pipeline: DiffusionPipeline, signature: Signature, values: Mapping[str, Any]) -> list[tuple[Any, int]]:
    """The schedulers that have a loop in a call with these arguments, and how many steps it is asked to take.

    They are those that have a number of steps of their own: others add noise, or go along with one of these.
    """
    found = {}
    for name, part in _schedulers(pipeline):
        steps = name.removesuffix("scheduler") + "num_inference_steps"
        if steps in signature.parameters:
            found[id(part)] = (part, values.get(steps, signature.parameters[steps].default) or 0)
    return list(found.values())


def planned_steps(pipeline: Any, scheduler: Any, *, alone: bool = True) -> int:
    """Steps of a loop, which the pipeline that steps this scheduler knows from before its first one; more than asked
    for where a scheduler takes several for one, fewer where strength skips some.
    """
    parts = [part for part in vars(pipeline).values() if isinstance(part, DiffusionPipeline)]
    of = next((part for part in parts if getattr(part, "scheduler", None) is scheduler), pipeline if alone else None)
    own = getattr(of, "num_timesteps", None)
    return own if isinstance(own, int) else len(scheduler.timesteps)


def _schedulers(pipeline: DiffusionPipeline) -> list[tuple[str, Any]]:
    return [(name, part) for name, part in pipeline.components.items() if "scheduler" in name and part is not None]


def _class(name: str) -> type[DiffusionPipeline]:
    kind = getattr(diffusers, name, None)
    if not (inspect.isclass(kind) and issubclass(kind, DiffusionPipeline)):
        raise CheckpointError(
            f"model_index.json names the pipeline {name!r}, which diffusers {diffusers.__version__} does not have",
            reason="MODEL_NOT_SUPPORTED",
        )
    return kind


def _load_arguments(adapter: AdapterConfig, kind: type[DiffusionPipeline], setting: RunnerContext) -> dict[str, Any]:
    given = dict(adapter.diffusers_load_kwargs or {})
    own = inspect.signature(kind.__init__).parameters
    if unknown := sorted(given.keys() - FROM_PRETRAINED - own.keys()):
        raise _error("diffusers_load_kwargs", f"{kind.__name__} would ignore {', '.join(unknown)}; leave it out")
    if given.get("use_safetensors") is False:
        raise _error("diffusers_load_kwargs", "use_safetensors false would unpickle; convert the weights instead")
    if adapter.boundary_ratio is not None and "boundary_ratio" not in own:
        raise _error("boundary_ratio", f"{kind.__name__} has no boundary between two experts")
    if "torch_dtype" in given:
        # its older name, which the library still takes, and warns of
        given.setdefault("dtype", given.pop("torch_dtype"))
    if isinstance(dtype := given.get("dtype"), str):
        given["dtype"] = _dtype(dtype)
    if isinstance(config := given.get("quantization_config"), Mapping):
        given["quantization_config"] = _quantization(config)
    ours = {"local_files_only": True, "use_safetensors": True, "dtype": setting.dtype}
    if adapter.boundary_ratio is not None:
        ours["boundary_ratio"] = adapter.boundary_ratio
    return ours | given


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise _error("diffusers_load_kwargs", f"dtype {name!r} is no dtype of torch")
    return dtype


def _quantization(config: Mapping[str, Any]) -> PipelineQuantizationConfig:
    """Builds a PipelineQuantizationConfig from JSON; `quant_mapping` names the class of each entry as "class"."""
    values = dict(config)
    if isinstance(mapping := values.get("quant_mapping"), Mapping):
        values["quant_mapping"] = {component: _object(entry) for component, entry in mapping.items()}
    try:
        return PipelineQuantizationConfig(**values)
    except (TypeError, ValueError) as error:
        raise _error("diffusers_load_kwargs", f"quantization_config: {error}") from error


def _object(entry: Any) -> Any:
    """An object of the class that an entry names; its other keys are the arguments, which may be such entries too."""
    arguments = {key: _object(value) if isinstance(value, Mapping) else value for key, value in entry.items()}
    name = arguments.pop("class", None)
    if name is None:
        return arguments
    library, _, kind = str(name).rpartition(".")
    for place in (library,) if library else CLASSES:
        if place in CLASSES and hasattr(module := _module(place), kind):
            try:
                return getattr(module, kind)(**arguments)
            except (TypeError, ValueError, ImportError) as error:
                raise _error("diffusers_load_kwargs", f"quantization_config: {name}: {error}") from error
    known = ", ".join(CLASSES)
    raise _error("diffusers_load_kwargs", f'quantization_config: "class" is {name!r}, no class of {known}')


def _module(name: str) -> Any:
    """None for a package that is not installed."""
    return importlib.import_module(name) if importlib.util.find_spec(name.partition(".")[0]) else None


def _check_quantised(pipeline: DiffusionPipeline, arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for a component that does not exist or was not quantized, which diffusers ignores."""
    config = arguments.get("quantization_config")
    named = getattr(config, "quant_mapping", None) or getattr(config, "components_to_quantize", None) or ()
    for component in (named,) if isinstance(named, str) else tuple(named):
        part = getattr(pipeline, component, None)
        if getattr(part, "hf_quantizer", None) is None:
            raise _error("diffusers_load_kwargs", f"quantization_config: {component!r} was not quantised")


def _shift(pipeline: DiffusionPipeline, shift: float) -> None:
    scheduler = pipeline.scheduler
    name = next((name for name in ("flow_shift", "shift") if name in scheduler.config), None)
    if name is None:
        raise _error("flow_shift", f"{type(scheduler).__name__} has no shift")
    pipeline.scheduler = type(scheduler).from_config(scheduler.config, **{name: shift})


def shift_name(pipeline: DiffusionPipeline) -> str:
    """What the only scheduler of a pipeline calls the time shift of its flow matching; "" where it has none."""
    scheduler = getattr(pipeline, "scheduler", None)
    if scheduler is None or len(schedulers(pipeline)) != 1:
        return ""
    if type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler":
        return "shift"
    flow = type(scheduler).__name__ == "UniPCMultistepScheduler" and scheduler.config.get("use_flow_sigmas")
    return "flow_shift" if flow else ""


def reconfigure(pipeline: DiffusionPipeline, request: Request) -> None:
    """Puts what a request says of the schedule into the pipeline's scheduler, which keeps what hangs on it."""
    changed = dict(request.scheduler_config)
    if request.shift is not None:
        changed |= {shift_name(pipeline): request.shift, "use_dynamic_shifting": False, "shift_terminal": None}
    if changed:
        scheduler: Any = pipeline.scheduler
        vars(scheduler).update(vars(type(scheduler).from_config({**scheduler.config, **changed})))


def visited_levels(pipeline: DiffusionPipeline, request: Request) -> VisitedLevels:
    """The levels of a call that stands before its first step. None where strength skips some, or where its scheduler
    does not do flow matching.
    """
    name = shift_name(pipeline)
    if not name or request.strength is not None:
        return VisitedLevels()
    scheduler: Any = pipeline.scheduler
    shift = None if scheduler.config.get("use_dynamic_shifting") else float(scheduler.config[name])
    return VisitedLevels(sigmas=tuple(scheduler.sigmas.tolist()), shift=shift)


def _place(pipeline: DiffusionPipeline, setting: RunnerContext, *, moved: bool) -> None:
    device, by_component = setting.device, setting.config.adapter.enable_cpu_offload
    by_layer = setting.config.offload is not None and setting.config.offload.enable_layerwise_offload
    if by_component:
        if device.type == "cpu":
            raise _error("enable_cpu_offload", "needs an accelerator to offload from; leave it out on a CPU")
        pipeline.enable_model_cpu_offload(device=device)
    elif by_layer:
        _offload_blocks(pipeline, device)
    elif moved:
        pipeline.to(device)


def _offload_blocks(pipeline: DiffusionPipeline, device: torch.device) -> None:
    """Hooks that bring each block to the device for as long as it runs."""
    parts = {name: part for name, part in pipeline.components.items() if isinstance(part, ModelMixin)}
    resident = {name for name, part in parts.items() if not part._supports_group_offloading}
    for denoiser in denoisers(pipeline):
        if not denoiser._supports_group_offloading:
            why = f"{type(denoiser).__name__} cannot be offloaded by blocks; use --enable-cpu-offload"
            raise _error("enable_layerwise_offload", why)
    # the hooks of blocks hang on `forward`, and an autoencoder is entered by `decode`: unless it names its parts that
    # have a forward of their own, each of its layers is a block
    entered = [
        name for name, part in parts.items()
        if hasattr(part, "decode") and not hasattr(part, "_group_offload_block_modules") and name not in resident
    ]  # fmt: skip
    where = {"onload_device": device, "offload_device": torch.device("cpu")}
    pipeline.enable_group_offload(
        **where,
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=device.type == "cuda",
        exclude_modules=[*entered, *resident],
    )
    for name in entered:
        apply_group_offloading(parts[name], **where, offload_type="leaf_level")


def weight_bytes(parts: Sequence[Any]) -> int:
    """Bytes of the parameters of these components, as they are stored."""
    modules = (part for part in parts if isinstance(part, torch.nn.Module))
    return sum(_stored_bytes(parameter) for module in modules for parameter in module.parameters())


def _stored_bytes(tensor: Any) -> int:
    """The bytes that a tensor occupies. A quantized one reports the dtype that it stands for, and is made of others."""
    if isinstance(tensor, torch.Tensor) and hasattr(tensor, "__tensor_flatten__"):
        return sum(_stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.numel() * tensor.element_size())


def _error(setting: str, why: str) -> ConfigError:
    return ConfigError(f"--{setting.replace('_', '-')}: {why}", violations=(Violation(setting, why),))
