"""Maven fetches the jar files of Apache Kafka once, into the user's cache folder."""

import hashlib
import shutil
from pathlib import Path

from support.maven import Artifact, cache_folder, fetched

__all__ = ["KAFKA_VERSION", "class_archive", "formatted_folder", "kafka_jars", "what_is_missing"]

KAFKA_VERSION = "4.1.1"
# Kafka's own release adds this logging backend to the jars; without it, a broker that fails logs nothing.
_LOGGING_VERSION = "2.24.3"

_KAFKA = [
    Artifact("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
    Artifact("org.apache.logging.log4j", "log4j-slf4j-impl", _LOGGING_VERSION),
]


def what_is_missing() -> str | None:
    """Return the reason why no broker can start on this machine, or None."""
    if shutil.which("java") is None:
        return "no Kafka broker: java is not installed (or set STREAMITER_TEST_KAFKA=host:port)"
    if shutil.which("mvn") is None and not _folder().is_dir():
        return "no Kafka broker: mvn is not installed (or set STREAMITER_TEST_KAFKA=host:port)"
    return None


def kafka_jars() -> Path:
    """Return the folder with the jars; download them if they are missing."""
    return fetched(_folder(), _KAFKA)


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
    return cache_folder() / f"kafka-{KAFKA_VERSION}-log4j-{_LOGGING_VERSION}"
