"""What is told of an adapter: which file it is, what of it the model takes, and why not the rest."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence

from omni_grpc.loading.adapters import AdapterFile
from omni_grpc.loading.adapters.binding import OTHER, Bound
from omni_grpc.loading.adapters.encoder_names import is_encoder
from omni_grpc.loading.adapters.names import TEXT_ENCODER
from omni_grpc.loading.adapters.targets import warnings
from omni_grpc.types.lora import Adapter

logger = logging.getLogger(__name__)


def of_file(name: str, uid: str, file: AdapterFile, *, denoisers: Sequence[str] = (), pinned: bool = False) -> Adapter:
    """The record of an adapter that no component has taken yet. `denoisers`: those of the model."""
    told = warnings(file, denoisers)
    for warning in told:
        logger.warning("adapter %s: %s", name, warning)
    return Adapter(
        id=name,
        file=file.name,
        sha256=file.sha256,
        format=file.format,
        rank=file.rank,
        size_bytes=file.size_bytes,
        applied={},
        skipped=dict.fromkeys(file.keys, ""),
        warnings=told,
        uid=uid,
        pinned=pinned,
    )


def extended(record: Adapter, component: str, bound: Bound, nbytes: int = 0) -> Adapter:
    """The record with what another component takes. `nbytes`: in memory, of all components so far."""
    # what is another component's for one denoiser has a better reason elsewhere, or none
    skipped = {
        key: record.skipped[key] if record.skipped.get(key) and why == OTHER else why
        for key, why in bound.skipped.items()
        if key in record.skipped
    }
    keys = len(bound.keys)
    logger.info("adapter %s: %d keys fit %s, %d fit nothing so far", record.id, keys, component, len(skipped))
    # of an encoder that most adapters leave alone, nothing is told
    counted = {component: keys} if keys or not is_encoder(component) else {}
    applied = {**record.applied, **counted}
    return dataclasses.replace(record, applied=applied, skipped=skipped, nbytes=nbytes)


def weighed(record: Adapter, copied: Mapping[str, int], rescaled: Mapping[str, int]) -> Adapter:
    """The record with the layers of another component of which the adapter makes new weights."""
    return dataclasses.replace(record, copied={**record.copied, **copied}, rescaled={**record.rescaled, **rescaled})


def leaves_alone(record: Adapter, component: str) -> bool:
    """Whether an adapter has nothing for a component that comes after the denoisers."""
    return is_encoder(component) and not {TEXT_ENCODER, OTHER} & set(record.skipped.values())


def unused(record: Adapter) -> str:
    """What is wrong with an adapter of which nothing is used, "" where something is."""
    if record.keys_applied:
        return ""
    first = ", ".join(f"{key} ({why})" for key, why in itertools.islice(record.skipped.items(), 4))
    return f"no key of {record.file} fits a layer of the model; it has {first}"
