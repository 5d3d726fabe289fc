"""What to tell about a run that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamiter.checkpoints.plain_data import PlainData
from streamiter.testing.restore.differences import first_difference

__all__ = ["RestoreMismatch", "lost_attributes", "state_difference", "stream_difference"]


class RestoreMismatch(AssertionError):
    """A restored run is not the run that went on: the message says what differs, where it was cut, what to do."""


def stream_difference(
    expected: Mapping[str, Sequence[bytes]],
    given: Mapping[str, Sequence[bytes]],
    plain_data: PlainData,
    *,
    ordered: bool = True,
) -> str | None:
    """The first record that differs, of all outputs."""
    for name, wanted in expected.items():
        came = given.get(name, ())
        if not ordered:
            wanted, came = sorted(wanted), sorted(came)
        for number, (one, other) in enumerate(zip(wanted, came, strict=False), 1):
            if one != other:
                difference = first_difference(plain_data.decode(one), plain_data.decode(other), "record")
                return f"output {name!r}, record {number} of {len(wanted)}: {difference}"
        if len(wanted) != len(came):
            more = wanted[len(came) :] or came[len(wanted) :]
            kind = "missing" if len(came) < len(wanted) else "too many"
            return (
                f"output {name!r}: expected {len(wanted)} records, given {len(came)}; {kind}: "
                f"{plain_data.decode(more[0])!r:.200}"
            )
    return None


def state_difference(expected: bytes | None, given: bytes | None, plain_data: PlainData) -> str | None:
    """The first place where two states differ."""
    if expected == given:
        return None
    if expected is None or given is None:
        return f"a state at the end: expected {expected is not None}, given {given is not None}"
    difference = first_difference(plain_data.decode(expected), plain_data.decode(given), "snapshot")
    return f"the state before the end: {difference}"


def lost_attributes(
    before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Sentences about attributes that are not after a restore what they were at the cut."""
    lost: list[str] = []
    for who, attributes in before.items():
        restored = after.get(who, {})
        for path, value in attributes.items():
            there = restored.get(path, "nothing")
            if there != value:
                lost.append(
                    f"attribute {path!r} of {who} was {value} at the cut and is {there} after restore()"
                )
    return lost
