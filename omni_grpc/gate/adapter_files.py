"""Where the file of a LoRA adapter comes from: a folder of the operator's, the hub, or an upload."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from omni_grpc.checkpoint import adapter_file
from omni_grpc.checkpoint.adapter_file import Checked, bad
from omni_grpc.checkpoint.hub import fetch_adapter
from omni_grpc.checkpoint.registry import HUB_ID
from omni_grpc.fleet import Fleet
from omni_grpc.gate.refusals import refused
from omni_grpc.gate.stored import available
from omni_grpc.store.records import AdapterRow, AdapterSource
from omni_grpc.store.seam import MissingBlob
from omni_grpc.types.errors import Code, Failure, OmniError, PermissionDenied, Violation
from omni_grpc.types.os_errors import plain

T = TypeVar("T")

_REVISION = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A file that was found. `place` and `filename` find the same one again, see AdapterRow."""

    source: AdapterSource
    place: str
    filename: str
    file: Checked

    @property
    def told(self) -> str:
        """As callers are told."""
        return self.place + (f"/{self.filename}" if self.filename else "")


class AdapterFiles:
    """Uploads are copied to a folder of this process, since workers read files."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._roots = [Path(root).resolve() for root in fleet.config.fleet.lora_roots]
        self._from_hub = fleet.config.fleet.lora_hub
        self._copies: Path | None = None

    async def at_path(self, path: str, filename: str) -> Place:
        """Raises PermissionDenied (PATH_NOT_ALLOWED) for what is not below the operator's roots, there or not,
        InvalidArgument for what is no adapter.
        """
        found = await asyncio.to_thread(self._at_path, path, filename)
        return Place(source=AdapterSource.PATH, place=path, filename=filename, file=found)

    def _at_path(self, path: str, filename: str) -> Checked:
        place = self._within(path, "path")
        if place.is_dir():
            files = {one.relative_to(place).as_posix() for one in place.rglob("*") if one.is_file()}
            # links out of the roots are followed here, too
            place = self._within(str(place / adapter_file.chosen(files, filename, path)), "filename")
        elif filename:
            raise refused("filename", "is for folders and repositories, and `path` is none; leave it out")
        elif not place.is_file():
            raise refused("path", f"{path!r} is neither a file nor a folder")
        elif place.suffix != adapter_file.SUFFIX:
            raise refused("path", f"{path!r} is no {adapter_file.SUFFIX} file, and no other is read")
        return adapter_file.check(place)

    def _within(self, path: str, field: str) -> Path:
        try:
            found = Path(path).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise refused(field, f"{path!r} is no path: {plain(error)}") from error
        if not Path(path).is_absolute() or not any(found.is_relative_to(root) for root in self._roots):
            why = "is outside of the folders that this server loads adapters from (--lora-roots); give an absolute path"
            raise PermissionDenied(f"{field} {why}", reason="PATH_NOT_ALLOWED", violations=(Violation(field, why),))
        return found

    async def on_hub(self, hub_id: str, filename: str) -> Place:
        """ORG/NAME or ORG/NAME@REVISION. Raises PermissionDenied (HUB_NOT_ALLOWED), what keeps it from being
        downloaded, InvalidArgument for what is no adapter.
        """
        if not self._from_hub:
            why = "this server loads no adapters from the hub (--lora-hub)"
            raise PermissionDenied(f"hub_id: {why}", reason="HUB_NOT_ALLOWED", violations=(Violation("hub_id", why),))
        repo, at, revision = hub_id.partition("@")
        named = bool(_REVISION.fullmatch(revision)) and ".." not in revision if at else True
        if not HUB_ID.fullmatch(repo) or not named:
            raise refused("hub_id", f"{hub_id!r} is neither ORG/NAME nor ORG/NAME@REVISION")
        try:
            path, commit = await in_thread(lambda: fetch_adapter(repo, revision, filename))
        except OmniError as error:
            if error.failure.violations:
                raise
            failure = error.failure
            raise dataclasses.replace(failure, violations=(Violation("hub_id", failure.message),)).error() from error
        name = filename or path.as_posix().partition(f"/{commit}/")[2]
        found = await asyncio.to_thread(adapter_file.check, path)
        return Place(source=AdapterSource.HUB, place=f"{repo}@{commit}", filename=name, file=found)

    async def of_asset(self, asset_id: str, filename: str, tenant: str | None) -> Place:
        """Raises NotFound (ASSET_NOT_FOUND), InvalidArgument for what is no adapter. The upload is held."""
        if filename:
            raise refused("filename", "is for folders and repositories, and an upload is one file; leave it out")
        with available():
            await self._fleet.assets.use(asset_id, tenant)
            file = await self._copied(asset_id)
            try:
                found = await asyncio.to_thread(adapter_file.check, file)
            except OmniError:
                self.forget(asset_id)
                raise
            await self._fleet.assets.hold(asset_id, tenant)
        return Place(source=AdapterSource.ASSET, place=asset_id, filename="", file=found)

    async def again(self, row: AdapterRow) -> Place:
        """The file of an adapter that was loaded before. Raises what it cannot be loaded for."""
        match row.source:
            case AdapterSource.PATH:
                found = await self.at_path(row.place, row.filename)
            case AdapterSource.HUB:
                found = await self.on_hub(row.place, row.filename)
            case AdapterSource.ASSET:
                found = await self.of_asset(row.place, "", None)
        if found.file.sha256 != row.sha256:
            raise bad(f"{found.told} has changed: its SHA-256 is {found.file.sha256}, and was {row.sha256}")
        return found

    def forget(self, asset_id: str) -> None:
        """The copy of an upload is not needed any more."""
        if self._copies is not None:
            (self._copies / f"{asset_id}{adapter_file.SUFFIX}").unlink(missing_ok=True)

    def close(self) -> None:
        if self._copies is not None:
            shutil.rmtree(self._copies, ignore_errors=True)
            self._copies = None

    async def _copied(self, asset_id: str) -> Path:
        if self._copies is None:
            self._copies = Path(tempfile.mkdtemp(prefix="omni_grpc-adapters-"))
        path = self._copies / f"{asset_id}{adapter_file.SUFFIX}"
        if path.is_file():
            return path
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as file:
                async for piece in self._fleet.assets.pieces(asset_id):
                    await asyncio.to_thread(file.write, piece)
            part.rename(path)
        except MissingBlob as error:
            raise bad(f"the bytes of {asset_id} are gone; upload it again") from error
        except OSError as error:
            message = f"the upload cannot be copied for the workers: {plain(error)}"
            raise Failure(code=Code.RESOURCE_EXHAUSTED, reason="DISK_FULL", message=message).error() from error
        finally:
            part.unlink(missing_ok=True)
        return path


async def in_thread(work: Callable[[], T]) -> T:
    """What `work` returns, in a thread that nobody waits for at the end of the process: a download may hang."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001 - whoever waits for it gets it
            error = raised
        # nobody waits any more where the loop is closed
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=body, name="omni_grpc-hub", daemon=True).start()
    return await done
