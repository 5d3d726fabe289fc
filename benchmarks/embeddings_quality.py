"""Quality of embeddings: beside river's factorization machines, and beside hashing into the same memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Final
from zlib import crc32

import numpy as np

from benchmarks.embeddings import Record, clicks
from benchmarks.measuring import Figure, Target
from benchmarks.session import Session
from streamiter.learn import AdaptiveLinearModel, Embeddings

__all__ = ["embeddings_quality"]

_FACTORS: Final = 8
_ROWS: Final = 20_000
_SEEDS: Final = (1, 2, 3)
_AT_ONCE: Final = 500

# An id is alive for a tenth of the stream, and has so many rows on average.
_CHURN_ROWS: Final = 400_000
_ROWS_OF_AN_ID: Final = 20
_ALIVE_SHARE: Final = 10
_COUNTRIES: Final = 200
# 512 bytes for each id that is alive, as in networks-churn.
_CAP_BYTES_OF_ALIVE: Final = 512
# Two experts with a weight and a vector each, and the sums of squares of all; without keys, clocks and links.
_BYTES_OF_A_ROW: Final = 2 * 4 * 2 * (1 + _FACTORS)

Rows = tuple[list[Record], list[bool]]


def embeddings_quality(session: Session) -> Iterator[Figure]:
    """Progressive AUC beside river's FM and FFM, and the log loss with a cap beside hashing into the same memory."""
    yield from _beside_river(session)
    yield from _beside_hashing(session)


def _beside_river(session: Session) -> Iterator[Figure]:
    peers: dict[str, Callable[[Rows], Any]] = {}
    if find_spec("river") is not None:
        peers = {name: partial(_of_river, kind) for name, kind in (("river, FM", "FM"), ("river, FFM", "FFM"))}
    else:
        print("river is not installed: no comparison with it (pip install river)", file=sys.stderr)
    learners: dict[str, Callable[[Rows], Any]] = {
        "linear default": partial(_of_ours, None),
        "embeddings, fm": partial(_of_ours, Embeddings(kind="fm", factors=_FACTORS)),
        "embeddings, deepfm": partial(_of_ours, Embeddings(factors=_FACTORS)),
    }
    for stream, made in (("clicks of ten fields", _clicks), ("users and items", _shop)):
        streams = [made(session.size(_ROWS, 1_000), seed) for seed in _SEEDS]
        areas = {
            name: tuple(_area(learn(rows), rows[1]) for rows in streams)
            for name, learn in {**learners, **peers}.items()
        }
        for name in ("linear default", *peers):
            yield Figure(f"{stream}: {name}", "AUC", areas[name])
        for name in ("embeddings, fm", "embeddings, deepfm"):
            for other in peers or ("linear default",):
                ratios = tuple(a / b for a, b in zip(areas[name], areas[other], strict=True))
                yield Figure(f"{stream}: {name}", "AUC", areas[name], other, ratios, Target("ratio", at_least=1.0))


def _clicks(count: int, seed: int) -> Rows:
    records = clicks(count, seed)
    return [{name: row[name] for name in row if name != "click"} for row in records], [row["click"] for row in records]


def _shop(count: int, seed: int) -> Rows:
    """300 users and 200 items with four tastes each, and effects of both."""
    draw = np.random.default_rng(seed)
    users, items = draw.integers(0, 300, count), draw.integers(0, 200, count)
    of_users, of_items = draw.normal(size=(300, 4)), draw.normal(size=(200, 4))
    scores = (of_users[users] * of_items[items]).sum(axis=1) + 0.5 * draw.normal(size=200)[items]
    rows = [{"user": f"u{user}", "item": f"i{item}"} for user, item in zip(users, items, strict=True)]
    return rows, (draw.random(count) < 1 / (1 + np.exp(-scores))).tolist()


def _of_ours(embeddings: Embeddings | None, rows: Rows) -> Any:
    """Return the prediction of each row before it was learned."""
    model = AdaptiveLinearModel(embeddings=embeddings, shapes=False)
    cuts = range(0, len(rows[0]), _AT_ONCE)
    found = [model.learn_each(*(each[start : start + _AT_ONCE] for each in rows)) for start in cuts]
    return np.concatenate(found)


def _of_river(kind: str, rows: Rows) -> Any:
    from river import facto

    model = getattr(facto, f"{kind}Classifier")(n_factors=_FACTORS, seed=1)
    found = []
    for row, label in zip(*rows, strict=True):
        found.append(model.predict_proba_one(row).get(True, 0.5))
        model.learn_one(row, label)
    return np.array(found)


def _area(predictions: Any, labels: Sequence[bool]) -> float:
    """Return the area under the ROC curve, by the mean ranks of equal predictions."""
    _, places, counts = np.unique(predictions, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    are_true = np.asarray(labels)
    positive = int(are_true.sum())
    return float((ranks[are_true].sum() - positive * (positive + 1) / 2) / (positive * (len(are_true) - positive)))


def _beside_hashing(session: Session) -> Iterator[Figure]:
    count = session.size(_CHURN_ROWS, 100_000)
    alive = count // _ROWS_OF_AN_ID // _ALIVE_SHARE
    size_bytes = max(1_000_000, _CAP_BYTES_OF_ALIVE * alive)
    fm = partial(Embeddings, kind="fm", factors=_FACTORS)
    ways: dict[str, tuple[Embeddings | None, int]] = {
        "linear default": (None, 0),
        "unlimited": (fm(at_most="1 GB", admit=1), 0),
        "unlimited, with admission": (fm(at_most="1 GB"), 0),
        "hashed into the same memory": (fm(at_most="1 GB", admit=1), size_bytes // _BYTES_OF_A_ROW),
        "admission, expiry and a cap": (fm(at_most=size_bytes, expire=count / _ALIVE_SHARE, time="at"), 0),
    }
    losses = {
        name: tuple(_loss(embeddings, _churn(count, alive, seed), places) for seed in _SEEDS)
        for name, (embeddings, places) in ways.items()
    }
    ours = losses["admission, expiry and a cap"]
    for name in ("linear default", "unlimited", "unlimited, with admission", "hashed into the same memory"):
        yield Figure(f"ids that come and go: {name}", "log loss", losses[name])
    for other, below in (("unlimited", 1.005), ("hashed into the same memory", 1.0), ("linear default", 1.0)):
        ratios = tuple(a / b for a, b in zip(ours, losses[other], strict=True))
        name = "ids that come and go: admission, expiry and a cap"
        yield Figure(name, "log loss", ours, other, ratios, Target("ratio", below=below))


def _churn(count: int, alive: int, seed: int) -> Rows:
    """An id and a country, which fit or do not; a row a second."""
    draw = np.random.default_rng(seed)
    all_ids = count // _ROWS_OF_AN_ID
    ids = draw.integers(0, alive, count) + np.arange(count) * (all_ids - alive) // count
    countries = draw.integers(0, _COUNTRIES, count)
    of_ids, of_countries = draw.normal(size=(all_ids, 2)), draw.normal(size=(_COUNTRIES, 2))
    scores = 1.5 * (of_ids[ids] * of_countries[countries]).sum(axis=1) + draw.normal(size=all_ids)[ids]
    rows = [
        {"id": f"t{each}", "country": f"c{country}", "at": at}
        for at, (each, country) in enumerate(zip(ids.tolist(), countries.tolist(), strict=True))
    ]
    return rows, (draw.random(count) < 1 / (1 + np.exp(-scores))).tolist()


def _loss(embeddings: Embeddings | None, rows: Rows, places: int) -> float:
    """Return the progressive log loss; with ``places`` the texts of all fields are hashed to so many."""
    records, labels = rows
    if places:
        records = [
            {name: f"h{crc32(f'{name}{row[name]}'.encode()) % places}" for name in ("id", "country")} for row in records
        ]
    predictions = np.clip(_of_ours(embeddings, (records, labels)), 1e-9, 1 - 1e-9)
    return float(-np.where(labels, np.log(predictions), np.log(1 - predictions)).mean())
