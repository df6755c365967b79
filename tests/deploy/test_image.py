"""The Dockerfile and the compose files: linted, pinned, and in accordance with the server that they run."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from omni_grpc.config.sections import options
from omni_grpc.config.settings import OF_THE_BUILD, OF_THE_CLIENT
from omni_grpc.types.version import __version__
from tools import image_requirements, setup_env

from .manifests import DEPLOY, ROOT, STOP_SECONDS, documents, read, variables

DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
TARGETS = ("cpu", "cuda")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
KNOWN = {option.environment for option in options()} | OF_THE_BUILD | OF_THE_CLIENT


def stage(name: str) -> str:
    """The lines of one stage, continued ones joined."""
    found = re.search(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert found, name
    return found[1].replace("\\\n", " ")


def instruction(text: str, word: str) -> list[str]:
    return re.findall(rf"^{word} +(.*)$", text, re.MULTILINE)


def environment(target: str) -> dict[str, str]:
    return dict(re.findall(r"([A-Z_]+)=(\S+)", " ".join(instruction(stage(target), "ENV"))))


def ours(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith("OMNI_GRPC_") and name in KNOWN}


def test_hadolint_has_no_complaint():
    hadolint = Path(sys.executable).with_name("hadolint")
    ran = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (0, "")


@pytest.mark.parametrize("target", TARGETS)
def test_what_runs_has_no_rights_no_compiler_and_a_health_check(target):
    text = stage(target)
    assert instruction(text, "USER") == ["10001:10001"]
    assert instruction(text, "STOPSIGNAL") == ["SIGTERM"]
    assert instruction(text, "ENTRYPOINT") == ['["tini", "--", "omni-grpc", "serve"]']
    (check,) = instruction(text, "HEALTHCHECK")
    assert check.endswith('CMD ["omni-grpc", "health"]')
    (label,) = instruction(text, "LABEL")
    assert f'org.opencontainers.image.version="{__version__}"' in label
    assert "g++" not in text
    assert instruction(text, "EXPOSE") == [
        str(read([], ours(environment(target)) | {"OMNI_GRPC_INSECURE": "1"}).server.port)
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_a_server_without_certificates_does_not_start_unless_it_is_told_to(target):
    from omni_grpc.types.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        read([], ours(environment(target)))
    assert caught.value.reason == "PLAINTEXT_REFUSED"


def test_the_volumes_are_those_of_the_user():
    for target in TARGETS:
        (volumes,) = instruction(stage(target), "VOLUME")
        folders = re.findall(r'"([^"]+)"', volumes)
        assert f"install -d -o omni-grpc -g omni-grpc -m 0750 {' '.join(folders)}" in stage(target)
        home = environment(target)["HOME"]
        assert home in folders
        assert environment(target)["HF_HOME"].startswith(home)


def test_versions_are_those_of_the_project():
    requirements = {
        re.split("[=<>]", line, maxsplit=1)[0]: line
        for line in [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["gpu"]]
    }
    assert set(instruction(DOCKERFILE, "ARG TORCH_VERSION")) == set()
    assert set(re.findall(r"^ARG TORCH_VERSION=(\S+)", DOCKERFILE, re.MULTILINE)) == {setup_env.CPU_TORCH}
    assert re.findall(r"^ARG TORCH_INDEX=(\S+)", DOCKERFILE, re.MULTILINE) == [setup_env.CPU_INDEX]
    assert PROJECT["tool"]["omni-grpc"]["cutlass"] in DOCKERFILE
    (attention,) = re.findall(r"fa3-fwd==(\S+)", DOCKERFILE)
    assert requirements["fa3-fwd"].startswith(f"fa3-fwd>={attention};")
    python = re.findall(r"^ARG PYTHON_IMAGE=python:(\d+\.\d+)", DOCKERFILE, re.MULTILINE)
    assert python == [image_requirements.IMAGE["python_version"]]


def test_the_pins_are_what_pyproject_asks_for():
    pins = image_requirements.pinned(image_requirements.FILE.read_text(encoding="utf-8"))
    assert list(image_requirements.wrong(pins, image_requirements.asked())) == []
    assert len(pins) > 60
    old = pins | {"grpcio": "1.60.0"}
    assert ["grpcio 1.60.0" in line for line in image_requirements.wrong(old, image_requirements.asked())] == [True]
    missing = {name: version for name, version in pins.items() if name != "starlette"}
    assert ["lacks starlette" in line for line in image_requirements.wrong(missing, image_requirements.asked())] == [
        True
    ]


def test_what_is_copied_is_not_ignored():
    kept = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")
    }
    assert all((ROOT / name).exists() for name in kept)
    read_by_setup = {
        "pyproject.toml",
        "setup.py",
        "csrc",
        "omni_grpc",
        "models",
        "clients/python",
        "README.md",
        "LICENSE",
    }
    assert read_by_setup <= kept
    for source in re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, re.MULTILINE):
        assert source == "." or source in kept


@pytest.mark.parametrize(
    "path",
    sorted(path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix not in (".json", ".txt")),
    ids=str,
)
def test_every_variable_is_one_of_a_setting(path):
    text = path.read_text(encoding="utf-8")
    # CUDA_ARCHS is an argument of the build, which ends up in one of ours
    assert set(variables(text)) - KNOWN - {"OMNI_GRPC_HTTP_SERVICE_HOST"} == set()


# --- compose ----------------------------------------------------------------------------------------------------------


def compose(*names: str) -> dict[str, object]:
    """The files as compose merges them: mappings by key, the rest by the last one."""

    def merged(below: object, above: object) -> object:
        if isinstance(below, dict) and isinstance(above, dict):
            keys = [*below, *(key for key in above if key not in below)]
            return {key: merged(below.get(key), above[key]) if key in above else below[key] for key in keys}
        return above

    found: object = {}
    for name in names:
        (document,) = documents(DEPLOY / name)
        found = merged(found, document)
    assert isinstance(found, dict)
    return found


def filled(environ: dict[str, str]) -> dict[str, str]:
    return {name: re.sub(r"\$\{[^}]*\}", "x", value) for name, value in environ.items()}


@pytest.mark.parametrize(
    ("names", "target"), [(("compose.yaml",), "cpu"), (("compose.yaml", "compose.gpu.yaml"), "cuda")]
)
def test_compose_runs_the_image_with_settings_that_it_takes(names, target):
    server = compose(*names)["services"]["server"]
    assert server["build"]["target"] == target
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    config = read([], ours(environment(target)) | ours(filled(server["environment"])))
    for published in server["ports"]:
        host, _, port = published.split(":")
        assert host == "127.0.0.1", "it does not encrypt"
        assert int(port) in (config.server.port, config.http.http_port)
    assert int(server["stop_grace_period"].removesuffix("s")) > config.server.drain_timeout + STOP_SECONDS
    assert int(server["shm_size"].removesuffix("gb")) << 30 >= config.limits.input_budget + (1 << 30)
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    mounts = {volume.split(":")[1] for volume in server["volumes"]}
    (volumes,) = instruction(stage(target), "VOLUME")
    assert mounts == set(re.findall(r'"([^"]+)"', volumes))
    (scraped,) = documents(DEPLOY / "compose" / "prometheus.yml")
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == [f"server:{config.metrics.metrics_port}"]


def test_compose_names_what_is_there():
    whole = compose("compose.yaml", "compose.gpu.yaml")
    for name, service in whole["services"].items():
        assert set(service) <= SERVICE, f"{name}: {set(service) - SERVICE}"
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), volume
            elif not source.startswith("$"):
                assert source in whole["volumes"]
        waits = service.get("depends_on", ())
        assert set(waits) <= set(whole["services"])
    images = [service["image"] for service in whole["services"].values()]
    assert all(re.search(r":v?\d", image) for image in images), "images are pinned"
    for name in ("compose.yaml", "compose.gpu.yaml"):
        text = (DEPLOY / name).read_text(encoding="utf-8")
        for image in re.findall(r"image: omni-grpc:(\S+)", text):
            assert image.removesuffix("-cpu") == __version__
        asked = set(re.findall(r"\$\{([A-Z_]+)", text)) - {"OUT", "DEMO_USER"}
        example = (DEPLOY / "compose.env.example").read_text(encoding="utf-8")
        assert asked <= set(re.findall(r"^([A-Z_]+)=$", example, re.MULTILINE))


SERVICE = {
    *("build", "cap_drop", "command", "depends_on", "deploy", "entrypoint", "environment", "healthcheck", "image"),
    *("ports", "profiles", "read_only", "restart", "security_opt", "shm_size", "stop_grace_period", "tmpfs", "ulimits"),
    *("user", "volumes"),
}
"""Keys of a service that are used, of the Compose specification."""


def test_docker_reads_the_compose_files():
    compose_there = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
    if not compose_there:
        pytest.skip("docker has no compose here")
    for files in (["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]):
        flags = [word for name in files for word in ("-f", str(DEPLOY / name))]
        ran = subprocess.run(
            ["docker", "compose", *flags, "config", "--quiet"],
            env={"PATH": "/usr/bin:/usr/local/bin", "POSTGRES_PASSWORD": "x", "MODEL": "x"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr


def test_the_dashboards_are_where_grafana_looks():
    (provider,) = documents(DEPLOY / "compose" / "grafana-dashboards.yml")[0]["providers"]
    mounts = dict(volume.split(":")[1::-1] for volume in compose("compose.yaml")["services"]["grafana"]["volumes"])
    assert list((DEPLOY / mounts[provider["options"]["path"]]).glob("*.json"))
    rules = documents(DEPLOY / "compose" / "prometheus.yml")[0]["rule_files"]
    prometheus = dict(
        volume.split(":")[1::-1] for volume in compose("compose.yaml")["services"]["prometheus"]["volumes"]
    )
    for rule in rules:
        folder, name = rule.rsplit("/", 1)
        assert yaml.safe_load((DEPLOY / prometheus[folder] / name).read_text(encoding="utf-8"))["groups"]
