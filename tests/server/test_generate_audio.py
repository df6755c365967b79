"""GenerateAudio: playing time, the sound to start from, and every refusal by name."""

import array

import pytest

from omni_grpc.types.media import AudioFormat
from omni_grpc.types.request import Task
from omni_grpc.v1 import generation_pb2, job_pb2

from .service import kinds, refusal
from .studio import noise, png, serving_studio, studio, wav

pytestmark = pytest.mark.service
TAKES = frozenset({"duration", "start", "text", "audio", "strength"})


@pytest.fixture
async def service():
    async with serving_studio(studio(takes=TAKES)) as running:
        yield running


def audio(**changes):
    values = {"model": "toy", "prompt": "rain on a tin roof", "sampling": {"seed": 7, "num_outputs": 2}}
    return generation_pb2.GenerateAudioRequest(**(values | changes))


async def made(service, request):
    return [message.event async for message in service.generation.GenerateAudio(request)]


async def test_a_sound_and_all_that_is_to_know_of_it(service):
    request = audio(
        duration={"seconds": 3},
        start={"seconds": 1},
        text="la",
        output_format="AUDIO_FORMAT_FLAC",
        sample_rate_hz=44100,
    )
    events = await made(service, request)
    asked = service.executor.request
    assert (asked.task, asked.duration, asked.start, asked.text) == (Task.TEXT_TO_AUDIO, 3, 1, "la")
    assert (asked.output_format, asked.sample_rate_hz) == (AudioFormat.FLAC, 44100)
    assert (asked.width, asked.height) == (0, 0)
    assert [e.artifact_chunk.data for e in events if e.HasField("artifact_chunk")] == [noise(7), noise(8)]
    done = events[-1].completed
    assert [(found.mime_type, found.sample_rate_hz, found.width) for found in done.artifacts] == [
        ("audio/flac", 44100, 0)
    ] * 2
    assert done.artifacts[0].duration.seconds == 3
    effective = done.effective
    assert (effective.sample_rate_hz, effective.duration.seconds, effective.audio_format) == (44100, 3, 2)
    assert (effective.task, effective.num_frames, effective.width) == (11, 0, 0)


async def test_an_end_is_a_playing_time(service):
    await made(service, audio(start={"seconds": 1}, end={"seconds": 3, "nanos": 500_000_000}))
    assert (service.executor.request.start, service.executor.request.duration) == (1, 2.5)
    await made(service, audio(end={"seconds": 4}))
    assert (service.executor.request.start, service.executor.request.duration) == (None, 4)


async def test_the_sound_to_start_from_arrives_as_samples(service):
    create = job_pb2.CreateJobRequest(generate_audio=audio(reference={"data": wav(0.25)}, strength=0.0))
    job = (await service.jobs.CreateJob(create)).job
    assert kinds(await service.watch(job.job_id))[-1] == "completed"
    asked = service.executor.request
    assert (asked.inputs.given, asked.strength) == (("audio",), 0.0)
    sound = asked.inputs.audio
    samples = array.array("f", sound.data)
    assert (sound.channels, sound.sample_rate, len(samples)) == (1, 16_000, 4000)
    assert max(samples) == pytest.approx(8000 / 32768, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"end": {"seconds": 2}, "duration": {"seconds": 2}}, "end, duration", "are both set"),
        ({"start": {"seconds": 2}, "end": {"seconds": 2}}, "start, end", "is not after the start"),
        ({"duration": {"seconds": 31}}, "duration", "31 is outside 0.01..30"),
        ({"duration": {}}, "duration", "0 is outside"),
        ({"start": {"seconds": -1}}, "start", "is negative"),
        ({"sample_rate_hz": 1}, "sample_rate_hz", "1 is outside 8000..192000"),
        ({"strength": 1.5}, "strength", "1.5 is outside 0..1"),
        ({"reference": {"data": png()}}, "reference", "is image/png"),
        ({"reference": {}}, "reference", "has no source"),
        ({"options": {"preview": {"every_steps": 1}}}, "options.preview", "is not yet served"),
        ({"output_format": 9}, "output_format", "9 is not supported"),
        ({"prompt": ""}, "prompt", "is empty"),
    ],
)
async def test_what_is_wrong_is_refused_by_its_path(service, changes, field, text):
    error = await refusal(service.generation.GenerateAudio(audio(**changes)))
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", [field])
    assert text in error.details["BadRequest"].field_violations[0].description


async def test_what_the_model_does_not_take_is_called_as_the_request_calls_it():
    async with serving_studio(studio(takes=frozenset())) as service:
        request = audio(reference={"data": wav()}, duration={"seconds": 1}, start={}, text="la")
        error = await refusal(service.generation.GenerateAudio(request))
    assert sorted(error.fields) == ["duration", "reference", "start", "text"]


async def test_a_model_without_sound_says_which_tasks_it_has():
    async with serving_studio(studio(tasks=(Task.TEXT_TO_VIDEO,))) as service:
        error = await refusal(service.generation.GenerateAudio(audio()))
    assert (error.reason, error.metadata["tasks"]) == ("TASK_NOT_SUPPORTED", "TEXT_TO_VIDEO")
