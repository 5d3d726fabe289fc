"""Jobs in a process that may open too few files, or has too little memory, end with the failure of the step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from job_faults.scarce import Outcome
from support.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limits of a process are those of Linux")


def outcomes_of(kind: str, folder: Path) -> list[Outcome]:
    """Run the program in a process of its own, whose limits are not those of the tests."""
    program = Path(__file__).with_name("scarce.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(program), kind, str(folder)]
    ran = subprocess.run(command, env=environment, capture_output=True, timeout=PATIENCE_S, check=False)
    assert not ran.returncode, ran.stderr.decode()
    return msgspec.json.decode(ran.stdout, type=list[Outcome])


def test_without_files_to_open_a_job_fails_with_the_limit_and_never_with_rights(tmp_path: Path) -> None:
    """A process had no file descriptors left, and was told to make the folder of its topics writable."""
    outcomes = outcomes_of("files", tmp_path)
    failed = [each for each in outcomes if each.state != "finished"]
    assert len(outcomes) - len(failed) == 6, "each flow finishes without a limit, and with enough files"
    assert {each.state for each in failed} == {None, "failed"}
    for each in failed:
        assert "Too many open files" in each.error, each
        assert "raise the limit on open files of this process (ulimit -n)" in each.error, each
        assert "writable" not in each.error, each
    for step in ("count", "lines", "b", "variable 0"):
        assert any(f"step {step!r}" in each.error for each in failed), step


def test_a_job_without_memory_fails_with_the_step_that_needed_it(tmp_path: Path) -> None:
    """Memory that ended in a checkpoint was reported as a fault of streamiter, or as a bad file descriptor."""
    outcomes = outcomes_of("memory", tmp_path)
    places = ("step 'hungry'", "step 'hungry'", "in a checkpoint")
    for each, place in zip(outcomes, places, strict=True):
        assert each.state == "failed", each
        assert each.causes[:2] == ["JobFailed", "MemoryError"], each
        assert each.error.startswith(f"flow 'scarce', {place}"), each
        assert each.error.endswith("MemoryError: no memory is left; give this process more memory, or keep less in it")
