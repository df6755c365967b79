"""docs/api.md says what this version serves and how it fails: its tables are compared with the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from omni_grpc.gate.recovery import RESTARTED
from omni_grpc.media_in import refusal
from omni_grpc.server.served import EDIT_IMAGE, GENERATE_AUDIO, GENERATE_IMAGE, GENERATE_VIDEO, unserved_paths
from omni_grpc.server.server import SERVICES, unserved_methods
from omni_grpc.types import errors
from omni_grpc.types.errors import Code
from omni_grpc.types.events import Event
from omni_grpc.v1 import event_pb2, generation_pb2
from omni_grpc.wire import arm
from omni_grpc.wire.status import _DETAILS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
NEVER_ON_A_CALL = {
    *("ATTENTION_UNAVAILABLE", "BAD_LORA", "CANNOT_LISTEN", "CHECKPOINT_DOES_NOT_LOAD", "MODEL_NOT_SUPPORTED"),
    *("NO_DEVICE", "NOTHING_QUANTIZED", "SCHEDULER_NOT_SUPPORTED", "SETTING_WITHOUT_EFFECT", "UNKNOWN_TARGET"),
    *("BAD_CERTIFICATE", "BAD_JWKS", "BAD_TOKEN_FILE", "BAD_TENANT_LIMITS", "BAD_AUDIT_LOG", "TOKEN_NOT_FOUND"),
    *("CHECKPOINT_NOT_ON_NODE", "EXTRA_NOT_INSTALLED", "RAY_NOT_REACHED", "RAY_NOT_STARTED", "RAY_NO_PLACE"),
    *("RAY_VERSION_MISMATCH", "HANDOVER_REFUSED", "BAD_PRESET", "BAD_RECIPE"),
}
"""Reasons that keep a server from starting, that LoadModel ends with, or that a command on a file has."""


def table(header: str) -> list[list[str]]:
    """The cells of the rows below a header line."""
    _, _, rest = PAGE.partition(header + "\n")
    assert rest, f"the page has no table {header!r}"
    rows = rest.split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_calls_on_the_page_are_those_that_are_served():
    served, missing = set(), set()
    for service, here, not_yet in table("| service | served | not yet |"):
        served |= {f"{names(service)[0]}/{name}" for name in names(here)}
        missing |= {f"{names(service)[0]}/{name}" for name in names(not_yet)}
    unserved = {method.removeprefix("/omni_grpc.v1.") for method in unserved_methods()}
    assert missing == unserved
    everything = {f"{descriptor.name}/{method.name}" for descriptor, _, _ in SERVICES for method in descriptor.methods}
    assert served == everything - missing


def test_the_fields_on_the_page_are_those_that_are_served():
    served, refused = set(), set()
    for part, here, not_yet in table("| part of `GenerateImageRequest` | served | refused as `FIELD_NOT_SUPPORTED` |"):
        prefix = "" if part == "itself" else names(part)[0] + "."
        served |= {prefix + name for name in names(here)}
        refused |= {prefix + name for name in names(not_yet)}
    assert served == GENERATE_IMAGE
    assert refused == set(unserved_paths(generation_pb2.GenerateImageRequest.DESCRIPTOR, GENERATE_IMAGE))


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("EditImageRequest", EDIT_IMAGE),
        ("GenerateVideoRequest", GENERATE_VIDEO),
        ("GenerateAudioRequest", GENERATE_AUDIO),
    ],
)
def test_the_fields_of_the_other_requests_are_those_on_the_page(name, served):
    rows = {names(row[0])[0]: row[1:] for row in table("| request | served | refused too |")}
    here, not_yet = rows[name]
    descriptor = generation_pb2.DESCRIPTOR.message_types_by_name[name]
    assert set(names(here)) == served - GENERATE_IMAGE
    own = {path for path in unserved_paths(descriptor, served) if path in descriptor.fields_by_name}
    assert set(names(not_yet)) == own
    shared = set(unserved_paths(generation_pb2.GenerateImageRequest.DESCRIPTOR, GENERATE_IMAGE))
    assert set(unserved_paths(descriptor, served)) - own - {"options.preview"} == shared


def test_the_events_on_the_page_are_those_of_the_api_and_those_that_are_not_sent_say_so():
    rows = {name: row[1] for row in table("| event | when | seq |") for name in names(row[0])}
    assert rows.keys() == {field.name for field in event_pb2.JobEvent.DESCRIPTOR.oneofs_by_name["event"].fields}
    sent = {arm(kind) for kind in get_args(Event)} | {"artifact_chunk", "heartbeat"}
    assert {name for name, when in rows.items() if "ot sent by this version" not in when} == sent


def reasons() -> Iterator[tuple[str, str]]:
    """Code and reason of every row; a row without a code has that of the row above."""
    code = ""
    for row in table("| code | reason | when | metadata |"):
        code = (names(row[0]) or [code])[0]
        for reason in names(row[1]):
            yield code, reason


def test_every_reason_that_a_call_or_a_job_can_end_with_is_on_the_page():
    package = ROOT / "omni_grpc"
    sources = [package / "resolve" / "request.py", package / "resolve" / "rules.py"]
    sources.append(package / "resolve" / "memory_fit.py")
    sources.append(package / "types" / "caller.py")
    rooms = ("gate", "identity", "server", "web", "media_in", "store", "fleet", "engine")
    for folder in (*rooms, "worker", "adapter", "pipeline"):
        sources += (package / folder).rglob("*.py")
    raised = {
        name
        for path in sources
        for name in re.findall(r'(?:reason=|REASON = )"([A-Z_]+)"', path.read_text(encoding="utf-8"))
    }
    raised |= {value for value in vars(refusal).values() if isinstance(value, str) and re.match("INPUT_|URI_", value)}
    listed = {reason for _, reason in reasons()}
    assert raised - NEVER_ON_A_CALL <= listed
    composed = {"INVALID_ARGUMENT", "NOT_YET_SERVED", "QUEUE_TIMEOUT", "RUN_TIMEOUT", "DEADLINE", "TOKEN_NOT_YET_VALID"}
    composed.add(RESTARTED)
    # of a feature
    composed.add("LORA_CACHE_FULL")
    states = {f"ENGINE_{state}" for state in ("DRAINING", "STOPPED", "FAILED")}
    assert listed - raised == composed | states, "a reason that nothing raises"


def test_the_details_on_the_page_come_with_their_codes():
    rows = {
        names(row[0])[0]: row[2] for row in table("| code | meaning | details besides ErrorInfo | retry unchanged |")
    }
    always = {
        "NOT_FOUND": "ResourceInfo",
        "FAILED_PRECONDITION": "PreconditionFailure",
        "RESOURCE_EXHAUSTED": "QuotaFailure",
    }
    assert {code.value for code in _DETAILS} == always.keys()
    assert {code: names(cell)[0] for code, cell in rows.items() if code in always} == always
    assert {code for code, _ in reasons()} <= rows.keys()


def coded(*rooms: str) -> Iterator[tuple[str, str]]:
    """Reason and code of every error that is written out where it is raised."""
    kinds = {name: kind.code for name, kind in vars(errors).items() if isinstance(getattr(kind, "code", None), Code)}
    for path in (path for room in rooms for path in (ROOT / "omni_grpc" / room).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            reason, code = given.get("reason"), given.get("code")
            if not isinstance(reason, ast.Constant):
                continue
            if call.func.id in kinds:
                yield reason.value, kinds[call.func.id].value
            elif isinstance(code, ast.Attribute):
                yield reason.value, code.attr


def test_reasons_stand_below_the_code_that_they_come_with():
    found: dict[str, set[str]] = {}
    for reason, code in coded("gate", "identity", "server", "web", "media_in", "store", "engine"):
        found.setdefault(reason, set()).add(code)
    assert len(found) > 40
    wrong = {reason: code for code, reason in reasons() if reason in found and code not in found[reason]}
    assert wrong == {}
