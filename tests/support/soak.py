"""Tests marked ``soak`` make the same checks as other tests, with many more seeds or cases.

``make soak`` runs them; ``STREAMITER_SOAK_SEED`` is the first seed, ``STREAMITER_SOAK_RUNS`` the number of
seeds. ``tests/conftest.py`` makes the fixture known to all tests.
"""

import os
from collections.abc import Callable

import pytest
from _pytest.mark.structures import ParameterSet

__all__ = ["ForEachSeed", "for_each_soak_seed", "in_soak", "soak_header", "without_time_limits"]

# Enough seeds to see that a soak test works; ``make soak`` uses more.
_RUNS = 100
# The seeds of a test are divided into this many shares, which run in parallel on several cores.
_SHARES = 8

ForEachSeed = Callable[[Callable[[int], object]], None]


@pytest.fixture(params=range(_SHARES), ids=lambda share: f"share {share + 1} of {_SHARES}")
def for_each_soak_seed(request: pytest.FixtureRequest) -> ForEachSeed:
    """Call a check with each seed of this share; a failure names its seed, and the command to run it alone."""
    first, runs = _first_seed(), _runs()

    def run(check: Callable[[int], object]) -> None:
        for seed in range(first + request.param, first + runs, _SHARES):
            try:
                check(seed)
            except BaseException as error:
                error.add_note(f"seed {seed}; alone: make soak SEED={seed} RUNS=1")
                raise

    return run


def in_soak(*cases: object) -> list[ParameterSet]:
    """Return more cases of a parametrized test, which only ``make soak`` runs; a tuple has the values of a case."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]


def soak_header(config: pytest.Config) -> str | None:
    """Return a line with the seeds of this run, or None if no soak tests run."""
    if not config.option.markexpr.startswith("soak"):
        return None
    return f"soak: seeds {_first_seed()} to {_first_seed() + _runs() - 1}"


def without_time_limits(items: list[pytest.Item]) -> None:
    """Remove the time limits of a soak test, which may take hours; its checks have their own limits.

    A test of random examples has no limit either if the environment sets the number of examples.
    """
    soaked = ["soak", *(["random_examples"] if os.environ.get("STREAMITER_EXAMPLES") else [])]
    for item in items:
        if any(map(item.get_closest_marker, soaked)) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(0))


def _first_seed() -> int:
    return int(os.environ.get("STREAMITER_SOAK_SEED", "0"))


def _runs() -> int:
    return int(os.environ.get("STREAMITER_SOAK_RUNS", str(_RUNS)))
