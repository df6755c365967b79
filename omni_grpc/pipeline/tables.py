"""SharedTables: modulation that is the same for several requests is computed and kept once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from weakref import WeakValueDictionary

from torch import Tensor, nn

from omni_grpc.nn.rows import Owner, variants
from omni_grpc.pipeline.state import COND, State, Tables


class SharedTables:
    """The tables that a denoiser computes, shared by states with the same timesteps for as long as one of them lives.

    A feature may change the weights for one request. The `variant` of such parts of the denoiser (`nn.rows.ByOwner`) is
    part of the key.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        self._denoiser = denoiser
        self._tables: WeakValueDictionary[Hashable, Tables] = WeakValueDictionary()

    def get(self, state: State, make: Callable[[], Mapping[str, Tensor]], *conditions: Hashable) -> Tables:
        """The tables of `state`, [evaluations, levels, ...] by name, made by `make` where there are none yet.
        `conditions` are what they depend on besides the timesteps: an embedded guidance scale, for example.
        """
        by_owner = tuple(variant((state, COND)) for variant in self._variants)
        key = (state.schedule.timesteps, by_owner, conditions)
        tables = self._tables.get(key)
        if tables is None:
            tables = self._tables[key] = Tables(make())
        return tables

    @functools.cached_property
    def _variants(self) -> tuple[Callable[[Owner], Hashable], ...]:
        """Found at the first call: by then every feature has edited the denoiser."""
        return variants(self._denoiser)
