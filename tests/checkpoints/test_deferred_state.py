"""Deferred state is a reference in the encoding, in order, and it is released if encoding fails."""

from contextlib import suppress

import pytest
from checkpoints.plain_values import Click, Point, many, same, some_int, some_plain_value, some_text
from support.examples import random_examples

from streamiter.errors import PlainDataError
from streamiter.values.deferred import Deferred
from streamiter.values.plain_data import PlainData

PLAIN = PlainData([Click, Point])


class Values(Deferred):
    """Plain values as deferred state; it counts its releases."""

    def __init__(self, *values):
        self.values = values
        self.released = 0

    def frames(self):
        return map(PLAIN.encode, self.values)

    def release(self):
        self.released += 1


def some_piece(random):
    return Values(*many(random, some_int, 3))


def some_state(random, levels=3):
    """Return plain values with deferred pieces at any place except in a key."""
    kind = random.randrange(8) if levels else 0
    if kind < 2:
        return some_plain_value(random, 1)
    if kind < 4:
        return some_piece(random)

    def inner(random):
        return some_state(random, levels - 1)

    if kind == 4:
        return many(random, inner)
    if kind == 5:
        return tuple(many(random, inner))
    if kind == 6:
        return {some_text(random): inner(random) for _ in range(random.randint(0, 4))}
    return Click(user=some_text(random), more=inner(random))


def materialized(state, found):
    """Return the state with a list instead of each piece; append the pieces to ``found`` in order."""
    if isinstance(state, Values):
        found.append(state)
        return list(state.values)
    if type(state) in (list, tuple):
        return type(state)([materialized(item, found) for item in state])
    if type(state) is dict:
        return {key: materialized(item, found) for key, item in state.items()}
    if type(state) is Click:
        return Click(state.user, state.item, materialized(state.more, found))
    return state


def listed(deferred):
    return lambda number: [PLAIN.decode(frame) for frame in deferred[number].frames()]


@random_examples(some_state)
def test_deferred_pieces_keep_their_places_and_other_state_is_exact(state):
    """A large piece was restored in another step's place, as a model that was never trained."""
    found = []
    expected = materialized(state, found)
    data, deferred = PLAIN.encode_state(state)
    assert [id(piece) for piece in deferred] == [id(piece) for piece in found]
    assert same(PLAIN.decode_state(data, listed(deferred)), expected)
    assert not any(piece.released for piece in deferred)


def test_a_piece_before_a_lone_surrogate_is_one_piece():
    """With text that is not UTF-8 the encoder starts again, and earlier pieces were included twice."""
    state = {"piece": Values(1, 2), "file": "\ud800"}
    data, deferred = PLAIN.encode_state(state)
    assert deferred == [state["piece"]]
    assert PLAIN.decode_state(data, listed(deferred)) == {"piece": [1, 2], "file": "\ud800"}


@random_examples(some_state)
def test_state_without_deferred_pieces_is_encoded_as_ever_and_other_state_refused(state):
    """A record that refers to state outside of the snapshot was stored, and its state was lost."""
    found = []
    materialized(state, found)
    data, _ = PLAIN.encode_state(state)
    if found:
        with pytest.raises(PlainDataError, match=r"given .*Values; only what an operator's snapshot\(\) gives"):
            PLAIN.encode(state)
        with pytest.raises(PlainDataError, match="refers to deferred state, which only the state of a check"):
            PLAIN.decode(data)
    else:
        assert PLAIN.encode(state) == data
        assert same(PLAIN.decode(data), state)


@random_examples(lambda random: (some_state(random), some_state(random)))
def test_all_deferred_pieces_of_refused_state_are_released(example):
    """Each failed checkpoint left the files of a replay cache open."""
    before, after = example
    found = []
    state = {"before": before, "at fault": {1, 2}, "after": [after, {"in": {"a set"}}]}
    materialized(before, found)
    materialized(after, found)
    with pytest.raises(PlainDataError, match=r'^mean\["at fault"\]: expected plain data .* given set; convert'):
        PLAIN.encode_state(state, name="mean")
    assert [piece.released for piece in found] == [1] * len(found)


def test_state_that_contains_itself_is_refused_and_its_deferred_pieces_released():
    """The search for deferred state in a value that contains itself never ended."""
    piece = Values(1)
    circle = []
    circle.append(circle)
    state = [circle, piece]
    with pytest.raises(PlainDataError, match="levels of nesting"):
        PLAIN.encode_state(state)
    assert piece.released


def test_the_same_piece_twice_is_refused():
    """The frames of a piece can be read once, and the second place was restored empty."""
    piece = Values(1)
    with pytest.raises(PlainDataError, match=r'^train\[1\]\["again"\]: expected each Deferred once'):
        PLAIN.encode_state([piece, {"again": piece}], name="train")
    assert piece.released


def some_changed_state(random):
    encoded, _ = PLAIN.encode_state(some_state(random))
    changed = bytearray(encoded)
    for _ in range(random.randint(1, 3)):
        changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed)


@random_examples(some_changed_state)
def test_changed_bytes_of_state_are_read_or_refused(changed):
    """A flipped bit requested a piece that does not exist, or one piece twice."""
    asked_for = []

    def resolve(number):
        asked_for.append(number)
        return []

    with suppress(PlainDataError):
        PLAIN.decode_state(changed, resolve)
    assert asked_for == list(range(len(asked_for)))
    assert len(asked_for) <= len(changed)


def test_pieces_out_of_order_are_refused():
    """Bytes that mix two parts of a snapshot were decoded."""
    data, _ = PLAIN.encode_state([Values(), Values()])
    first, second = b"\x00\x00\x00\x00", b"\x01\x00\x00\x00"
    assert data.index(first) < data.index(second)
    swapped = data.replace(second, first)
    with pytest.raises(PlainDataError, match="refers to deferred state 0 where 1 is due"):
        PLAIN.decode_state(swapped, lambda number: [])


def test_the_error_of_the_resolver_is_raised_unchanged():
    """A wrong checksum was reported as damaged plain data, without the name of the file."""
    data, _ = PLAIN.encode_state([Values()])

    def resolve(number):
        raise OSError("the file cannot be read")

    with pytest.raises(OSError, match="the file cannot be read"):
        PLAIN.decode_state(data, resolve)
