"""`omni-grpc generate`, against a server and offline."""

import json

import PIL.Image
import pytest

from omni_grpc.cli import main as cli
from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.media import ImageFormat
from tests.server.fake_executor import picture


async def test_an_image_its_progress_and_where_it_went(run, server, tmp_path):
    out = tmp_path / "out.png"
    done = await run("generate", "a red circle", "--out", out, *server, "--steps", 3, "--seed", 7, "--no-metadata")
    assert done.code == 0
    assert out.read_bytes() == picture(64, 32, 7, ImageFormat.PNG)
    assert done.out.startswith(f"{out}  64 x 32  seed 7  3 steps  ")
    assert [line for line in done.err.splitlines() if line.startswith("step")][-1].startswith("step 3/3")
    assert not set(done.err) & {"\x1b", "\r", "\b"}


async def test_every_option_arrives(run, server, service, tmp_path):
    done = await run(
        "generate", "x", "--out", tmp_path / "o.webp", *server, "--model", "toy", "--negative-prompt", "",
        "--width", 48, "--height", 16, "--steps", 2, "--true-cfg-scale", 2.5, "--guidance-norm", "none",
        "--scheduler", "ToyScheduler",
        "--seeds", "5,9", "--num-outputs", 2, "--request-id", "mine", "--label", "team=red", "--timeout", 60,
        "--guidance-rescale", 0.5, "--guidance-interval-start", 0.25, "--guidance-interval-end", 0.75, "--priority", 3,
        "--guidance-scale-low-noise", 1.5, "--boundary-ratio", 0.5,
        "--queue-timeout", 50, "--run-timeout", 40, "--retention", 30,
        "--json", "--quiet", "--no-metadata",
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    (job,) = service.engine.jobs.newest()
    assert (job.record.request_id, job.record.labels) == ("mine", {"team": "red"})
    record = json.loads(done.out)
    assert record["job_id"] == job.id
    assert record["files"] == [str(tmp_path / "o-0.webp"), str(tmp_path / "o-1.webp")]
    assert record["seeds"] == [5, 9]
    guidance = record["effective"]["guidance"]
    assert (guidance["scale"], guidance["true_cfg_scale"], guidance["norm"]) == (None, 2.5, "NONE")
    assert (guidance["rescale"], guidance["interval_start"], guidance["interval_end"]) == (0.5, 0.25, 0.75)
    assert round(job.record.expire_time - job.record.end_time) == 30
    assert (record["effective"]["width"], record["effective"]["height"], record["effective"]["steps"]) == (48, 16, 2)
    assert record["effective"]["output_format"] == "WEBP"
    assert job.request.scheduler == record["effective"]["scheduler"] == "ToyScheduler"
    assert record["effective"]["defaults_used"] == {}
    assert [(warning["code"], warning["field"], warning["requested"]) for warning in record["warnings"]] == [
        ("GUIDANCE_WITHOUT_EFFECT", "sampling.guidance.scale_low_noise", "1.5"),
        ("GUIDANCE_WITHOUT_EFFECT", "sampling.guidance.boundary_ratio", "0.5"),
        ("PRIORITY_WITHOUT_EFFECT", "options.priority", "3"),
    ]
    assert job.record.priority == 3
    assert record["stats"]["steps_run"] == 2
    for number, seed in enumerate((5, 9)):
        assert (tmp_path / f"o-{number}.webp").read_bytes() == picture(48, 16, seed, ImageFormat.WEBP)


async def test_names_of_vllm_omni_mean_the_same(run, server, tmp_path):
    out = tmp_path / "out.png"
    done = await run(
        "generate", "--prompt", "a star", "--output", out, *server, "--num-inference-steps", 3, "--seed", 7,
        "--no-metadata",
    )  # fmt: skip
    assert (done.code, out.read_bytes()) == (0, picture(64, 32, 7, ImageFormat.PNG))
    assert "seed 7  3 steps" in done.out
    twice = await run("generate", "a star", "--prompts", "a star", "--out", out, *server)
    assert (twice.code, "give exactly one prompt" in twice.err) == (2, True)
    assert (await run("generate", "--out", out, *server)).code == 2
    edit = cli._parser().parse_args(["edit", "--prompt", "x", "--image-path", "a.png", "--output", "b.png"])
    assert [str(path) for path in edit.images] == ["a.png"]


async def test_limits_of_the_job_arrive(run, server, tmp_path):
    for flag, field in (("--priority", "options.priority"), ("--run-timeout", "options.run_timeout")):
        done = await run("generate", "x", "--out", tmp_path / "o.png", *server, flag, "-100000")
        assert done.code == 1
        assert f"{field}: -100000" in done.err


@pytest.mark.parametrize("flags", [("--json",), ("--quiet",), ()])
async def test_warnings_are_told_once(run, server, tmp_path, flags):
    done = await run("generate", "x", "--out", tmp_path / "o.png", *server, "--true-cfg-scale", 3, *flags)
    assert done.err.count("warning: CFG_OFF negative_prompt") == 1
    if "--json" in flags:
        assert [warning["code"] for warning in json.loads(done.out)["warnings"]] == ["CFG_OFF"]


@pytest.mark.parametrize(
    ("name", "flags", "kind"),
    [
        ("o.jpg", (), "JPEG"),
        ("o.JPEG", (), "JPEG"),
        ("o.webp", (), "WEBP"),
        ("o", ("--format", "jpg"), "JPEG"),
        ("o.dat", ("--format", "PNG"), "PNG"),
    ],
)
async def test_the_format_follows_the_name_unless_it_is_given(run, server, tmp_path, name, flags, kind):
    done = await run("generate", "x", "--out", tmp_path / name, *server, *flags)
    assert (done.code, "warning" in done.err) == (0, False)
    assert PIL.Image.open(tmp_path / name).format == kind


async def test_a_format_against_the_name_is_obeyed_and_told(run, server, tmp_path):
    done = await run("generate", "x", "--out", tmp_path / "o.png", *server, "--format", "jpeg")
    assert "o.png will contain JPEG" in done.err
    assert PIL.Image.open(tmp_path / "o.png").format == "JPEG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "o.gif"), "unknown extension '.gif'; use one of .png, .jpg, .jpeg, .webp"),
        (("--out", "o"), "unknown extension ''"),
        (("--out", "nowhere/o.png"), "the folder nowhere does not exist"),
        (("--out", "o.png", "--format", "gif"), "'gif' is not one of PNG, JPEG, WEBP"),
        (("--out", "o.png", "--seeds", "1,x"), "'1,x' is not a list of integers"),
        (("--out", "o.png", "--seed", "1", "--seeds", "2"), "not allowed with argument"),
        (("--out", "o.png", "--label", "red"), "'red' is not KEY=VALUE"),
        (("--out", "o.png", "--device", "cpu"), "--device is a setting of the server"),
        (("--out", "o.png", "--widht", "4"), "--widht"),
        ((), "--out"),
    ],
)
async def test_a_wrong_command_line_is_refused_before_anything_is_asked(run, service, server, arguments, message):
    done = await run("generate", "x", *server, *arguments)
    assert done.code == 2
    assert message in done.err
    assert len(service.engine.jobs) == 0


async def test_a_refusal_is_one_line_with_the_fix(run, server, tmp_path):
    done = await run("generate", "x", "--out", tmp_path / "o.png", *server, "--width", 20, "--steps", 0, "--quiet")
    assert done.code == 1
    assert done.err == (
        "error: INVALID_ARGUMENT: width: 20 is not a multiple of 16; nearest valid value: 16; "
        "sampling.steps: 0 is outside 1..200; nearest valid value: 1\n"
    )
    assert list(tmp_path.iterdir()) == []


async def test_a_failed_job_says_when_to_try_again(run, server, service, tmp_path):
    failure = Failure(code=Code.RESOURCE_EXHAUSTED, reason="OUT_OF_MEMORY", message="no\nroom", retry_after=2.0)
    service.executor.failures[Lane.STEP] = failure
    done = await run("generate", "x", "--out", tmp_path / "o.png", *server, "--quiet")
    assert (done.code, done.err) == (1, "error: RESOURCE_EXHAUSTED OUT_OF_MEMORY: no room\n  retry after 2 s\n")


async def test_a_model_that_is_no_folder_is_asked_of_the_default_server(run, tmp_path, monkeypatch):
    monkeypatch.setenv("OMNI_GRPC_SERVER", "127.0.0.1:1")
    done = await run("generate", "x", "--out", tmp_path / "o.png", "--model", "no/folder")
    assert done.code == 1
    assert done.err.startswith("error: UNAVAILABLE SERVER_UNREACHABLE: cannot reach the server at 127.0.0.1:1")
    assert "no/folder is not a folder on this machine" in done.err


async def test_a_folder_runs_here(run, tiny_qwen_image, tmp_path):
    done = await run(
        "generate", "a red circle", "--out", tmp_path / "o.png", "--model", tiny_qwen_image,
        "--width", 32, "--height", 32, "--steps", 2, "--seed", 7, "--device", "cpu", "--cpu-threads", 1, "--json",
    )  # fmt: skip
    assert done.code == 0
    record = json.loads(done.out)
    assert (record["job_id"], record["seeds"], record["effective"]["steps"]) == (None, [7], 2)
    assert PIL.Image.open(tmp_path / "o.png").size == (32, 32)
    assert "step 2/2" in done.err


async def test_what_needs_a_server_is_refused_offline(run, tmp_path):
    for flag in (("--request-id", "a"), ("--label", "a=b"), ("--timeout", "3"), ("--run-timeout", "3")):
        done = await run("generate", "x", "--out", tmp_path / "o.png", "--model", tmp_path, *flag)
        assert done.code == 2
        assert f"{flag[0]} has no effect without a server" in done.err


async def test_a_folder_without_a_checkpoint_is_one_line(run, tmp_path):
    done = await run("generate", "x", "--out", tmp_path / "o.png", "--model", tmp_path, "--quiet")
    assert done.code == 1
    assert done.err.startswith("error: FAILED_PRECONDITION NO_MODEL_INDEX: ")
    assert len(done.err.splitlines()) == 1
