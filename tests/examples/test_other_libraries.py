"""The examples with models of other libraries run, and their models are good."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from support.processes import forked_run
from support.waiting import PATIENCE_S

EXAMPLES = Path(__file__).parents[2] / "examples" / "other_libraries"


@pytest.mark.parametrize(
    ("example", "library", "package"),
    [
        ("river_trees.py", "river", "river"),
        ("scikit_learn.py", "sklearn", "scikit-learn"),
        ("pytorch.py", "torch", "torch"),
    ],
)
def test_an_example_trains_publishes_and_serves_a_model_of_its_library(
    example: str, library: str, package: str
) -> None:
    """A new version of a library changed a method, and the example in the documents no longer ran."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{package} is not installed (pip install {package})")
    ran = forked_run([sys.executable, example], cwd=EXAMPLES, limit_s=PATIENCE_S, check=True)
    accuracies = [float(found) for found in re.findall(r"accuracy (\d\.\d+)", ran.stdout)]
    assert accuracies
    assert accuracies[-1] > 0.75
    [probability] = re.findall(r"probability that \(0, 0\) is inside: \[?(\d\.\d+)", ran.stdout)
    assert float(probability) > 0.5
    if example == "river_trees.py":
        linear, tree, forest = accuracies
        assert linear < tree < forest
