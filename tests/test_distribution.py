"""The archives for the package index have their metadata, page and licence, and can be installed."""

import re
import shlex
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [found] = built.glob("streamiter-*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Metadata:
    """Return the metadata as the package index reads it; it refuses invalid metadata."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return Metadata.from_email(archive.read(name), validate=True)


def test_the_metadata_have_licence_author_keywords_and_links(metadata: Metadata) -> None:
    """The package had no licence, so companies could not use it, or no links, so users could not find it again."""
    assert (metadata.license_expression, metadata.author) == ("Apache-2.0", "The streamiter maintainers")
    assert metadata.summary
    assert {"kafka", "online learning"} <= set(metadata.keywords or [])
    assert "Typing :: Typed" in (metadata.classifiers or [])
    pythons = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)}
    assert pythons <= set(metadata.classifiers or [])
    assert {"Homepage", "Documentation", "Changelog", "Source", "Issues"} == set(metadata.project_urls or {})
    assert all(url.startswith("https://") for url in (metadata.project_urls or {}).values())


def test_the_links_of_the_page_on_the_package_index_have_targets(metadata: Metadata) -> None:
    """Links of the README led to missing pages of the package index, and its drawing was shown as source text."""
    assert metadata.description_content_type == "text/markdown"
    page = metadata.description or ""
    links = re.findall(r"\]\(([^)]+)\)", page)
    in_repository = "https://github.com/streamiter/streamiter/blob/main/"
    named = [link.removeprefix(in_repository) for link in links if link.startswith(in_repository)]
    pictures = re.findall(r"!\[[^]]*\]\(https://raw.githubusercontent.com/streamiter/streamiter/main/([^)]+)\)", page)
    assert "docs/learning.md" in named
    assert pictures == ["docs/pictures/service-page.png"]
    assert [name for name in named + pictures if not (ROOT / name).exists()] == []
    assert [link for link in links if not link.startswith("https://")] == []
    assert "mermaid" not in page
    assert "pip install 'streamiter[standard]'\n" in page
    assert not re.search(r'"\.\[|git\+|not yet on PyPI', page)


def test_the_schema_of_updates_is_in_the_wheel(wheel: Path) -> None:
    """The documents named a file of the package that only a checkout had."""
    with zipfile.ZipFile(wheel) as archive:
        assert "streamiter/models/model-update.schema.json" in archive.namelist()


def test_licences_are_in_both_archives(built: Path, wheel: Path) -> None:
    """An archive had no copy of the licence, which the licence requires, or no licence of the font."""
    licence = (ROOT / "LICENSE").read_bytes()
    assert b"Apache License\n                           Version 2.0, January 2004" in licence
    with zipfile.ZipFile(wheel) as archive:
        given = {name.partition("/licenses/")[2]: name for name in archive.namelist() if "/licenses/" in name}
        assert set(given) == {"LICENSE", "streamiter/flow/drawing/font/LICENSE.txt"}
        assert archive.read(given["LICENSE"]) == licence
    [source] = built.glob("streamiter-*.tar.gz")
    with tarfile.open(source) as archive_of_source:
        names = {name.partition("/")[2] for name in archive_of_source.getnames()}
    wanted = {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "Makefile", "constraints.txt"}
    assert wanted | {"tests/test_distribution.py", "docs/README.md", "examples/page_rank.py"} <= names
    assert not [name for name in names if name.startswith((".venv", ".git/", "dist/"))]


def test_the_hint_for_a_missing_extra_is_a_command_that_installs_it(wheel: Path, tmp_path: Path) -> None:
    """The hint named no extra, or zsh took it for a pattern, so users could not install the connector.

    It stood behind ``kafka://`` in the list of schemes, too, after the installation.
    """
    installed = Installation(tmp_path, [wheel])
    kafka = ["streamiter", "topics", "list", "kafka://127.0.0.1:1?compression=wrong"]  # An error before it connects.
    misspelt = ["streamiter", "topics", "list", "kafk://127.0.0.1:1"]
    assert "kafka:// (pip install 'streamiter[kafka]'), memory://" in installed.run(*misspelt).stderr
    ran = installed.run(*kafka)
    assert ran.returncode == 1
    [hint] = re.findall(r"install it with: (.+)", ran.stderr)
    assert shlex.split(hint) == ["pip", "install", "streamiter[kafka]"]
    assert installed.run("/bin/sh", "-c", hint).returncode == 0
    assert "option compression: expected" in installed.run(*kafka).stderr
    assert "kafka://, memory://" in installed.run(*misspelt).stderr


def test_all_extras_that_hints_name_exist(metadata: Metadata) -> None:
    """A hint named an unknown extra, for which pip installs nothing and only warns."""
    code = [*ROOT.joinpath("streamiter").rglob("*.py"), *ROOT.joinpath("connectors").rglob("*.py")]
    texts = "".join(map(Path.read_text, code))
    named = set(re.findall(r"pip install ['\"]streamiter\[([\w,]+)\]['\"]", texts))
    named.update(re.findall(r'need_package\([^()]*(?:\([^()]*\)[^()]*)*, "[\w.]+", "([\w-]+)"', texts))
    assert {"kafka", "draw", "ray", "demo"} <= named <= set(metadata.provides_extra or [])


class Installation:
    """A virtual environment with the requirements of the wheels, without extras.

    Nothing is downloaded: requirements are taken from this environment, and the packages of an extra are made into
    wheels again.
    """

    def __init__(self, folder: Path, wheels: list[Path]) -> None:
        self._folder = folder / "environment"
        venv.create(self._folder)  # An installation of pip would take 4 s of processor time.
        python, pip = (self._folder / "bin" / name for name in ("python", "pip"))
        pip.write_text(f"#!{python}\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n")
        pip.chmod(0o755)
        self._wheels = folder / "wheels"
        self._wheels.mkdir()
        extra = requirements("streamiter", extra="kafka") - requirements("streamiter")
        for name in extra:
            as_wheel(distribution(name), self._wheels)
        here = self._folder / "here"
        here.mkdir()
        for each in distributions():
            if canonicalize_name(each.name) not in {*extra, "streamiter"}:
                link_into(here, each)
        [packages] = self._folder.glob("lib/python*/site-packages")
        (packages / "here.pth").write_text(f"{here}\n")
        done = self.run("pip", "install", *map(str, wheels))
        assert done.returncode == 0, done.stderr

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the environment, as if it were active."""
        environment = {
            "PATH": f"{self._folder / 'bin'}:/usr/bin:/bin",
            "PIP_NO_INDEX": "1",
            "PIP_NO_COMPILE": "1",
            "PIP_FIND_LINKS": str(self._wheels),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        return subprocess.run(
            [str(self._folder / "bin" / command[0]) if "/" not in command[0] else command[0], *command[1:]],
            env=environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


def requirements(name: str, extra: str = "") -> set[str]:
    """Return the names of all distributions that a distribution requires with an extra, directly or indirectly."""
    found: set[str] = set()
    open_requirements = [Requirement(f"{name}[{extra}]" if extra else name)]
    while open_requirements:
        each = open_requirements.pop()
        extras = [*each.extras, ""]
        for further in map(Requirement, distribution(each.name).requires or []):
            is_wanted = further.marker is None or any(further.marker.evaluate({"extra": one}) for one in extras)
            if is_wanted and canonicalize_name(further.name) not in found:
                found.add(canonicalize_name(further.name))
                open_requirements.append(further)
    return found


def as_wheel(installed: Distribution, folder: Path) -> None:
    """Write the wheel from which a package was installed into a folder, without its programs."""
    tag = re.findall(r"^Tag: (.+)$", installed.read_text("WHEEL") or "", re.MULTILINE)[0]
    name = installed.name.replace("-", "_")
    with zipfile.ZipFile(folder / f"{name}-{installed.version}-{tag}.whl", "w") as archive:
        for file in installed.files or []:
            if file.parts[0] != ".." and file.suffix != ".pyc":
                archive.write(file.locate(), str(file))


def link_into(folder: Path, installed: Distribution) -> None:
    """Make links to a package in a folder."""
    for top in {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}:
        link = folder / top
        if not link.exists():
            link.symlink_to(Path(str(installed.locate_file(top))))
