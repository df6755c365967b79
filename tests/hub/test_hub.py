"""Fetching from a hub on loopback: what comes, what does not, and what is said when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import NEEDED, NOT_NEEDED, answered, files_in
from .fake_hub import Cut, Stall

REPO = "tiny-org/tiny"
INDEX_BYTES = len(NEEDED["transformer/diffusion_pytorch_model.safetensors.index.json"])
TOTALS = {"text_encoder": 500, "transformer": 300 + 200 + INDEX_BYTES, "vae": 400}


def test_only_the_needed_files_come_and_a_second_start_downloads_nothing(hub, fetch, tmp_path):
    commit = hub.add(REPO, NEEDED | NOT_NEEDED)
    first = fetch(REPO)
    assert first["path"] == str(tmp_path / "home/hub/models--tiny-org--tiny/snapshots" / commit)
    assert files_in(first["path"]) == NEEDED
    assert sorted(hub.downloads()) == sorted(NEEDED)
    hub.requests.clear()
    again = fetch(REPO)
    assert again["path"] == first["path"]
    assert hub.requests == [("GET", "info", REPO)]
    assert again["progress"] == []
    hub.requests.clear()
    offline = fetch(REPO, HF_HUB_OFFLINE="1")
    assert offline["path"] == first["path"]
    assert hub.requests == []


def test_progress_counts_the_bytes_of_each_component(hub, fetch):
    hub.add(REPO, NEEDED)
    progress = fetch(REPO)["progress"]
    by_component = {name: [it["done"] for it in progress if it["component"] == name] for name in TOTALS}
    assert {it["component"]: it["total"] for it in progress} == TOTALS
    assert {name: done[-1] for name, done in by_component.items()} == TOTALS
    assert all(done == sorted(done) for done in by_component.values())
    assert by_component["vae"][0] == 0
    everything = [it["all_done"] for it in progress]
    assert (everything, everything[-1]) == (sorted(everything), sum(TOTALS.values()))
    assert {it["all_total"] for it in progress} == {sum(TOTALS.values())}, "known from the beginning"
    files = {it["file"] for it in progress if it["component"] == "vae"}
    assert files == {"", "vae/diffusion_pytorch_model.safetensors"}


def test_a_variant_stands_in_where_the_plain_weights_are_missing(hub, fetch):
    files = {path: data for path, data in NEEDED.items() if not path.startswith("transformer/diffusion")}
    files |= {
        "text_encoder/model.fp16.safetensors": b"h" * 250,
        "transformer/diffusion_pytorch_model.safetensors.index.fp16.json": (
            b'{"weight_map": {"a": "diffusion_pytorch_model.fp16-00001-of-00001.safetensors"}}'
        ),
        "transformer/diffusion_pytorch_model.fp16-00001-of-00001.safetensors": b"half",
    }
    hub.add(REPO, files)
    got = files_in(fetch(REPO)["path"])
    assert "text_encoder/model.fp16.safetensors" not in got
    assert got["text_encoder/model.safetensors"] == b"t" * 500
    assert got["transformer/diffusion_pytorch_model.fp16-00001-of-00001.safetensors"] == b"half"
    assert b"fp16-00001" in got["transformer/diffusion_pytorch_model.safetensors.index.json"]
    hub.requests.clear()
    assert files_in(fetch(REPO, HF_HUB_OFFLINE="1")["path"]) == got
    assert hub.requests == []


def test_a_revision_is_a_branch_or_a_commit(hub, fetch):
    old = hub.add(REPO, NEEDED)
    new = hub.add(REPO, NEEDED | {"vae/config.json": b'{"z": 16}'})
    hub.repos[REPO].refs["refs/pr/1"] = old
    revisions, commits = ("refs/pr/1", old, "main", "", new), [old, old, new, new, new]
    online = fetch(REPO, *revisions)
    assert [Path(answer["path"]).name for answer in online] == commits
    assert hub.downloads().count("vae/config.json") == 2
    assert hub.downloads().count("vae/diffusion_pytorch_model.safetensors") == 1
    offline = fetch(REPO, *revisions, HF_HUB_OFFLINE="1")
    assert [answer["path"] for answer in offline] == [answer["path"] for answer in online]


@pytest.mark.parametrize(
    ("options", "revision", "reason", "words"),
    [
        (None, "", "MODEL_NOT_FOUND", ("no folder 'tiny-org/tiny'", "hf auth login", "HF_TOKEN")),
        ({"private": True}, "", "MODEL_NOT_FOUND", ("private",)),
        ({"gated": True}, "", "MODEL_GATED", ("request access at http://127.0.0.1", "hf auth login")),
        ({}, "v9", "REVISION_NOT_FOUND", ("'v9'", "--revision")),
        ({}, "../../main", "REVISION_NOT_FOUND", ("not a valid branch, tag or commit",)),
    ],
)
def test_a_refusal_of_the_hub_says_what_to_run(hub, fetch, options, revision, reason, words):
    if options is not None:
        hub.add(REPO, NEEDED, **options)
    refused = fetch(REPO, revision)
    assert (refused["reason"], refused["code"]) == (reason, "FAILED_PRECONDITION")
    assert all(word in refused["message"] for word in words), refused["message"]
    if options and reason != "REVISION_NOT_FOUND":
        assert files_in(fetch(REPO, HF_TOKEN=hub.token)["path"]) == NEEDED


def test_offline_without_a_copy_says_how_to_get_one(hub, fetch):
    hub.add(REPO, NEEDED)
    refused = fetch(REPO, "main", HF_HUB_OFFLINE="1")
    assert refused["reason"] == "HUB_OFFLINE"
    assert "HF_HUB_OFFLINE=0 python -m omni_grpc pull tiny-org/tiny" in refused["message"]
    assert hub.requests == []


def test_offline_with_half_a_copy_names_what_is_missing(hub, fetch):
    hub.add(REPO, NEEDED)
    path = Path(fetch(REPO)["path"])
    (path / "vae/diffusion_pytorch_model.safetensors").unlink()
    refused = fetch(REPO, HF_HUB_OFFLINE="1")
    assert refused["reason"] == "HUB_OFFLINE"
    assert "vae" in refused["message"]


def test_a_hub_that_is_down_is_replaced_by_the_copy_and_that_is_logged(hub, fetch):
    hub.add(REPO, NEEDED)
    hub.down = True
    assert fetch(REPO)["reason"] == "DOWNLOAD_FAILED"
    hub.down = False
    path = fetch(REPO)["path"]
    hub.down = True
    again = fetch(REPO)
    assert again["path"] == path
    assert "does not respond" in again["log"]


def test_a_repository_of_another_kind_is_refused_with_what_it_has(hub, fetch):
    hub.add(REPO, {"config.json": b"{}", "model.safetensors": b"x"})
    refused = fetch(REPO)
    assert refused["reason"] == "NO_MODEL_INDEX"
    assert "config.json, model.safetensors" in refused["message"]
    assert hub.downloads() == []


def test_a_repository_with_pickles_alone_is_refused_with_the_fix(hub, fetch):
    files = NEEDED | {"vae/diffusion_pytorch_model.bin": b"pickle"}
    del files["vae/diffusion_pytorch_model.safetensors"]
    hub.add(REPO, files)
    refused = fetch(REPO)
    assert refused["reason"] == "UNSAFE_WEIGHTS"
    assert "vae: diffusion_pytorch_model.bin" in refused["message"]
    assert "python -m omni_grpc convert DIR OUT" in refused["message"]
    assert "vae/diffusion_pytorch_model.bin" not in hub.downloads()


def test_a_cut_download_goes_on_where_it_was_cut(hub, fetch):
    weights = bytes(range(256)) * (21 << 12)
    file = "vae/diffusion_pytorch_model.safetensors"
    hub.add(REPO, NEEDED | {file: weights})
    hub.faults[file] = [Cut(11 << 20), Stall(0)]
    got = fetch(REPO)
    assert files_in(got["path"])[file] == weights
    assert hub.ranges == [f"{file} {10 << 20}"] * 2
    assert [it["done"] for it in got["progress"] if it["component"] == "vae"][-1] == len(weights)


def test_after_a_failed_download_the_next_start_fetches_the_rest(hub, fetch):
    hub.add(REPO, NEEDED)
    file = "vae/diffusion_pytorch_model.safetensors"
    hub.faults[file] = [Cut(0)] * 6
    refused = fetch(REPO)
    assert refused["reason"] == "DOWNLOAD_FAILED"
    assert "start again" in refused["message"]
    assert fetch(REPO, HF_HUB_OFFLINE="1")["reason"] == "HUB_OFFLINE"
    hub.requests.clear()
    assert files_in(fetch(REPO)["path"]) == NEEDED
    assert file in hub.downloads()
    assert not any(path.endswith("json") for path in hub.downloads())


def test_a_full_disk_is_seen_before_the_download(hub, fetch):
    file = "vae/diffusion_pytorch_model.safetensors"
    hub.add(REPO, NEEDED)
    hub.sizes[file] = 1 << 60
    refused = fetch(REPO)
    assert refused["reason"] == "DOWNLOAD_FAILED"
    assert "HF_HOME" in refused["message"]
    assert file not in hub.downloads()


def test_two_processes_at_once_share_the_cache(hub, start, tmp_path):
    weights = bytes(range(256)) * (12 << 12)
    files = NEEDED | {"vae/diffusion_pytorch_model.safetensors": weights}
    hub.add(REPO, files)
    both = [start(REPO), start(REPO)]
    paths = {answer["path"] for process in both for answer in answered(process)}
    assert len(paths) == 1
    assert files_in(paths.pop()) == files
    assert not list((tmp_path / "home").rglob("*.incomplete"))
