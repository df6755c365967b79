"""The API files: style, compatibility with what is published, agreement with the stubs and the Python vocabulary."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from omni_grpc.client.channel import DIRECT
from omni_grpc.store.records import JobState
from omni_grpc.types import lora, step_cache
from omni_grpc.types.events import Event
from omni_grpc.types.media import ImageFormat, Inputs, Preview, PreviewImage
from omni_grpc.types.request import Draft, Guidance, GuidanceDraft, GuidanceNorm, Task
from omni_grpc.types.results import Artifact, Effective, RequestWarning, Stats
from omni_grpc.types.spec import GuidanceKind
from omni_grpc.v1 import event_pb2, generation_pb2, media_pb2, model_pb2, options_pb2, sampling_pb2
from omni_grpc.wire.exceptions import EXCEPTIONS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "omni_grpc/v1"
SOURCES = sorted(path.stem for path in (ROOT / "proto" / PACKAGE).glob("*.proto"))
REQUESTS = ("GenerateImageRequest", "EditImageRequest", "GenerateVideoRequest", "GenerateAudioRequest")


def buf(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "buf"
    if not program.exists():
        pytest.fail(f"{program} does not exist; install the dev extra (pip install buf-bin)")
    return subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


def stub(name: str) -> Any:
    return importlib.import_module(f"omni_grpc.v1.{name}")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """What buf reads from proto/, by file name, comments included."""
    out = tmp_path_factory.mktemp("image") / "image.binpb"
    result = buf("build", "--as-file-descriptor-set", "-o", out)
    assert result.returncode == 0, result.stderr
    files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    return {file.name: file for file in files if file.package == "omni_grpc.v1"}


# --- style and compatibility ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("lint",), ("format", "-d", "--exit-code")], ids=["lint", "format"])
def test_buf_has_nothing_to_say(command: tuple[str, ...]) -> None:
    result = buf(*command)
    assert result.returncode == 0, result.stdout + result.stderr


def git(*arguments: str) -> bytes | None:
    """What git says; None where it fails, or is not there."""
    program = shutil.which("git")
    said = subprocess.run([program, *arguments], cwd=ROOT, capture_output=True) if program else None
    return said.stdout if said and said.returncode == 0 else None


def baseline(folder: Path, refs: Sequence[str]) -> str:
    """Writes the API of the first ref that there is to `folder`/image.binpb. Returns the ref, "" if there is none."""
    for ref in refs:
        if packed := git("archive", "--format=zip", ref):
            archive = folder / "baseline.zip"
            archive.write_bytes(packed)
            shutil.unpack_archive(archive, folder)
            # one image, however many modules there were
            assert (built := buf("build", folder, "-o", folder / "image.binpb")).returncode == 0, built.stderr
            return ref
    return ""


@pytest.mark.parametrize("since", ["the main branch", "the last version"])
def test_compatible_with_what_is_published(tmp_path: Path, since: str) -> None:
    tag = (git("describe", "--tags", "--abbrev=0", "--match=v*") or b"").decode().strip()
    if not baseline(tmp_path, ("origin/main", "main", "HEAD") if since == "the main branch" else (tag,) if tag else ()):
        pytest.skip(f"{since} is not at hand: nothing is published that could be broken")
    result = buf("breaking", "--against", tmp_path / "image.binpb")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("sampling.proto", "optional uint64 seed = 3;", "optional uint32 seed = 3;", "seed"),
        ("event.proto", "Completed completed = 18;", "Completed completed = 28;", "18"),
        ("job.proto", "rpc CancelJob(", "rpc StopJob(", "CancelJob"),
    ],
    ids=["type", "number", "rpc"],
)
def test_a_breaking_change_is_noticed(tmp_path: Path, file: str, old: str, new: str, complaint: str) -> None:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    changed = tmp_path / "proto" / PACKAGE / file
    text = changed.read_text(encoding="utf-8")
    assert text.count(old) == 1
    changed.write_text(text.replace(old, new), encoding="utf-8")
    result = buf("breaking", "--against", ROOT, cwd=tmp_path)
    assert result.returncode != 0
    assert complaint in result.stdout


# --- where generated code lands: buf.yaml leaves these alone, since they were first set after v0.1.0 ------------------

LANDS = {
    "csharp_namespace": "OmniGrpc.V1",
    "go_package": "github.com/omni-grpc/omni_grpc/clients/go/v1;omnigrpcv1",
    "java_multiple_files": True,
    "java_package": "io.github.omnigrpc.v1",
}


@pytest.mark.parametrize("option", LANDS)
def test_generated_code_stays_where_it_is(image: dict[str, descriptor_pb2.FileDescriptorProto], option: str) -> None:
    assert {getattr(file.options, option) for file in image.values()} == {LANDS[option]}


def test_a_java_class_of_a_file_is_no_message(image: dict[str, descriptor_pb2.FileDescriptorProto]) -> None:
    """artifact.proto would have the class Artifact, which a message of media.proto is already."""
    outer = {file.options.java_outer_classname for file in image.values()}
    assert outer == {f"{name.capitalize()}Proto" for name in SOURCES}
    assert not outer & {message.name for file in image.values() for message in file.message_type}


# --- the proto files themselves ---------------------------------------------------------------------------------------


def test_every_element_has_a_comment(image: dict[str, descriptor_pb2.FileDescriptorProto]) -> None:
    assert sorted(image) == [f"{PACKAGE}/{name}.proto" for name in SOURCES]
    bare = []
    for file in image.values():
        comments = {tuple(at.path): at.leading_comments.strip() for at in file.source_code_info.location}
        bare += [f"{file.name}: {name}" for path, name in elements(file) if not comments.get(path, "").endswith(".")]
    assert bare == []


def elements(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """(path as in SourceCodeInfo, name) of all that must be explained."""
    for i, message in enumerate(file.message_type):
        yield (4, i), message.name
        for j, field in enumerate(message.field):
            yield (4, i, 2, j), f"{message.name}.{field.name}"
        for j, oneof in enumerate(message.oneof_decl):
            if not oneof.name.startswith("_"):  # a proto3 optional field has a oneof of its own
                yield (4, i, 8, j), f"{message.name}.{oneof.name}"
    for i, enumeration in enumerate(file.enum_type):
        yield (5, i), enumeration.name
        for j, value in enumerate(enumeration.value):
            yield (5, i, 2, j), value.name
    for i, service in enumerate(file.service):
        yield (6, i), service.name
        for j, method in enumerate(service.method):
            yield (6, i, 2, j), f"{service.name}.{method.name}"


def test_zero_of_every_enum_is_unspecified(image: dict[str, descriptor_pb2.FileDescriptorProto]) -> None:
    enums = [enumeration for file in image.values() for enumeration in file.enum_type]
    assert len(enums) >= 13
    for enumeration in enums:
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enumeration.name).upper()
        assert (enumeration.value[0].name, enumeration.value[0].number) == (f"{prefix}_UNSPECIFIED", 0)


def test_requests_share_their_first_fields() -> None:
    common = ["model", "prompt", "negative_prompt", "sampling", "output_format", "options"]
    for name in REQUESTS:
        fields: Descriptor = generation_pb2.DESCRIPTOR.message_types_by_name[name]
        by_number = {field.number: field for field in fields.fields}
        assert [by_number[number].name for number in range(1, 7)] == common
        assert by_number[3].has_presence, f"{name}: unset and empty negative_prompt differ"
        assert all(number >= 10 or by_number[number].name == "task" for number in by_number if number > 6)


def test_numbers_whose_zero_means_something_tell_it_from_unset() -> None:
    scalars = {"steps", "seed", "num_outputs", "shift"}
    message = sampling_pb2.SamplingParams.DESCRIPTOR
    assert all(message.fields_by_name[name].has_presence for name in scalars)
    norm = {"norm"}  # an enum says it with UNSPECIFIED
    assert {f.name for f in sampling_pb2.Guidance.DESCRIPTOR.fields if not f.has_presence} == norm
    assert sampling_pb2.LoraRef.DESCRIPTOR.fields_by_name["scale"].has_presence
    assert media_pb2.Artifact.DESCRIPTOR.fields_by_name["seed"].has_presence


def test_frequent_events_are_small() -> None:
    event = event_pb2.JobEvent.DESCRIPTOR.fields_by_name
    hot = ("job_id", "seq", "time", "coalesced", "step_progress", "decode_progress", "artifact_chunk")
    assert all(event[name].number < 16 for name in hot)
    assert all(field.number < 16 for field in event_pb2.StepProgress.DESCRIPTOR.fields)
    step = event_pb2.StepProgress(
        step=99, total_steps=100, sigma=0.5, timestep=500.0, rows_total=2, rows_reused=2, evals=1
    )
    step.step_time.CopyFrom(Duration(nanos=123_456_789))
    step.elapsed.CopyFrom(Duration(seconds=12, nanos=345_678_901))
    step.eta.CopyFrom(Duration(seconds=1, nanos=234_567_890))
    time = Timestamp(seconds=1_800_000_000, nanos=123_456_789)
    encoded = event_pb2.JobEvent(job_id="0" * 26, seq=104, time=time, step_progress=step).SerializeToString()
    assert len(encoded) < 112


# --- the stubs are those of the proto files ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_stubs_have_the_messages_of_the_proto_files(
    name: str, image: dict[str, descriptor_pb2.FileDescriptorProto]
) -> None:
    wanted = descriptor_pb2.FileDescriptorProto()
    wanted.CopyFrom(image[f"{PACKAGE}/{name}.proto"])
    wanted.ClearField("source_code_info")
    found = descriptor_pb2.FileDescriptorProto()
    stub(f"{name}_pb2").DESCRIPTOR.CopyToProto(found)
    for message in (*wanted.message_type, *found.message_type):
        _clear_json_names(message)
    assert found == wanted, "run tools/gen_protos.py"


def _clear_json_names(message: descriptor_pb2.DescriptorProto) -> None:
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _clear_json_names(nested)


def test_stubs_have_the_calls_of_the_proto_files(image: dict[str, descriptor_pb2.FileDescriptorProto]) -> None:
    served = {}
    with grpc.insecure_channel("localhost:1", options=DIRECT) as channel:
        for name in SOURCES:
            for service in image[f"{PACKAGE}/{name}.proto"].service:
                calls = stub(f"{name}_pb2_grpc")
                client = getattr(calls, f"{service.name}Stub")(channel)
                servicer = getattr(calls, f"{service.name}Servicer")
                methods = {method.name for method in service.method}
                assert methods == set(vars(client)) == {n for n in vars(servicer) if not n.startswith("_")}
                served[service.name] = len(methods)
    assert served == {
        "AdminService": 12,
        "ArtifactService": 4,
        "GenerationService": 4,
        "JobService": 7,
        "ModelService": 3,
    }


def test_stubs_need_no_more_than_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    floors = {m[1]: m[2] for text in project["dependencies"] if (m := re.match(r"([\w-]+)>=([\d.]+)", text))}
    for name in SOURCES:
        text = (ROOT / PACKAGE / f"{name}_pb2.py").read_text(encoding="utf-8")
        assert f"# Protobuf Python Version: {floors['protobuf']}\n" in text
    for path in (ROOT / PACKAGE).glob("*_pb2_grpc.py"):
        assert f"GRPC_GENERATED_VERSION = '{floors['grpcio']}'\n" in path.read_text(encoding="utf-8")


def test_generator_without_its_pins_says_what_to_install() -> None:
    script = ROOT / "tools" / "gen_protos.py"
    tool = runpy.run_path(str(script))
    if not tool["toolchain_problem"]():
        pytest.skip("this environment has the pinned generator; `make checkgen` runs it")
    result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    for package, version in tool["pins"]().items():
        assert f"{package}: needs {version}, is " in result.stderr
        assert f"{package}=={version}" in result.stderr.splitlines()[-2]


def test_generator_names_every_kind_of_difference(tmp_path: Path) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "gen_protos.py"))
    fresh, committed = tmp_path / "fresh", tmp_path / "committed"
    for folder, files in (
        (fresh, {"a_pb2.py": "1", "b_pb2.py": "1", "c_pb2.pyi": "1"}),
        (committed, {"a_pb2.py": "1", "b_pb2.py": "2", "d_pb2_grpc.py": "1", "__init__.py": "1"}),
    ):
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content)
    changes = tool["differences"](fresh, committed)
    assert changes == {"b_pb2.py": "stale", "c_pb2.pyi": "missing", "d_pb2_grpc.py": "surplus"}
    tool["apply"](changes, fresh, committed)
    assert tool["differences"](fresh, committed) == {}
    assert (committed / "__init__.py").exists()


def test_importing_the_stubs_loads_no_torch() -> None:
    modules = [f"omni_grpc.v1.{path.stem}" for path in sorted((ROOT / PACKAGE).glob("*_pb2*.py"))]
    program = (
        f"import sys, {', '.join(modules)}\nprint(len({{'torch', 'diffusers', 'transformers'}} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.stdout.strip(), result.stderr) == ("0", "")


# --- the API and the Python vocabulary say the same -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("python", "wire"),
    [
        (Task, sampling_pb2.DESCRIPTOR.enum_types_by_name["Task"]),
        (GuidanceNorm, sampling_pb2.DESCRIPTOR.enum_types_by_name["GuidanceNorm"]),
        (ImageFormat, media_pb2.DESCRIPTOR.enum_types_by_name["ImageFormat"]),
        (GuidanceKind, model_pb2.DESCRIPTOR.enum_types_by_name["GuidanceKind"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_enums_match(python: type[enum.StrEnum], wire: EnumDescriptor) -> None:
    prefix = wire.values[0].name.removesuffix("UNSPECIFIED")
    assert [member.value for member in python] == [value.name.removeprefix(prefix) for value in wire.values[1:]]


INPUTS_BY_FIELD = {"reference": "audio"}

TWINS: tuple[tuple[type, Descriptor], ...] = (
    *((kind, event_pb2.DESCRIPTOR.message_types_by_name[kind.__name__]) for kind in get_args(Event)),
    (Artifact, media_pb2.Artifact.DESCRIPTOR),
    (RequestWarning, event_pb2.Warning.DESCRIPTOR),
    (Guidance, sampling_pb2.Guidance.DESCRIPTOR),
    (GuidanceDraft, sampling_pb2.Guidance.DESCRIPTOR),
    (Effective, event_pb2.EffectiveParams.DESCRIPTOR),
    (Stats, event_pb2.GenerationStats.DESCRIPTOR),
    (Preview, options_pb2.PreviewOptions.DESCRIPTOR),
    (PreviewImage, event_pb2.Preview.DESCRIPTOR),
    (lora.AppliedLora, event_pb2.AppliedLora.DESCRIPTOR),
    (step_cache.CacheCount, event_pb2.CacheStats.DESCRIPTOR),
    (lora.Lora, sampling_pb2.LoraRef.DESCRIPTOR),
    (step_cache.TeaCache, sampling_pb2.TeaCacheOptions.DESCRIPTOR),
)


@pytest.mark.parametrize(("python", "wire"), TWINS, ids=lambda v: v.__name__ if isinstance(v, type) else "")
def test_every_field_of_the_vocabulary_is_on_the_wire(python: type, wire: Descriptor) -> None:
    names = {field.name for field in dataclasses.fields(python)}
    exceptions = {name for kind, name in EXCEPTIONS if kind is python}
    assert (names - exceptions) - {*wire.fields_by_name, *wire.oneofs_by_name} == set()


def test_one_field_alone_has_another_name_on_the_wire() -> None:
    renames = {(kind.__name__, name): row.name for (kind, name), row in EXCEPTIONS.items() if row.name}
    assert renames == {("Failed", "failure"): "status", ("Retrying", "failure"): "status"}
    unsent = {(kind.__name__, name) for (kind, name), row in EXCEPTIONS.items() if not row.sent}
    assert unsent == {("CacheCount", "measured"), ("CacheCount", "change"), ("CacheCount", "observed"), ("Lora", "uid")}


def test_every_field_of_a_draft_can_be_asked_for() -> None:
    requests = [generation_pb2.DESCRIPTOR.message_types_by_name[name] for name in REQUESTS]
    parts = [*requests, sampling_pb2.SamplingParams.DESCRIPTOR, options_pb2.JobOptions.DESCRIPTOR]
    asked = {name for part in parts for name in part.fields_by_name}
    names = {field.name for field in dataclasses.fields(Draft)}
    assert names - asked == {"inputs", "input_traits", "scheduler_config"}, "a preset sets that"
    assert all("task" in request.fields_by_name for request in requests[1:3])  # the other two have one task each


def test_every_input_of_a_draft_can_be_sent() -> None:
    requests = [generation_pb2.DESCRIPTOR.message_types_by_name[name] for name in REQUESTS]
    media = {field.name for request in requests for field in request.fields if is_media(field)}
    names = {field.name for field in dataclasses.fields(Inputs)}
    assert {INPUTS_BY_FIELD.get(name, name) for name in media} == names


def is_media(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.name == "MediaInput"


def test_every_state_of_a_job_is_on_the_wire() -> None:
    names = {value.name for value in event_pb2.DESCRIPTOR.enum_types_by_name["JobState"].values}
    assert {f"JOB_STATE_{state.name}" for state in JobState} <= names


def test_the_reference_names_every_call(image: dict[str, descriptor_pb2.FileDescriptorProto]) -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    calls = [f"`{method.name}`" for file in image.values() for service in file.service for method in service.method]
    events = [f"`{field.name}`" for field in event_pb2.JobEvent.DESCRIPTOR.oneofs_by_name["event"].fields]
    assert [name for name in calls + events if name not in text] == []
