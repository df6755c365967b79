"""The file of an adapter goes to the machine of an actor where it is not there. Actors are called without a cluster."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from omni_grpc.config import EngineConfig
from omni_grpc.engine.ray_actor import RayWorker
from omni_grpc.engine.ray_driver import _Rank, _Replica
from omni_grpc.types.plan import LoadAdapter, Order, Plan, UnloadAdapter


class Inner:
    def __init__(self) -> None:
        self.orders: list[Order] = []

    def start(self) -> None: ...

    def submit(self, plan: Plan) -> None: ...

    def order(self, order: Order) -> None:
        self.orders.append(order)

    def close(self) -> None: ...


class Here(_Replica):
    """Calls the methods of an actor that is an object of this process."""

    def _call(self, rank: _Rank, method: Any, *arguments: object, timeout: float | None = None) -> Any:
        return method(*arguments)


def test_a_file_is_sent_with_its_config_and_goes_with_its_adapter(tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"weights")
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "other.json").write_text("{}")
    sha256 = hashlib.sha256(b"weights").hexdigest()
    actor = RayWorker()
    actor._worker = inner = Inner()
    replica = Here(EngineConfig.from_settings(model="toy"), "", "", lambda report: None)
    rank = _Rank(0, "rank 0", actor)
    order = LoadAdapter(id="style", uid="style#1", path=str(file), sha256=sha256)
    assert replica._with_file(rank, order) == order, "it is there"
    # as on a machine that has another file of that name
    actor.has_file = lambda path, sha256: RayWorker.has_file(actor, str(tmp_path / "other.json"), sha256)  # type: ignore[method-assign]
    sent = replica._with_file(rank, order)
    kept = Path(sent.path)
    assert (sent.uid, kept.name, kept.parent == tmp_path) == ("style#1", file.name, False)
    assert {one.name: one.read_bytes() for one in kept.parent.iterdir()} == {
        "adapter_model.safetensors": b"weights",
        "adapter_config.json": b"{}",
    }
    actor.feed(sent)
    actor.feed(UnloadAdapter(uid="style#1"))
    assert not kept.parent.exists()
    assert inner.orders == [sent, UnloadAdapter(uid="style#1")]


def test_what_the_server_cannot_read_is_left_to_the_worker(tmp_path: Path) -> None:
    replica = Here(EngineConfig.from_settings(model="toy"), "", "", lambda report: None)
    order = LoadAdapter(id="style", uid="style#1", path=str(tmp_path / "gone"), sha256="ab")
    assert replica._with_file(_Rank(0, "rank 0", RayWorker()), order) == order
