"""SharedTables: modulation that is the same for several requests is computed and kept once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from weakref import WeakValueDictionary

from torch import Tensor

from omni_grpc.pipeline.state import State, Tables


class SharedTables:
    """The tables of a model, shared by states of the same timesteps under the same weights for as long as one of them
    lives. One request may change the weights for itself, so what it does that with is a part of the key.
    """

    def __init__(self) -> None:
        self._tables: WeakValueDictionary[Hashable, Tables] = WeakValueDictionary()

    def get(self, state: State, make: Callable[[], Mapping[str, Tensor]], *conditions: Hashable) -> Tables:
        """The tables of `state`, made by `make` where there are none yet. `conditions` are what they depend on besides
        the timesteps: an embedded guidance scale, for example.
        """
        key = (state.schedule.timesteps, state.request.loras, conditions)
        tables = self._tables.get(key)
        if tables is None:
            tables = self._tables[key] = Tables(make())
        return tables
