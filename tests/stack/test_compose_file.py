"""``docker-compose.yml`` and the Dockerfile are valid, and services have no more rights than they need."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
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


def test_the_standby_is_the_service_and_starts_only_if_asked_for() -> None:
    """A standby had checkpoints of its own, and began to learn from the beginning when it took over."""
    others = {"profiles", "ports"}
    standby, service = ({name: value for name, value in SERVICES[each].items() if name not in others} for each in PAIR)
    assert standby == service
    assert SERVICES["standby"]["profiles"] == ["standby"]
    assert "standby" in tomllib.loads((EXAMPLE / "service.toml").read_text(encoding="utf-8"))["service"]


PAIR = ("standby", "service")


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
    longest_s = LONGEST_STOP_S if service in ("service", "standby") else 20
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
    assert with_token == {"prepare", "service", "standby", "prometheus"}
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
    given: list[Any] = [environment_of(name).get("KAFKA") for name in PROGRAMS if name not in ("service", "standby")]
    assert given == [advertised["INTERNAL"]] * len(given)
    settings = (EXAMPLE / "service.toml").read_text(encoding="utf-8")
    assert set(re.findall(r"kafka://([^/]*)/", settings)) == {advertised["INTERNAL"]}


DOCKERFILE = (EXAMPLE / "Dockerfile").read_text(encoding="utf-8")
STEPS = [
    (match[1], " ".join(match[2].split()))
    for match in re.finditer(
        r"^([A-Z]+) (.*)$", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " "), re.MULTILINE
    )
]


def arguments_of(instruction: str) -> list[str]:
    return [argument for name, argument in STEPS if name == instruction]


def copied_paths() -> list[str]:
    """Return what is copied from the project, and not from another stage."""
    copies = [each.split() for each in arguments_of("COPY") if not each.startswith("--from=")]
    return [path for words in copies for path in words[:-1]]


def is_ignored(path: str) -> bool:
    """Return whether Docker ignores the path: the last rule that matches the path or a folder above it counts."""
    ignored = False
    above = [path, *map(str, Path(path).parents)][:-1]
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        rule = line.removeprefix("!").removeprefix("**/")
        names = [*above, *(Path(each).name for each in above if "**/" in line)]
        if line and not line.startswith("#") and any(fnmatch(name, rule) for name in names):
            ignored = not line.startswith("!")
    return ignored


def test_the_dockerfile_has_no_known_mistakes() -> None:
    """A linter knows mistakes that one sees only in a registry: a moving tag, a shell that hides an error."""
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [linter, EXAMPLE / "Dockerfile"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_has_two_stages_one_version_of_python_and_no_root() -> None:
    """The image had a compiler, the sources and root, and another Python than the one that was tested."""
    bases = [argument.partition(" AS ")[0] for argument in arguments_of("FROM")]
    assert len(bases) == 2
    [base] = set(bases)
    version = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-\w+", base)
    assert version is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"Programming Language :: Python :: {version[1]}" in project["classifiers"]
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", arguments_of("USER")[-1])


def test_the_image_has_the_files_and_extras_that_it_uses() -> None:
    """The image had no Kafka, because .dockerignore left out a folder or an extra was misspelt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for path in copied_paths():
        assert (ROOT / path).exists(), path
        assert not is_ignored(path), path
    assert {"README.md", project["license-files"][0]} <= set(copied_paths())
    install = re.search(r'pip .*install --no-cache-dir -c constraints\.txt "\.\[(.*)\]"', DOCKERFILE)
    assert install is not None
    assert {"kafka", "service"} <= set(install[1].split(",")) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("path", [".venv", ".git", "tests", "streamiter/__pycache__", "benchmarks/results"])
def test_files_that_the_image_does_not_need_are_not_sent_to_the_build(path: str) -> None:
    """Each build first copied a virtual environment of a gigabyte."""
    assert is_ignored(path)


class Image:
    """The stages of the Dockerfile as folders of this machine. Requirements come from the environment of the tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.workdir = folder
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": sysconfig.get_path("purelib"),
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as: build isolation is off
        }

    def replay(self) -> None:
        """Run all steps but those that need another user."""
        for instruction, argument in STEPS:
            if instruction == "WORKDIR":
                self.workdir = self._here(argument)
                self.workdir.mkdir(parents=True, exist_ok=True)
            elif instruction == "ENV":
                for name, value in re.findall(r"(\w+)=(\S+)", argument):
                    self.environment[name] = self._in_text(value).replace("$PATH", self.environment["PATH"])
            elif instruction == "COPY" and not argument.startswith("--from="):
                *sources, target = argument.split()
                self._copy(sources, target)
            elif instruction == "RUN" and "useradd" not in argument:
                text = self._in_text(argument)
                done = self.run(json.loads(text) if text.startswith("[") else ["/bin/sh", "-c", text])
                assert done.returncode == 0, done.stdout + done.stderr

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in the work folder with the environment of the image."""
        given = {"env": self.environment, "cwd": self.workdir}
        return subprocess.run(command, **given, capture_output=True, text=True, timeout=PATIENCE_S, check=False)  # type: ignore[call-overload, no-any-return]

    def _here(self, path: str) -> Path:
        return self._folder / path.lstrip("/")

    def _in_text(self, text: str) -> str:
        return re.sub(r"(?<![\w.])/(?=opt|var|run)", f"{self._folder}/", text)

    def _copy(self, sources: list[str], target: str) -> None:
        for source in sources:
            place = self.workdir / target / (Path(source).name if target.endswith("/") else "")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, place)


def test_the_steps_of_the_image_install_the_project_and_its_command_starts(tmp_path: Path) -> None:
    """The image was built without a module, or its command did not exist; only the container failed."""
    image = Image(tmp_path)
    # The steps of the image compile for ten seconds; here they only have to run.
    image.environment["NUMBA_DISABLE_JIT"] = "1"
    image.replay()
    where = image.run(["python", "-c", "import streamiter, streamiter_kafka; print(streamiter.__file__)"])
    assert str(tmp_path) in where.stdout, where.stderr
    command = json.loads(arguments_of("CMD")[-1])
    helped = image.run([*command[:2], "--help"])
    assert helped.returncode == 0, helped.stdout + helped.stderr
    assert (image.workdir / command[-1]).is_file()
    assert not list(tmp_path.rglob("pip/__init__.py"))


# ---- the second service, of examples/recommendations

SECOND = ROOT / "examples" / "recommendations"
OVERRIDE: dict[str, Any] = yaml.safe_load((SECOND / "compose.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("service", OVERRIDE["services"])
def test_a_service_of_the_second_file_is_like_those_of_the_first(service: str) -> None:
    """A second file was written by hand, and its service ran as root, without a limit, on another broker."""
    config = OVERRIDE["services"][service]
    assert (config["cap_drop"], config["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert set(config["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert set(config["logging"]["options"]) == {"max-size", "max-file"}
    assert config["read_only"]
    assert config["image"] == SERVICES["prepare"]["image"]
    assert set(config["depends_on"]) <= SERVICES.keys() | OVERRIDE["services"].keys()
    assert all(port.startswith("127.0.0.1:") for port in config.get("ports", []))
    file = config["command"][-1]
    assert file.startswith("examples/recommendations/")
    assert (ROOT / file).is_file()
    assert any(Path(file).is_relative_to(path) for path in copied_paths())


def test_the_second_service_reads_what_its_producer_writes() -> None:
    """The service waited for a topic of another name."""
    settings = tomllib.loads((SECOND / "service.toml").read_text(encoding="utf-8"))
    given = OVERRIDE["services"]["clicks"]["environment"]
    assert settings["input"]["topic"] == given["TOPIC"]
    assert settings["publish"]["topic"] == given["MODELS"]
    assert settings["checkpoints"]["store"].startswith("/var/lib/streamiter/")
    assert "recommender-state:/var/lib/streamiter" in OVERRIDE["services"]["recommender"]["volumes"]
