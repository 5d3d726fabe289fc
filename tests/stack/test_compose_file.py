"""``docker-compose.yml`` is valid, and its services have no more rights than they need."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stack.stack_files import COMPOSE, EXAMPLE, LONGEST_STOP_S, PROGRAMS, ROOT, SERVICES, environment_of
from support.waiting import PATIENCE_S

IMAGES = [name for name in SERVICES if name not in PROGRAMS]


def mounts_of(service: str) -> dict[str, str]:
    """Return what is mounted in a service: the path in the container, and the volume or folder."""
    mounts = [volume.split(":") for volume in SERVICES[service].get("volumes", [])]
    return {mount[1]: mount[0] for mount in mounts}


@pytest.mark.parametrize(
    ("schema", "file"),
    [
        ("vendor.compose-spec", "docker-compose.yml"),
        ("vendor.github-workflows", ".github/workflows/newest-aiokafka.yml"),
        ("vendor.github-workflows", ".github/workflows/site.yml"),
    ],
)
def test_a_file_follows_its_specification(schema: str, file: str) -> None:
    """Docker compose refused the file: an unknown key, or a condition with a spelling error."""
    check = ["-m", "check_jsonschema", "--builtin-schema", schema, file]
    done = subprocess.run(
        [sys.executable, *check], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_check_of_the_specification_finds_an_error(tmp_path: Path) -> None:
    """The check passed for every file."""
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text("services: {a: {image: b, depends_on: {c: {condition: service_is_up}}}}", encoding="utf-8")
    check = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(wrong)]
    done = subprocess.run([sys.executable, *check], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert "service_is_up" in done.stdout


@pytest.mark.parametrize("service", SERVICES)
def test_what_a_service_refers_to_exists(service: str) -> None:
    """A container did not start: a volume was not declared, a folder was renamed, a dependency had no health check."""
    config = SERVICES[service]
    for source in mounts_of(service).values():
        assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], source
    for name, dependency in config.get("depends_on", {}).items():
        wanted = dependency["condition"]
        if wanted == "service_healthy":
            assert "healthcheck" in SERVICES[name]
        else:
            assert (wanted, SERVICES[name]["restart"]) == ("service_completed_successfully", "on-failure")
    assert all(isinstance(value, str) for value in environment_of(service).values())


def test_the_file_of_the_settings_can_be_changed_while_the_service_runs() -> None:
    """SIGHUP read the file of the image again, which no user could change."""
    file = Path(SERVICES["service"]["command"][-1])
    folder = re.findall(r"^WORKDIR (.*)$", (EXAMPLE / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)[-1]
    assert mounts_of("service")[f"{folder}/{file.parent}"] == f"./{file.parent}"
    assert f"./{file.parent}:{folder}/{file.parent}:ro" in SERVICES["service"]["volumes"]


def test_all_volumes_are_used() -> None:
    """The data of a service was in a volume that no container mounted, and was lost with the container."""
    assert {source for name in SERVICES for source in mounts_of(name).values() if "/" not in source} == set(
        COMPOSE["volumes"]
    )


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_restarted_and_has_time_to_stop(service: str) -> None:
    """The service was killed ten seconds after SIGTERM, during its last checkpoint."""
    config = SERVICES[service]
    assert config["restart"] in ("on-failure", "unless-stopped")
    longest_s = LONGEST_STOP_S if service == "service" else 20
    assert int(config["stop_grace_period"].removesuffix("s")) >= longest_s


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_limits_and_no_rights_that_it_does_not_need(service: str) -> None:
    """A container had the rights of root and the memory of the machine, and its log filled the disk."""
    config = SERVICES[service]
    assert config["cap_drop"] == ["ALL"]
    assert config["security_opt"] == ["no-new-privileges:true"]
    assert set(config["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert set(config["logging"]["options"]) == {"max-size", "max-file"}
    assert config.get("read_only", False) or service == "kafka", "the image of Kafka writes below /opt/kafka"
    assert not set(config) & {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"}
    user = config.get("user", "appuser" if service == "kafka" else "10001")  # the users of the images
    assert user.partition(":")[0] not in ("0", "root")


@pytest.mark.parametrize("service", SERVICES)
def test_ports_are_open_to_this_machine_only(service: str) -> None:
    """The broker, which asks for no password, was open to the network of a café."""
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[service].get("ports", []))


@pytest.mark.parametrize("service", IMAGES)
def test_images_have_versions(service: str) -> None:
    """A new major version of an image came with a restart, and did not read its old data."""
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", SERVICES[service]["image"])


@pytest.mark.parametrize("service", PROGRAMS)
def test_a_service_runs_a_program_that_the_image_contains(service: str) -> None:
    """A program was renamed, and only the container failed."""
    config = SERVICES[service]
    assert (ROOT / config["build"]["context"] / config["build"]["dockerfile"]).samefile(EXAMPLE / "Dockerfile")
    file = config["command"][-1]
    assert config["command"][:-1] in (["python"], ["streamiter", "serve"])
    assert file.startswith("examples/online_service/")
    assert (ROOT / file).is_file()


@pytest.mark.parametrize("service", [name for name in PROGRAMS if SERVICES[name]["command"][0] == "python"])
def test_each_variable_of_a_service_is_read_and_documented(service: str) -> None:
    """A misspelt variable in docker-compose.yml had no effect, and no error named it."""
    file = SERVICES[service]["command"][-1]
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / file, EXAMPLE / "service.py")]
    read = {name for text in texts for name in re.findall(r'(?:environ\.get|_topic)\("(\w+)"', text)}
    documented = {name for text in texts for name in re.findall(r"^    ([A-Z_]+)  ", text, re.MULTILINE)}
    assert documented == read
    assert set(environment_of(service)) <= read


def test_the_speed_of_the_producer_can_be_chosen() -> None:
    """A user changed the speed in the file, and the next pull was a conflict."""
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert 'EVENTS_PER_SECOND: "${EVENTS_PER_SECOND:-500}"' in text
    assert environment_of("producer")["EVENTS_PER_SECOND"] == "500"


def test_the_token_reaches_those_who_need_it_and_no_others() -> None:
    """Prometheus had no right to read the token, so each scrape was refused; or the consumer had it for no reason."""
    folder = Path(environment_of("prepare")["TOKEN_FILE"]).parent
    with_token = {name for name in SERVICES if "token" in mounts_of(name).values()}
    assert with_token == {"prepare", "service", "prometheus"}
    assert all(mounts_of(name)[str(folder)] == "token" for name in with_token)
    writers = [name for name in with_token if "token:/run/streamiter" in SERVICES[name]["volumes"]]
    assert writers == ["prepare"]
    user = re.search(r"^USER (\d+):(\d+)$", (EXAMPLE / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert user is not None
    assert SERVICES["prometheus"]["group_add"] == [user[2]]


def test_the_broker_of_the_file_is_published_and_checked_on_its_own_ports() -> None:
    """A health check of a port without a listener prevented the start of all other services."""
    environment = environment_of("kafka")
    listeners = dict(each.split("://") for each in environment["KAFKA_LISTENERS"].split(","))
    advertised = dict(each.split("://") for each in environment["KAFKA_ADVERTISED_LISTENERS"].split(","))
    [(host, published, container)] = [port.split(":") for port in SERVICES["kafka"]["ports"]]
    assert advertised["EXTERNAL"] == f"{host}:{published}"
    assert listeners["EXTERNAL"] == f":{container}"
    assert advertised["INTERNAL"] == f"kafka{listeners['INTERNAL']}"
    assert f"--bootstrap-server {advertised['INTERNAL']} " in SERVICES["kafka"]["healthcheck"]["test"][1]
    given: list[Any] = [environment_of(name).get("KAFKA") for name in PROGRAMS if name != "service"]
    assert given == [advertised["INTERNAL"]] * len(given)
    settings = (EXAMPLE / "service.toml").read_text(encoding="utf-8")
    assert set(re.findall(r"kafka://([^/]*)/", settings)) == {advertised["INTERNAL"]}
