"""Progress of a download: bytes of files that are downloaded concurrently, added up by component."""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from omni_grpc.checkpoint import layout
from omni_grpc.types.load_progress import size_text

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Bytes of `file` arrived. `done` of `total` bytes of its component's weights are here, and `all_done` of
    `all_total` bytes of the whole model's. The first Transfer of a component has no file.
    """

    component: str
    file: str
    done: int
    total: int
    all_done: int
    all_total: int


OnTransfer = Callable[[Transfer], None]
"""Called for one Transfer at a time. An exception ends the download."""
Count = Callable[[int], None]


class ProgressLog:
    """Logs a line for each component at its first bytes, at every 5 percent, and when it is complete."""

    def __init__(self) -> None:
        self._shown: dict[str, int] = {}

    def __call__(self, it: Transfer) -> None:
        percent = 100 if it.total == 0 else 100 * it.done // it.total
        if percent // 5 > self._shown.get(it.component, -1):
            self._shown[it.component] = percent // 5
            sizes = size_text(it.done), size_text(it.total)
            logger.info("downloading %s: %d%% (%s of %s)", it.component, percent, *sizes)


class DownloadBar:
    """Replaces huggingface_hub's progress bar of one file: draws nothing and passes its bytes to `count`."""

    def __init__(self, *, total: int | None = None, initial: int = 0, **_: Any) -> None:
        self.total, self.n, self.format_dict = total, initial, dict[str, Any]()

    def __enter__(self) -> DownloadBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def count(self, size: int) -> None:
        """Called with each number of new bytes. Does nothing; subclasses override it."""

    def update(self, size: float | None = 1) -> None:
        """`size` is negative if the server sent a file from its start again after a broken connection."""
        self.n += int(size or 0)
        self.count(int(size or 0))

    def update_transfer(self, size: float | None = 1) -> None:
        """Bytes on the wire, which may be fewer than those of the file. Ignored."""

    def set_postfix_str(self, *_: object, **__: object) -> None:
        """The speed as text. Ignored."""

    set_transfer_postfix_str = set_description_str = set_description = refresh = set_postfix_str

    def close(self) -> None:
        """Does nothing: no bar was drawn."""


def uncounted(size: int) -> None:
    """The `count` of a file that is too small to report on."""


def counting_bar(count: Count, stopped: threading.Event) -> type[DownloadBar]:
    """A bar class that passes bytes to `count`; a class, since huggingface_hub creates the bar itself."""

    class Counting(DownloadBar):
        def count(self, size: int) -> None:
            if stopped.is_set():
                raise InterruptedError(errno.EINTR, "stopped because another file failed")
            count(size)

    return Counting


class Tally:
    """Adds up the bytes of concurrent downloads by component."""

    def __init__(
        self, weights: Sequence[layout.Weights], sizes: Mapping[str, int], absent: Collection[str], progress: OnTransfer
    ) -> None:
        self._progress, self._lock = progress, threading.Lock()
        self._total = {part.component: sum(sizes[file] for file in part.files) for part in weights}
        here = {part.component: [file for file in part.files if file not in absent] for part in weights}
        self._done = {component: sum(sizes[file] for file in files) for component, files in here.items()}
        self.counts: Mapping[str, Count] = {
            file: functools.partial(self._add, part.component, file)
            for part in weights
            for file in part.files
            if file in absent
        }
        for component in self._total:
            self._add(component, "", 0)

    def _add(self, component: str, file: str, size: int) -> None:
        with self._lock:
            self._done[component] += size
            self._progress(
                Transfer(
                    component=component,
                    file=file,
                    done=self._done[component],
                    total=self._total[component],
                    all_done=sum(self._done.values()),
                    all_total=sum(self._total.values()),
                )
            )
