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
    """A model gave a wrong verdict, released calls in a wrong order or read wrong values for a rare sequence.

    A worker that joined late was out of turn, or the others did not wait for it. The sum of an iteration lacked the
    adds of a worker that had left before its end; the last gradients of a training were lost when its last worker left;
    the shard with these adds ended the iteration, and the other shards did not. A get for a clock that the minimum
    skipped waited forever. A shard that received a clock late refused a call in turn, or put its add into the iteration
    before. Adds of two iterations were summed up together. A restored shard lost the adds that waited. A cancelled get
    was answered.
    """
    assert difference(*example) is None


@pytest.mark.parametrize("consistency", KINDS, ids=repr)
def test_long_runs_follow_the_table(consistency: Consistency) -> None:
    """Bugs that need workers far apart, or many joins and leaves, did not occur in short random sequences."""
    for seed in range(8):
        workers = 1 + seed % 4
        assert difference(consistency, workers, random_steps(Random(seed), workers)) is None, f"seed {seed}"
