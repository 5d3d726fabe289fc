"""Which snapshot a rollback restores."""

from __future__ import annotations

from typing import Any

import pytest

from streamiter.errors import ConfigurationError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.requests import CreateRequest
from streamiter.parameter_server.snapshots import KeptSnapshots, ShardSnapshot, SnapshotEvery


def part(number: int, state: str, workers: tuple[int, ...] = (0, 1)) -> ShardSnapshot[str]:
    """Return the part of a snapshot that one shard gives."""
    return ShardSnapshot(number, workers, (CreateRequest(Matrix("w", rows=1, columns=2), 2),), state)


def test_only_a_snapshot_from_all_shards_is_restored() -> None:
    """One half of the parameters came from clock 10, the other half from clock 20."""
    kept = KeptSnapshots[str](shards=2)
    assert not kept.add(0, part(1, "left 1"))
    assert not kept.add(0, part(2, "left 2"))
    assert kept.latest is None
    assert kept.add(1, part(1, "right 1"))
    assert kept.latest is not None
    assert kept.latest.states == ("left 1", "right 1")
    assert kept.add(1, part(2, "right 2"))
    assert kept.latest.states == ("left 2", "right 2")
    assert [create.matrix.name for create in kept.latest.matrices] == ["w"]


def test_parts_from_before_a_rollback_are_not_combined_with_later_parts() -> None:
    """After a loss the shards reached the same clock again, and one half came from before the loss."""
    kept = KeptSnapshots[str](shards=2)
    for shard in range(2):
        kept.add(shard, part(1, f"{shard}"))
    kept.add(0, part(2, "of the past"))
    kept.replace(kept.latest)
    assert not kept.add(1, part(2, "new right"))
    assert kept.add(0, part(2, "new left"))
    assert kept.latest is not None
    assert kept.latest.states == ("new left", "new right")
    assert not kept.add(0, part(1, "late"))


def test_a_worker_that_has_not_joined_all_shards_is_not_in_a_snapshot() -> None:
    """A worker rejoined on one shard only, and the others waited for its clock."""
    kept = KeptSnapshots[str](shards=2)
    kept.add(0, part(1, "left", workers=(0, 1, 2)))
    kept.add(1, part(1, "right", workers=(0, 2)))
    assert kept.latest is not None
    assert kept.latest.workers == (0, 2)


@pytest.mark.parametrize(("clocks", "of"), [(0, "w"), (1.5, "w"), (1, ""), (1, None)])
def test_impossible_settings_of_snapshots_are_refused(clocks: Any, of: Any) -> None:
    """A snapshot every 0 clocks was accepted."""
    with pytest.raises(ConfigurationError, match="SnapshotEvery"):
        SnapshotEvery(clocks=clocks, of=of)
