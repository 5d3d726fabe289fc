"""Every sequence of gets, adds, clocks, joins and leaves against a model that works all out anew from the history."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parameter_server.consistency.brute_force import KINDS
from parameter_server.consistency.comparison import RARE, STEPS, Step, difference, random_steps

from streamiter.parameter_server.consistency import Consistency

steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(STEPS + RARE),
        st.sampled_from((0, 1, 0, 1, 2, 3, 4)),
        st.sampled_from((-1, 0, 1, 2)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("consistency", KINDS, ids=repr)
@settings(max_examples=50, deadline=None)
@given(workers=st.integers(1, 4), steps=steps)
def test_any_sequence_of_calls_does_what_the_table_says(
    consistency: Consistency, workers: int, steps: list[Step]
) -> None:
    """Verdicts, order of release and values read: a table of three lines has more corners than anyone thinks of."""
    assert difference(consistency, workers, steps) is None


@pytest.mark.parametrize("consistency", KINDS, ids=repr)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_long_runs_do_what_the_table_says(consistency: Consistency, workers: int) -> None:
    """Workers that are far apart, and many who come and go, take more calls than a search makes by itself."""
    for seed in range(4):
        assert difference(consistency, workers, random_steps(Random(seed), workers)) is None, f"seed {seed}"
