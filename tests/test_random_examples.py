"""The tool for property tests finds a rare fault, reduces its example, and prints how to repeat it."""

from __future__ import annotations

import re
from random import Random

import pytest
from support.examples import EXAMPLES, random_examples


def _numbers(random: Random) -> list[int]:
    return [random.randrange(100) for _ in range(random.randrange(30))]


@random_examples(_numbers)
def _below_99(numbers: list[int]) -> None:
    assert 99 not in numbers


def _failure() -> list[str]:
    with pytest.raises(AssertionError) as raised:
        _below_99()
    return raised.value.__notes__


def test_a_fault_is_reported_with_its_seed_and_the_smallest_example() -> None:
    """A plan of sixty steps failed, and only two of them mattered."""
    [note] = _failure()
    assert note.endswith("smaller example: [99]")
    assert re.match(r"seed \d+; again: STREAMITER_EXAMPLES_SEED=\d+\n", note)


def test_the_reported_seed_gives_the_failing_example_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure could not be repeated, so it could not be corrected."""
    monkeypatch.setenv("STREAMITER_EXAMPLES_SEED", "11")
    [first] = _failure()
    seed = first.split("\n")[0].rpartition("=")[2]
    monkeypatch.setenv("STREAMITER_EXAMPLES_SEED", seed)
    [again] = _failure()
    assert again == first
    assert 99 in _numbers(Random(int(seed)))


@pytest.mark.parametrize("most", [3, 5])
def test_all_examples_run_and_other_arguments_are_those_of_the_test(most: int) -> None:
    """A decorator ran a test only once, or hid its parameters, and no test noticed it."""
    seen = []

    @random_examples(lambda random: random.randrange(2**60))
    def check(example: int, given: int) -> None:
        seen.append((example, given))

    check(most)
    check(given=most)
    assert [given for _, given in seen] == [most] * 2 * EXAMPLES
    assert len(set(seen)) == 2 * EXAMPLES
