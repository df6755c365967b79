"""What it costs a unary call to be encrypted and to say who makes it: against a server without either.

Every kind of caller has a channel of its own, and they take short turns, so that a slow second is one of all.
Tokens of the kind that is new at every call are signed before, and each is used once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import yaml

from omni_grpc.cli.bench.figures import quantile
from omni_grpc.identity import tokens
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, job_pb2, job_pb2_grpc
from tests.identity import keys
from tests.server.certificates import Authority

from .report import Result
from .server import PATIENCE, Server, served

Call = Callable[[Sequence[tuple[str, str]]], object]

TENANT, NAME = "studio", "gateway.studio.example"
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
MODEL = "tiny"
FLAGS = ("--served-model-name", MODEL, "--warm-up-seconds", "0", "--retention", "3600")
JOB = generation_pb2.GenerateImageRequest(model=MODEL, prompt="x", width=64, height=64, sampling={"steps": 1})
CALLS = ("GetServerInfo", "GetJob")
FIRST = "the plaintext server without identities"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """`calls` of each kind of caller, of each rpc. A turn has `turn` of them, of which the first `settle` do not count:
    the server of another kind ran before.
    """

    calls: int = 3000
    turn: int = 25
    settle: int = 5

    @property
    def signed(self) -> int:
        """Tokens that are each used once."""
        turns = math.ceil(self.calls / (self.turn - self.settle))
        return len(CALLS) * (turns * self.turn + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A kind of caller: its channel, and the `authorization` of its next call, if it has one."""

    channel: grpc.Channel
    token: Callable[[], str | None] = lambda: None

    def metadata(self) -> Sequence[tuple[str, str]]:
        token = self.token()
        return () if token is None else (("authorization", f"Bearer {token}"),)


def run(checkpoint: Path) -> Result:
    return measure(checkpoint, Numbers())


def measure(checkpoint: Path, numbers: Numbers) -> Result:
    with TemporaryDirectory() as folder, ways(checkpoint, Path(folder), numbers) as callers:
        taken = {rpc: take_turns(callers, rpc, numbers) for rpc in CALLS}
    return result(numbers, taken)


@contextlib.contextmanager
def ways(checkpoint: Path, folder: Path, numbers: Numbers) -> Iterator[Mapping[str, Way]]:
    """Four servers, since TLS and identities belong to a server, and a channel for each kind of caller."""
    authority, key = Authority(folder), keys.key()
    (folder / "jwks.json").write_bytes(keys.jwks(key))
    token = tokens.new_token()
    records = [
        {"name": "static", "tenant": TENANT, "scopes": ["generate", "read"], "sha256": tokens.hash_of(token)},
        {"name": "gateway", "tenant": TENANT, "scopes": ["generate", "read"], "certificate": f"DNS:{NAME}"},
    ]
    callers = folder / "callers.yaml"
    callers.write_text(yaml.safe_dump(records))
    callers.chmod(0o600)
    tls = [f"--{name.replace('_', '-')}={path}" for name, path in authority.server().items()]
    known = [f"--token-file={callers}", f"--jwt-issuer={keys.ISSUER}", f"--jwt-audience={keys.AUDIENCE}"]
    known.append(f"--jwt-jwks={folder / 'jwks.json'}")
    mutual = [f"--tls-client-ca={authority.file}", "--tls-require-client-cert"]
    ca = Path(authority.file).read_bytes()
    pair = [Path(path).read_bytes() for path in authority.issue("client", NAME)]
    with contextlib.ExitStack() as stack:

        def channel(server: Server, *identity: bytes) -> grpc.Channel:
            credentials = grpc.ssl_channel_credentials(ca, *reversed(identity))
            return stack.enter_context(grpc.secure_channel(server.address, credentials, options=OPTIONS))

        def start(*flags: str) -> Server:
            return stack.enter_context(served(checkpoint, *FLAGS, *flags))

        plain, encrypted, identified, both = start(), start(*tls), start(*tls, *known), start(*tls, *known, *mutual)
        exp = int(time.time()) + 3600
        kept = key.token(exp=exp)
        fresh = iter([key.token(exp=exp, jti=str(number)) for number in range(numbers.signed)])
        yield {
            FIRST: Way(channel=stack.enter_context(grpc.insecure_channel(plain.address, options=OPTIONS))),
            "TLS": Way(channel=channel(encrypted)),
            "TLS, a token of the file": Way(channel=channel(identified), token=lambda: token),
            "TLS, a JWT for the first time (ES256)": Way(channel=channel(identified), token=lambda: next(fresh)),
            "TLS, the same JWT again": Way(channel=channel(identified), token=lambda: kept),
            "mTLS, known by the certificate": Way(channel=channel(both, *pair)),
        }


def take_turns(callers: Mapping[str, Way], rpc: str, numbers: Numbers) -> Mapping[str, Sequence[float]]:
    """Seconds of each call by kind of caller."""
    calls = {name: _call(way, rpc) for name, way in callers.items()}
    taken: dict[str, list[float]] = {name: [] for name in callers}
    while len(taken[FIRST]) < numbers.calls:
        for name, way in callers.items():
            for number in range(numbers.turn):
                metadata = way.metadata()
                began = time.perf_counter()
                calls[name](metadata)
                if number >= numbers.settle:
                    taken[name].append(time.perf_counter() - began)
    return taken


def _call(way: Way, rpc: str) -> Call:
    if rpc == "GetServerInfo":
        stub = admin_pb2_grpc.AdminServiceStub(way.channel)
        return lambda metadata: stub.GetServerInfo(admin_pb2.GetServerInfoRequest(), metadata=metadata)
    jobs, metadata = job_pb2_grpc.JobServiceStub(way.channel), way.metadata()
    made = jobs.CreateJob(job_pb2.CreateJobRequest(generate_image=JOB), metadata=metadata).job
    asked = job_pb2.GetJobRequest(job_id=made.job_id)
    until = time.monotonic() + PATIENCE
    while not jobs.GetJob(asked, metadata=metadata).job.HasField("end_time"):
        if time.monotonic() > until:
            raise RuntimeError("the job has not ended")
        time.sleep(0.05)
    return lambda metadata: jobs.GetJob(asked, metadata=metadata)


def result(numbers: Numbers, taken: Mapping[str, Mapping[str, Sequence[float]]]) -> Result:
    rows, figures = [], {}
    for rpc, by_caller in taken.items():
        milliseconds = {
            name: {"p50": 1000 * quantile(times, 0.5), "p99": 1000 * quantile(times, 0.99)}
            for name, times in by_caller.items()
        }
        figures[rpc] = milliseconds
        first = milliseconds[FIRST]
        for name, found in milliseconds.items():
            added = ["" if name == FIRST else f"{found[q] - first[q]:+.3f}" for q in ("p50", "p99")]
            rows.append((rpc, name, *(f"{found[q]:.3f}" for q in ("p50", "p99")), *added))
    return Result(
        columns=("call", "caller", "p50, ms", "p99, ms", "added to p50", "added to p99"),
        rows=rows,
        figures={"calls": numbers.calls, "milliseconds": figures},
    )
