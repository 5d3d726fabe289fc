"""Parameters that are read from a topic equal the published parameters exactly."""

import math
from random import Random
from typing import Any, Literal

import numpy as np
import orjson
import pytest
import safetensors.numpy
from checkpoints.plain_values import many, some_bytes, some_float, some_text
from models.model_case import decoded, encoder, same
from support.examples import random_examples

from streamiter.models import ModelSnapshot

DTYPES = ["f2", "f4", "f8", ">f8", ">i2", "?", "i1", "i2", "i4", "i8", "u1", "u8"]
NAMES = ["list", "dict", "dtype", "value", "tensor", "values", "shape", "__metadata__", "a.b"]
"""Names that have a meaning in one of the formats."""


def finite(random: Random) -> float:
    while not math.isfinite(number := some_float(random)):
        pass
    return number


def text(random: Random) -> str:
    """Return a text without lone surrogates, which UTF-8 cannot contain."""
    return some_text(random).encode(errors="ignore").decode()[:8]


def name(random: Random) -> str:
    return random.choice(NAMES) if random.random() < 0.5 else text(random)


def array(random: Random) -> np.ndarray[Any, Any]:
    """Return an array of random bits except NaN and infinity."""
    shape = tuple(many(random, lambda random: random.randint(0, 4), 3))
    dtype = np.dtype(random.choice(DTYPES))
    if dtype == np.bool_:
        return np.array([random.random() < 0.5 for _ in range(math.prod(shape))], bool).reshape(shape)
    made = np.frombuffer(random.randbytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape).copy()
    if dtype.kind == "f":
        made[~np.isfinite(made)] = -0.0
    return made


def number(random: Random) -> Any:
    exact = random.choice((True, False, -(2**63), 2**64 - 1, 0, random.getrandbits(63)))
    return random.choice((exact, finite(random), np.float32(random.gauss(0, 9)), np.int8(random.randint(-128, 127))))


def nothing(_: Random) -> None:
    return None


def tree(random: Random, levels: int = 3) -> Any:
    kind = random.randrange(7 if levels else 4)
    if kind < 4:
        return random.choice((array, number, text, nothing, some_bytes))(random)
    if kind == 4:
        return {name(random): tree(random, levels - 1) for _ in range(random.randrange(4))}
    return (list, tuple)[kind - 5](many(random, lambda random: tree(random, levels - 1), 3))


def parameters(random: Random) -> Any:
    if random.random() < 0.3:
        return array(random)
    return {name(random): tree(random) for _ in range(random.randrange(5))}


def as_published(value: Any) -> Any:
    """Return the parameters that a reader should get: in native byte order, otherwise unchanged."""
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("="))
    if isinstance(value, dict):
        return {name: as_published(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(as_published(part) for part in value)
    return value


FORMS: list[Literal["json", "safetensors"]] = ["json", "safetensors"]


@random_examples(lambda random: (parameters(random), random.choice(FORMS)))
def test_parameters_of_every_type_are_read_bit_for_bit(example: tuple[Any, Literal["json", "safetensors"]]) -> None:
    """A float32 model that is read as float64, or −0.0 that is read as 0.0, differs from the trained model."""
    published, form = example
    [update] = decoded(encoder(format=form).encode([published]))
    assert same(update.parameters, as_published(published))


@random_examples(parameters)
def test_equal_models_give_equal_bytes(published: Any) -> None:
    """A restored run writes its updates again: the same chunks must have the same keys and checksum."""
    for form in FORMS:
        first, second = (encoder(format=form).encode([published]) for _ in range(2))
        assert first.values == second.values
        assert first.keys == second.keys


def test_json_of_float64_is_plain_lists_that_any_language_reads() -> None:
    """Consumers in other languages must be able to read a common model without a manual."""
    snapshot = ModelSnapshot(
        {"weights": np.array([0.1, -2.0]), "intercept": np.float64(0.5), "link": "logit"},
        records=1000,
        metrics={"loss": np.float32(0.25), "batches": 3},
        epoch=7,
    )
    batch = encoder(2, 5).encode([snapshot])
    assert orjson.loads(batch.values[0] or b"") == {
        "model": "ctr",
        "generation": 2,
        "version": 5,
        "epoch": 7,
        "records": 1000,
        "metrics": {"loss": 0.25, "batches": 3.0},
        "parameters": {"weights": [0.1, -2.0], "intercept": 0.5, "link": "logit"},
    }


def test_json_names_the_type_of_other_arrays() -> None:
    """A reader in another language needs the type and the shape of the flat list of values."""
    batch = encoder().encode([{"counts": np.array([[1, 2], [3, 4]], dtype=np.int32)}])
    assert orjson.loads(batch.values[0] or b"")["parameters"] == {
        "counts": {"dtype": "int32", "shape": [2, 2], "values": [1, 2, 3, 4]}
    }


def test_record_has_the_model_as_key_and_the_headers_of_the_format() -> None:
    """Consumers filter by key and headers, without decoding values."""
    batch = encoder(2, 5).encode([ModelSnapshot(np.zeros(1), epoch=3)])
    assert batch.keys == [b"ctr"]
    assert batch.headers is not None
    assert dict(batch.headers[0]) == {
        "model": b"ctr",
        "generation": b"2",
        "version": b"5",
        "created_at": b"1700000000000",
        "content_type": b"application/json",
        "epoch": b"3",
    }


def test_large_arrays_go_into_safetensors_that_other_tools_open() -> None:
    """Tensors must have the names of the parameters, so that other safetensors libraries can use them."""
    weights = np.linspace(0, 1, 10_000)
    batch = encoder().encode([{"weights": weights, "layers": [{"bias": np.ones(2, np.float32)}], "link": "logit"}])
    assert batch.headers is not None
    assert dict(batch.headers[0])["content_type"] == b"application/vnd.safetensors"
    tensors = safetensors.numpy.load(batch.values[0] or b"")
    assert sorted(tensors) == ["layers.0.bias", "weights"]
    assert same(tensors["weights"], weights)


@pytest.mark.parametrize(("count", "form"), [(8192, "application/json"), (8193, "application/vnd.safetensors")])
def test_auto_changes_the_format_above_64_kib_of_arrays(count: int, form: str) -> None:
    """The limit must be the documented one."""
    headers = encoder().encode([np.zeros(count)]).headers
    assert headers is not None
    assert dict(headers[0])["content_type"] == form.encode()


def test_arrays_whose_paths_read_the_same_do_not_overwrite_each_other() -> None:
    """Layer 'a.b' and layer 'b' of block 'a' are two different tensors."""
    published = {"a.b": np.zeros(1), "a": {"b": np.ones(1)}, "__metadata__": np.full(1, 2.0)}
    [update] = decoded(encoder(format="safetensors").encode([published]))
    assert same(update.parameters, published)


@pytest.mark.parametrize("form", ["json", "safetensors"])
def test_arrays_of_text_are_read_unchanged(form: Any) -> None:
    """The class names are published with the model that predicts them."""
    published = {"classes": np.array([["yes", "naïve"]], dtype="<U9")}
    [update] = decoded(encoder(format=form).encode([published]))
    assert same(update.parameters, published)


def test_arrays_of_an_update_cannot_be_changed() -> None:
    """A consumer that changed the weights in place would change the model of every other consumer."""
    for form in ("json", "safetensors"):
        [update] = decoded(encoder(format=form).encode([{"layers": [np.zeros(2), {"b": np.zeros(1)}]}]))
        assert isinstance(update.parameters, dict)
        first, second = update.parameters["layers"]
        for array in (first, second["b"]):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1.0
