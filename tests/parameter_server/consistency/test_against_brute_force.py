"""Random sequences of calls, compared with a model that computes each answer from the complete history."""

from __future__ import annotations

from random import Random

import pytest
from parameter_server.consistency.brute_force import KINDS
from parameter_server.consistency.comparison import RARE, STEPS, Step, difference, random_steps
from support.examples import random_examples

from streamiter.parameter_server.consistency import Consistency

Calls = tuple[Consistency, int, list[Step]]


def calls(random: Random) -> Calls:
    """Return a short sequence of calls; the brute force takes time with the square of its length."""
    steps = [
        Step(
            random.choice(RARE) if random.random() < 0.05 else random.choice(STEPS),
            random.choice((0, 1, 0, 1, 2, 3, 4)),
            random.choice((-1, 0, 1, 2)),
        )
        for _ in range(random.randrange(11))
    ]
    return random.choice(KINDS), random.randint(1, 4), steps


@random_examples(calls)
def test_any_sequence_of_calls_follows_the_table(example: Calls) -> None:
    """A model gave a wrong verdict, released calls in a wrong order or read wrong values for a rare sequence."""
    assert difference(*example) is None


@pytest.mark.parametrize("consistency", KINDS, ids=repr)
def test_long_runs_follow_the_table(consistency: Consistency) -> None:
    """Bugs that need workers far apart, or many joins and leaves, did not occur in short random sequences."""
    for seed in range(8):
        workers = 1 + seed % 4
        assert difference(consistency, workers, random_steps(Random(seed), workers)) is None, f"seed {seed}"
