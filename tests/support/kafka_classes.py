"""An archive of the classes that a broker loads, and the folder of a new broker, are made once: brokers start quickly.

The archive halves the time of a start, and a copy of the folder saves a run of Kafka's tool that formats folders. All
tests work without them too. ``make test`` makes both before the tests begin, and fetches Kafka and a schema registry if
needed (``PYTHONPATH=tests``)::

    python -m support.kafka_classes
"""

import contextlib
import subprocess
import tempfile
from pathlib import Path

from support.kafka_jars import class_archive, formatted_folder, kafka_jars, what_is_missing
from support.kafka_server import QUICK_START, KafkaServer
from support.registry_server import registry_files
from support.waiting import PATIENCE_S

__all__ = ["make_class_archive", "make_formatted_folder"]

# Java writes 50 MB when the broker ends, in 4 s on two free cores, or in 16 s on busy cores.
_WRITE_TIMEOUT_S = 120.0


def make_class_archive() -> bool:
    """Make the archive if it does not exist; return whether it exists now."""
    kafka_jars()  # the archive is in the same folder as the jars
    archive = class_archive()
    if archive.is_file():
        return True
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix="archiving-") as working:
        made = Path(working) / archive.name
        server = KafkaServer(Path(working) / "broker", jvm_options=(*QUICK_START, f"-XX:ArchiveClassesAtExit={made}"))
        server.start()
        # Java crashes if the archive is incomplete.
        if not server.stop(_WRITE_TIMEOUT_S) or not _is_whole(made):
            return False
        # The rename is atomic: other processes may look for the archive at this moment.
        made.rename(archive)
    return True


def make_formatted_folder() -> None:
    """Format a folder for a new broker if there is none."""
    folder = formatted_folder()
    if folder.is_dir():
        return
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="formatting-") as working:
        made = Path(working) / "broker"
        KafkaServer(made).format()
        # Two processes may make the folder at the same time; the rename of the second one fails.
        with contextlib.suppress(OSError):
            (made / "data").rename(folder)


def _is_whole(archive: Path) -> bool:
    """Return whether a small program of Kafka runs with the archive."""
    program = ["-cp", f"{kafka_jars()}/*", "kafka.tools.StorageTool", "random-uuid"]
    command = ["java", *QUICK_START, f"-XX:SharedArchiveFile={archive}", *program]
    return (
        archive.is_file()
        and subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE_S).returncode == 0
    )


def _main() -> None:
    reason = what_is_missing()
    if reason is None and not make_class_archive():
        reason = "no archive of Kafka's classes was made: brokers start slowly"
    if reason:
        print(reason)
    if what_is_missing() is None:
        make_formatted_folder()
        registry_files()


if __name__ == "__main__":
    _main()
