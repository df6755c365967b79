"""The results of a batch beside its outputs, one JSON object a line: what has been made, and what failed and why.

A line is written whole, to the disk, after its files are there. What a killed process left of a line is cut off.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from omni_grpc.cli.batch.lines import BatchLine
from omni_grpc.types.errors import ConfigError, FailedPrecondition, OmniError, Violation
from omni_grpc.types.json_text import read_json
from omni_grpc.types.output_files import not_written
from omni_grpc.types.version import __version__

NAME = "results.jsonl"
_HEAD = "omni_grpc_batch"


class Results:
    """The results file of one folder, open and locked. Threads must not share it without a lock of their own."""

    def __init__(self, folder: Path) -> None:
        """Raises FailedPrecondition where another process has it, ConfigError where the file is something else."""
        self.folder, self.path = folder, folder / NAME
        self.resumed = self.path.exists()
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise not_written(self.path, error) from error
        try:
            self._lock()
            self._done: dict[int, Mapping[str, Any]] = {}
            self._failures: dict[str, int] = {}
            self._load()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._file)

    def begin(self, lines: Iterable[BatchLine]) -> None:
        """Starts the file where there is none. Raises ConfigError where outputs would overwrite files of others, or
        where a line was made before of another request.
        """
        lines = list(lines)
        if self.resumed:
            changed = [
                Violation(f"line {line.number}", f"was made of another request: {self._done[line.number]['files'][0]}")
                for line in lines
                if line.number in self._done and self._done[line.number]["key"] != line.key
            ]
            if changed:
                message = f"{self.path} is of other lines or another model; name another folder, or move it away"
                raise ConfigError(message, reason="BATCH_CHANGED", violations=tuple(changed))
            return
        taken = [path.name for line in lines for path in self.folder.glob(f"{line.number:05d}-*")]
        if taken:
            self.path.unlink()
            some = ", ".join(sorted(taken)[:3])
            message = f"--output-dir {self.folder} has {len(taken)} files of other work ({some}); name another folder"
            raise ConfigError(message, reason="FOLDER_TAKEN", violations=(Violation("output_dir", "is taken"),))
        self._append({_HEAD: 1, "omni_grpc": __version__})

    def done(self, line: BatchLine) -> bool:
        """Whether the line has been made, and its files are still there."""
        record = self._done.get(line.number)
        return record is not None and all((self.folder / name).is_file() for name in record["files"])

    def failures(self, line: BatchLine) -> int:
        """How often the line has failed: its next request needs an idempotency key that no failed job has."""
        return self._failures.get(line.key, 0)

    def add(self, line: BatchLine, record: Mapping[str, Any]) -> dict[str, Any]:
        """Appends the result of a line, and returns it as written."""
        whole = {"line": line.number, "key": line.key, "prompt": line.prompt, **record}
        self._append(whole)
        self._take(whole)
        return whole

    def _append(self, record: Mapping[str, Any]) -> None:
        line, size = json.dumps(record).encode() + b"\n", os.fstat(self._file).st_size
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, size)
            raise not_written(self.path, error) from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another batch is at work in {self.folder}; wait for it, or name another folder"
            raise FailedPrecondition(message, reason="BATCH_RUNNING") from None

    def _load(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.ftruncate(self._file, len(whole))
        if not whole:
            self.resumed = False
            return
        try:
            head, *records = [read_json(row) for row in whole.splitlines()]
            if head[_HEAD] != 1:
                raise ValueError(head)
            for record in records:
                self._take(record)
        except (KeyError, TypeError, ValueError) as error:
            message = f"{self.path} is not of a batch of this version; name another folder, or move it away"
            raise ConfigError(
                message, reason="BATCH_CHANGED", violations=(Violation("output_dir", message),)
            ) from error

    def _take(self, record: Mapping[str, Any]) -> None:
        if "error" in record:
            self._failures[record["key"]] = self._failures.get(record["key"], 0) + 1
        else:
            self._done[int(record["line"])] = record


def failed(error: OmniError) -> dict[str, Any]:
    """The result of a line that failed."""
    failure = error.failure
    violations = [{"field": one.field, "description": one.description} for one in failure.violations]
    about = {"code": failure.code.value, "reason": failure.reason, "message": failure.message}
    return {"error": about | ({"violations": violations} if violations else {})}
