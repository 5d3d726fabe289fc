"""The names of files that a store makes from the names of flows and runs."""

import os
from random import Random

import pytest
from checkpoints.plain_values import CHARACTERS
from support.examples import random_examples

from streamiter.engine.storage.flow_record import (
    STORAGE_NAME_CHARACTERS,
    checkpoint_of,
    is_shortened,
    name_of,
    shortened_name,
    snapshot_name,
    storage_name,
)
from streamiter.engine.storage.snapshot import CheckpointId
from streamiter.errors import ConfigurationError

CHARACTERS_OF_NAMES = [character for character in CHARACTERS if not "\ud800" <= character <= "\udfff"]


def some_name(random: Random) -> str:
    """Return a name of characters with a meaning in file systems, and sometimes of any characters."""
    if random.random() < 0.7:
        return "".join(random.choices(CHARACTERS_OF_NAMES, k=random.choice((0, 1, 1, 2, 3, 8))))
    return "".join(chr(random.randrange(0xD800)) for _ in range(random.randint(0, 4)))


def two_names(random: Random) -> tuple[str, str]:
    """Return two names, some of which differ only in capital and small letters."""
    one = some_name(random)
    return one, random.choice((some_name(random), one.upper(), one.lower(), one.casefold(), one))


@random_examples(two_names)
def test_no_two_names_share_a_file(names: tuple[str, str]) -> None:
    """Two names shared a file on a file system that does not distinguish capital and small letters."""
    one, other = names
    assert name_of(storage_name(one)) == one
    assert (storage_name(one).casefold() == storage_name(other).casefold()) == (one == other)
    for stored in (storage_name(one), shortened_name(one)):
        assert os.path.basename(stored) == stored
        assert stored not in ("", ".", "..")
    assert len(os.fsencode(shortened_name(one * 50))) <= 200


@random_examples(lambda random: (random.randrange(10 ** random.randint(1, 13)), some_name(random) or "run"))
def test_the_name_of_a_file_identifies_its_snapshot(example: tuple[int, str]) -> None:
    """A snapshot to remove, which is found by its name, needed to be read, although it may be damaged."""
    number, run = example
    assert checkpoint_of(snapshot_name(CheckpointId(number, run))) == CheckpointId(number, run)


def test_names_of_small_letters_are_stored_unchanged() -> None:
    """A person who looked at the directory could not read the names without a table."""
    assert storage_name("clicks_2024-05.a") == shortened_name("clicks_2024-05.a") == "clicks_2024-05.a"
    assert storage_name(".Ab.") == "%2e%41b."
    assert storage_name("") == "%"


@pytest.mark.parametrize("stored", ["%61", "A", "%2E", ".a", "%ff", "a~b"])
def test_an_invalid_stored_name_has_no_name(stored: str) -> None:
    """One name had two files, of which one was found and the other removed."""
    assert name_of(stored) is None


def test_only_a_name_that_is_too_long_is_shortened_to_the_limit() -> None:
    """A name that just fits was shortened, and could not be read back from its file."""
    fits, long = "a" * STORAGE_NAME_CHARACTERS, "a" * (STORAGE_NAME_CHARACTERS + 1)
    assert shortened_name(fits) == fits
    assert not is_shortened(fits)
    assert len(shortened_name(long)) == STORAGE_NAME_CHARACTERS
    assert is_shortened(shortened_name(long))
    assert shortened_name(long) != shortened_name(long + "a")


def test_half_a_character_is_refused_by_name() -> None:
    """The encoder's own error named neither the flow nor a remedy."""
    with pytest.raises(ConfigurationError) as raised:
        storage_name("a\ud800")
    assert str(raised.value) == (
        "checkpoints: expected names of text, given 'a\\ud800', which holds half a character; rename it"
    )


@pytest.mark.parametrize(
    "name",
    [
        "",
        "00000000001-a.checkpoint",
        "1-a.checkpoint",
        "0000000001-.checkpoint",
        "0000000001-a.checkpoint.partial",
        "0000000001-A.checkpoint",
    ],
)
def test_files_of_others_are_no_snapshots(name: str) -> None:
    """Pruning removed files that the store had not written."""
    assert checkpoint_of(name) is None
