"""Whom new connections go to, where two processes listen on one port (SO_REUSEPORT of Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

FDS = Path("/proc/self/fd")
TCP_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
ESTABLISHED = "01"
SO_ATTACH_REUSEPORT_CBPF = 51
"""Of asm-generic/socket.h; Python has no name for it."""
RETURN_CONSTANT = 0x06
"""BPF_RET | BPF_K: a program of one instruction."""


@contextlib.contextmanager
def listening(ports: Collection[int]) -> Iterator[list[socket.socket]]:
    """The sockets of this process that listen on these ports, each once, as duplicates that are closed afterwards.
    gRPC does not hand out its own.
    """
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        for inode, number in _sockets():
            try:
                one = stack.enter_context(socket.socket(fileno=os.dup(number)))
            except OSError:
                # it was closed meanwhile
                continue
            if one.family in (socket.AF_INET, socket.AF_INET6) and _listens(one) and one.getsockname()[1] in ports:
                found.setdefault(inode, one)
        yield list(found.values())


def steer(one: socket.socket, place: int) -> None:
    """Has every new connection of the port go to the socket at this place, among those that listen there, counted from
    0 in the order in which they began to. Where there is none at that place any more, they go to any. Raises OSError.
    """
    code = ctypes.create_string_buffer(struct.pack("HBBI", RETURN_CONSTANT, 0, 0, place))
    program = struct.pack("HxxxxxxQ", 1, ctypes.addressof(code))
    one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, program)


def connections(ports: Collection[int]) -> int:
    """How many connections this process has at these ports of its own."""
    mine = {inode for inode, _ in _sockets()}
    count = 0
    for table in TCP_TABLES:
        for line in table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else ():
            _, local, _, state, *_rest = (fields := line.split())
            port = int(local.rpartition(":")[2], 16)
            count += state == ESTABLISHED and port in ports and int(fields[9]) in mine
    return count


def _sockets() -> Iterator[tuple[int, int]]:
    """Inode and descriptor of each socket of this process."""
    for name in os.listdir(FDS):
        try:
            target = os.readlink(FDS / name)
        except OSError:
            # that of the folder itself, or one that was closed meanwhile
            continue
        if target.startswith("socket:["):
            yield int(target[8:-1]), int(name)


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
