"""Components that transformers and diffusers bring: text encoders, tokenizers, VAEs. Local safetensors files only."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from omni_grpc.config import AdapterConfig
from omni_grpc.types.errors import CheckpointError, ConfigError, Violation
from omni_grpc.types.os_errors import plain
from omni_grpc.types.spec import Checkpoint

logger = logging.getLogger(__name__)

_LIBRARIES: Mapping[str, Any] = {"transformers": transformers, "diffusers": diffusers}

SWITCHES: Mapping[str, str] = {"vae_use_slicing": "enable_slicing", "vae_use_tiling": "enable_tiling"}
"""Settings of an autoencoder, and the method of diffusers that turns each on."""


Take = Callable[[str, nn.Module], bool]
"""Takes a component whose weights lie on the host to where it is to live, and returns whether it did."""


def load_module(
    checkpoint: Checkpoint,
    component: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    part: str = "",
    take: Take | None = None,
) -> Any:
    """One component in evaluation mode, without gradients; `part` keeps only the submodule of that name. It goes to the
    device, unless `take` takes it.

    Its weights end in memory of their own: what from_pretrained returns is a view of the mapped file, whose weights are
    not aligned to 64 bytes, and CPU kernels then round differently than they do for the same weights elsewhere. Raises
    CheckpointError where the class is unknown, files are missing or a weight is missing or misshapen.
    """
    try:
        with without_progress_bars():
            module, info = _kind(checkpoint, component).from_pretrained(
                checkpoint.path / component,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                dtype=dtype,
            )
    except CheckpointError:
        raise
    except Exception as error:
        raise _unloadable(checkpoint, component, error) from error
    if missing := sorted(map(str, itertools.chain(info["missing_keys"], info["mismatched_keys"]))):
        raise CheckpointError(f"component {component!r} of {checkpoint.path} lacks weights: {', '.join(missing)}")
    if info["unexpected_keys"]:
        logger.warning(
            "component %r has weights that its class ignores: %s", component, sorted(info["unexpected_keys"])
        )
    kept: nn.Module = module.get_submodule(part).eval().requires_grad_(False)
    if take is not None and take(component, kept):
        return kept
    for tensor in itertools.chain(kept.parameters(), kept.buffers()):
        tensor.data = tensor.data.to(device, copy=True)
    return kept


def configure_vae(module: Any, settings: AdapterConfig) -> None:
    """Configures an autoencoder by the settings. Raises ConfigError for one that lacks the method for a setting."""
    for name, method in SWITCHES.items():
        if not getattr(settings, name):
            continue
        if not hasattr(module, method):
            why = f"--{name.replace('_', '-')}: {type(module).__name__} has no {method}"
            raise ConfigError(why, violations=(Violation(name, why),))
        getattr(module, method)()


def load_tokenizer(checkpoint: Checkpoint, component: str) -> Any:
    """The tokenizer of a component. Raises CheckpointError where the class is unknown or its vocabulary is missing."""
    kind = _kind(checkpoint, component)
    folder = checkpoint.path / component
    vocabularies = kind.vocab_files_names.values()
    if not any((folder / file).is_file() for file in vocabularies):
        # from_pretrained would make a tokenizer without words
        raise CheckpointError(f"component {component!r}: {folder} has none of {', '.join(sorted(vocabularies))}")
    try:
        tokenizer = kind.from_pretrained(folder, local_files_only=True)
        longest = tokenizer.model_max_length
        if not isinstance(longest, int | float):
            raise ValueError(f"model_max_length is {longest!r}, not a number")
        return tokenizer
    except Exception as error:
        raise _unloadable(checkpoint, component, error) from error


def _unloadable(checkpoint: Checkpoint, component: str, error: Exception) -> CheckpointError:
    """The refusal of a component that its library cannot load: it raises anything over a config with other types than
    it knows, and over a damaged file. Where memory ran out, the worker finds that in the cause.
    """
    what = (
        plain(error) if isinstance(error, OSError | ValueError | RuntimeError) else f"{type(error).__name__}: {error}"
    )
    return CheckpointError(
        f"component {component!r} of {checkpoint.path} does not load: {what}; its config or its files are damaged, or "
        "made for another version of the library"
    )


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Turns off the libraries' progress bars: the worker reports loading itself, and a bar would clutter its log."""
    hidden = [library.utils.logging for library in _LIBRARIES.values()]
    hidden = [log for log in hidden if log.is_progress_bar_enabled()]
    for log in hidden:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in hidden:
            log.enable_progress_bar()


def _kind(checkpoint: Checkpoint, component: str) -> Any:
    """The class that model_index.json names for a component."""
    named = checkpoint.configs[""].get(component) or ("", "")
    if not isinstance(named, list | tuple) or len(named) != 2 or not all(isinstance(part, str) for part in named):
        raise CheckpointError(
            f"model_index.json of {checkpoint.path} must give {component!r} a library and a class, not {named!r}"
        )
    library, name = named
    if library not in _LIBRARIES:
        raise CheckpointError(
            f"model_index.json of {checkpoint.path} gives {component!r} to library {library!r}; "
            f"served: {', '.join(_LIBRARIES)}"
        )
    kind = getattr(_LIBRARIES[library], name, None)
    if kind is None:
        raise CheckpointError(
            f"{library} {_LIBRARIES[library].__version__} has no {name!r}, the class of component {component!r}"
        )
    return kind
