"""Maven fetches the jar files of Apache Kafka once, into the user's cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["KAFKA_VERSION", "class_archive", "formatted_folder", "kafka_jars", "what_is_missing"]

KAFKA_VERSION = "4.1.1"
# Kafka's own release adds this logging backend to the jars; without it, a broker that fails logs nothing.
_LOGGING_VERSION = "2.24.3"
# The first run fetches about 60 files and 120 MB.
_FETCH_TIMEOUT_S = 600.0

_POM = f"""\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>streamiter.test</groupId>
  <artifactId>kafka</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>{KAFKA_VERSION}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId>
      <artifactId>log4j-slf4j-impl</artifactId>
      <version>{_LOGGING_VERSION}</version>
    </dependency>
  </dependencies>
</project>
"""


def what_is_missing() -> str | None:
    """Return the reason why no broker can start on this machine, or None."""
    if shutil.which("java") is None:
        return "no Kafka broker: java is not installed (or set STREAMITER_TEST_KAFKA=host:port)"
    if shutil.which("mvn") is None and not _folder().is_dir():
        return "no Kafka broker: mvn is not installed (or set STREAMITER_TEST_KAFKA=host:port)"
    return None


def kafka_jars() -> Path:
    """Return the folder with the jars; download them if they are missing."""
    folder = _folder()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if not folder.is_dir():
            _fetch_into(folder)
    return folder


def class_archive() -> Path:
    """Return the path of the archive of a broker's classes, which ``support.kafka_classes`` makes.

    The path differs for each Java, because an archive works with one Java only.
    """
    java = Path(shutil.which("java") or "java").resolve()
    changed_ns = java.stat().st_mtime_ns if java.exists() else 0
    this_java = hashlib.sha256(f"{java} {changed_ns}".encode()).hexdigest()[:12]
    return _folder().with_name(f"{_folder().name}-classes-{this_java}.jsa")


def formatted_folder() -> Path:
    """Return the path of a folder as Kafka's tool prepares it for a new broker; ``support.kafka_classes`` makes it."""
    return _folder().with_name(f"{_folder().name}-formatted")


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "streamiter" / f"kafka-{KAFKA_VERSION}-log4j-{_LOGGING_VERSION}"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let only one process enter: two Maven processes would damage the repository that they fill.

    If a process ends, its lock ends too.
    """
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_into(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetching-") as working:
        # The rename is atomic: a process without the lock never sees an incomplete folder.
        _run_maven(Path(working)).rename(folder)


def _run_maven(working: Path) -> Path:
    (working / "pom.xml").write_text(_POM)
    command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars"]
    done = subprocess.run(command, cwd=working, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"Maven could not fetch Apache Kafka {KAFKA_VERSION}:\n{done.stdout}{done.stderr}")
    return working / "jars"
