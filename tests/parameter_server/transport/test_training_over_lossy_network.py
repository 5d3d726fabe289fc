"""Real matrices behind a network that loses messages: every worker reads what its consistency promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from parameter_server.transport.lossy_network import EVERYTHING
from parameter_server.transport.planted_bugs import (
    forget_a_reply_that_was_sent,
    handle_every_message,
    handle_in_order_of_arrival,
)
from parameter_server.transport.training import Training
from support.soak import ForEachSeed

from streamiter.errors import ParameterServerError
from streamiter.parameter_server import ASP, BSP, SSP
from streamiter.parameter_server.consistency import Consistency

SEEDS = range(40)


def _play_all(seeds: Iterable[int], consistency: Consistency) -> None:
    for seed in seeds:
        Training(seed, consistency, EVERYTHING).play()


@pytest.mark.parametrize("consistency", [ASP(), BSP(), SSP(staleness=0), SSP(staleness=2)], ids=repr)
def test_workers_read_what_their_consistency_promises_over_a_lossy_network(consistency: Consistency) -> None:
    """A get overtook the clock before it and read another iteration than its consistency allows."""
    _play_all(SEEDS, consistency)


@pytest.mark.parametrize("plant", [handle_every_message, handle_in_order_of_arrival, forget_a_reply_that_was_sent])
@pytest.mark.parametrize("consistency", [BSP(), SSP(staleness=1)], ids=repr)
def test_a_planted_bug_is_found_by_what_workers_read(
    consistency: Consistency, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers read too little of the matrix to notice that an add was done twice."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, ParameterServerError)):
        _play_all(range(10), consistency)


@pytest.mark.soak
def test_training_holds_for_many_more_seeds(for_each_soak_seed: ForEachSeed) -> None:
    """A rare order of messages was missed by the seeds of the short test."""
    kinds = (ASP(), BSP(), SSP(staleness=0), SSP(staleness=2))
    for_each_soak_seed(lambda seed: Training(seed, kinds[seed % 4], EVERYTHING).play())
