"""The proxy does what its weather says: what reaches the other side, when, and how connections end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from benchmarks.service.chaos.proxy import RETRANSMISSION, Proxy, Weather


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """In front of a server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_echo, args=(server,), daemon=True).start()
        found = Proxy(server.getsockname())
        yield found
        found.close()


def _echo(server: socket.socket) -> None:
    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()


def connected(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


def exchanged(one: socket.socket, data: bytes) -> tuple[bytes, float]:
    """What came back, and after how many seconds."""
    began = time.monotonic()
    one.sendall(data)
    found = b""
    while len(found) < len(data):
        found += one.recv(1 << 16)
    return found, time.monotonic() - began


def test_in_clear_weather_it_is_not_there(proxy: Proxy) -> None:
    data = bytes(range(256)) * 4096
    with connected(proxy) as one:
        thread = threading.Thread(target=one.sendall, args=(data,))
        thread.start()
        found = b""
        while len(found) < len(data):
            found += one.recv(1 << 16)
        thread.join()
    assert found == data
    assert proxy.connections == 1


@pytest.mark.parametrize(
    ("weather", "least"), [(Weather(delay=0.1), 0.2), (Weather(loss=1.0), 2 * RETRANSMISSION)], ids=["delay", "loss"]
)
def test_what_is_delayed_or_lost_comes_later_and_in_order(proxy: Proxy, weather: Weather, least: float) -> None:
    with connected(proxy) as one, proxy.weather(weather):
        found, seconds = exchanged(one, b"abc" * 20_000)
    assert found == b"abc" * 20_000
    assert seconds >= least


def test_a_stall_is_silent_and_what_was_sent_comes_after_it(proxy: Proxy) -> None:
    with connected(proxy) as one:
        with proxy.weather(Weather(stalled=True)):
            one.sendall(b"x")
            one.settimeout(0.3)
            with pytest.raises(TimeoutError):
                one.recv(1)
        one.settimeout(10)
        assert one.recv(1) == b"x"


def _read_from(proxy: Proxy) -> None:
    """A reset may come as early as the connect."""
    with connected(proxy) as one:
        one.recv(1)


def test_connections_are_reset_and_refused(proxy: Proxy) -> None:
    with connected(proxy) as one:
        exchanged(one, b"x")
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            one.recv(1)
    with proxy.weather(Weather(refusing=True)), pytest.raises(ConnectionResetError):
        _read_from(proxy)
    with connected(proxy) as one:
        assert exchanged(one, b"y")[0] == b"y"
