"""Connectors are found by the scheme of a URL."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from streamiter.errors import ConfigurationError
from streamiter.topics import MemoryConnector, connector_for, topic
from streamiter.topics.urls import known_schemes


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on the path in which a test can install a distribution with entry points."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(folder: Path, name: str, entry_point: str, code: str = "") -> None:
    """Install a distribution as pip does: metadata, an entry point and a module."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[streamiter.topics]\n{entry_point}\n")
    (folder / f"{name}.py").write_text(code)


def test_the_connectors_of_the_project_are_registered() -> None:
    """A scheme was missing in the packaging, and the first user noticed it."""
    assert known_schemes() == ["file", "kafka", "memory", "sqlite"]
    assert isinstance(connector_for("memory://a"), MemoryConnector)
    assert isinstance(connector_for("MEMORY://a"), MemoryConnector)


def test_a_third_party_can_add_a_scheme(installed: Path) -> None:
    """A connector of another package was not found, although it had an entry point."""
    install(
        installed,
        "pigeons",
        "pigeon = pigeons:Pigeons",
        "from streamiter.topics import MemoryConnector\nclass Pigeons(MemoryConnector): pass\n",
    )
    assert topic("pigeon://roof").name == "roof"
    assert "pigeon" in known_schemes()


def test_a_missing_extra_is_an_error_with_the_install_command(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error 'No module named aiokafka' did not say what to do."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("aiokafka", "streamiter_kafka")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiokafka", None)  # stands for a package that is not installed
    with pytest.raises(ConfigurationError, match=r"pip install 'streamiter\[kafka\]'"):
        topic("kafka://127.0.0.1:9092/clicks")


def test_a_broken_connector_is_named(installed: Path) -> None:
    """A bug in another package's connector looked like a bug of this package."""
    install(installed, "broken", "broken = broken:Connector", "import a_module_that_is_not_there\n")
    install(installed, "wrong", "wrong = wrong:Connector", "class Connector: pass\n")
    with pytest.raises(ConfigurationError, match=r"broken:Connector cannot be imported .*not_there"):
        topic("broken://a")
    with pytest.raises(ConfigurationError, match="wrong:Connector to be a subclass"):
        topic("wrong://a")


def test_a_file_has_one_commit_domain_under_all_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs in one file belonged to two commit domains, or to another one in another working directory."""
    (tmp_path / "link.db").symlink_to(tmp_path / "a.db")
    monkeypatch.chdir(tmp_path)
    relative = topic("sqlite:///a.db?topic=x")
    monkeypatch.chdir("/")
    names = [
        relative,
        topic(f"sqlite:///{tmp_path}/a.db?topic=y"),
        topic(f"sqlite:///{tmp_path}/link.db?topic=x"),
        topic(f"sqlite:///{tmp_path}/../{tmp_path.name}/a.db?topic=x"),
    ]
    assert len({found.commit_domain for found in names}) == 1


def test_the_url_of_a_topic_leads_back_to_it(tmp_path: Path) -> None:
    """A name or a path that needs quoting led to another topic."""
    for url in ("memory://a b", f"sqlite:///{tmp_path}/my%20log.db?topic=a%26b%2Fü"):
        found = topic(url)
        again = topic(found.url)
        assert (again.url, again.name, again.commit_domain) == (found.url, found.name, found.commit_domain)
    assert found.name == "a&b/ü"
