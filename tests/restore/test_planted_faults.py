"""The check finds operators whose restored run differs from the original run, and its error names a remedy."""

import functools
import re
from typing import Any

import pytest
from restore import planted_faults
from restore.planted_faults import ForgetsItsEpoch, Gathers, Momentum, ResumesAtItsPositions, SharesItsState, UsesHash

from streamiter.errors import ConfigurationError
from streamiter.testing import RestoreMismatch, RestoreProcess, check_restore

NUMBERS = [1.0, -2.0, 0.5, 3.0]
WORDS = ["to", "be", "or", "not", "that", "is", "the", "question"]

FAULTS: list[tuple[str, list[Any], dict[str, Any], list[str]]] = [
    (
        "ForgetsASlot",
        NUMBERS,
        {},
        [
            r"check_restore(ForgetsASlot), cut after record 1 ([1.0]), restored in a fresh process",
            r"output 'output', record 2 of 4: record: expected",
            r"attribute 'momentum' of ForgetsASlot of step 'ForgetsASlot' was 1.0 at the cut and is 0.0 after",
        ],
    ),
    ("RoundsItsState", NUMBERS, {}, ["record: expected", "attribute 'weight'"]),
    ("SharesItsState", NUMBERS, {}, ["changed afterwards: state[0]: expected nothing, given 1.0", "give copies"]),
    ("UsesTheGivenState", NUMBERS, {}, ["restore() of UsesTheGivenState", "was given changed afterwards"]),
    ("EmptiesOnSnapshot", NUMBERS, {}, ["called twice in a row after record 1", "it must only look"]),
    ("CountsSnapshots", NUMBERS, {}, ["with snapshots it gives other results than without", "given 2"]),
    ("StampsItsState", NUMBERS, {}, ["called twice in a row", "state[0]: expected"]),
    ("UsesTheWallClock", NUMBERS, {}, ["two runs from the beginning differ", "take time from context.clock"]),
    ("UsesMonotonicTime", NUMBERS, {}, ["monotonic_s starts at 0 in each process"]),
    ("IteratesOverASet", WORDS, {}, ["restored in a fresh process: output 'output', record"]),
    ("UsesHash", [*WORDS, *WORDS], {}, ["Restored in this process it is equal", "hash(), id()"]),
    ("KeepsASet", WORDS, {}, ["snapshot() of KeepsASet", "given set; convert it, for example to a sorted list"]),
    ("CountsInItsClass", NUMBERS, {}, ["cut after record 1", "expected 2, given 1"]),
    ("FailsToRestore", NUMBERS, {}, ["the restored run failed: JobFailed", "list indices must be integers"]),
    ("ForgetsItsEpoch", [1, 2, 3, 4], {"epochs": 2}, ["attribute 'total' of ForgetsItsEpoch", "was 1 at the cut"]),
    ("IgnoresItsPositions", [], {}, ["output 'output', record 2 of 3: record: expected 2, given 1"]),
]


@pytest.mark.parametrize(("name", "records", "options", "expected"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_found_and_reported(
    name: str, records: list[Any], options: dict[str, Any], expected: list[str], restore_process: RestoreProcess
) -> None:
    """A check that finds no fault proves nothing: each of these faults has damaged a real restart."""
    with pytest.raises(RestoreMismatch) as found:
        check_restore(getattr(planted_faults, name), records, **options, process=restore_process)
    message = str(found.value)
    for part in expected:
        assert part in message, message


@pytest.mark.parametrize(
    ("factory", "records"), [(Momentum, NUMBERS), (Gathers, NUMBERS), (ResumesAtItsPositions, None)]
)
def test_a_sound_operator_passes(factory: Any, records: Any, restore_process: RestoreProcess) -> None:
    """A check with false alarms gets switched off."""
    check_restore(factory, records, process=restore_process)
    check_restore(factory, records, fresh_process=False)


def test_some_faults_are_found_only_in_a_fresh_process() -> None:
    """Hashes are constant within one process, so this fault shows only in a fresh process."""
    check_restore(UsesHash, [*WORDS, *WORDS], fresh_process=False)


def test_a_factory_that_cannot_be_imported_elsewhere_is_refused(restore_process: RestoreProcess) -> None:
    """A lambda has no importable name, so the error must come before anything runs."""

    class Local(Momentum): ...

    for factory in (Local, lambda: Momentum(), functools.partial(Local)):
        with pytest.raises(ConfigurationError, match=r"made inside a function; move it .*; or pass fresh_process"):
            check_restore(factory, NUMBERS, process=restore_process)
        check_restore(factory, NUMBERS, fresh_process=False)


def test_a_factory_may_be_given_by_name(restore_process: RestoreProcess) -> None:
    """Programs may run the check from a list of names in a file."""
    check_restore("restore.planted_faults:Momentum", NUMBERS, process=restore_process)
    with pytest.raises(RestoreMismatch):
        check_restore("restore.planted_faults:ForgetsASlot", NUMBERS, cuts=2, process=restore_process)


def test_the_same_seed_cuts_at_the_same_places() -> None:
    """A failure that cannot be repeated cannot be fixed."""
    messages = set()
    for _ in range(2):
        with pytest.raises(RestoreMismatch) as found:
            check_restore(planted_faults.ForgetsASlot, NUMBERS, cuts=1, seed=3, fresh_process=False)
        messages.add(str(found.value))
    assert len(messages) == 1
    assert re.search(r"cut after record \d", messages.pop())


async def test_it_is_not_called_within_an_event_loop() -> None:
    """The check has its own event loops, and inside another loop the error came from asyncio."""
    with pytest.raises(ConfigurationError, match="no running event loop"):
        check_restore(SharesItsState, NUMBERS, fresh_process=False)


def test_an_operator_needs_records() -> None:
    """Without records every operator would pass."""
    with pytest.raises(ConfigurationError, match="given none; give a list"):
        check_restore(ForgetsItsEpoch, fresh_process=False)
