"""How metrics are named, bounded, written and served, and who may read them."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine
from omni_grpc.engine.items import Lane
from omni_grpc.store.open import open_storage
from omni_grpc.store.records import JobState
from omni_grpc.telemetry.declared import METRICS, OF_THE_PROCESS, Kind
from omni_grpc.telemetry.gauges import _tenants
from omni_grpc.telemetry.instruments import Bounded, Histogram
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.plan import Stepped
from omni_grpc.v1 import job_pb2, model_pb2
from tests.server.certificates import Authority
from tests.server.fake_executor import FakeExecutor
from tests.server.service import CHECKPOINT, Service, image, refusal, served, serving, until
from tests.telemetry.scraping import OPENMETRICS, read, scrape
from tests.web.tokens import token_file
from tools import metrics_table

pytestmark = pytest.mark.service

PROMTOOL = shutil.which("promtool")


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_name_says_what_prometheus_expects_of_it(metric) -> None:
    assert re.fullmatch(r"omni_grpc(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert not re.search(r"_(ms|milliseconds|kb|mb|count|sum|bucket)$", metric.name)
    assert metric.help.endswith(".") or metric.help.startswith("1, with")
    assert bool(metric.labels) == bool(metric.bound), "what has labels says how many series it has at most"
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_no_name_is_there_twice() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_the_page_has_the_table_of_the_code() -> None:
    page = metrics_table.PAGE.read_text(encoding="utf-8")
    assert metrics_table.written(page, metrics_table.NAME, metrics_table.metrics()) == page, (
        "run python -m tools.metrics_table --write"
    )


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_values_of_a_label_beyond_its_bound_count_as_one() -> None:
    bounded = Bounded(2)
    assert [bounded(value) for value in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]


def test_a_histogram_counts_by_the_first_bound_that_is_not_less() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.read() == ((2, 2, 1), 14.0)


async def test_tenants_with_the_most_jobs_have_figures_of_their_own(tmp_path: Path) -> None:
    path, tokens = token_file(tmp_path, **{name: ["generate", "read"] for name in ("a", "b", "c", "d")})
    async with serving(token_file=path, metrics_port=0, metrics_tenants=2, max_num_seqs=1) as service:
        service.executor.gates[Lane.STEP].close()
        for tenant, jobs in {"a": 1, "b": 3, "c": 2, "d": 1}.items():
            for _ in range(jobs):
                await service.jobs.CreateJob(
                    job_pb2.CreateJobRequest(generate_image=image()),
                    metadata=[("authorization", f"Bearer {tokens[tenant]}")],
                )
        figures = await scrape(service.server.metrics_address)
        found = {
            tenant: figures.of("omni_grpc_tenant_jobs", tenant=tenant)
            for tenant in {labels["tenant"] for labels in figures.labels("omni_grpc_tenant_jobs")}
        }
        assert found == {"b": 3, "c": 2, "other": 2}
        assert sum(_tenants([service.engine.stats()], 0).values()) == 7
        service.executor.gates[Lane.STEP].open()


async def test_what_a_caller_makes_up_is_no_label() -> None:
    async with serving(http_port=0) as service, httpx2.AsyncClient(base_url=service.http, trust_env=False) as http:
        for path in ("/omni_grpc.v1.JobService/MadeUp", "/v1/made/up"):
            await http.post(path, content=b"{}", headers={"content-type": "application/json"})
        call = service.channel.unary_unary("/omni_grpc.v1.JobService/AlsoMadeUp")
        await refusal(call(b""))
        await service.models.ListModels(model_pb2.ListModelsRequest())
        figures = await scrape(service.http)
    methods = {labels["method"] for labels in figures.labels("omni_grpc_rpcs_total")}
    assert methods == {"", "ModelService/ListModels"}


# --- formats ----------------------------------------------------------------------------------------------------------


async def test_both_formats_have_every_metric(service: Service) -> None:
    await service.finished()
    for accept, kind in ((OPENMETRICS, "application/openmetrics-text"), ("", "text/plain; version=0.0.4")):
        async with httpx2.AsyncClient(trust_env=False) as http:
            response = await http.get(f"{service.server.metrics_address}/metrics", headers={"accept": accept})
        assert response.headers["content-type"].startswith(kind)
        figures = read(response.text, response.headers["content-type"])
        known = {name.removesuffix("_total") for name in figures.families}
        assert {metric.name.removesuffix("_total") for metric in METRICS} <= known
        assert {name.removesuffix("_total") for name in OF_THE_PROCESS} <= known
        assert known - {name.removesuffix("_total") for name in OF_THE_PROCESS} <= {
            metric.name.removesuffix("_total") for metric in METRICS
        }
        assert "_created" not in response.text
        assert figures.of("omni_grpc_jobs_total", state="SUCCEEDED") == 1


async def test_gzip_where_it_is_accepted(service: Service) -> None:
    metrics = service.server._metrics
    assert metrics is not None
    text, headers = await metrics.text("", "gzip, br")
    assert headers["content-encoding"] == "gzip"
    assert b"omni_grpc_build_info" in gzip.decompress(text)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
async def test_promtool_finds_nothing_to_say(service: Service) -> None:
    await service.finished()
    metrics = service.server._metrics
    assert metrics is not None
    text, _ = await metrics.text()
    assert PROMTOOL is not None
    done = await asyncio.to_thread(subprocess.run, [PROMTOOL, "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stderr.decode()) == (0, "")


# --- ports ------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def service():
    async with serving(metrics_port=0) as running:
        yield running


async def said(service: Service, request: bytes) -> bytes:
    port = int(str(service.server.metrics_address).rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /metrics HTTP/1.1", 200),
        ("GET /metrics?name=x HTTP/1.0", 200),
        ("HEAD /metrics HTTP/1.1", 200),
        ("GET / HTTP/1.1", 404),
        ("POST /metrics HTTP/1.1", 405),
        ("hello", 400),
        ("GET /metrics HTTP/2", 400),
    ],
)
async def test_the_port_of_the_metrics_answers(service: Service, request_line: str, status: int) -> None:
    head, _, body = (await said(service, f"{request_line}\r\nHost: x\r\n\r\n".encode())).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    (length,) = re.findall(rb"content-length: (\d+)", head)
    assert len(body) == (0 if request_line.startswith("HEAD") else int(length))
    assert int(length) > 0


async def test_a_head_without_end_is_cut_off(service: Service) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert await said(service, b"GET /metrics HTTP/1.1\r\nx: " + b"a" * (1 << 20)) == b""
    assert (await scrape(service.server.metrics_address)).of("omni_grpc_build_info") == 1


async def test_what_cannot_be_read_is_an_error_that_is_logged(
    service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.fleet.storage.store, "counts", None)
    assert (await said(service, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 500 ")
    assert "the metrics could not be read" in caplog.text


async def test_a_port_that_is_taken_is_told_of_by_its_setting(service: Service) -> None:
    port = str(service.server.metrics_address).rpartition(":")[2]
    with pytest.raises(ConfigError, match="--metrics-port") as caught:
        async with serving(metrics_port=int(port)):
            pytest.fail("it listens there")
    assert (caught.value.reason, caught.value.violations[0].field) == ("CANNOT_LISTEN", "metrics_port")


@pytest.mark.parametrize("mutual", [False, True])
async def test_the_port_has_the_tls_of_the_server(tmp_path: Path, mutual: bool) -> None:
    authority = Authority(tmp_path)
    asked = {"tls_client_ca": authority.file, "tls_require_client_cert": True} if mutual else {}
    trust = ssl.create_default_context(cafile=authority.file)
    async with serving(metrics_port=0, **authority.server(**asked)) as service:
        address = str(service.server.metrics_address)
        assert address.startswith("https://127.0.0.1:")
        if mutual:
            with pytest.raises(httpx2.TransportError):
                await _read_over(address, trust)
            trust.load_cert_chain(*authority.issue("prometheus", common_name="prometheus"))
        assert "omni_grpc_build_info" in await _read_over(address, trust)


async def _read_over(address: str, trust: ssl.SSLContext) -> str:
    async with httpx2.AsyncClient(verify=trust, trust_env=False) as http:
        return (await http.get(f"{address}/metrics")).text


async def test_only_an_admin_reads_them_on_the_http_port(tmp_path: Path) -> None:
    path, tokens = token_file(tmp_path, reader=["read", "generate"], admin=["admin"])
    async with (
        serving(token_file=path, http_port=0, metrics_port=0) as service,
        httpx2.AsyncClient(base_url=service.http, trust_env=False) as http,
    ):
        answers = {
            name: await http.get("/metrics", headers={"authorization": f"Bearer {token}"} if token else {})
            for name, token in {**tokens, "nobody": ""}.items()
        }
        assert {name: answer.status_code for name, answer in answers.items()} == {
            "reader": 403,
            "admin": 200,
            "nobody": 401,
        }
        assert answers["reader"].json()["code"] == "permission_denied"
        figures = read(answers["admin"].text)
        assert figures.of("omni_grpc_refusals_total", reason="SCOPE_MISSING") == 1
        assert figures.of("omni_grpc_rpcs_total", stack="http", method="AdminService/GetServerStats") == 1
        assert (await scrape(service.server.metrics_address)).of("omni_grpc_build_info") == 1


@pytest.mark.parametrize("settings", [{"admin_address": "127.0.0.1:0"}, {"enable_metrics": False}])
async def test_where_the_http_port_has_none(settings) -> None:
    async with serving(http_port=0, **settings) as service, httpx2.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"{service.http}/metrics")).status_code == 404


async def test_nothing_is_measured_where_nobody_could_read_it() -> None:
    async with serving() as service:
        assert service.server._metrics is None
        assert (service.server._calls.observers, service.engine.on_report, service.engine.on_restart) == ([], [], [])


def test_the_port_of_the_metrics_needs_no_extra() -> None:
    code = (
        "import sys; import omni_grpc.server.metrics_port; "
        "print(sorted({'starlette', 'uvicorn', 'connectrpc', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- observing --------------------------------------------------------------------------------------------------------


async def test_servers_of_one_process_have_figures_of_their_own(service: Service) -> None:
    async with serving(metrics_port=0) as other:
        await other.finished()
        assert (await scrape(other.server.metrics_address)).of("omni_grpc_jobs_total") == 1
        with pytest.raises(KeyError):
            (await scrape(service.server.metrics_address)).of("omni_grpc_jobs_total")


async def test_an_observer_that_fails_breaks_no_job_and_no_call(service: Service) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("an observer")

    service.engine.on_report.insert(0, fail)
    service.engine.on_stored.insert(0, fail)
    service.server._calls.observers.insert(0, fail)
    job = await service.finished()
    assert service.engine.jobs.get(job.job_id).state is JobState.SUCCEEDED
    assert (await scrape(service.server.metrics_address)).of("omni_grpc_steps_total") == 3


async def test_a_forward_is_counted_with_what_was_planned_for_it() -> None:
    config = EngineConfig.from_settings(model="toy", port=0, metrics_port=0, max_num_seqs=2)
    executor = FakeExecutor()
    async with served(config, Engine(config, CHECKPOINT, executor, open_storage(config)), executor) as service:
        gate = executor.gates[Lane.STEP]
        gate.close()
        jobs = [await service.create(sampling={"steps": 2}) for _ in range(2)]
        await until(lambda: len(service.engine.replicas[0].meter.planned_for) > 0)
        gate.let(1)
        await until(lambda: len(service.engine.replicas[0].meter.planned_for) == 2)
        gate.open()
        for job in jobs:
            await service.watch(job.job_id)
        figures = await scrape(service.server.metrics_address)
        tokens = 32 * 16 // 256 + 3
        assert figures.of("omni_grpc_steps_total") == 4
        assert figures.of("omni_grpc_step_requests_sum") == 4
        assert figures.of("omni_grpc_step_requests_count") == 3
        assert figures.of("omni_grpc_step_requests_bucket", le="1.0") == 2
        assert figures.of("omni_grpc_step_tokens_total") == 4 * tokens
        assert figures.of("omni_grpc_step_pixels_total") == 4 * 32 * 16
        assert figures.of("omni_grpc_step_measured_seconds_total") == pytest.approx(0.03)
        cost = executor.ready.cost
        predicted = 2 * cost.step_ms([tokens]) + cost.step_ms([tokens] * 2)
        assert figures.of("omni_grpc_step_predicted_seconds_total") == pytest.approx(predicted / 1000)
        # a step that is planned for nobody any more counts as one too
        service.engine.replicas[0].meter.planned_for = ("job_gone",)
        service.engine.on_report[0](service.engine.replicas[0], Stepped(elapsed=0.5))
        assert (await scrape(service.server.metrics_address)).of("omni_grpc_step_requests_count") == 4
