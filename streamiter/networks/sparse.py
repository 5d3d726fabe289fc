"""Networks whose features are too many for arrays: only features that the network has learned from are stored.

The initial values of all other features are functions of the seed, the name of the parameter, and the feature. So
training, prediction and a restored training have the same ones, in any order and on any number of shards. The
parameters of such a network are arrays, too: a parameter by feature has a row for each of ``features``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.networks.layers.layer import ANGEL_DEVIATION, Parameter, xavier_limit
from streamiter.parameter_server.matrix import DrawnValues
from streamiter.parameter_server.optimizers import Optimizer
from streamiter.parameter_server.psf.random import RandomNormal, RandomUniform
from streamiter.values.numbers import Array

FEATURES: Final = "features"
"""The name of the array of stored features, ascending. Names of parameters have a dot, this one has none."""

SEED: Final = "seed"
"""The name of the array with the one number that determines the values of all other features."""

FeatureNumbers = npt.NDArray[np.int64]

FEATURES_MAX: Final = 1 << 52
"""The features where no range is known: hashes of 52 bits. The columns of 1,024 numbers each are below 2⁶²."""

# 2^52 divided by the golden ratio (Knuth's multiplicative hashing), so that neighbours are in all blocks of a matrix.
_SPREAD: Final = 0x9E3779B97F4A7
_SPREAD_BACK: Final = pow(_SPREAD, -1, FEATURES_MAX)


def permuted(features: FeatureNumbers, *, back: bool = False) -> FeatureNumbers:
    """Return for each feature a number below ``FEATURES_MAX`` of its own, far from its neighbours'; ``back``: undo it.

    >>> permuted(permuted(np.array([0, 1, 2, FEATURES_MAX - 1])), back=True).tolist()
    [0, 1, 2, 4503599627370495]
    """
    mixed = features.astype(np.uint64) * np.uint64(_SPREAD_BACK if back else _SPREAD)
    return (mixed & np.uint64(FEATURES_MAX - 1)).astype(np.int64)


def drawn_weights(parameter: Parameter, seed: int, way: str) -> RandomNormal | RandomUniform:
    """Return the function that draws the values of a parameter by feature: ``way`` is as for ``initial_values``.

    It draws the values of a feature f in columns f·n to f·n + n − 1 of row 0, for n values a feature.
    """
    word = int.from_bytes(hashlib.sha256(f"{seed} {parameter.name}".encode()).digest()[:8], "little")
    if way == "angel":
        return RandomNormal(parameter.name, row=0, mean=0.0, std=ANGEL_DEVIATION, seed=word)
    limit = xavier_limit(parameter)
    return RandomUniform(parameter.name, row=0, low=-limit, high=limit, seed=word)


@dataclass(frozen=True)
class DrawnRows(DrawnValues):
    """The first rows of a matrix of the parameter server: drawn weights, and the slots that fit them."""

    weights: tuple[tuple[int, RandomNormal | RandomUniform], ...]
    """For each parameter the count of its values for a feature, and the function that draws them."""
    optimizer: Optimizer = field(repr=False)  # A definition has the text of this object; rates may change.
    seed: int
    """The seed of the network, from which the functions have theirs."""
    is_spread: bool = field(default=False, repr=False)
    """Whether the columns are those of spread features, of which there are ``FEATURES_MAX``."""

    @classmethod
    def of(cls, parameters: Sequence[Parameter], way: str, seed: int) -> Self:
        """Return the rows of parameters with one optimizer."""
        weights = ((math.prod(made.shape[1:]), drawn_weights(made, seed, way)) for made in parameters)
        return cls(tuple(weights), parameters[0].optimizer, seed, parameters[0].shape[0] == FEATURES_MAX)

    def draws(self, row: int) -> bool:
        if row == 0:
            return True
        return row <= len(self.optimizer.slot_names) and bool(self._slot(row, np.ones(1)).any())

    def draw(self, row: int, columns: FeatureNumbers, out: Array) -> None:
        features, within = np.divmod(columns, sum(width for width, _ in self.weights))
        features = permuted(features, back=True) if self.is_spread else features
        for width, weights in self.weights:
            at = ((within >= 0) & (within < width)).nonzero()[0]
            drawn = np.empty(len(at), out.dtype)
            weights.draw(0, features[at] * width + within[at], drawn)
            out[at] = drawn
            within -= width
        if row:
            out[:] = self._slot(row, out)

    def _slot(self, row: int, weights: Array) -> Array:
        return self.optimizer.slots_for_warm_start(weights)[self.optimizer.slot_names[row - 1]]


def columns_of(features: FeatureNumbers, width: int) -> FeatureNumbers:
    """Return the columns of features with ``width`` numbers each."""
    return features if width == 1 else (features[:, np.newaxis] * width + np.arange(width)).reshape(-1)


def values_at(indices: FeatureNumbers, parameter: Parameter, arrays: Mapping[str, Array], way: str) -> Array:
    """Return the values of a parameter for these features: those in ``arrays``, or the initial ones."""
    stored, given = arrays[FEATURES], arrays[parameter.name]
    values = np.empty((len(indices), *parameter.shape[1:]), given.dtype)
    places = stored.searchsorted(indices)
    is_stored = places < len(stored)
    is_stored[is_stored] = stored[places[is_stored]] == indices[is_stored]
    values[is_stored] = given[places[is_stored]]
    if not is_stored.all():
        unseen = indices[~is_stored]
        width = math.prod(parameter.shape[1:])
        drawn = np.empty(len(unseen) * width, given.dtype)
        drawn_weights(parameter, seed_of(arrays), way).draw(0, columns_of(unseen, width), drawn)
        values[~is_stored] = drawn.reshape(-1, *parameter.shape[1:])
    return values


def no_features(seed: int) -> dict[str, Array]:
    """Return the arrays that say which features are stored: none."""
    return {FEATURES: np.empty(0, np.int64), SEED: np.array([seed], np.uint64)}


def seed_of(arrays: Mapping[str, Array]) -> int:
    """Return the seed of the values that are not stored."""
    return int(arrays[SEED][0])


def checked_features(arrays: Mapping[str, Any], count: int, subject: str) -> dict[str, Array]:
    """Return ``features`` and ``seed``. Raises ModelError unless these are ascending features, and one number."""
    features, seed = arrays.get(FEATURES), arrays.get(SEED)
    if (
        not isinstance(features, np.ndarray)
        or features.dtype != np.int64
        or features.ndim != 1
        or (len(features) and not (features[0] >= 0 and features[-1] < count and (np.diff(features) > 0).all()))
    ):
        raise ModelError(
            f"{subject}: expected {FEATURES!r}, the ascending numbers from 0 to {count - 1:,} of the features that it "
            f"stores, given {_shown(features)}; load it with the network that it was trained as"
        )
    if not isinstance(seed, np.ndarray) or seed.dtype.kind not in "iu" or seed.shape != (1,) or seed[0] < 0:
        raise ModelError(
            f"{subject}: expected {SEED!r}, the number that its other features are drawn from, given {_shown(seed)}; "
            "load it with the network that it was trained as"
        )
    return {FEATURES: features, SEED: seed.astype(np.uint64)}


def _shown(array: object) -> str:
    return f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "none"
