"""Ranks on other hosts, here on the loopback interface: agents that come, go and come back, and what crosses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
from collections.abc import AsyncIterator
from multiprocessing.connection import Client

import psutil
import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.engine import rank_link
from omni_grpc.engine.rank_agent import DONE, LOST, REFUSED, RankAgent
from omni_grpc.engine.rank_link import LaunchedExecutor, RankLink
from omni_grpc.engine.rank_network import interface_to
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import ConfigError, Unavailable
from omni_grpc.types.launch import Launch
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.media import ImageInput, Inputs
from omni_grpc.types.plan import Broken, Died, Plan, Prepared, Ready, Sleep, Slept
from tests.engine.test_rank_executor import SOON, request
from tests.toy import toy_checkpoint

WORKER = "tests.engine.toy_ranks:serve"
SECRET = b"a secret of all ranks"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Hosts:
    """A server with rank 0, and the agents of others, all in this process; ranks are toys in processes of their own."""

    def __init__(self, world: int = 2, patience: float = 5.0) -> None:
        self.world, self.patience, self.port = world, patience, free_port()
        config = EngineConfig.from_settings(
            ring_degree=world, rank_timeout=1.0, worker_timeout=20.0, device="cpu", cpu_threads=1
        )
        self.link = RankLink(self.launch(0), self.port, SECRET, patience)
        checkpoint = toy_checkpoint(limits=str, defaults=str)
        self.executor = LaunchedExecutor(config, checkpoint, self.link, environment={}, worker=WORKER)
        self.reports: asyncio.Queue = asyncio.Queue()
        self.agents: dict[int, tuple[RankAgent, asyncio.Task[int]]] = {}

    def launch(self, rank: int) -> Launch:
        return Launch(rank=rank, world=self.world, local_rank=0, host="127.0.0.1", port=9)

    def come(self, rank: int, secret: bytes = SECRET) -> asyncio.Task[int]:
        agent = RankAgent(self.launch(rank), self.port, secret, self.patience, {})
        self.agents[rank] = agent, asyncio.create_task(agent.run())
        return self.agents[rank][1]

    async def next(self) -> object:
        return await asyncio.wait_for(self.reports.get(), SOON)

    async def start(self) -> None:
        self.executor.start(self.reports.put_nowait)
        assert isinstance(await self.next(), Loading)
        assert isinstance(await self.next(), Ready)

    def prepare(self, prompt: str, inputs: Inputs | None = None) -> None:
        self.executor.submit(Plan(admit=(request(prompt, inputs=inputs),)))

    @property
    def pids(self) -> list[int]:
        """Of the ranks, not of what has started them."""
        others = [self.agents[rank][0]._life._process.pid for rank in range(1, self.world)]
        return [self.executor._process.pid, *others]


@contextlib.asynccontextmanager
async def hosts(**settings: object) -> AsyncIterator[Hosts]:
    """At the end nothing is left, and each agent has ended cleanly."""
    it = Hosts(**settings)
    for rank in range(1, it.world):
        it.come(rank)
    await it.start()
    pids = it.pids
    yield it
    await asyncio.wait_for(it.executor.close(), SOON)
    assert it.reports.empty(), "no report is left over"
    await asyncio.wait_for(it.link.close(), SOON)
    assert [await asyncio.wait_for(task, SOON) for _, task in it.agents.values()] == [DONE] * len(it.agents)
    assert not any(map(psutil.pid_exists, pids))
    assert not list(shared.BLOCKS.glob(f"omni-{os.getpid()}-*"))


ENDS: dict[str, tuple[str, str]] = {
    "0:dies": ("WORKER_DIED", r"rank 0 of 3, process \d+ died by signal SIGKILL"),
    "1:dies": ("WORKER_DIED", r"rank 1 of 3, process \d+ died by signal SIGKILL"),
    "2:gives-up": ("X", "rank 2 of 3: said by 2"),
    "1:counts": ("RANKS_DISAGREE", "rank 1 of 3 and rank 0 disagree on its prepare of job_1"),
    "2:hangs": ("RANK_STUCK", "rank 2 of 3 is 1 s late with its prepare of job_1"),
}


async def test_ranks_of_other_hosts_answer_as_one_and_end_as_one():
    async with hosts(world=3) as it:
        it.prepare("x")
        assert await it.next() == Prepared(id="job_1", elapsed=0.0, prompt_tokens=0)
        it.executor.order(Sleep())
        assert await it.next() == Slept(freed_bytes=0, elapsed=0.0)
        it.executor.submit(Plan(decode=("fails 0",)))
        assert isinstance(await it.next(), Broken)
        it.prepare("x")
        assert (await it.next()).prompt_tokens == 1, "each rank has dropped it, before what came next"
        for prompt, (reason, message) in ENDS.items():
            pids = it.pids
            it.prepare(prompt)
            died = await it.next()
            assert (type(died), died.failure.reason) == (Died, reason), prompt
            assert re.search(message, died.failure.message), died.failure.message
            assert not any(map(psutil.pid_exists, pids)), "their devices are free when the death is told"
            with pytest.raises(Unavailable):
                it.prepare("x")
            await it.start()
        it.prepare("x")
        assert isinstance(await it.next(), Prepared)


async def test_the_bytes_of_inputs_cross_and_their_blocks_are_of_the_servers_host():
    async with hosts() as it:
        block = f"omni-{os.getpid()}-input"
        shared.store(b"twelve bytes", block)
        picture = ImageInput(width=2, height=2, channels=3, data=b"", block=block)
        it.prepare("1:waits", Inputs(images=(picture,)))
        shared.discard(block)
        assert (await it.next()).rows == (12,), "both ranks have got them"


async def test_an_agent_that_is_lost_ends_the_group_and_the_next_one_waits_for_another():
    async with hosts() as it:
        agent, task = it.agents[1]
        lost = it.pids
        agent._line.cut()
        died = await it.next()
        assert (type(died), died.failure.reason) == (Died, "WORKER_DIED")
        assert f"rank 1 of 2 on host {os.uname().nodename}, process {os.getpid()}, was lost: " in died.failure.message
        await it.start()
        assert not task.done(), "it has come back by itself"
        assert not any(map(psutil.pid_exists, lost))
        agent.leave()
        agent.leave()
        assert await task == DONE
        assert isinstance(await it.next(), Died)
        it.executor.start(it.reports.put_nowait)
        assert isinstance(await it.next(), Loading)
        await asyncio.sleep(0.2)
        assert it.reports.empty(), "rank 1 is not there"
        it.come(1)
        assert isinstance(await it.next(), Ready)


async def test_agents_come_to_the_next_server_when_theirs_was_killed():
    async with hosts() as it:
        old = it.pids
        # as a dead process leaves them: nothing is said, and sockets close
        it.link._listener.shutdown(socket.SHUT_RDWR)
        it.link._listener.close()
        it.link._agents[1].line.cut()
        assert isinstance(await it.next(), Died)
        it.link = it.executor._link = RankLink(it.launch(0), it.port, SECRET, it.patience)
        await it.start()
        assert not any(map(psutil.pid_exists, old))
        it.prepare("x")
        assert isinstance(await it.next(), Prepared)


async def test_an_agent_that_stops_is_found_by_its_silence(monkeypatch):
    """As after the loss of its host: nothing is closed."""
    async with hosts(patience=2.0) as it:
        monkeypatch.setattr(it.agents[1][0]._line._connection, "send", lambda message: None)
        died = await it.next()
        assert (type(died), died.failure.reason) == (Died, "WORKER_DIED")
        assert "was lost: no sign of life for 2 s" in died.failure.message
        await it.start()


async def test_without_an_agent_a_group_does_not_come_up(monkeypatch):
    monkeypatch.setattr(rank_link, "ARRIVE_SECONDS", 0.3)
    it = Hosts()
    it.executor.start(it.reports.put_nowait)
    report = await it.next()
    while isinstance(report, Loading):
        report = await it.next()
    assert (type(report), report.failure.reason) == (Died, "WORKER_DIED")
    assert "rank 1 of 2 has not come within 0.3 s; start it with the torchrun of its host" in report.failure.message
    await it.executor.close()
    await it.link.close()


async def test_whoever_does_not_know_the_secret_is_refused_and_read_no_further(caplog):
    it = Hosts()
    with caplog.at_level(logging.WARNING):
        assert await asyncio.wait_for(it.come(1, secret=b"another secret, as long"), SOON) == LOST
        # a stranger whose greeting is right in form, and one that has none
        with pytest.raises(Exception, match="digest"):
            await asyncio.to_thread(Client, ("127.0.0.1", it.port), authkey=b"x" * 32)
        with socket.create_connection(("127.0.0.1", it.port)) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            with contextlib.suppress(ConnectionResetError):
                while await asyncio.to_thread(sock.recv, 4096):
                    pass
    assert caplog.text.count("refused a connection from 127.0.0.1") == 3
    assert not it.link._agents
    await it.link.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [({"rank": 2}, "the server has ranks 1 to 1"), ({"version": "0.0.1"}, "has omni_grpc 0.0.1")],
    ids=["rank", "version"],
)
async def test_an_agent_of_another_launch_or_version_is_sent_away_with_the_reason(change, said, monkeypatch, caplog):
    import omni_grpc.engine.rank_agent as agents

    made = agents.Hello
    monkeypatch.setattr(agents, "Hello", lambda **fields: made(**fields | change))
    it = Hosts()
    assert await asyncio.wait_for(it.come(1), SOON) == REFUSED
    assert said in caplog.text
    await it.link.close()


async def test_a_second_model_and_a_port_that_is_taken_are_refused():
    it = Hosts()
    it.link.take("one")
    it.link.take("one")
    with pytest.raises(ConfigError, match="--model is two, but the ranks that torchrun started have one"):
        it.link.take("two")
    with pytest.raises(ConfigError, match=f"--rank-port cannot be listened at .* port {it.port}"):
        RankLink(it.launch(0), it.port, SECRET, 5.0)
    await it.link.close()


def test_ranks_meet_on_the_interface_that_leads_to_the_first_one():
    assert interface_to("127.0.0.1") == interface_to("localhost") == "lo"
    others = [name for name in psutil.net_if_addrs() if name != "lo"]
    own = {
        address.address: name
        for name in others
        for address in psutil.net_if_addrs()[name]
        if address.family is socket.AF_INET and psutil.net_if_stats()[name].isup
    }
    assert {address: interface_to(address) for address in own} == own
    with pytest.raises(OSError, match=r"Name or service not known|failure in name resolution"):
        interface_to("no-such-host.invalid")
