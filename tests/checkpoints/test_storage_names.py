"""Names of files that a store makes of the names of flows and runs."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamiter.checkpoints.snapshot import CheckpointId
from streamiter.checkpoints.storage_names import (
    checkpoint_of,
    name_of,
    shortened_name,
    snapshot_name,
    storage_name,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]))


@given(NAMES, NAMES)
def test_no_two_names_share_a_file(one: str, other: str) -> None:
    """Also where the file system takes capital and small letters for the same."""
    assert name_of(storage_name(one)) == one
    assert (storage_name(one).casefold() == storage_name(other).casefold()) == (one == other)
    for stored in (storage_name(one), shortened_name(one)):
        assert os.path.basename(stored) == stored
        assert stored not in ("", ".", "..")
    assert len(os.fsencode(shortened_name(one * 50))) <= 200


@given(st.integers(0, 10**12), NAMES.filter(bool))
def test_the_name_of_a_file_tells_which_snapshot_it_is(number: int, run: str) -> None:
    """What is to be removed is found by names, without reading files that may be damaged."""
    assert checkpoint_of(snapshot_name(CheckpointId(number, run))) == CheckpointId(number, run)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1-a.checkpoint",
        "0000000001-.checkpoint",
        "0000000001-a.checkpoint.partial",
        "0000000001-A.checkpoint",
    ],
)
def test_files_of_others_are_no_snapshots(name: str) -> None:
    """Pruning must not touch what it did not write."""
    assert checkpoint_of(name) is None
