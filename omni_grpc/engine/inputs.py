"""Decoded inputs of jobs that have not been prepared yet: how much of them there may be, and who frees them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from omni_grpc.store.tally import Tally
from omni_grpc.types.errors import ResourceExhausted
from omni_grpc.types.media import Inputs
from omni_grpc.types.plan import SharedBytes
from omni_grpc.types.shared_inputs import free_blocks, media_of

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""After how long to ask again when the budget is full: jobs give theirs back as they start."""


class InputStore:
    """The shared-memory blocks of decoded inputs, at most `budget` bytes of them.

    A block is reserved before it is put, and freed when its job is prepared or ends. Its methods may be called from any
    thread. Blocks are unlinked in a thread: giving a gigabyte back to the operating system takes a tenth of a second.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._blocks: dict[str, tuple[int, str]] = {}
        """Size and tenant by name."""
        self._held = Tally()
        self._freeing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="omni_grpc-inputs")
        self.size_bytes = 0

    def input_bytes(self, tenant: str) -> int:
        """The size of the inputs that one tenant's jobs wait with."""
        with self._lock:
            return self._held[tenant]

    def of(self, tenant: str) -> TenantInputs:
        """The same store, where what is reserved belongs to this tenant."""
        return TenantInputs(self, tenant)

    def reserve(self, blocks: Sequence[SharedBytes], *, tenant: str = "") -> None:
        """Counts the blocks of one request. Raises ResourceExhausted (INPUTS_FULL, with the time after which to ask
        again; INPUTS_OVER_BUDGET for what never fits).
        """
        size = sum(block.size for block in blocks)
        if size > self._budget:
            message = (
                f"the inputs are {size} bytes decoded, this server holds {self._budget}; send fewer or smaller ones, "
                "or raise --input-budget"
            )
            raise ResourceExhausted(message, reason="INPUTS_OVER_BUDGET")
        with self._lock:
            if self.size_bytes + size > self._budget:
                free = self._budget - self.size_bytes
                message = (
                    f"the inputs are {size} bytes decoded, {free} of {self._budget} are free until jobs that wait have "
                    "started; retry later, or raise --input-budget"
                )
                raise ResourceExhausted(message, reason="INPUTS_FULL", retry_after=RETRY_SECONDS)
            self.size_bytes += size
            self._held.add(tenant, size)
            self._blocks |= {block.name: (block.size, tenant) for block in blocks}

    def free(self, inputs: Inputs) -> None:
        """Gives back what the inputs have in shared memory; nothing where that has been done. Returns at once."""
        self.free_blocks([medium.block for medium in media_of(inputs)])

    def free_blocks(self, names: Sequence[str]) -> None:
        """The same for blocks that were reserved, put or not."""
        with self._lock:
            blocks = {name: self._blocks.pop(name) for name in names if name in self._blocks}
        if blocks:
            self._freeing.submit(self._free, blocks)

    def close(self) -> None:
        """Frees everything, and returns when that is done. Blocks."""
        with self._lock:
            blocks, self._blocks = self._blocks, {}
        self._free(blocks)
        self._freeing.shutdown()

    def _free(self, blocks: dict[str, tuple[int, str]]) -> None:
        free_blocks(blocks)
        with self._lock:
            for size, tenant in blocks.values():
                self.size_bytes -= size
                self._held.add(tenant, -size)


class TenantInputs:
    """An `InputStore` as one tenant's requests see it: what decodes their media need not know whose they are."""

    def __init__(self, store: InputStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant

    def reserve(self, blocks: Sequence[SharedBytes]) -> None:
        """As `InputStore.reserve`."""
        self._store.reserve(blocks, tenant=self._tenant)

    def free_blocks(self, names: Sequence[str]) -> None:
        """As `InputStore.free_blocks`."""
        self._store.free_blocks(names)
