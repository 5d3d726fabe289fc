"""The command line finds and runs the flows of the examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import forked_run
from support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
WITHOUT = {"decision_tree.py"}
"""Examples without a flow of their own, because ``fit`` builds it."""
FLOWS = sorted(
    f"{file.relative_to(ROOT)}:flow"
    for room in ("", "linear_regression")
    for file in (ROOT / "examples" / room).glob("*.py")
    if file.name not in WITHOUT
)


def streamiter(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked_run([sys.executable, "-m", "streamiter", *arguments], cwd=ROOT, limit_s=PATIENCE_S, check=True)


def test_the_list_of_examples_is_complete() -> None:
    """The list of examples was empty, and all other tests of this module passed."""
    assert len(FLOWS) >= 7


@pytest.mark.parametrize("target", [*FLOWS, "examples/online_service/trainer.py:training_flow"])
def test_the_flow_of_an_example_is_drawn_without_running_it(target: str) -> None:
    """The whole example ran, and its flow could not be drawn afterwards."""
    drawn = streamiter("draw", target)
    title, *lines = drawn.stdout.removeprefix("---\ntitle: ").splitlines()
    assert title
    assert lines[:2] == ["---", "flowchart LR"]
    assert any("iteration 1" in line for line in lines)
    assert drawn.stderr == ""


@pytest.mark.parametrize("target", FLOWS)
def test_the_flow_of_an_example_runs_and_says_how_its_loop_ended(target: str) -> None:
    """The program around the flow printed the result, so `streamiter run` printed none."""
    ran = streamiter("run", target)
    assert ran.stdout
    assert re.search(r"^iteration 1 \(.*\): ended in epoch \d+, .* fed back$", ran.stderr, re.MULTILINE)
