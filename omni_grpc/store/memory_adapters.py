"""Loaded LoRA adapters in this process: whoever restarts it loads them again."""

from __future__ import annotations

from omni_grpc.store.records import AdapterRow


class MemoryAdapters:
    """It implements `omni_grpc.store.seam.AdapterRows`."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], AdapterRow] = {}

    async def add(self, row: AdapterRow) -> AdapterRow:
        return self._rows.setdefault((row.model, row.lora_id), row)

    async def all(self) -> list[AdapterRow]:
        return sorted(self._rows.values(), key=lambda row: (row.create_time, row.model, row.lora_id))

    async def delete(self, row: AdapterRow) -> bool:
        key = (row.model, row.lora_id)
        found = self._rows.get(key)
        if found is None or found.uid != row.uid:
            return False
        del self._rows[key]
        return True
