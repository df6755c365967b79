"""Media that a request names by URL, on a real server that fetches them from a real one."""

import asyncio
import hashlib
import time

import pytest

from omni_grpc import InvalidArgument, Omni
from omni_grpc.client import AsyncClient
from omni_grpc.client.media import media_input
from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.media import Inputs
from omni_grpc.types.request import Task
from omni_grpc.v1.media_pb2 import MediaInput
from tests.server.service import kinds, refusal, until
from tests.server.studio import pixels, png, serving_studio, studio
from tests.server.test_edit_image import edit, edited

from .web import answer, endless, silence, web

pytestmark = pytest.mark.service

LOCAL = "127.0.0.1"


@pytest.fixture
async def site(tmp_path):
    async with web(tmp_path) as running:
        running.paths["/a.png"] = answer(png(), headers={"Content-Type": "text/html"})
        running.paths["/b.png"] = answer(png(seed=1))
        yield running


def serving(site, checkpoint=None, **settings):
    hosts = f"{LOCAL}:{site.port}"
    return serving_studio(checkpoint, **({"outbound_hosts": hosts, "outbound_ca": str(site.ca)} | settings))


def uri(site, path="/a.png", **more):
    return {"uri": site.url(path, host=LOCAL), **more}


async def test_an_edit_gets_its_images_from_another_host(site):
    digest = hashlib.sha256(png()).digest()
    async with serving(site) as service:
        request = edit(
            uri(site, sha256=digest), uri(site, "/b.png", mime_type="image/png"), mask={"data": png(mode="L")}
        )
        events = await edited(service, request)
        assert kinds(events)[-1] == "completed"
        inputs = service.executor.request.inputs
        assert [image.data for image in inputs.images] == [pixels().tobytes(), pixels(seed=1).tobytes()]
        assert inputs.mask.data == pixels(mode="L").tobytes()


async def test_the_client_sends_an_address_and_opens_nothing(site):
    assert media_input("HTTPS://example.com/a.png") == MediaInput(uri="HTTPS://example.com/a.png")
    assert media_input("http://example.com/a.png") == MediaInput(uri="http://example.com/a.png")
    async with serving(site) as service, AsyncClient(f"{LOCAL}:{service.server.port}") as client:
        await client.edit_image("blue", images=[site.url("/a.png", host=LOCAL)], width=32, height=16)
        assert service.executor.request.inputs.images[0].data == pixels().tobytes()
    assert "User-Agent: omni_grpc/" in site.asked[0]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"sha256": hashlib.sha256(b"other").digest()}, "INPUT_HASH_MISMATCH"),
        ({"mime_type": "image/jpeg"}, "INPUT_TYPE_MISMATCH"),
    ],
)
async def test_what_arrives_is_checked_like_a_file(site, more, reason):
    async with serving(site) as service:
        error = await refusal(service.generation.EditImage(edit(uri(site, **more))))
        assert (error.code, error.reason, error.fields) == ("INVALID_ARGUMENT", reason, ["images[0]"])


async def test_every_address_that_is_not_allowed_is_named_before_anything_is_fetched(site):
    async with serving(site) as service:
        others = ({"uri": "https://example.org/?secret"}, {"uri": "ftp://example.org/"})
        request = edit(uri(site), others[0], mask=others[1])
        error = await refusal(service.generation.EditImage(request))
        assert (error.code, error.reason) == ("INVALID_ARGUMENT", "OUTBOUND_HOST_NOT_ALLOWED")
        assert error.fields == ["images[1].uri", "mask.uri"]
        assert "--outbound-hosts example.org" in error.message
        assert "UploadAsset" in error.message
        assert "secret" not in error.message
        assert service.executor.plans == []
    assert site.connections == 0


async def test_without_a_list_nothing_is_fetched(site):
    async with serving(site, outbound_hosts="") as service:
        for address, reason in (
            ("https://example.org/a.png", "OUTBOUND_HOST_NOT_ALLOWED"),
            (uri(site)["uri"], "OUTBOUND_ADDRESS_NOT_ALLOWED"),
            ("ftp://example.org/a.png", "URI_NOT_ALLOWED"),
            ("/etc/passwd", "URI_NOT_ALLOWED"),
        ):
            error = await refusal(service.generation.EditImage(edit({"uri": address})))
            assert (error.code, error.reason, error.fields) == ("INVALID_ARGUMENT", reason, ["images[0].uri"])
            assert "--outbound-hosts" in error.message
    assert site.connections == 0


async def test_other_refusals_come_first(site):
    only = studio(tasks=(Task.IMAGE_EDIT,))
    async with serving(site, only) as service:
        for request in (
            edit(uri(site), strength=0.5),
            edit(uri(site), width=17),
            edit(uri(site), uri(site), uri(site)),
            edit(uri(site, sha256=b"hex")),
        ):
            await refusal(service.generation.EditImage(request))
    assert site.connections == 0


async def test_a_failure_of_the_other_host_names_the_input(site):
    site.paths["/gone.png"] = answer(b"secret", status="404 Not Found")
    site.paths["/busy.png"] = answer(b"secret", status="503 Busy")
    async with serving(site) as service:
        for path, code in (("/gone.png", "FAILED_PRECONDITION"), ("/busy.png", "UNAVAILABLE")):
            error = await refusal(service.generation.EditImage(edit(uri(site), uri(site, path))))
            assert (error.code, error.reason, error.fields) == (code, "OUTBOUND_STATUS", ["images[1].uri"])
            assert "secret" not in error.message
        assert len(service.engine.jobs) == 0


async def test_the_limit_for_inputs_holds_for_all_of_a_request(site):
    site.paths["/endless"] = endless()
    most = 2 * len(png()) + len(png(seed=1)) - 1
    async with serving(site, max_input_bytes=most) as service:
        error = await refusal(service.generation.EditImage(edit(uri(site, "/endless"))))
        assert (error.code, error.reason, error.fields) == ("INVALID_ARGUMENT", "OUTBOUND_TOO_LARGE", ["images[0].uri"])
        error = await refusal(service.generation.EditImage(edit(uri(site), uri(site, "/b.png"), mask={"data": png()})))
        assert (error.reason, error.fields) == ("OUTBOUND_TOO_LARGE", ["images[1].uri"])


async def test_a_call_that_is_cancelled_stops_its_fetch(site):
    site.paths["/slow"] = silence
    async with serving(site) as service:
        call = service.generation.EditImage(edit(uri(site, "/slow")))
        reading = asyncio.ensure_future(call.read())
        await until(lambda: site.open == 1)
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: site.open == 0)
        await edited(service, edit(uri(site)))


async def test_a_slow_host_does_not_hold_up_requests_without_addresses(site):
    site.paths["/slow"] = silence
    async with serving(site) as service:
        calls = [service.generation.EditImage(edit(uri(site, "/slow"))) for _ in range(6)]
        reading = [asyncio.ensure_future(call.read()) for call in calls]
        await until(lambda: site.open == 4)
        start = time.perf_counter()
        await edited(service, edit(png()))
        assert time.perf_counter() - start < 5
        assert site.open == 4, "the others wait for their turn"
        for call in calls:
            call.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def test_a_request_that_was_made_before_is_not_fetched_again(site):
    async with serving(site) as service:
        service.executor.gates[Lane.PREPARE].close()
        asked = edit(uri(site), options={"request_id": "mine"})
        for _ in range(2):
            call = service.generation.EditImage(asked)
            await call.read()
            call.cancel()
    assert site.connections == 1


async def test_without_a_server_the_same_rules_hold(site, tiny_qwen_image):
    settings = {"device": "cpu", "cpu_threads": 1, "warm_up_seconds": 0}
    address = site.url("/a.png", host=LOCAL)

    def decode(**more):
        with Omni(str(tiny_qwen_image), **settings, **more) as omni:
            return omni._decode({"images": [address]})[:2]

    inputs, _ = await asyncio.to_thread(decode, outbound_hosts=f"{LOCAL}:{site.port}", outbound_ca=str(site.ca))
    assert isinstance(inputs, Inputs)
    assert inputs.images[0].data == pixels().tobytes()
    with pytest.raises(InvalidArgument) as caught:
        await asyncio.to_thread(decode)
    assert caught.value.reason == "OUTBOUND_ADDRESS_NOT_ALLOWED"
    assert caught.value.violations[0].field == "images[0].uri"
