"""``PublishedEmbeddings``: the embeddings of a published model, checked.

A *feature* is a text of a field, or a missing value; its *key* has the number of the field (10 bits, 0 for missing
values), then the low 52 bits of the hash of field and text. Each known feature has a weight, and if it is admitted a
vector; all others have the common vector of their field. Each *expert* has a *head* for each score: one, or one for
each class. All heads have the same features, with weights and vectors of their own; the heads of the first expert come
first. What a feature without a vector has learned is added to the common one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError, shortened
from streamiter.models.documents import EMBEDDINGS, are_names, checked_array, is_count, members_in, parameter_of
from streamiter.models.stored_rows import StoredRows
from streamiter.values.numbers import Array, Integers, is_number

HASH_BITS: Final = 52
"""The number of bits that a key has of the hash of its text."""

FIELDS_MAX: Final = 1022
"""The largest number of a field: a key has 10 bits for it, and 1023 is of no field."""

EmbeddingKind = Literal["fm", "deepfm", "wide and deep"]
"""``fm``: factorization machines; ``deepfm``: with a network; ``wide and deep``: a network in place of one of them."""

_KINDS: Final[tuple[EmbeddingKind, ...]] = get_args(EmbeddingKind)

_Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingHead:
    """The numbers of one head; k is the number of factors."""

    weights: _Float32
    """(features,): the weight of each known feature; of all others it is 0."""
    vectors: _Float32 | StoredRows
    """(admitted features, k): their vectors, in memory or on disk."""
    commons: _Float32
    """(1 + text fields, k): the vectors of all other features, by the number of the field."""
    numbers: _Float32
    """(fields, 1 + k): weight and vector of each numeric field of the linear member."""
    products: bool
    """Whether the products of all pairs of vectors are added."""
    layers: Sequence[tuple[_Float32, _Float32]]
    """The weights (inputs, outputs) and the bias (outputs,) of each layer of the network; the last has one output."""
    early_steps: _Float32
    """(16,): what is added to a number of the common vector, by 4 bits of ``PublishedEmbeddings.early``."""
    intercept: float
    """The score of a row of which nothing is known."""
    share: float
    """The weight of the expert's prediction in the mixture; all its heads have the same."""


@dataclass(frozen=True, slots=True, eq=False)
class PublishedEmbeddings:
    """The members of the mixture that have a vector for each admitted feature."""

    kind: EmbeddingKind
    """What the scores are made of."""
    factors: int
    """The length of a vector."""
    text_fields: list[str]
    """The fields with the numbers 1, 2, …."""
    keys: Integers
    """(features,): the keys of the known features, ascending."""
    admitted: Integers
    """(admitted features,): the keys of the features with a vector, ascending."""
    early: npt.NDArray[np.uint8]
    """(features, scores · k): what features without a vector have learned, 4 bits for each expert, the low ones for the
    first; (0, scores · k): nothing."""
    scale: float
    """By which all but intercepts is multiplied: 1, or the deviation of the numbers to predict."""
    scores: int
    """The number of scores of an expert."""
    experts: Sequence[EmbeddingHead]
    """The heads. The shares of the experts add up to the share of the embeddings; all other members have the rest."""

    @staticmethod
    def of(given: Mapping[str, Any], subject: str, *, fields: int, scores: int) -> PublishedEmbeddings:
        """Return the embeddings of a published model, whose linear member has ``fields`` numeric fields and ``scores``.

        The arrays are taken as they are, without a copy. Raises ``ModelError`` for embeddings that do not fit.
        """
        subject = f"{subject}: embeddings"
        kind = parameter_of(given, "kind", subject, "a text", lambda value: isinstance(value, str))
        if kind not in _KINDS:
            raise ModelError(
                f"{subject}: expected 'kind' as one of {', '.join(_KINDS)}, given {kind!r}; the model is of a newer "
                "version of streamiter, or damaged"
            )
        factors: int = parameter_of(given, "factors", subject, "a whole number above 0", is_count)
        names: list[str] = parameter_of(given, "text_fields", subject, f"at most {FIELDS_MAX} names", _are_few_names)
        keys, admitted = (_keys(given, name, subject, len(names)) for name in ("keys", "admitted"))
        has_early = np.size(given.get("early", ())) > 0
        early = _array(given, "early", subject, (len(keys) if has_early else 0, scores * factors), np.uint8)
        experts = parameter_of(given, "experts", subject, "a list of experts", _are_objects)
        if given.get("scores", 1) != scores or len(experts) % scores:
            raise ModelError(
                f"{subject}: expected experts for {scores} scores, as many as the model has, given {len(experts)} for "
                f"{given.get('scores', 1)}; the model is damaged"
            )
        sizes = {
            "features": len(keys),
            "rows": len(admitted),
            "fields": 1 + len(names),
            "numbers": fields,
            "factors": factors,
        }
        found = [_expert(each, f"{subject}: expert {number}", **sizes) for number, each in enumerate(experts)]
        if (total := sum(each.share for each in found[::scores])) > 1.0 + _ROUNDING_OF_SHARES:
            raise ModelError(f"{subject}: expected shares of at most 1 in all, given {total}; the model is damaged")
        scale = float(parameter_of(given, "scale", subject, "a number", is_number))
        return PublishedEmbeddings(kind, factors, names, keys, admitted, early, scale, scores, found)


@dataclass(frozen=True, slots=True)
class EmbeddingFigures:
    """How much a published model has learned of features, and how much its embeddings count."""

    kind: EmbeddingKind
    """What the scores are made of."""
    factors: int
    """The length of a vector."""
    fields: int
    """The number of fields of texts."""
    features: int
    """The number of features that are known."""
    admitted: int
    """The number of these that have a vector."""
    expired: int
    """The number of features that have left so far because they had not occurred for too long."""
    evicted: int
    """The number of features that have left so far because there was no room."""
    share: float
    """The share of the embeddings in the prediction."""

    @staticmethod
    def of(parameters: object) -> EmbeddingFigures | None:
        """Return the figures of published parameters; None without embeddings."""
        if (given := members_in(parameters, EMBEDDINGS)) is None:
            return None
        experts = given["experts"]
        return EmbeddingFigures(
            given["kind"],
            given["factors"],
            len(given["text_fields"]),
            len(given["keys"]),
            len(experts[0]["vectors"]),
            given.get("expired", 0),
            given.get("evicted", 0),
            float(sum(each["share"] for each in experts[:: given.get("scores", 1)])),
        )


# Shares are sums of rounded numbers.
_ROUNDING_OF_SHARES: Final = 1e-9


def _expert(
    given: Mapping[str, Any], subject: str, *, features: int, rows: int, fields: int, numbers: int, factors: int
) -> EmbeddingHead:
    return EmbeddingHead(
        weights=_array(given, "weights", subject, (features,), np.float32),
        vectors=_vectors(given, subject, (rows, factors)),
        commons=_array(given, "commons", subject, (fields, factors), np.float32),
        numbers=_array(given, "numbers", subject, (numbers, 1 + factors), np.float32),
        products=parameter_of(given, "products", subject, "true or false", lambda value: isinstance(value, bool)),
        layers=_layers(given, subject, fields * factors + numbers),
        early_steps=_array(given, "early_steps", subject, (16,), np.float32),
        intercept=float(parameter_of(given, "intercept", subject, "a number", is_number)),
        share=float(parameter_of(given, "share", subject, "a number from 0 to 1", _is_share)),
    )


def _vectors(given: Mapping[str, Any], subject: str, shape: tuple[int, int]) -> _Float32 | StoredRows:
    stored = given.get("vectors")
    if not isinstance(stored, StoredRows):
        return _array(given, "vectors", subject, shape, np.float32)
    if stored.shape != shape:
        raise ModelError(f"{subject}: expected 'vectors' of shape {shape}, given {stored.shape}; the model is damaged")
    return stored


def _keys(given: Mapping[str, Any], name: str, subject: str, fields: int) -> Integers:
    """Return the keys of features, whose fields have the numbers up to ``fields``."""
    keys = _array(given, name, subject, (None,), np.int64)
    if len(keys) and (keys[0] < 0 or keys[-1] >> HASH_BITS > fields or (keys[1:] <= keys[:-1]).any()):
        raise ModelError(
            f"{subject}: expected {name!r} in ascending order, of the fields 0 to {fields}, given {shortened(keys)}; "
            "the model is damaged"
        )
    return keys


def _layers(given: Mapping[str, Any], subject: str, inputs: int) -> list[tuple[_Float32, _Float32]]:
    """Return the layers; the first one has this number of inputs."""
    layers = parameter_of(given, "layers", subject, "a list of layers", lambda value: isinstance(value, list))
    found = []
    for number, layer in enumerate(layers):
        is_last, of_layer = number == len(layers) - 1, f"{subject}: layer {number}"
        if not isinstance(layer, Mapping):
            raise ModelError(f"{of_layer}: expected weights and a bias, given {shortened(layer)}; the model is damaged")
        weights = _array(layer, "weights", of_layer, (inputs, 1 if is_last else None), np.float32)
        inputs = weights.shape[1]
        found.append((weights, _array(layer, "bias", of_layer, (inputs,), np.float32)))
    return found


def _array(given: Mapping[str, Any], name: str, subject: str, shape: tuple[int | None, ...], dtype: type[Any]) -> Array:
    """Return an array as it is, or in this type if it has another one that can be cast to it."""
    whole = np.issubdtype(dtype, np.integer)
    return np.ascontiguousarray(checked_array(given, name, subject, shape, whole=whole), dtype)


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and 0.0 <= value <= 1.0


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)


def _are_few_names(value: object) -> bool:
    return are_names(value) and len(value) <= FIELDS_MAX  # type: ignore[arg-type]
