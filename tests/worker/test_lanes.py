"""Threads beside each other, and one that is alone."""

from __future__ import annotations

import threading

import pytest

from omni_grpc.worker.lanes import Lanes


def test_who_is_alone_gets_it_only_where_nobody_works() -> None:
    lanes = Lanes()
    with lanes.exclusive() as quiet:
        assert quiet
    with lanes.work(), lanes.work(), lanes.exclusive() as quiet:
        assert not quiet
    with lanes.exclusive() as quiet:
        assert quiet
        with lanes.exclusive() as second:
            assert not second
    with pytest.raises(RuntimeError), lanes.exclusive():
        raise RuntimeError
    with pytest.raises(RuntimeError), lanes.work():
        raise RuntimeError
    with lanes.exclusive() as quiet:
        assert quiet


def test_who_comes_meanwhile_waits() -> None:
    lanes, came, order = Lanes(), threading.Event(), []

    def work() -> None:
        came.set()
        with lanes.work():
            order.append("work")

    thread = threading.Thread(target=work)
    with lanes.exclusive() as quiet:
        assert quiet
        thread.start()
        assert came.wait(30)
        thread.join(0.05)
        order.append("alone")
    thread.join(30)
    assert order == ["alone", "work"]
