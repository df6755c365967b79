"""Downloads checkpoints from the hub, only the files that a pipeline is loaded from, into the cache that HF_HOME names.

HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean to huggingface_hub, which does the transfer. The
reference of a revision is written last, so that without the network it always leads to a complete checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, is_offline_mode
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)

from omni_grpc.checkpoint import adapter_file, layout, sizes
from omni_grpc.checkpoint.download_progress import (
    Count,
    DownloadBar,
    OnTransfer,
    ProgressLog,
    Tally,
    counting_bar,
    uncounted,
)
from omni_grpc.checkpoint.intact import DAMAGED
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.json_text import read_json
from omni_grpc.types.load_progress import size_text
from omni_grpc.types.os_errors import plain, reason
from omni_grpc.types.version import __version__

logger = logging.getLogger(__name__)

# the HTTP client is another one in each major version of huggingface_hub; its error is the first base in all of them
_TRANSPORT_ERROR: type[BaseException] = HfHubHTTPError.__bases__[0]
_WORKERS = 4
_COMMIT = re.compile(r"[0-9a-f]{40}")


InspectConfigs = Callable[[Path], Collection[str]]


def _unseen(folder: Path) -> Collection[str]:
    """The default of `look`: inspects nothing, and needs all weights."""
    return ()


def fetch(
    repo: str, *, revision: str | None = None, progress: OnTransfer | None = None, look: InspectConfigs = _unseen
) -> Path:
    """The folder of a checkpoint of the hub (`org/name`), downloaded unless the cache has it.

    `look` gets the folder once everything but the weights is in it, and returns the components whose weights are not
    needed; an exception ends the download. Without `progress`, progress is logged.

    Raises CheckpointError with the reason HUB_OFFLINE, MODEL_NOT_FOUND, MODEL_GATED, REVISION_NOT_FOUND,
    DOWNLOAD_FAILED, NO_MODEL_INDEX, UNSAFE_WEIGHTS or WEIGHTS_MISSING; the message says what to run.
    """
    revision = revision or constants.DEFAULT_REVISION
    if revision.startswith("/") or ".." in revision.split("/"):
        raise CheckpointError(f"{revision!r} is not a valid branch, tag or commit", reason="REVISION_NOT_FOUND")
    cache = _Cache(repo)
    if is_offline_mode():
        with _explained(repo, revision):
            return _cached(cache, revision, look)
    try:
        commit, sizes = _look_up(repo, revision)
    except (OSError, ValueError, _TRANSPORT_ERROR) as error:
        if not _unreachable(error):
            raise _failure(error, repo, revision) from error
        try:
            folder = _cached(cache, revision, look)
        except CheckpointError as incomplete:
            if incomplete.reason != "HUB_OFFLINE":
                raise
            raise _failure(error, repo, revision) from error
        logger.warning("%s does not respond (%s); using the copy in the cache", constants.ENDPOINT, plain(error))
        return folder
    with _explained(repo, revision):
        return _download(cache, revision, commit, sizes, ProgressLog() if progress is None else progress, look)


class _Cache:
    """What the cache holds of one repository, in the layout that huggingface_hub documents."""

    def __init__(self, repo: str) -> None:
        self.repo = repo
        self.folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"

    def commit(self, revision: str) -> str | None:
        """The commit that a revision was at when it was last downloaded."""
        if _COMMIT.fullmatch(revision):
            return revision
        reference = self.folder / "refs" / revision
        return reference.read_text(encoding="utf-8").strip() if reference.is_file() else None

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def remember(self, revision: str, commit: str) -> None:
        if self.commit(revision) == commit:
            return
        reference = self.folder / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        fresh = reference.with_name(f".{uuid.uuid4().hex}")
        fresh.write_text(commit, encoding="utf-8")
        fresh.replace(reference)


def _look_up(repo: str, revision: str) -> tuple[str, dict[str, int]]:
    """The commit of a revision, and the size of each of its files in bytes."""
    api = HfApi(library_name="omni_grpc", library_version=__version__)
    info = api.model_info(repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    return str(info.sha), {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _cached(cache: _Cache, revision: str, look: InspectConfigs = _unseen) -> Path:
    """The checkpoint in the cache, without asking the hub. Raises CheckpointError if it is missing or incomplete."""
    commit = cache.commit(revision)
    folder = cache.snapshot(commit) if commit else None
    with _with_the_fix(cache.repo, revision):
        if folder is None or not (folder / layout.INDEX).is_file():
            raise CheckpointError(f"revision {revision!r} was never downloaded")
        index = _json(folder / layout.INDEX)
        files = layout.files_of(folder)
        layout.texts(index, files, "the copy")
    without = look(folder)
    with _with_the_fix(cache.repo, revision):
        weights = layout.weights(index, files, "the copy", lambda file: _json(folder / file), without)
    return with_plain_names(folder, weights)


@contextlib.contextmanager
def _with_the_fix(repo: str, revision: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{repo} is not complete in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set: {error}. "
            f"Run once with network access: HF_HUB_OFFLINE=0 {_pull(repo, revision)}",
            reason="HUB_OFFLINE",
        ) from error


def _download(
    cache: _Cache, revision: str, commit: str, files: Mapping[str, int], progress: OnTransfer, look: InspectConfigs
) -> Path:
    texts, weights = _contents(cache.repo, f"{cache.repo} (revision {revision})", commit, files)
    folder = cache.snapshot(commit)
    # the small files first: a cache with all of the weights then has everything
    _transfer(cache.repo, commit, dict.fromkeys(texts, uncounted))
    without = look(folder)
    weights = [part for part in weights if part.component not in without]
    absent = [file for part in weights for file in part.files if not (folder / file).is_file()]
    _check_space(cache, sum(files[file] for file in absent))
    if absent:
        needed = size_text(sum(files[file] for file in absent))
        logger.info("downloading %s at %s: %d files, %s", cache.repo, commit[:12], len(absent), needed)
        _transfer(cache.repo, commit, Tally(weights, files, absent, progress).counts)
    cache.remember(revision, commit)
    return with_plain_names(folder, weights)


def _contents(repo: str, where: str, commit: str, files: Collection[str]) -> tuple[list[str], list[layout.Weights]]:
    """The small files and the weights that a checkpoint is loaded from."""
    if layout.INDEX not in files:
        raise CheckpointError(
            f"{where} has no {layout.INDEX}, so it is not a checkpoint in the diffusers layout; it has "
            f"{layout.some(files) or 'no files'}",
            reason="NO_MODEL_INDEX",
        )

    def read(file: str) -> Mapping[str, Any]:
        return _json(Path(hf_hub_download(repo, file, revision=commit, tqdm_class=DownloadBar)))

    index = read(layout.INDEX)
    return layout.texts(index, files, where), layout.weights(index, files, where, read)


def _transfer(repo: str, commit: str, files: Mapping[str, Count]) -> None:
    """Downloads files side by side and tells each one's count of its bytes. The first error stops the others."""
    stopped = threading.Event()
    with ThreadPoolExecutor(_WORKERS) as pool:
        jobs = [
            pool.submit(hf_hub_download, repo, file, revision=commit, tqdm_class=counting_bar(count, stopped))
            for file, count in files.items()
        ]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


def headers(repo: str, *, revision: str | None = None) -> tuple[Path, dict[str, list[sizes.Header]]]:
    """A folder with the configs of a checkpoint of the hub, and the headers of its weights, by component: no weights
    are downloaded. Raises CheckpointError as `fetch` does.
    """
    revision = revision or constants.DEFAULT_REVISION
    with _explained(repo, revision):
        if is_offline_mode():
            folder = _cached(_Cache(repo), revision)
            return folder, sizes.headers(folder)
        commit, files = _look_up(repo, revision)
        texts, weights = _contents(repo, f"{repo} (revision {revision})", commit, files)
        _transfer(repo, commit, dict.fromkeys(texts, uncounted))
        found = {part.component: [_header(repo, file, commit) for file in sizes.holders(part)] for part in weights}
        return _Cache(repo).snapshot(commit), found


def _header(repo: str, file: str, commit: str) -> sizes.Header:
    """The tensors of one file, of which only the beginning is read."""
    tensors = HfApi().parse_safetensors_file_metadata(repo, file, revision=commit).tensors
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def fetch_file(repo: str, file: str) -> Path:
    """One file of the hub, downloaded unless the cache has it. Raises CheckpointError as `fetch` does."""
    with _explained(repo, constants.DEFAULT_REVISION):
        try:
            return Path(hf_hub_download(repo, file, tqdm_class=DownloadBar))
        except EntryNotFoundError as error:
            offline = isinstance(error, LocalEntryNotFoundError)
            if offline and not is_offline_mode():
                raise
            why = "HF_HUB_OFFLINE is set, and the file is not in the cache" if offline else "the file does not exist"
            raise CheckpointError(
                f"{repo}:{file}: {why}. `hf download {repo} {file}` downloads it; files: {constants.ENDPOINT}/{repo}",
                reason="HUB_OFFLINE" if offline else "MODEL_NOT_FOUND",
            ) from error


def fetch_adapter(repo: str, revision: str, filename: str) -> tuple[Path, str]:
    """The file of a LoRA adapter of the hub, with PEFT's config beside it where there is one, and the commit that it is
    of. `revision`: "" for the default branch; `filename`: "" for the only one. Only safetensors files are downloaded.
    Raises CheckpointError as `fetch` does, InvalidArgument for a file that is not there.
    """
    revision = revision or constants.DEFAULT_REVISION
    cache = _Cache(repo)
    with _explained(repo, revision):
        if (commit := cache.commit(revision)) is not None and (is_offline_mode() or _COMMIT.fullmatch(revision)):
            # one that was loaded before needs no hub
            folder = cache.snapshot(commit)
            if filename and (folder / filename).is_file():
                return folder / filename, commit
        commit, files = _look_up(repo, revision)
        chosen = adapter_file.chosen(files, filename, f"{repo} at {commit[:12]}")
        config = str(PurePosixPath(chosen).parent / adapter_file.CONFIG)
        _check_space(cache, files[chosen])
        _transfer(repo, commit, dict.fromkeys([chosen, *({config} & set(files))], uncounted))
        return cache.snapshot(commit) / chosen, commit


def discard_unfinished() -> None:
    """Removes this process's unfinished downloads, for a process that ends at once.

    huggingface_hub does so when a read returns, which takes long on a silent line. Without /proc they stay: they have
    names of their own, and nothing reads them.
    """
    for descriptor in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            file = descriptor.readlink()
            if file.suffix == ".incomplete":
                file.unlink()


def _check_space(cache: _Cache, needed: int) -> None:
    folder = next(folder for folder in (cache.folder, *cache.folder.parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{cache.repo} needs {size_text(needed)} more, but the disk of {constants.HF_HUB_CACHE} has only "
            f"{size_text(free)} left; free some space, or set HF_HOME to a folder on another disk",
            reason="DOWNLOAD_FAILED",
        )


# --- folders ----------------------------------------------------------------------------------------------------------


def with_plain_names(folder: Path, weights: Sequence[layout.Weights]) -> Path:
    """`folder` itself, or where only a variant of some weights is there, a folder of links in which they have the plain
    names that loaders ask for.
    """
    renamed = {plain: file for part in weights for plain, file in part.renamed.items()}
    if not renamed:
        return folder
    links = {file: folder.resolve() / file for file in layout.files_of(folder)}
    links |= {plain: folder.resolve() / file for plain, file in renamed.items()}
    key = hashlib.sha256(json.dumps({name: str(path) for name, path in sorted(links.items())}).encode()).hexdigest()
    place = Path("omni_grpc") / "plain" / key[:24] / folder.name
    # the user may have no name, and no home
    temporary = Path(tempfile.gettempdir()) / f"omni_grpc-{os.getuid()}"
    failures = []
    for home in (Path(constants.HF_HOME), temporary):
        try:
            if home is temporary:
                home.mkdir(mode=0o700, exist_ok=True)
                if home.stat().st_uid != os.getuid():
                    raise PermissionError(errno.EPERM, "belongs to another user")
            return _linked(home / place, links)
        except OSError as error:
            # a read-only root, or no home at all
            failures.append(f"{home}: {reason(error)}")
    raise CheckpointError(
        f"{folder} has only a variant of some weights ({layout.some(list(renamed.values()), 4)}), which needs a "
        f"folder of links, and none can be made ({'; '.join(failures)}); set HF_HOME or TMPDIR to a folder that can be "
        "written, or rename the weights",
        reason="CHECKPOINT_DOES_NOT_LOAD",
    )


def _linked(target: Path, links: Mapping[str, Path]) -> Path:
    """The folder `target` with these links, made where it is not there."""
    if target.is_dir() and all((target / name).readlink() == path for name, path in links.items()):
        return target
    fresh = target.with_name(f".{uuid.uuid4().hex}")
    for name, path in links.items():
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        (fresh / name).symlink_to(path)
    try:
        fresh.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(fresh)  # another process made the same folder meanwhile
    return target


def _json(path: Path) -> Mapping[str, Any]:
    try:
        content = read_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} contains a JSON {type(content).__name__}, expected an object")
    return content


# --- errors -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _explained(repo: str, revision: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorsParsingError, _TRANSPORT_ERROR) as error:
        raise _failure(error, repo, revision) from error


def _unreachable(error: BaseException) -> bool:
    """Whether the hub or the network failed, and not the request."""
    if isinstance(error, HfHubHTTPError):
        return bool(error.response.status_code >= 500)
    return not isinstance(error, ValueError)


def _failure(error: BaseException, repo: str, revision: str) -> CheckpointError:
    """Our error for an exception of huggingface_hub."""
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    page = f"{constants.ENDPOINT}/{repo}"
    login = "run `hf auth login`, or set HF_TOKEN"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    match error:
        case OfflineModeIsEnabled():
            fix = f"HF_HUB_OFFLINE=0 {_pull(repo, revision)}"
            return CheckpointError(f"HF_HUB_OFFLINE is set; run once: {fix}", reason="HUB_OFFLINE")
        case RevisionNotFoundError():
            message = f"{repo} has no revision {revision!r}; --revision takes a branch, tag or commit of {page}"
            return CheckpointError(message, reason="REVISION_NOT_FOUND")
        case GatedRepoError():
            message = f"{repo} is gated: request access at {page}, then {login}"
            return CheckpointError(message, reason="MODEL_GATED")
        case RepositoryNotFoundError() | DisabledRepoError():
            message = (
                f"there is no folder {repo!r} and no model of that name at {constants.ENDPOINT}, or it is "
                f"private or disabled; if you have access, {login}"
            )
            return CheckpointError(message, reason="MODEL_NOT_FOUND")
        case HfHubHTTPError() if status in (401, 403):
            message = f"{constants.ENDPOINT} denies access to {repo} (HTTP {status}): see {page}, then {login}"
            return CheckpointError(message, reason="MODEL_GATED")
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"the disk of {constants.HF_HUB_CACHE} is full; free some space, or move HF_HOME to another disk"
            return CheckpointError(message, reason="DOWNLOAD_FAILED")
        case OSError() if error.filename is not None:
            # of this machine: what fails on the network names no file
            message = (
                f"{repo} cannot be kept in the cache {constants.HF_HUB_CACHE}: {plain(error)}; set HF_HOME to a folder "
                "that can be written"
            )
            return CheckpointError(message, reason="DOWNLOAD_FAILED")
        case SafetensorsParsingError():
            message = f"{repo} has a file that is no safetensors file: {error}; another --revision may have a whole one"
            return CheckpointError(message, reason=DAMAGED)
    what = " ".join(plain(error).split())
    message = (
        f"downloading {repo} from {constants.ENDPOINT} failed: {what}. Complete files are kept; start again to "
        f"continue, or download it first: {_pull(repo, revision)}"
    )
    return CheckpointError(message, reason="DOWNLOAD_FAILED")


def _pull(repo: str, revision: str) -> str:
    flag = "" if revision == constants.DEFAULT_REVISION else f" --revision {revision}"
    return f"python -m omni_grpc pull {repo}{flag}"
