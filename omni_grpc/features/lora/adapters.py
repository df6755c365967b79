"""The adapters of a model, which come and go while it runs: in host memory, and as far as there is room on the device.

Three threads work with them. Reading, checking and converting a file is for a thread of its own (`load`); what a
request needs is brought to the device where requests are prepared (`admit`); between steps, nothing is done but putting
loaded adapters into the layers (`attach`) and counting requests that ended (`release`). What is slow happens outside of
the lock.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path

from omni_grpc.config import LoraConfig
from omni_grpc.feature_rules.lora import DEVICE_CACHE, HOST_CACHE, MERGED_CACHE, sources
from omni_grpc.features import Context
from omni_grpc.features.lora import records
from omni_grpc.features.lora.cache import ByteCache
from omni_grpc.features.lora.entry import Entry, Part
from omni_grpc.features.lora.site import Placed, Site
from omni_grpc.features.lora.variants import MergedCache
from omni_grpc.loading.adapters import AdapterFile
from omni_grpc.loading.adapters.binding import Bound
from omni_grpc.loading.adapters.files import refused
from omni_grpc.loading.adapters.targets import read_files
from omni_grpc.types.errors import (
    ConfigError,
    FailedPrecondition,
    InvalidArgument,
    OmniError,
    ResourceExhausted,
    Violation,
)
from omni_grpc.types.load_progress import size_text
from omni_grpc.types.lora import Adapter, Lora
from omni_grpc.types.plan import LoadAdapter
from omni_grpc.types.request import Request
from omni_grpc.types.vitals import AdapterMemory

logger = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
"""When a request may come again whose adapters found no room beside those of others."""


class Adapters:
    """Those of one model, whose components come one after the other (`add`) before any adapter is loaded by order."""

    holds_copies = True

    def __init__(self, config: LoraConfig, context: Context) -> None:
        self._effects, self._copied, self._work = context.effects, context.copied, context.work
        self._ranks, self._device_of = context.ranks, context.device
        self._config = config
        self._sites: list[Site] = []
        self._entries: dict[str, Entry] = {}
        self._leases: dict[str, list[Entry]] = {}
        self._lock = threading.RLock()
        self._asleep = False
        self.device, self.host = ByteCache(math.inf), ByteCache(math.inf)
        limit = config.lora_merged_cache
        self.copies = MergedCache(MERGED_CACHE if limit is None else limit)

    # --- at start -----------------------------------------------------------------------------------------------------

    def add(self, site: Site) -> None:
        """Takes another component of the model, with what the adapters of the settings change of it. Raises ConfigError
        for the setting `lora`.
        """
        self._sites.append(site)
        for name, paths in sources(self._config).items():
            entry = self._entries.get(name)
            if entry is not None and records.leaves_alone(entry.record, site.component):
                # the file need not be read once more
                bound = None
            else:
                bound, entry = self._bound(site, name, {where: Path(path) for where, path in paths.items()})
            placed = [] if bound is None else site.placed(bound)
            part = Part.of(site, placed)
            entry.parts.append(part)
            if bound is not None:
                entry.record = records.extended(entry.record, site.component, bound, entry.nbytes)
                entry.record = records.weighed(entry.record, *site.own_weights(placed))
            part.keep(placed)
            self._fetch(part)
            part.put(name)
            for cache in (self.host, self.device):
                cache.add(name, part.nbytes)
            entry.attached = True
        self._report()

    def _bound(self, site: Site, name: str, paths: Mapping[str, Path]) -> tuple[Bound, Entry]:
        """What an adapter of the settings changes of a component, and its entry."""
        file = read_files(name, paths)
        entry = self._entries.get(name)
        if entry is None:
            record = records.of_file(name, name, file, denoisers=site.context.denoisers)
            entry = self._entries[name] = Entry(paths, record)
        return site.bind(name, file), entry

    def settle(self) -> None:
        """Once all components are there: from now on the caches have their bounds. Raises ConfigError for an adapter of
        the settings that changes nothing, and for one that is larger than them.
        """
        for entry in self._entries.values():
            if fault := records.unused(entry.record):
                raise refused(entry.record.id, fault)
        at_start = self.host.used
        # without a setting, all of them fit at once
        self.device.limit = _limit(self._config.lora_device_cache, DEVICE_CACHE, at_start)
        self.host.limit = _limit(self._config.lora_host_cache, HOST_CACHE, at_start)
        for entry in self._entries.values():
            if fault := self._too_large(entry.nbytes):
                raise refused(entry.record.id, fault)
        # those that were named first stay
        for cache, drop in ((self.device, self._leave_device), (self.host, self._leave_host)):
            for key in reversed(cache.keys):
                if cache.used > cache.limit:
                    drop(self._entries[key])

    # --- loading, on a thread of its own ------------------------------------------------------------------------------

    def load(self, order: LoadAdapter) -> Entry:
        """Reads, checks and converts an adapter, unless it is there already, and brings it to the device where there is
        room without any other one having to go; a pinned one makes room. It is in no layer yet: `attach` follows.

        Raises InvalidArgument for a file that cannot be used, ResourceExhausted where the caches have no room for it.
        """
        if (known := self._entries.get(order.uid)) is not None:
            return known
        try:
            file = self._read(order.id, {"": Path(order.path)}, order.sha256)
            if order.format and order.format != file.format:
                raise refused(order.id, f"{file.path} has the layout {file.format}, not {order.format}")
            bound = [(site, site.bind(order.id, file)) for site in self._sites]
            denoisers = self._sites[0].context.denoisers
            record = records.of_file(order.id, order.uid, file, denoisers=denoisers, pinned=order.pinned)
            for site, one in bound:
                record = records.extended(record, site.component, one)
            if fault := records.unused(record):
                raise refused(order.id, fault)
        except ConfigError as error:
            message = str(error).removeprefix("--lora ")
            raise InvalidArgument(message, reason="BAD_LORA", violations=(Violation("source", message),)) from error
        placed = [(site, site.placed(one)) for site, one in bound]
        del file, bound
        for site, changes in placed:
            record = records.weighed(record, *site.own_weights(changes))
        entry = Entry({"": Path(order.path)}, record)
        try:
            self._keep_on_host(entry, placed)
            entry.record = dataclasses.replace(entry.record, nbytes=entry.nbytes)
            if self._take_room(entry, others_go=order.pinned):
                self._bring(entry)
            elif order.pinned:
                raise self._full(entry, "device")
        except BaseException:
            self.remove(entry)
            raise
        return entry

    def attach(self, entry: Entry) -> Adapter:
        """Puts a loaded adapter into the layers, between steps: from then on requests may name it."""
        with self._lock:
            if entry.key in self.device:
                for part in entry.parts:
                    part.put(entry.key)
            else:
                for part in entry.parts:
                    for target in part.targets:
                        part.site.wrap(target)
            entry.attached = True
            self._report()
            return entry.record

    # --- requests -----------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Has the adapters of a request on the device until it is released. Called where requests are prepared.

        Raises FailedPrecondition for an adapter that is not loaded or whose file is another one now, ResourceExhausted
        where the device has no room for it beside those in use; of several ranks, where any of them cannot.
        """
        if not request.loras:
            return
        error: Exception | None = None
        try:
            self._admit(request)
        except Exception as caught:  # noqa: BLE001 - raised below, once the other ranks know
            error = caught
        if self._ranks is not None and not self._ranks.all_say(error is None, self._device_of) and error is None:
            message = f"another rank could not bring the adapters of {request.id} to its device; see its log"
            error = FailedPrecondition(message, reason="LORA_NOT_LOADED")
        if error is not None:
            self.release(request.id)
            raise error

    def release(self, request_id: str) -> list[Entry]:
        """A request has ended. Returns the adapters that were to be unloaded and had no other: `remove` follows."""
        with self._lock:
            mine = self._leases.pop(request_id, [])
            for entry in mine:
                entry.users -= 1
            return [entry for entry in mine if entry.leaving and not entry.users]

    # --- unloading ----------------------------------------------------------------------------------------------------

    def unload(self, key: str) -> Entry | None:
        """No request is admitted with an adapter any more. Returns it where none has it: `remove` follows. None where
        one still has it. Raises KeyError where there is none of that key.
        """
        with self._lock:
            entry = self._entries[key]
            entry.leaving = True
            return None if entry.users else entry

    def remove(self, entry: Entry) -> None:
        """Frees all that is left of an adapter which nobody uses."""
        with self._lock:
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
            self._leave_device(entry)
            self._leave_host(entry)
            others = [part for one in self._entries.values() for part in one.parts]
            for part in entry.parts:
                changed = {target for other in others if other.site is part.site for target in other.targets}
                for target in set(part.targets) - changed:
                    part.site.unwrap(target)
            self._report()

    # --- sleep --------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Gives back all memory of the device, while there is no request."""
        self.copies.clear()
        with self._lock:
            self._asleep = True
            for key in self.device.keys:
                self._leave_device(self._entries[key])

    def wake(self) -> None:
        """The device is there again. Adapters that are pinned come at once, others with their requests."""
        with self._lock:
            self._asleep = False
            pinned = [entry for entry in self._entries.values() if entry.record.pinned and entry.attached]
        for entry in pinned:
            if self._take_room(entry, others_go=True):
                self._bring(entry)
                self._put(entry)

    @property
    def found(self) -> tuple[Adapter, ...]:
        """Those that requests may name, and those that are being unloaded, oldest first."""
        with self._lock:
            return tuple(entry.record for entry in self._entries.values() if entry.attached)

    @property
    def room(self) -> int:
        """Bytes of the device that adapters, and weights with them merged in, may still take."""
        return max(0, int(self.device.limit) - self.device.used) + self.copies.limit - self.copies.size

    @property
    def memory(self) -> tuple[AdapterMemory, ...]:
        """Once they are settled. Whole numbers that change beside: from any thread, without waiting."""
        found = (
            ("host", self.host.used, self.host.limit, self.host.evictions),
            ("device", self.device.used, self.device.limit, self.device.evictions),
            ("merged", self.copies.size, self.copies.limit, self.copies.evictions),
        )
        return tuple(
            AdapterMemory(name=name, used_bytes=used, limit_bytes=int(limit), evictions=evictions)
            for name, used, limit, evictions in found
        )

    # --- parts --------------------------------------------------------------------------------------------------------

    def _admit(self, request: Request) -> None:
        with self._lock:
            entries = [self._found(key) for key in dict.fromkeys(lora.key for lora in request.loras)]
            self._leases[request.id] = entries
            for entry in entries:
                entry.users += 1
        for entry in entries:
            if entry.key in self.device:
                self.device.touch(entry.key)
            elif self._take_room(entry, others_go=True):
                self._bring(entry)
                self._put(entry)
            else:
                raise self._full(entry, "device")

    def _found(self, key: str) -> Entry:
        entry = self._entries.get(key)
        if entry is None or entry.leaving or not entry.attached:
            why = "is being unloaded" if entry is not None and entry.leaving else "is not loaded"
            raise FailedPrecondition(f"the adapter {key!r} {why} in this worker", reason="LORA_NOT_LOADED")
        return entry

    def _read(self, name: str, paths: Mapping[str, Path], sha256: str) -> AdapterFile:
        file = read_files(name, paths)
        if sha256 and file.sha256 != sha256:
            raise refused(name, f"{file.name} has the SHA-256 {file.sha256}, not {sha256}: it is another file now")
        return file

    def _keep_on_host(self, entry: Entry, placed: Sequence[tuple[Site, list[Placed]]]) -> None:
        """Puts converted changes into host memory, for which others go that were used longest ago."""
        if not entry.parts:
            entry.parts = [Part.of(site, one) for site, one in placed]
        if fault := self._too_large(entry.nbytes):
            raise ResourceExhausted(f"the adapter {entry.record.id!r} {fault}", reason="LORA_CACHE_FULL")
        with self._lock:
            going = self.host.in_the_way(entry.nbytes, lambda key: not self._entries[key].stays)
            if going is None:
                raise self._full(entry, "host")
            for key in going:
                self._leave_host(self._entries[key])
            self.host.evictions += len(going)
            self._entries.setdefault(entry.key, entry)
            self.host.add(entry.key, entry.nbytes)
        # of a device, the driver pins it; neither holds up who has the lock
        for part, (_, one) in zip(entry.parts, placed, strict=True):
            part.keep(one)

    def _take_room(self, entry: Entry, *, others_go: bool) -> bool:
        """Counts an adapter on the device, where there is room for it, and has others go for it if they may."""
        with self._lock:
            if entry.key in self.device:
                return False
            may_go: Callable[[str], bool] = lambda key: others_go and not self._entries[key].stays  # noqa: E731
            going = None if self._asleep else self.device.in_the_way(entry.nbytes, may_go)
            if going is None:
                return False
            for key in going:
                self._leave_device(self._entries[key])
            self.device.evictions += len(going)
            self.device.add(entry.key, entry.nbytes)
            return True

    def _bring(self, entry: Entry) -> None:
        """Copies an adapter to the device, which has been counted there. What the host has dropped is read again."""
        try:
            if not entry.on_host:
                self._reread(entry)
            for part in entry.parts:
                self._fetch(part)
        except BaseException:
            with self._lock:
                self._leave_device(entry)
            raise
        with self._lock:
            if self._asleep:
                # the device's memory was given back meanwhile
                self._leave_device(entry)

    def _put(self, entry: Entry) -> None:
        with self._lock:
            for part in entry.parts:
                part.put(entry.key)

    def _fetch(self, part: Part) -> None:
        assert part.host is not None
        with self._work():
            part.waiting = part.host.on_device(self._copied)

    def _reread(self, entry: Entry) -> None:
        record = entry.record
        logger.info("adapter %s: reading %s again, which the host had dropped", record.id, record.file)
        try:
            file = self._read(record.id, entry.paths, record.sha256)
            placed = [(site, site.placed(site.bind(record.id, file))) for site in self._sites]
        except ConfigError as error:
            raise FailedPrecondition(str(error).removeprefix("--lora "), reason="LORA_NOT_LOADED") from error
        self._keep_on_host(entry, placed)

    def _leave_device(self, entry: Entry) -> None:
        """Takes an adapter out of the layers. Graphs that read its tensors by their addresses are forgotten."""
        if entry.key not in self.device:
            return
        for part in entry.parts:
            part.take(entry.key)
        self.device.remove(entry.key)
        for forget in self._effects.stale:
            forget(_names(entry.key))

    def _leave_host(self, entry: Entry) -> None:
        self.host.remove(entry.key)
        for part in entry.parts:
            part.host = None

    def _too_large(self, nbytes: int) -> str:
        for cache, name in ((self.device, "lora_device_cache"), (self.host, "lora_host_cache")):
            if nbytes > cache.limit:
                flag = "--" + name.replace("_", "-")
                return f"takes {size_text(nbytes)}, and {flag} is {size_text(int(cache.limit))}; give it more"
        return ""

    def _full(self, entry: Entry, where: str) -> OmniError:
        """What is in use, or pinned, leaves no room. With less of it at once there would be."""
        cache = self.device if where == "device" else self.host
        message = (
            f"the adapter {entry.record.id!r} takes {size_text(entry.nbytes)}, and of what adapters have on the "
            f"{where}, {size_text(int(cache.limit))}, those that are in use or pinned leave less; use fewer at once, "
            f"or give --lora-{where}-cache more"
        )
        return ResourceExhausted(message, reason="LORA_CACHE_FULL", retry_after=RETRY_SECONDS)

    def _report(self) -> None:
        self._effects.report(loras=self.found, lora_merged_cache=self.copies.limit)


def _limit(setting: int | None, default: int, at_start: int) -> float:
    return max(default, at_start) if setting is None else setting


def _names(key: str) -> Callable[[Hashable], bool]:
    """Whether something that was made for a request was made with an adapter."""

    def names(looked_at: Hashable) -> bool:
        parts: Iterable[object] = looked_at if isinstance(looked_at, tuple) else ()
        return any(isinstance(one, Lora) and one.key == key for one in parts)

    return names
