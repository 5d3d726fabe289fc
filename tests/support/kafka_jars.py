"""The jar files of Apache Kafka, fetched once by Maven and kept in the user's cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["KAFKA_VERSION", "kafka_jars", "what_is_missing"]

KAFKA_VERSION = "4.1.1"
# The logging backend that Kafka's own release adds to the jars: without it a broker that fails says nothing.
_LOGGING_VERSION = "2.24.3"
# About 60 files and 120 MB on the first run.
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
    """Why no broker can be started here, or None where one can."""
    if shutil.which("java") is None:
        return "no Kafka broker: java is not installed (or set STREAMITER_TEST_KAFKA=host:port)"
    if shutil.which("mvn") is None and not _folder().is_dir():
        return "no Kafka broker: mvn is not installed (or set STREAMITER_TEST_KAFKA=host:port)"
    return None


def kafka_jars() -> Path:
    """The folder with the jars; fetches them where they are not there yet."""
    folder = _folder()
    if not folder.is_dir():
        _fetch_into(folder)
    return folder


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "streamiter" / f"kafka-{KAFKA_VERSION}-log4j-{_LOGGING_VERSION}"


def _fetch_into(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetching-") as working:
        jars = _run_maven(Path(working))
        try:
            # Whole or not at all, so that runs side by side do not see half a folder.
            jars.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def _run_maven(working: Path) -> Path:
    (working / "pom.xml").write_text(_POM)
    command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars"]
    done = subprocess.run(
        command, cwd=working, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"Maven could not fetch Apache Kafka {KAFKA_VERSION}:\n{done.stdout}{done.stderr}")
    return working / "jars"
