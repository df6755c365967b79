"""A hub on loopback: the endpoints that huggingface_hub asks for a model, with faults on demand."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import socket
import threading
import urllib.parse
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

LARGE = ".safetensors"
"""What is stored elsewhere, as the hub does with large files: `resolve` answers with a redirect to another host."""


@dataclasses.dataclass
class Repo:
    """`commits` maps a commit to its files, `refs` a branch or tag to its commit."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False
    private: bool = False


@dataclasses.dataclass(frozen=True)
class Cut:
    """Closes the connection of one download after `size` bytes."""

    size: int


@dataclasses.dataclass(frozen=True)
class Stall:
    """Sends nothing more after `size` bytes of one download, until the hub closes or the client goes."""

    size: int


@dataclasses.dataclass(frozen=True)
class Hold:
    """Sends the rest of one download after `size` bytes only when it is let."""

    size: int
    let: threading.Event


class FakeHub:
    """`requests` lists (method, what, path): what is "info", "resolve" or "data". `faults` are used up one by one.
    While `gate` is closed no repository is looked up.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.ranges: list[str] = []
        self.faults: dict[str, list[Cut | Stall | Hold]] = defaultdict(list)
        self.sizes: dict[str, int] = {}
        self.token = "hf_good"
        self.down = False
        self.closing = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.closing.set()
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, repo: str, files: dict[str, bytes], **options: bool) -> str:
        """Makes `files` the main branch of a repository, and returns the commit."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        known = self.repos.setdefault(repo, Repo({}, {}, **options))
        known.commits[commit] = files
        known.refs["main"] = commit
        return commit

    def downloads(self) -> list[str]:
        """The files whose bytes were asked for."""
        return [path for method, what, path in self.requests if method == "GET" and what != "info"]


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        if self.hub.down:
            return self._refuse(503, "", "the hub is down")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._info(found[1], found[2] or "main")
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(found[1], found[2], found[3])
        if found := re.fullmatch(r"/data/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            self.hub.requests.append((self.command, "data", found[3]))
            return self._send(self.hub.repos[found[1]].commits[found[2]][found[3]], {}, found[3])
        return self._refuse(404, "", f"no such path: {path}")

    def _info(self, name: str, revision: str) -> None:
        self.hub.requests.append((self.command, "info", name))
        self.hub.gate.wait()
        if (place := self._find(name, revision)) is None:
            return
        repo, commit = place
        files = [
            {"rfilename": path, "size": self.hub.sizes.get(path, len(data)), "blobId": _sha1(data)}
            for path, data in repo.commits[commit].items()
        ]
        body = json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": files, "tags": []}).encode()
        self._send(body, {"Content-Type": "application/json"}, "")

    def _resolve(self, name: str, revision: str, path: str) -> None:
        self.hub.requests.append((self.command, "resolve", path))
        if (place := self._find(name, revision)) is None:
            return None
        repo, commit = place
        if repo.gated and not self._authorised():
            return self._refuse(403, "GatedRepo", f"Access to model {name} is restricted")
        if (data := repo.commits[commit].get(path)) is None:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_sha1(data)}"'}
        if not path.endswith(LARGE):
            return self._send(data, headers, path)
        headers |= {
            "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Linked-Size": str(len(data)),
            "Location": f"http://localhost:{self.hub.port}/data/{name}/{commit}/{path}",
            "Content-Length": "0",
        }
        return self._head(302, headers)

    def _find(self, name: str, revision: str) -> tuple[Repo, str] | None:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self._authorised()):
            self._refuse(401, "RepoNotFound", "Repository not found")
            return None
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repo, commit

    def _authorised(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {self.hub.token}"

    def _send(self, data: bytes, headers: dict[str, str], path: str) -> None:
        start, end = 0, len(data)
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", "")):
            self.hub.ranges.append(f"{path} {asked[1]}")
            start, end = int(asked[1]), min(len(data), int(asked[2] or len(data)) + 1)
            headers = headers | {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
        part = data[start:end]
        self._head(206 if start else 200, headers | {"Content-Length": str(len(part)), "Accept-Ranges": "bytes"})
        if self.command == "HEAD":
            return
        faults = self.hub.faults[path]
        fault = faults.pop(0) if faults else None
        self.wfile.write(part if fault is None else part[: fault.size])
        if isinstance(fault, Stall):
            self.hub.closing.wait()
        if isinstance(fault, Hold):
            self.wfile.flush()
            fault.let.wait()
            self.wfile.write(part[fault.size :])
        elif fault is not None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._head(status, {"X-Error-Code": code, "X-Error-Message": message, "Content-Length": "0"})

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
