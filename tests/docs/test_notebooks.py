"""The notebooks of the documents run in a kernel, and print what is stored in them."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import forked_run
from support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))

# The kernel is a process of its own, and so is the client, whose libraries warn.
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=int(sys.argv[3]), kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def shown(notebook: Any) -> list[list[str]]:
    """Return what each cell of code prints, and of which kinds its result is: tables of a job contain times."""
    return [
        [
            output["text"] if output["output_type"] == "stream" else str(sorted(output["data"]))
            for output in cell["outputs"]
        ]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_prints_what_is_stored_in_it(notebook: Path, tmp_path: Path) -> None:
    """A reader ran the notebook, and a cell failed, or printed other figures than the website shows."""
    # Imported in the test: each process of the tests would import it, to collect the tests.
    nbformat = pytest.importorskip("nbformat") if "CI" not in os.environ else __import__("nbformat")
    executed = tmp_path / "executed.ipynb"
    command = [sys.executable, "-c", EXECUTE, str(notebook), str(executed), str(int(PATIENCE_S))]
    run = forked_run(command, cwd=tmp_path, limit_s=PATIENCE_S)
    assert run.returncode == 0, run.stderr
    stored, now = (nbformat.read(path, as_version=4) for path in (notebook, executed))
    assert shown(now) == shown(stored)
    assert len(shown(stored)) >= 5


def test_there_is_a_notebook() -> None:
    """A move of files left nothing to run, and no test said so."""
    assert NOTEBOOKS != []
