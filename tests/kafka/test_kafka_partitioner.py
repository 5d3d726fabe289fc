"""Keys go where the Java client sends them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamiter_kafka.partitioner import murmur2, partitions_of_keys

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


@given(st.lists(st.binary(max_size=40), min_size=8, max_size=60), st.integers(1, 1000))
def test_many_keys_at_once_go_where_each_goes_alone(keys: list[bytes], partitions: int) -> None:
    """Few keys are hashed one by one and many together: a key must not move with the size of its batch."""
    alone = [(murmur2(key) & 0x7FFFFFFF) % partitions for key in keys]
    assert partitions_of_keys(keys, partitions) == alone
