"""Kafka is downloaded once, for any number of test runs that find it missing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from support.processes import process

TESTS = Path(__file__).parent

# A program that is slow like Maven, so that the other processes start while it works.
MAVEN = """\
#!/bin/sh
echo fetched >> "$FETCHES"
mkdir jars
sleep 0.3
echo jar > jars/kafka.jar
"""


def test_processes_that_start_at_once_download_kafka_once(tmp_path: Path) -> None:
    """Two processes of Maven filled the same repository, and one of them read a half-written file of the other."""
    maven = tmp_path / "bin" / "mvn"
    maven.parent.mkdir()
    maven.write_text(MAVEN)
    maven.chmod(0o755)
    fetches = tmp_path / "fetches"
    environment = os.environ | {
        "PATH": f"{maven.parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "FETCHES": str(fetches),
        "PYTHONPATH": str(TESTS),
    }
    program = "from support.kafka_jars import kafka_jars; print([jar.name for jar in kafka_jars().iterdir()])"
    with contextlib.ExitStack() as processes:
        command = [sys.executable, "-c", program]
        started = [processes.enter_context(process(command, env=environment, stdout=subprocess.PIPE)) for _ in range(3)]
        assert [each.communicate()[0] for each in started] == ["['kafka.jar']\n"] * 3
    assert fetches.read_text() == "fetched\n"
