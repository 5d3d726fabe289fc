"""Keys go where the Java client sends them."""

from __future__ import annotations

from random import Random

import pytest
from support.examples import random_examples

from streamiter_kafka.packing import murmur2, partitions_of_keys

# From the Java client's own test, UtilsTest.testMurmur2.
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
    """Another hash would part equal keys that are written from two languages."""
    assert murmur2(key) == expected % 2**32


def keys_and_partitions(random: Random) -> tuple[list[bytes], int]:
    keys = [random.randbytes(random.randrange(41)) for _ in range(random.randint(8, 40))]
    return keys, random.randint(1, 1000)


@random_examples(keys_and_partitions, examples=500)
def test_many_keys_at_once_go_where_each_goes_alone(example: tuple[list[bytes], int]) -> None:
    """A few keys are hashed one by one and many together: the partition of a key must not depend on the size of
    its batch.
    """
    keys, partitions = example
    alone = [(murmur2(key) & 0x7FFFFFFF) % partitions for key in keys]
    assert partitions_of_keys(keys, partitions) == alone
