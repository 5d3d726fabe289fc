"""A change turns the parameters of a version into those of the next one, to the last bit, whatever they are."""

import copy
import itertools
from random import Random
from typing import Any

import numpy as np
import pytest
from models.model_case import same
from support.examples import random_examples

from streamiter.models.changes import applied, changes_between
from streamiter.models.documents import array_bytes, freeze_arrays, own_copy, with_state


def some_array(random: Random) -> Any:
    shape = tuple(random.randrange(4) for _ in range(random.randrange(3)))
    dtype = random.choice(["f4", "f8", "f2", "i4", "i8", "u1", "?", "U3", ">f8"])
    values = [random.choice([0, 1, -1, 0.5, -0.0, 7]) for _ in range(int(np.prod(shape)))]
    return np.array([abs(value) for value in values] if dtype == "u1" else values).astype(dtype).reshape(shape)


def some_value(random: Random, depth: int = 3) -> Any:
    """Return any part of parameters."""
    leaves = [some_array, lambda r: r.choice([0, 1, True, None, 0.0, -0.0, "a", "", b"", b"x", 1.5, np.float32(0.5)])]
    if depth:
        inner = lambda r: some_value(r, depth - 1)  # noqa: E731
        leaves += [
            lambda r: [inner(r) for _ in range(r.randrange(4))],
            lambda r: tuple(inner(r) for _ in range(r.randrange(3))),
            lambda r: {name: inner(r) for name in r.sample("abcd", r.randrange(4))},
        ]
    return random.choice(leaves)(random)


def next_value(random: Random, value: Any) -> Any:
    """Return a value that is like the given one in many parts."""
    if random.random() < 0.2:
        return some_value(random)
    if isinstance(value, np.ndarray) and value.size and random.random() < 0.7:
        new = value.copy()
        new.reshape(-1)[random.randrange(value.size)] = random.choice([0, 1])
        return new
    if isinstance(value, dict):
        names = random.sample([*value], len(value)) if random.random() < 0.2 else [*value]
        return {name: next_value(random, value[name]) for name in names if random.random() < 0.9}
    if isinstance(value, (list, tuple)):
        return type(value)(next_value(random, part) for part in value)
    return value


@random_examples(lambda random: ([(first := some_value(random)), next_value(random, first)]))
def test_any_value_becomes_the_next_one(values: list[Any]) -> None:
    """−0.0 was taken for 0.0, and a score of one in a million rows had another sign in a follower."""
    old, new = values
    freeze_arrays(old)
    before = own_copy(old)
    assert same(applied(old, changes_between(old, new)), new)
    assert same(old, before)  # followers share the arrays of a version
    assert not changes_between(new, own_copy(new))


def keyed(random: Random, names: tuple[str, ...], others: int) -> dict[str, Any]:
    """Return arrays with a row for each of some ascending keys, and some rows more."""
    keys = np.array(sorted(random.sample(range(60), random.randrange(30))), np.int64)
    rng = np.random.default_rng(random.randrange(100))
    return {"keys": keys, **{name: rng.random((others + len(keys), *[3][: n % 2])) for n, name in enumerate(names)}}


@random_examples(lambda random: [keyed(random, ("a", "b"), others) for others in [random.randrange(3)] * 2])
def test_rows_are_followed_by_their_keys(example: list[dict[str, Any]]) -> None:
    """A feature that came or went moved all others by a row, and each of them was published again."""
    one, other = example
    changes = changes_between(one, other)
    assert same(applied(own_copy(one), changes), other)


@random_examples(lambda random: [keyed(random, ("a", "b"), others) for others in [random.randrange(3)] * 5])
def test_several_changes_are_applied_at_once(versions: list[dict[str, Any]]) -> None:
    """A reader that starts late applies all changes of a chain, and moved each row with each of them."""
    changes = [each for one, other in itertools.pairwise(versions) for each in changes_between(one, other)]
    freeze_arrays(versions)
    assert same(applied(versions[0], changes), versions[-1])


@pytest.mark.parametrize("in_front", [True, False])
@pytest.mark.parametrize("others", [0, 2])
def test_a_key_that_comes_or_goes_is_one_row(others: int, in_front: bool) -> None:
    """The change has the new row and the changed row, wherever the rows of the fields are."""
    keys = np.arange(0, 2000, 2)
    weights = np.random.default_rng(1).random((len(keys) + others, 8))
    first = others if in_front else 0
    new = np.insert(np.delete(weights, first + 100, axis=0), first + 500, 0.5, axis=0)
    new[first + 700] += 1.0
    now = np.sort(np.append(np.delete(keys, 100), 1001))
    assert now[500] == 1001
    changes = changes_between({"places": keys, "w": weights}, {"places": now, "w": new})
    assert [operation["path"] for operation in changes] == [["places"], ["w"]]
    assert changes[1]["removed"].tolist() == [first + 100]
    assert changes[1]["inserted"].tolist() == [first + 500]
    assert changes[1]["rows"].tolist() == [first + 500, first + 700]
    assert array_bytes(changes) < 0.01 * weights.nbytes
    assert same(applied({"places": keys, "w": weights}, changes), {"places": now, "w": new})


def test_arrays_follow_their_own_keys_where_lists_of_keys_are_of_one_length() -> None:
    """Rows followed the keys of another list, which of them depended on the process, and half of them came again."""
    rng, old, new = np.random.default_rng(1), {}, {}
    for name, at in [("a", 100), ("b", 400), ("c", 250)]:
        keys, weights = np.arange(0, 1000, 2), rng.random(500)
        old[name] = {"keys": keys, "weights": weights}
        new[name] = {"keys": np.insert(keys, at, 2 * at - 1), "weights": np.insert(weights, at, 0.5)}
    changes = changes_between(old, new)
    assert [len(operation["rows"]) for operation in changes] == [1] * 6
    assert same(applied(own_copy(old), changes), new)


def test_the_state_of_a_learner_changes_by_its_rows() -> None:
    """A state is bytes with a checksum: of one row that was learned, all of it was published again."""
    weights = np.random.default_rng(1).random((1000, 12))
    content = {"model": {"weights": weights, ("a", 1): [np.int8(1), float("inf")], "rows": 10**30}}
    old = with_state({"weights": np.zeros(2)}, "Model", content)
    learned = copy.deepcopy(content)
    learned["model"]["weights"][7] += 1.0  # type: ignore[index]
    learned["model"]["rows"] = 10**30 + 1
    new = with_state({"weights": np.zeros(2)}, "Model", learned)
    [change] = changes_between(old, new)
    assert len(change["state"]) < 0.01 * len(new["state"])
    assert same(applied(old, [change]), new)


@pytest.mark.parametrize("state", [b"", b"no state", b"streamiter state 1 Model 00\nno plain data", b"\xff\n\x00"])
def test_bytes_that_are_no_state_are_replaced(state: bytes) -> None:
    """A model of another library may have a parameter of this name."""
    for old, new in [(state, b"other"), (b"other", state)]:
        assert applied({"state": old}, changes_between({"state": old}, {"state": new})) == {"state": new}


@pytest.mark.parametrize(
    "operation",
    [
        {"path": ["none", 0], "value": 1},
        {"path": ["w"], "rows": np.array([3]), "values": np.zeros(1)},
        {"path": ["w"], "rows": np.array([-1]), "values": np.zeros(1)},
        {"path": ["w"], "rows": np.array([1, 0]), "values": np.zeros(2)},
        {"path": ["w"], "rows": np.array([0]), "values": np.zeros(1, np.float32)},
        {"path": ["w"], "rows": np.array([0]), "values": np.zeros((1, 2))},
        {"path": ["w"], "removed": np.array([9]), "rows": np.array([], int), "values": np.zeros(0)},
        {"path": ["w"], "inserted": np.array([9]), "rows": np.array([9]), "values": np.zeros(1)},
        {"path": ["s"], "rows": np.array([0]), "values": np.zeros(1)},
        {"path": ["w"], "rows": np.zeros((1, 1), int), "values": np.zeros(1)},
        {"path": ["w"], "rows": [0], "values": [1.0]},
        {"path": ["w"]},
        {"path": 5, "value": 1},
        {"path": ["state"], "head": "streamiter state 1 Model 00", "state": b"no plain data"},
        {"path": ["d"], "names": 7},
        {"value": 1},
        7,
    ],
)  # fmt: skip
def test_a_change_of_other_parameters_is_refused(operation: Any) -> None:
    """Rows outside of an array raised IndexError, which ended the task that followed the model."""
    with pytest.raises(ValueError, match=r"fit|expected"):
        applied({"w": np.zeros(3), "s": "text", "d": {}, "state": b"head\n\x00"}, [operation])
