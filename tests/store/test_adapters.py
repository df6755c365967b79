"""Adapters that were loaded, in every store."""

from __future__ import annotations

from omni_grpc.store.records import AdapterRow, AdapterSource
from omni_grpc.store.seam import Store


def adapter(lora_id: str = "style", model: str = "tiny", **changes) -> AdapterRow:
    known = {
        "uid": f"{lora_id}#1",
        "source": AdapterSource.PATH,
        "place": "/loras/it's \0",
        "filename": "a\\b",
        "format": "",
    }
    known |= {
        "sha256": "ab" * 32,
        "size_bytes": 2**40,
        "pinned": False,
        "create_time": 1.5,
        "tenant": "a",
        "subject": "b",
    }
    return AdapterRow(model=model, lora_id=lora_id, **(known | changes))


class TestAdapters:
    async def test_they_come_back_in_order_as_they_were_written(self, store: Store) -> None:
        later = adapter("first", pinned=True, create_time=2.5, format="peft", source=AdapterSource.ASSET)
        rows = [adapter(), later, adapter("Z", "other", create_time=3.5)]
        for row in reversed(rows):
            assert await store.adapters.add(row) == row
        assert await store.adapters.all() == rows

    async def test_of_one_id_for_a_model_the_first_stays(self, store: Store) -> None:
        first = adapter()
        await store.adapters.add(first)
        assert await store.adapters.add(adapter(uid="style#2", sha256="cd" * 32)) == first
        assert await store.adapters.add(adapter(model="other")) != first
        assert len(await store.adapters.all()) == 2

    async def test_it_is_deleted_by_its_uid(self, store: Store) -> None:
        await store.adapters.add(adapter())
        assert not await store.adapters.delete(adapter(uid="style#2"))
        assert not await store.adapters.delete(adapter(model="other"))
        assert await store.adapters.delete(adapter())
        assert not await store.adapters.delete(adapter())
        assert await store.adapters.all() == []
        again = adapter(uid="style#2")
        assert await store.adapters.add(again) == again
