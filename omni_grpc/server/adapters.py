"""LoRA adapters as messages."""

from __future__ import annotations

from collections.abc import Mapping

from omni_grpc import wire
from omni_grpc.gate import AdapterState, LoraAsk, LoraView
from omni_grpc.server.fields import members
from omni_grpc.v1 import admin_pb2, model_pb2

_STATES: Mapping[AdapterState, int] = {
    state: number for number, state in members(AdapterState, model_pb2.LoraState).items() if state is not None
}


def lora_message(view: LoraView) -> model_pb2.Lora:
    adapter = view.adapter
    return wire.build(
        model_pb2.Lora,
        lora_id=adapter.id,
        model=view.model,
        source=view.source,
        rank=adapter.rank,
        size_bytes=adapter.size_bytes,
        pinned=adapter.pinned,
        load_time=view.load_time,
        targets=adapter.targets,
        format=adapter.format,
        keys_applied=adapter.keys_applied,
        keys_skipped=[f"{key} ({why})" for key, why in adapter.skipped.items()],
        in_use=view.in_use,
        sha256=bytes.fromhex(adapter.sha256),
        uid=adapter.key,
        state=_STATES[view.state],
        error=view.failure,
        cache_bytes=adapter.nbytes,
        warnings=adapter.warnings,
    )


def lora_ask(request: admin_pb2.LoadLoraRequest) -> LoraAsk:
    return LoraAsk(
        lora_id=request.lora_id,
        model=request.model,
        path=request.path,
        hub_id=request.hub_id,
        asset_id=request.asset_id,
        filename=request.filename,
        sha256=request.sha256,
        format=request.format,
        pinned=request.pinned,
    )
