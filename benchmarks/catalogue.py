"""The ten best of many items for a user, by factorization machines with two experts: exact, and by faiss."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from benchmarks.measuring import Figure, Stopwatch, Trial, alternate
from benchmarks.session import Session
from streamiter.models import Catalogue, LinearPredictor
from streamiter.models.published_embeddings import HASH_BITS
from streamiter.values.hashes import hashes_of_texts
from streamiter.values.numbers import Array

__all__ = ["catalogue_answers"]

_FACTORS: Final = 8
_USERS: Final = 1_000
_ANSWERS: Final = 50
_BITS: Final = 18


def parameters(items: Array, seed: int = 1) -> dict[str, Any]:
    """Return a model of users and items: clusters, longer vectors of popular items, and experts that are alike."""
    random = np.random.default_rng(seed)

    def keys_of(number: int, name: str, texts: Array) -> Array:
        return (hashes_of_texts(name, texts)[0] & np.uint64((1 << HASH_BITS) - 1)).astype(
            np.int64
        ) | number << HASH_BITS

    users = np.array([f"u{number}" for number in range(_USERS)])
    keys = np.concatenate([keys_of(1, "item", items), keys_of(2, "user", users)])
    order, popularity = keys.argsort(), random.exponential(size=len(items))
    tastes = random.normal(size=(200, _FACTORS))[random.integers(0, 200, len(keys))]
    tastes += 0.5 * random.normal(size=tastes.shape)
    tastes *= np.append(0.2 + 0.2 * np.minimum(popularity, 3.0), np.full(_USERS, 0.5))[:, None]
    weights = np.append(0.3 * popularity - 2.0, 0.3 * random.normal(size=_USERS))

    def expert() -> dict[str, Any]:
        vectors = (tastes + 0.05 * random.normal(size=tastes.shape))[order].astype(np.float32)
        none = np.zeros((3, _FACTORS), np.float32)
        given = {"weights": weights[order].astype(np.float32), "vectors": vectors, "commons": none, "products": True}
        given |= {"numbers": np.zeros((0, 1 + _FACTORS), np.float32), "early_steps": np.zeros(16, np.float32)}
        return given | {"layers": [], "intercept": -1.0, "share": 0.45}

    keys = keys[order]
    embeddings = {"kind": "fm", "factors": _FACTORS, "text_fields": ["item", "user"], "keys": keys, "admitted": keys}
    embeddings |= {"early": np.zeros((0, _FACTORS), np.uint8), "scale": 1.0, "experts": [expert(), expert()]}
    places = np.unique(keys & ((1 << _BITS) - 1))
    linear = {"fields": [], "text_fields": ["item", "user"], "places": places, "bits": _BITS, "link": "logit"}
    linear |= {"weights": 0.1 * random.normal(size=len(places)), "center": np.zeros(len(places))}
    return linear | {"limit": np.ones(len(places)), "intercept": -1.0, "embeddings": embeddings}


def changed(model: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the next version: one of a hundred vectors has changed, and all weights of the linear member."""
    random, embeddings = np.random.default_rng(seed), model["embeddings"]
    count = len(embeddings["keys"])
    at = random.choice(count, count // 100, replace=False)
    steps = (0.1 * random.normal(size=(len(at), _FACTORS))).astype(np.float32)
    experts = [each | {"vectors": each["vectors"].copy()} for each in embeddings["experts"]]
    for each in experts:
        each["vectors"][at] += steps
    weights = model["weights"] * (1.0 + 0.001 * random.normal(size=len(model["weights"])))
    return model | {"weights": weights, "embeddings": embeddings | {"experts": experts}}


def catalogue_answers(session: Session) -> Iterator[Figure]:
    """The ten best of a million items with eight factors: answers, new versions, and recall of the index."""
    items = np.array([f"i{number}" for number in range(session.size(1_000_000, 20_000))])
    versions = [parameters(items)]
    for seed in range(session.repeat):
        versions.append(changed(versions[-1], seed))
    first = LinearPredictor(versions[0])
    rows = [{"user": f"u{number}"} for number in range(_ANSWERS)]

    def best(top_k: Callable[[dict[str, Any]], Any]) -> list[set[int]]:
        return [{each.position for each in top_k(row)} for row in rows]

    def answers(catalogue: Catalogue) -> Callable[[], Trial]:
        followed = iter([LinearPredictor(each) for each in versions[1:]])

        def run() -> Trial:
            predict = next(followed)
            with Stopwatch() as found:
                catalogue.find(predict)
            catalogue._predictor = lambda: predict
            with Stopwatch() as watch:
                positions = best(catalogue.top_k)
            recall[catalogue].append(positions)
            return Trial(watch.rates(_ANSWERS, "answers") | found.rates(1, "versions"))

        return run

    def plain() -> Trial:
        with Stopwatch() as watch:
            first.top_k(rows[0], {"item": items})
        return Trial(watch.rates(1, "answers"))

    recall: dict[Catalogue, list[list[set[int]]]] = {}
    contenders: dict[str, Callable[[], Trial]] = {"top_k": plain}
    catalogues = {"catalogue": first.catalogue({"item": items})}
    if find_spec("faiss") is not None:
        catalogues["catalogue, faiss"] = first.catalogue({"item": items}, approximate="faiss")
    else:
        print("faiss is not installed: no approximate catalogue (pip install faiss-cpu)", file=sys.stderr)
    for name, catalogue in catalogues.items():
        recall[catalogue] = []
        contenders[name] = answers(catalogue)
    series = alternate(contenders, repeat=session.repeat)
    yield series.figure("top_k", "answers/CPU-s")
    for name in catalogues:
        yield series.figure(name, "answers/CPU-s", compared_with="top_k")
        yield series.figure(name, "versions/CPU-s")
    exact, *others = recall.values()
    for found in others:
        shares = [
            sum(len(one & other) for one, other in zip(*both, strict=True)) / (10 * _ANSWERS)
            for both in zip(exact, found, strict=True)
        ]
        yield Figure("catalogue, faiss", "recall@10", tuple(shares))
