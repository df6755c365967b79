"""A real web server on a real port, over TLS by an authority of its own, that answers as a test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import trustme

from omni_grpc.config import OutboundConfig, WebhooksConfig

NAMES = ("media.test", "*.cdn.test", "xn--bcher-kva.test", "127.0.0.1", "::1")
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Web:
    """`paths` says what is answered to which path; `asked` has the heads of the requests so far, `bodies` what came
    with them.
    """

    def __init__(self, folder: Path) -> None:
        self.port = 0
        self.paths: dict[str, Answer] = {}
        self.asked: list[str] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.ca))

    def url(self, path: str = "/", *, host: str = "media.test", scheme: str = "https") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def config(self, *hosts: str, **changes: object) -> OutboundConfig:
        """Lists these hosts, in which {} is this server's port; by default one name and the loopback addresses."""
        listed = tuple(host.format(self.port) for host in hosts or ("media.test:{}", "127.0.0.0/8"))
        return OutboundConfig(outbound_hosts=listed, outbound_ca=str(self.ca), **changes)

    def hooks(self, *hosts: str, **changes: object) -> WebhooksConfig:
        """The same for webhooks."""
        return WebhooksConfig(webhook_hosts=self.config(*hosts).outbound_hosts, **changes)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            lines = (line.partition(":") for line in head.split("\r\n"))
            length = next((int(value) for name, _, value in lines if name.lower() == "content-length"), 0)
            self.bodies.append(await reader.readexactly(length))
            self.asked.append(head)
            await self.paths[head.split(" ")[1].partition("?")[0]](writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone, which tests ask for
        finally:
            self.open -= 1
            writer.close()


@contextlib.asynccontextmanager
async def web(folder: Path, *, tls: bool = True, names: tuple[str, ...] = NAMES) -> AsyncIterator[Web]:
    site = Web(folder)
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        site.authority.issue_cert(*names).configure_cert(context)
    server = await asyncio.start_server(site.serve, "127.0.0.1", 0, ssl=context)
    site.port = server.sockets[0].getsockname()[1]
    try:
        yield site
    finally:
        server.close()


def answer(
    body: bytes = b"", *, status: str = "200 OK", length: int | None = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """A whole response; `length` is what it declares, if that is not true."""
    lines = {"Content-Length": str(len(body) if length is None else length), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\n{head}\r\n".encode("latin-1") + body)

    return write


def moved(location: str, status: str = "302 Found") -> Answer:
    return answer(b"<html>secret</html>", status=status, headers={"Location": location})


def endless(chunk: bytes = b"x" * 65536, *, pause: float = 0.0, encoding: str = "identity") -> Answer:
    """A body in chunks that does not end."""

    async def write(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Encoding: {encoding}\r\n\r\n"
        writer.write(head.encode())
        while True:
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            await writer.drain()
            await asyncio.sleep(pause)

    return write


async def silence(writer: asyncio.StreamWriter) -> None:
    """No answer at all, until the client leaves."""
    while not writer.is_closing():  # noqa: ASYNC110 (what is waited for has no event)
        await asyncio.sleep(0.01)
