"""The manifests of deploy/kubernetes: valid for three versions of Kubernetes, and true of the server that they run."""

from __future__ import annotations

import re
import shutil

import jsonschema
import kubernetes_validate
import pytest
import yaml

from omni_grpc.server.health import LIVENESS, OVERALL
from omni_grpc.telemetry.declared import METRICS, Kind
from omni_grpc.types.version import __version__
from tests.cli.programs import run
from tools import prometheus_rule

from .crds import SCHEMAS
from .manifests import (
    BASE,
    COMPONENTS,
    KUBERNETES,
    NAME,
    OVERLAYS,
    STOP_SECONDS,
    configuration,
    container,
    documents,
    environment,
    one,
    overlay,
    pod,
    rendered,
)

VERSIONS = ("1.29", "1.32", "1.35")
ALL = (BASE, *OVERLAYS)
NEEDED = {"multi-gpu": ("gpu",), "tls": ("monitoring", "http"), "s3": ("postgres",), "postgres": ("s3",)}
"""What a component is listed after."""
GIB = 1 << 30
OUTPUTS = GIB
"""Room for the outputs of two jobs, as docs/deploy.md has it."""
LABEL = "app.kubernetes.io/name"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def test_every_file_is_yaml_and_part_of_its_kustomization():
    for folder in sorted(path.parent for path in KUBERNETES.rglob("kustomization.yaml")):
        (kustomization,) = documents(folder / "kustomization.yaml")
        named = [*kustomization.get("resources", ()), *kustomization.get("components", ())]
        named += [patch["path"] for patch in kustomization.get("patches", ())]
        named += [file for one in kustomization.get("configMapGenerator", ()) for file in one.get("files", ())]
        for name in named:
            assert (folder / name).exists(), f"{folder} names {name}"
        there = {path.name for path in folder.iterdir()} - {"kustomization.yaml", "adapter-rules.yaml"}
        assert there <= set(named), f"{folder} does not use all of its files"
        for path in folder.glob("*.yaml"):
            assert documents(path)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ALL)
def test_manifests_are_valid(name, version):
    for manifest in overlay(name):
        if (schema := SCHEMAS.get(manifest["kind"])) is not None:
            jsonschema.validate(manifest, schema)
        else:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_a_misspelled_field_is_found():
    manifest = yaml.safe_load(yaml.safe_dump(one(overlay("fleet"), "ScaledObject")))
    manifest["spec"]["minReplicas"] = manifest["spec"].pop("minReplicaCount")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMAS["ScaledObject"])
    manifest = yaml.safe_load(yaml.safe_dump(one(overlay(BASE), "Deployment")))
    manifest["spec"]["template"]["spec"]["terminationGraceSeconds"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", ALL)
def test_the_server_takes_its_settings(name, tmp_path):
    config = configuration(overlay(name), tmp_path)
    assert config.server.host == "0.0.0.0"
    ports = {port["name"]: port["containerPort"] for port in container(overlay(name))["ports"]}
    assert ports["grpc"] == config.server.port
    assert ports["metrics"] == config.metrics.metrics_port
    assert ports.get("http") == config.http.http_port


@pytest.mark.parametrize("name", ALL)
def test_a_pod_has_longer_to_end_than_the_drain_takes(name, tmp_path):
    drain = configuration(overlay(name), tmp_path).server.drain_timeout
    (asleep,) = re.findall(r"^\d+$", container(overlay(name))["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod(overlay(name))["terminationGracePeriodSeconds"] > int(asleep) + drain + STOP_SECONDS


@pytest.mark.parametrize("name", ALL)
def test_probes_ask_for_what_the_server_has(name, tmp_path):
    config = configuration(overlay(name), tmp_path)
    expected = dict(zip(PROBES, (LIVENESS, OVERALL, LIVENESS), strict=True))
    for kind, service in expected.items():
        probe = container(overlay(name))[kind]
        assert ("grpc" in probe) is not config.tls.on, "gRPC probes do no TLS"
        if "grpc" in probe:
            assert probe["grpc"] == {"port": config.server.port} | ({"service": service} if service else {})
            continue
        words = probe["exec"]["command"]
        assert words[:2] == ["omni-grpc", "health"]
        assert (words[words.index("--service") + 1] if "--service" in words else OVERALL) == service
        mounted = {mount["name"]: mount["mountPath"] for mount in container(overlay(name))["volumeMounts"]}
        assert words[words.index("--ca") + 1].startswith(mounted["tls"])
        code, _, error = run("health", *words[2:], "--server", "127.0.0.1:1", "--timeout", "0.1")
        assert (code, "ca " in error) == (1, True), error  # the flags are known; only the file is not there


@pytest.mark.parametrize("name", ALL)
def test_pods_are_restricted(name):
    spec = pod(overlay(name))
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert container(overlay(name))["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
    assert not any("hostPath" in volume for volume in spec["volumes"])


@pytest.mark.parametrize("name", ALL)
def test_kubernetes_adds_no_variable_that_would_be_an_unknown_setting(name):
    """A Service `omni-grpc-http` would make OMNI_GRPC_HTTP_SERVICE_HOST, with which no server starts."""
    assert pod(overlay(name))["enableServiceLinks"] is False


@pytest.mark.parametrize("name", ALL)
def test_what_a_pod_mounts_is_there(name):
    spec = pod(overlay(name))
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounted = {mount["name"]: mount["mountPath"] for mount in container(overlay(name))["volumeMounts"]}
    assert set(volumes) == set(mounted)
    assert mounted["shm"] == "/dev/shm"
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    maps = {it["metadata"]["name"] for it in overlay(name) if it["kind"] == "ConfigMap"}
    claims = {it["metadata"]["name"] for it in overlay(name) if it["kind"] == "PersistentVolumeClaim"}
    assert {volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume} <= maps
    used = {it["persistentVolumeClaim"]["claimName"] for it in volumes.values() if "persistentVolumeClaim" in it}
    assert used == claims
    assert not any(it["kind"] == "Secret" for it in overlay(name)), "secrets are not in git"
    for mount in container(overlay(name))["volumeMounts"]:
        for variable, value in environment(overlay(name)).items():
            if variable.endswith(("_FILE", "_CERT", "_KEY")) and value.startswith("/"):
                assert any(value.startswith(f"{path}/") for path in mounted.values()), f"{variable}={value}"
        assert mount["mountPath"].startswith("/")


@pytest.mark.parametrize("name", ALL)
def test_shared_memory_has_room_for_inputs_and_outputs(name, tmp_path):
    (size,) = [it["emptyDir"]["sizeLimit"] for it in pod(overlay(name))["volumes"] if it["name"] == "shm"]
    limits = container(overlay(name))["resources"]["limits"]
    budget = configuration(overlay(name), tmp_path).limits.input_budget
    assert int(size.removesuffix("Gi")) * GIB >= budget + OUTPUTS
    assert int(limits["memory"].removesuffix("Gi")) > 2 * int(size.removesuffix("Gi")), "it counts as memory"


@pytest.mark.parametrize("name", ALL)
def test_selectors_and_ports_meet(name):
    labels = one(overlay(name), "Deployment")["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for port in container(overlay(name))["ports"]}
    for manifest in overlay(name):
        spec = manifest.get("spec", {})
        if manifest["kind"] == "Service":
            assert spec["selector"].items() <= labels.items()
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        elif manifest["kind"] in ("PodDisruptionBudget", "PodMonitor"):
            assert spec["selector"]["matchLabels"].items() <= labels.items()
        elif manifest["kind"] == "NetworkPolicy":
            assert spec["podSelector"]["matchLabels"].items() <= labels.items()
            assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == ports
            peers = [peer for rule in spec["ingress"] + spec["egress"] for peer in rule.get("from", rule.get("to", ()))]
            assert peers
            for peer in peers:
                assert peer["podSelector"]["matchLabels"].get(LABEL) != NAME, "they are others than the server"
                assert len(peer["podSelector"]["matchLabels"]) == 1
        if manifest["kind"] == "PodMonitor":
            assert {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]} <= ports
            schemes = {endpoint.get("scheme", "http") for endpoint in spec["podMetricsEndpoints"]}
            assert schemes == {"https" if "OMNI_GRPC_TLS_CERT" in environment(overlay(name)) else "http"}
        if manifest["kind"] == "Ingress":
            (rule,) = spec["rules"]
            assert f"https://{rule['host']}" == environment(overlay(name))["OMNI_GRPC_HTTP_URL"]


@pytest.mark.parametrize("name", ALL)
def test_images_have_the_version_of_the_server(name):
    cpu = environment(overlay(name)).get("OMNI_GRPC_DEVICE") != "cuda"
    assert container(overlay(name))["image"] == f"{NAME}:{__version__}{'-cpu' if cpu else ''}"
    gpus = container(overlay(name))["resources"]["limits"].get("nvidia.com/gpu")
    assert (gpus is None) is cpu


def test_who_is_let_in_is_asked_who_it_is_wherever_a_gpu_is(tmp_path):
    for name in OVERLAYS:
        config = configuration(overlay(name), tmp_path)
        if name != "cpu-demo":
            assert config.tls.on
            assert config.identity.on
            assert not config.tls.insecure


@pytest.mark.parametrize("name", COMPONENTS)
def test_every_component_fits_the_base(name, tmp_path):
    # kustomize reads nothing outside of its root, links followed
    for folder in ("base", "components"):
        shutil.copytree(KUBERNETES / folder, tmp_path / folder)
    (tmp_path / "one").mkdir()
    components = [*NEEDED.get(name, ()), name]
    kustomization = {"resources": ["../base"], "components": [f"../components/{it}" for it in components]}
    (tmp_path / "one" / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    manifests = rendered(tmp_path / "one")
    for manifest in manifests:
        if manifest["kind"] not in SCHEMAS:
            kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    assert configuration(manifests, tmp_path).server.port == 50051
    scaled = name.startswith("autoscaling")
    assert ("replicas" in one(manifests, "Deployment")["spec"]) is not scaled, "else each apply would undo the scaling"


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\bomni_grpc_[a-z_]+", text))


@pytest.mark.parametrize("name", ["autoscaling-keda", "autoscaling-hpa"])
def test_scaling_goes_by_metrics_that_the_server_has(name):
    texts = [path.read_text(encoding="utf-8") for path in (KUBERNETES / "components" / name).glob("*.yaml")]
    asked = metrics_in("".join(texts))
    assert asked == {"omni_grpc_queue_delay_seconds", "omni_grpc_running_jobs"}
    declared = {metric.name: metric for metric in METRICS}
    for metric in asked:
        assert declared[metric].kind is Kind.GAUGE
        assert declared[metric].labels == ("model",)


def test_the_rules_of_the_adapter_offer_what_the_autoscaler_asks_for():
    folder = KUBERNETES / "components" / "autoscaling-hpa"
    (rules,) = documents(folder / "adapter-rules.yaml")
    (autoscaler,) = documents(folder / "autoscaler.yaml")
    offered = {rule["name"]["as"] for rule in rules["rules"]}
    assert {metric["pods"]["metric"]["name"] for metric in autoscaler["spec"]["metrics"]} == offered
    for rule in rules["rules"]:
        assert rule["seriesQuery"].startswith(rule["name"]["as"] + "{")


def test_the_rules_of_the_operator_are_those_of_prometheus():
    assert prometheus_rule.TARGET.read_text(encoding="utf-8") == prometheus_rule.made()
