"""Without Numba, or with its compiler switched off, all arithmetic of learners has the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from learn.uncompiled import results
from support.waiting import PATIENCE_S

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = """
import json, sys
{before}
from learn.uncompiled import results
print(json.dumps(results({names})))
"""


@pytest.mark.parametrize(
    ("before", "disabled", "names"),
    [
        ('sys.modules["numba"] = None', "0", ["rows", "embeddings", "tables"]),
        ("", "1", ["rows", "embeddings", "features", "late labels"]),
    ],
    ids=["missing", "disabled"],
)
def test_arithmetic_without_a_compiler_has_the_same_bits(before: str, disabled: str, names: list[str]) -> None:
    """Without Numba another code ran, and gave other predictions; a warning says that it is slow.

    Numpy added float32 with float32, and Numba multiplies a float32 with a float64 in double precision. A count became
    a number of another type, and a warning about its overflow ended the job. A bound was checked by neither.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM.format(before=before, names=names)],
        env=os.environ | {"NUMBA_DISABLE_JIT": disabled, "PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    found, expected = json.loads(done.stdout), results(names)
    for name, prediction in expected.pop("rows").items():
        own = np.ravel(found["rows"][name])
        assert own == pytest.approx(np.ravel(prediction), rel=1e-12, abs=1e-12), name
    del found["rows"]
    assert found == expected
    said = "the arithmetic of {} is not compiled, and some hundred times slower, because Numba is "
    said += 'not installed; install it with: pip install "streamiter[fast]"'
    slow = ["AdaptiveLinearModel", "FeatureTable", "embeddings"] if before else []
    assert [line for line in done.stderr.splitlines() if "pip install" in line] == [said.format(it) for it in slow]
