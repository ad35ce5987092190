"""Do the files of deploy/ name flags, paths, ports and waits that the server has?"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from ridgeline.asked import check_ranks
from ridgeline.cli.main import parse
from ridgeline.cli.serve import serve_config
from ridgeline.distributed.links import SECRET_VARIABLE
from ridgeline.server.auth import KEY_VARIABLE
from ridgeline.server.config import ServeConfig, check_serve_numbers
from ridgeline.server.engine_client import EXIT_WAIT_S
from ridgeline.server.hosts import is_loopback
from ridgeline.server.http_protocol import OPEN_PATHS
from ridgeline.server.lifecycle import LAST_WORDS_S
from ridgeline.server.tracing import LAST_EXPORT_S

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")
UNIT = (DEPLOY / "ridgeline.service").read_text("utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
SERVICES = COMPOSE["services"]
VOLUME, DEPLOYMENT, SERVICE = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8"))
POD = DEPLOYMENT["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


def unit(name: str) -> list[str]:
    """All values of one setting of the systemd unit."""
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


def instructions(name: str) -> list[str]:
    """What follows each such word of the Dockerfile, its lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    return re.findall(rf"^{name}\s+(.*)$", text, re.MULTILINE)


def commands() -> dict[str, list[str]]:
    """How each file starts the server, without the program's name."""
    [image], [start] = instructions("CMD"), unit("ExecStart")
    compose = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in SERVICES["ridgeline"]["command"]]
    words = start.replace("${MODEL}", "demo:chat").replace("$FLAGS", "").replace("%d", "/keys")
    return {
        "Dockerfile": json.loads(image),
        "compose.yaml": compose,
        "kubernetes.yaml": CONTAINER["args"],
        "ridgeline.service": shlex.split(words)[1:],
    }


def seconds(text: str) -> float:
    number, unit_name = re.fullmatch(r"(\d+)(s|min)?", text).groups()  # type: ignore[union-attr]
    return float(number) * (60 if unit_name == "min" else 1)


@pytest.fixture(params=commands())
def config(request: pytest.FixtureRequest) -> ServeConfig:
    return serve_config(parse(commands()[request.param]))


def test_every_command_line_is_one_of_the_server(config: ServeConfig) -> None:
    check_serve_numbers(config)
    assert config.port == 8000


def test_ranks_of_several_pods_meet() -> None:
    ranks, service = yaml.safe_load_all((DEPLOY / "leaderworkerset.yaml").read_text("utf-8"))
    group = ranks["spec"]["leaderWorkerTemplate"]
    leader, worker = group["leaderTemplate"], group["workerTemplate"]
    [driver], [other] = leader["spec"]["containers"], worker["spec"]["containers"]
    config = serve_config(parse(driver["args"]))
    check_serve_numbers(config)
    check_ranks(config.engine)
    assert config.engine.num_ranks == group["size"]
    assert parse(other["args"]).join == config.engine.join_address
    for container in (driver, other):
        assert SECRET_VARIABLE in [entry["name"] for entry in container["env"]]
    assert KEY_VARIABLE in [entry["name"] for entry in driver["env"]]
    assert service["spec"]["selector"].items() <= leader["metadata"]["labels"].items()


def test_who_listens_to_the_network_asks_for_a_key() -> None:
    names = [entry["name"] for entry in CONTAINER["env"]]
    for name, words in commands().items():
        config = serve_config(parse(words))
        has_key = config.api_key_file is not None or name == "Dockerfile"  # it says so and ends
        has_key |= name == "kubernetes.yaml" and KEY_VARIABLE in names
        assert has_key or is_loopback(config.host), name
        assert not config.allow_anyone_on_the_network_without_a_key


def test_no_file_has_a_secret() -> None:
    for path in DEPLOY.rglob("*"):
        text = path.read_text("utf-8") if path.is_file() else ""
        assert not re.search(rf"{KEY_VARIABLE}\s*[=:]\s*\w", text), path
    [entry] = [entry for entry in CONTAINER["env"] if entry["name"] == KEY_VARIABLE]
    assert set(entry) == {"name", "valueFrom"}
    ignored = (ROOT / ".gitignore").read_text("utf-8").split()
    for secret in COMPOSE["secrets"].values():
        assert f"deploy/{secret['file'].removeprefix('./')}" in ignored


def test_probes_ask_what_is_answered_without_a_key() -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = CONTAINER[probe]["httpGet"]
        assert asked["path"] in OPEN_PATHS
        assert asked["port"] == CONTAINER["ports"][0]["name"]
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    [path] = re.findall(r"http://127\.0\.0\.1:8000(/[\w/]+)", DOCKERFILE)
    assert path in OPEN_PATHS


def test_everything_speaks_of_one_port() -> None:
    assert instructions("EXPOSE") == ["8000"]
    assert CONTAINER["ports"][0]["containerPort"] == 8000
    [port] = SERVICE["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (8000, CONTAINER["ports"][0]["name"])
    published = [port for service in SERVICES.values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_whoever_stops_the_server_waits_until_it_has_drained() -> None:
    def needed_s(name: str) -> float:
        drain_s = serve_config(parse(commands()[name])).limits.drain_s
        return drain_s + LAST_WORDS_S + EXIT_WAIT_S + LAST_EXPORT_S

    before_s = float(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert POD["terminationGracePeriodSeconds"] >= before_s + needed_s("kubernetes.yaml")
    [timeout] = unit("TimeoutStopSec")
    assert seconds(timeout) >= needed_s("ridgeline.service")
    assert seconds(SERVICES["ridgeline"]["stop_grace_period"]) >= needed_s("compose.yaml")


def test_it_runs_as_nobody_in_particular() -> None:
    assert instructions("USER") == ["10001:10001"] * 2
    for stage in DOCKERFILE.split("\nFROM ")[-2:]:  # the two that become images
        steps = [line for line in stage.splitlines() if line and not line.startswith("#")]
        assert steps[-1] == "USER 10001:10001"
    context = POD["securityContext"]
    assert context["runAsNonRoot"]
    assert (context["runAsUser"], context["runAsGroup"]) == (10001, 10001)
    assert unit("DynamicUser") == ["yes"]
    assert SERVICES["prometheus"]["group_add"] == ["10001"]


def test_what_is_copied_and_mounted_is_there() -> None:
    kept = {
        line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").split() if line[0] == "!"
    }
    copied = {
        word for line in instructions("COPY") if "--from" not in line for word in line.split()[:-1]
    }
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
    sources = [
        mount.split(":")[0]
        for service in SERVICES.values()
        for mount in service["volumes"]
        if mount.startswith(".")
    ]
    assert sources
    assert all((DEPLOY / name).exists() for name in sources)
    assert SERVICES["ridgeline"]["build"]["target"] in re.findall(r"AS ([\w-]+)", DOCKERFILE)


def test_prometheus_asks_the_server_with_its_key() -> None:
    settings = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))
    [job] = settings["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["ridgeline:8000"]}]
    [secret] = SERVICES["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert SERVICES["ridgeline"]["secrets"] == [secret]
    assert f"--api-key-file=/run/secrets/{secret}" in SERVICES["ridgeline"]["command"]


def test_the_unit_waits_for_what_the_server_says() -> None:
    assert (unit("Type"), unit("NotifyAccess")) == (["notify"], ["main"])
    assert float(unit("WatchdogSec")[0]) > 10
    assert unit("RestartPreventExitStatus") == ["2"]  # a ConfigError, see ridgeline.cli.main


@pytest.mark.parametrize("name", ["cpu", "cuda", "compose.cuda.yaml"])
def test_both_images_have_a_stage(name: str) -> None:
    stages = re.findall(r"^FROM .* AS ([\w-]+)$", DOCKERFILE, re.MULTILINE)
    if name.endswith(".yaml"):
        over = yaml.safe_load((DEPLOY / name).read_text("utf-8"))
        name = over["services"]["ridgeline"]["build"]["target"]
    assert name in stages
    assert f"packages-{name}" in stages
