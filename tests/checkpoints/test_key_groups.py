"""Keys: the valid values, their bytes, and the groups in which their state is stored."""

import numpy as np
import pytest
from checkpoints.plain_values import many, some_bytes, some_int, some_text
from support.examples import random_examples

from streamiter.values.subtasks import KEY_GROUPS, check_keys, encode_key, key_group, key_groups, normalize_key

KINDS_OF_KEYS = (some_int, some_int, some_text, some_bytes)


def some_key(random, levels=2):
    if levels and random.random() < 0.25:
        return tuple(some_key(random, levels - 1) for _ in range(random.randint(0, 3)))
    return random.choice(KINDS_OF_KEYS)(random)


def two_keys(random):
    """Return two keys, often from the same few keys, because random keys are rarely equal."""
    if random.random() < 0.3:
        few = [0, 1, "", "a", b"", b"a", (), (0,), ((),), ("a", 0), (b"a", 0)]
        return random.choice(few), random.choice(few)
    return some_key(random), some_key(random)


@random_examples(two_keys)
def test_keys_have_the_same_bytes_exactly_when_they_are_equal(keys):
    """Two keys with the same bytes shared their state."""
    first, second = keys
    assert (encode_key(first) == encode_key(second)) == (first == second)


def test_keys_that_look_alike_differ():
    """A user id as a number, as text and as bytes was one key, although these are three keys."""
    alike = [1, "1", b"1", (1,), ("1",), (b"1",), ((1,),), "", b"", (), (1, 1), ("1", 1), ("11",), "\ud800", -1, 2**64]
    assert len({encode_key(key) for key in alike}) == len(alike)


@pytest.mark.parametrize(
    ("given_key", "plain"),
    [
        *((np.dtype(char).type(7), 7) for char in "bBhHiIlLqQ"),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.str_("a\0"), "a\0"),
        (np.bytes_(b"a\0"), b"a\0"),
        ((np.int8(1), (np.str_("a"), b"b")), (1, ("a", b"b"))),
    ],
)
def test_numpy_scalars_are_the_keys_they_equal(given_key, plain):
    """Keys came from columns on one day and from JSON on the next, and their state was not found."""
    normal = normalize_key(given_key)
    assert repr(normal) == repr(plain)
    assert encode_key(given_key) == encode_key(plain)
    assert key_group(given_key) == key_group(plain)


@pytest.mark.parametrize("keys", [[1, "a", b"b"], [(1, "a"), (b"c",)], []])
def test_normal_keys_are_returned_without_a_copy(keys):
    """The check copied the keys in every batch of a keyed step."""
    assert check_keys(keys) is keys


def test_other_keys_are_normalized_in_order():
    """One column of numpy integers made the keys different, or changed their order."""
    assert repr(check_keys([np.int64(1), "a", (np.str_("b"), (np.int8(2),))])) == repr([1, "a", ("b", (2,))])


def keys_and_groups(random):
    kind = random.choice((some_key, some_int, some_text))
    return many(random, kind, 20), random.choice((1, 7, 128))


@random_examples(keys_and_groups)
def test_the_groups_of_a_batch_are_those_of_its_keys(example):
    """Timers and restored state, found by single keys, and data, sent in batches, met in different subtasks."""
    keys, groups = example
    assert key_groups(keys, groups).tolist() == [key_group(key, groups) for key in keys]


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i4", ">i4", ">i8", "<u8", ">u8", "q", "U3", ">U3", "S3", "O"])
def test_the_groups_of_an_array_are_those_of_its_elements(dtype):
    """The fast path for columns, without Python objects, computed other groups."""
    keys = np.array([0, 1, 7, 99, 127]).astype(dtype)
    if np.dtype(dtype).kind in "iu":
        keys[:2] = np.iinfo(dtype).min, np.iinfo(dtype).max
    for groups in (KEY_GROUPS, 7):
        assert key_groups(keys, groups).tolist() == [key_group(key, groups) for key in keys]


@pytest.mark.parametrize("keys", [[], [1, "a"], [2**70], [1, 2**64]])
def test_groups_are_whole_numbers_for_any_keys(keys):
    """The groups of an empty batch were floats, which are no indices."""
    assert key_groups(keys).dtype == np.int64


STABLE = [
    (0, "00", 0),
    (1, "01", 101),
    (-1, "ff", 123),
    (128, "cc80", 102),
    (2**63 - 1, "cf7fffffffffffffff", 61),
    (2**64 - 1, "cfffffffffffffffff", 123),
    (2**64, "c70904010000000000000000", 0),
    (2**64 + 1, "c70904010000000000000001", 110),
    (-(2**63) - 1, "c70904ff7fffffffffffffff", 5),
    ("", "a0", 18),
    ("user-1", "a6757365722d31", 115),
    ("ключ", "a8d0bad0bbd18ed187", 113),
    ("\ud800", "a3eda080", 26),
    (b"user-1", "c406757365722d31", 18),
    ((1, "a", (b"b",)), "9301a16191c40162", 15),
]


@pytest.mark.parametrize(("key", "encoded", "group"), STABLE)
def test_bytes_and_groups_never_change(key, encoded, group):
    """The bytes or the group of a key changed, and the keyed state of older checkpoints was not found."""
    assert encode_key(key).hex() == encoded
    assert key_group(key) == group


SPREAD = {
    "small ints": list(range(20_000)),
    "even ints": list(range(0, 40_000, 2)),
    "multiples of 128": list(range(0, 128 * 20_000, 128)),
    "negative ints": list(range(-20_000, 0)),
    "powers of ten apart": [number * 10**9 for number in range(20_000)],
    "numbered names": [f"user-{number}" for number in range(20_000)],
    "padded names": [f"{number:08}" for number in range(20_000)],
    "bytes": [number.to_bytes(4, "big") for number in range(20_000)],
    "pairs": [(number % 141, number // 141) for number in range(20_000)],
    "huge ints": [number << 64 for number in range(1, 20_001)],
}


@pytest.mark.parametrize("groups", [KEY_GROUPS, 100])
@pytest.mark.parametrize("keys", SPREAD.values(), ids=SPREAD.keys())
def test_keys_spread_evenly_over_the_groups(keys, groups):
    """Ids in a row, or all even, loaded one subtask with most keys.

    Chi-squared of 127 degrees of freedom has mean 127 and deviation 16: more than six deviations are no chance.
    """
    counts = np.bincount(key_groups(keys, groups), minlength=groups)
    expected = len(keys) / groups
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < (groups - 1) + 6 * np.sqrt(2 * (groups - 1))


def test_an_int_past_64_bits_is_not_cut_to_them() -> None:
    """2**64 and 0 shared a group; with the usual number of groups they do so by chance."""
    assert (key_group(0, 1000), key_group(2**64, 1000)) == (0, 968)
