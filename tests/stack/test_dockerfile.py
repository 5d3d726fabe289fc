"""The image of the stack: its Dockerfile is linted, and its steps run in a clean virtual environment."""

from __future__ import annotations

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

import pytest
from stack.stack_files import EXAMPLE, ROOT
from support.waiting import PATIENCE_S

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
