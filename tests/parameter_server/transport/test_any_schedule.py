"""Requests over a network that delays, reorders and repeats calls: handled once, in order, answered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from parameter_server.transport.lossy_network import CALM, EVERYTHING, NetworkFaults
from parameter_server.transport.planted_bugs import PLANTED
from parameter_server.transport.schedule import Broken, Schedule, check_schedule
from support.soak import ForEachSeed

from streamiter.errors import ParameterServerError

SEEDS = range(60)
SEEDS_TO_FIND_A_BUG = range(30)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(CALM, id="calm"),
        pytest.param(NetworkFaults(drop=0.4), id="drop"),
        pytest.param(NetworkFaults(repeat=0.5, delay_s=0.2), id="repeat"),
        pytest.param(NetworkFaults(linger=0.5, linger_s=30.0), id="reorder"),
        pytest.param(EVERYTHING, id="everything"),
    ],
)
def test_each_request_is_handled_once_and_in_order_over_a_lossy_network(faults: NetworkFaults) -> None:
    """A gradient was added twice, or after a clock that was sent later, and spoiled a model without an error."""
    for seed in SEEDS:
        check_schedule(Schedule(seed, faults))


@pytest.mark.parametrize(("plant", "broken"), PLANTED)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network disturbed too little, or the check compared too little, and every bug passed."""
    plant(monkeypatch)
    for seed in SEEDS_TO_FIND_A_BUG:
        for faults in (EVERYTHING, CALM):
            try:
                check_schedule(Schedule(seed, faults))
            except (Broken, KeyError, ParameterServerError) as found:
                if broken in str(found):
                    return
    pytest.fail(f"{plant.__name__} is found by none of {len(SEEDS_TO_FIND_A_BUG)} seeds")


@pytest.mark.soak
def test_sessions_hold_for_many_more_seeds(for_each_soak_seed: ForEachSeed) -> None:
    """A rare order of messages was missed by the seeds of the short test."""
    for_each_soak_seed(lambda seed: check_schedule(Schedule(seed, clients=seed % 5 + 1, requests=30)))
