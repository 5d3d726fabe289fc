"""A key goes to the same partition as with the Java client."""

from __future__ import annotations

from random import Random

import pytest
from support.examples import random_examples

from streamiter_kafka.packing import partitions_of_keys
from streamiter_kafka.wire import murmur2

# The hashes are those of the Java client's own test, UtilsTest.testMurmur2.
JAVA_HASHES = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("key", "expected"), JAVA_HASHES.items())
def test_the_hash_is_that_of_the_java_client(key: bytes, expected: int) -> None:
    """Records with equal keys from two languages went to different partitions, because the hashes differed."""
    assert murmur2(key) == expected % 2**32


def keys_and_partitions(random: Random) -> tuple[list[bytes], int]:
    keys = [random.randbytes(random.randrange(41)) for _ in range(random.randint(8, 40))]
    return keys, random.randint(1, 1000)


@random_examples(keys_and_partitions, examples=500)
def test_many_keys_go_to_the_same_partitions_as_single_keys(example: tuple[list[bytes], int]) -> None:
    """The partition of a key depended on the size of its batch, because many keys are hashed together."""
    keys, partitions = example
    alone = [(murmur2(key) & 0x7FFFFFFF) % partitions for key in keys]
    assert partitions_of_keys(keys, partitions) == alone
