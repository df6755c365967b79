"""Many webhooks at once, several servers, and the end of one."""

import asyncio
import random
import time

from omni_grpc.store.memory import MemoryStore
from omni_grpc.store.records import Outcome
from omni_grpc.store.seam import StoreError
from omni_grpc.webhooks import Schedule
from tests.outbound.web import answer, silence
from tests.webhooks.hooks import (
    ended,
    headers_of,
    make,
    owe,
    running,
    until,
)

# --- many at once -----------------------------------------------------------------------------------------------------


async def test_a_receiver_that_does_not_answer_starves_nobody(site, file):
    site.paths |= {"/dead": silence, "/hook": answer()}
    store = MemoryStore()
    async with running(site, store, file, schedule=Schedule(), webhook_timeout=1.0) as hooks:
        for host in range(6):
            for number in range(20):
                await owe(hooks, store, site, f"dead_{host}_{number}", host=f"dead{host}.hooks.test", path="/dead")
        await until(lambda: site.open == 8)
        for number in range(20):
            await owe(hooks, store, site, f"job_{number}")
        start = time.monotonic()
        for number in range(20):
            assert (await ended(store, f"job_{number}")).outcome is Outcome.DELIVERED
        assert time.monotonic() - start < 3.0, "one time-out of those before, and its own calls"
        # the six are known now, and have half of the calls: whoever comes late has the others at once
        await asyncio.sleep(0.3)
        assert 0 < site.open <= 4
        await owe(hooks, store, site, "late")
        assert (await ended(store, "late", seconds=0.5)).outcome is Outcome.DELIVERED


async def test_hosts_take_turns(site, file):
    """Four slow receivers, which answer and have much to get, hold all eight calls; a fifth one has its turn next."""

    chance = random.Random(1)

    async def slow(writer):
        await asyncio.sleep(chance.uniform(0.05, 0.25))
        await answer()(writer)

    site.paths |= {"/slow": slow, "/hook": answer()}
    store = MemoryStore()
    async with running(site, store, file) as hooks:
        for number in range(10):
            for host in range(4):
                await owe(hooks, store, site, f"slow_{host}_{number}", host=f"slow{host}.hooks.test", path="/slow")
        await until(lambda: site.open == 8)
        await owe(hooks, store, site)
        await ended(store)
        assert len(site.asked) < 20, "of 41"


async def test_calls_are_bounded_in_all_and_by_host(site, file):
    site.paths["/hook"] = silence
    store = MemoryStore()
    async with running(site, store, file, webhook_timeout=5.0) as hooks:
        for number in range(10):
            await owe(hooks, store, site, f"job_{number}")
        await until(lambda: site.open == 2)
        await asyncio.sleep(0.1)
        assert site.open == 2
        for host in range(10):
            await owe(hooks, store, site, f"other_{host}", host=f"a{host}.hooks.test")
        await until(lambda: site.open == 8)
        await asyncio.sleep(0.1)
        assert site.open == 8


async def test_the_loop_does_not_stall(site, file):
    site.paths["/hook"] = answer()
    store, longest = MemoryStore(), 0.0
    async with running(site, store, file) as hooks:
        for number in range(50):
            await owe(hooks, store, site, f"job_{number}")
        while [one for number in range(50) for one in await store.deliveries.of(f"job_{number}") if not one.end_time]:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            longest = max(longest, time.perf_counter() - before)
    assert longest < 0.25


async def test_two_servers_on_one_store_do_not_send_the_same(site, file):
    site.paths["/hook"] = answer()
    store = MemoryStore()
    store.shared = True
    async with running(site, store, file) as one, running(site, store, file, server="server-2") as two:
        for number in range(30):
            await owe(one, store, site, f"job_{number}")
            two.wake()
        for number in range(30):
            await ended(store, f"job_{number}")
    ids = [headers_of(head)["webhook-id"] for head in site.asked]
    assert len(ids) == len(set(ids)) == 30


# --- the end of a server ----------------------------------------------------------------------------------------------


async def test_a_stop_lets_what_is_on_its_way_arrive(site, file):
    async def slow(writer):
        await asyncio.sleep(0.2)
        await answer()(writer)

    site.paths["/hook"] = slow
    store = MemoryStore()
    hooks = make(site, store, file)
    await hooks.start()
    await owe(hooks, store, site)
    await until(lambda: site.asked)
    await hooks.stop(5.0)
    (found,) = await store.deliveries.of("job_1")
    assert (found.outcome, len(site.asked)) == (Outcome.DELIVERED, 1)


async def test_a_stop_gives_back_what_takes_longer(site, file):
    site.paths["/hook"] = silence
    store = MemoryStore()
    store.shared = True
    hooks = make(site, store, file, webhook_timeout=30.0)
    await hooks.start()
    await owe(hooks, store, site)
    await until(lambda: site.asked)
    start = time.monotonic()
    await hooks.stop(0.1)
    assert time.monotonic() - start < 2.0
    (found,) = await store.deliveries.of("job_1")
    assert (found.outcome, found.attempts) == (Outcome.PENDING, 0)
    site.paths["/hook"] = answer()
    async with running(site, store, file, server="server-2"):
        assert (await ended(store, seconds=3.0)).outcome is Outcome.DELIVERED
    assert len({headers_of(head)["webhook-id"] for head in site.asked}) == 1


class Away(MemoryStore):
    """A store that cannot be reached for a while."""

    def __init__(self):
        super().__init__()
        self.away = False
        inner = self.deliveries

        class Gone:
            def __getattr__(gone, name):
                if self.away and name not in ("add", "of"):
                    raise StoreError("the database does not answer")
                return getattr(inner, name)

        self.deliveries = Gone()


async def test_a_store_that_is_away_is_waited_for(site, file, caplog):
    store = Away()

    async def answered_while_the_store_goes(writer):
        store.away = True
        await answer()(writer)

    site.paths["/hook"] = answered_while_the_store_goes
    async with running(site, store, file) as hooks:
        await owe(hooks, store, site)
        await until(lambda: site.asked)
        await until(lambda: "webhooks wait for the store" in caplog.text)
        store.away = False
        assert (await ended(store)).outcome is Outcome.DELIVERED
    assert len(site.asked) == 1, "the result was written as soon as it could be"
