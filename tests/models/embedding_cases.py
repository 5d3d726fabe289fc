"""Tests of served embeddings share this code: random embeddings beside a linear member, and their scores by hand."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from models.shape_cases import TOWNS, linear_part, random_shapes

from streamiter.models import LinearPredictor
from streamiter.models.published_embeddings import EmbeddingKind
from streamiter.values.hashes import hash_of

FACTORS = 3
FIELDS = ["town", "at[hour]", "gone", "at[weekday]"]
"""The fields with the numbers 1 to 4; the linear member has no texts in the field "gone"."""


def hash_in(field: str, text: str | None) -> int:
    """Return the low 52 bits of the hash of a text, or of a missing value."""
    name = field.encode()
    return hash_of(name + b"\xfe" if text is None else name + b"\xff" + text.encode()) & (1 << 52) - 1


def key_of(field: str, text: str | None) -> int:
    """Return the key of a text, or of a missing value."""
    number = 0 if text is None else 1 + FIELDS.index(field)
    return number << 52 | hash_in(field, text)


SHARES = (0.5, 0.2)


def embeddings(kind: EmbeddingKind = "deepfm", seed: int = 1, scores: int = 1, **changed: Any) -> dict[str, Any]:
    """Return embeddings of the linear member of ``linear_part``, which has three numbers and so many scores."""
    random = np.random.default_rng(seed)
    known = [*(key_of("town", town) for town in TOWNS[:3]), key_of("at[hour]", "23"), key_of("km", None)]
    known += [key_of("gone", "x"), key_of("other", None)]

    def normal(*shape: int) -> Any:
        return random.normal(size=shape).astype(np.float32)

    sizes = [(1 + len(FIELDS)) * FACTORS + 3, 5, 4, 1]

    def layers() -> list[Any]:
        return [{"weights": normal(inputs, outputs), "bias": normal(outputs)} for inputs, outputs in pairwise(sizes)]

    experts = [
        {
            "weights": normal(len(known)) / 2,
            "vectors": normal(5, FACTORS) / 2,
            "commons": normal(1 + len(FIELDS), FACTORS) / 2,
            "numbers": normal(3, 1 + FACTORS) / 5,
            "products": expert == 1 or kind != "wide and deep",
            "layers": layers() if expert == 0 and kind != "fm" else [],
            "early_steps": normal(16) / 5,
            "intercept": float(random.normal()),
            "share": share,
        }
        for expert, share in enumerate(SHARES)
        for _ in range(scores)
    ]
    keys = np.sort(np.array(known))
    early = random.integers(0, 256, (7 if seed % 3 else 0, scores * FACTORS)).astype(np.uint8)
    given = {"kind": kind, "factors": FACTORS, "text_fields": list(FIELDS), "keys": keys}
    given |= {} if scores == 1 else {"scores": scores}
    return {**given, "admitted": keys[[1, 2, 3, 5, 6]], "early": early, "scale": 1.0, "experts": experts, **changed}


def embedded(link: str = "logit", kind: EmbeddingKind = "deepfm", seed: int = 1, **changed: Any) -> dict[str, Any]:
    """Return the parameters of a model with a linear member, embeddings, and for even seeds tables."""
    scores = 3 if link == "softmax" else 1
    shapes = {"shapes": random_shapes(seed, scores).published()} if seed % 2 == 0 else {}
    return linear_part(link, scores) | shapes | {"embeddings": embeddings(kind, seed, scores, **changed)}


EMBEDDED_ROWS: list[dict[str, Any]] = [
    {"km": 7.25, "load": 0.5, "at": "2024-05-01T23:30", "town": "Ἀθῆναι"},
    {"km": -1e9, "load": True, "at": "1969-12-31T01:00", "town": "never seen"},
    {"km": None, "load": None, "at": None, "town": None},
    {"km": float("nan"), "other": None, "town": ["Roma", "𝄞", "Roma"], "strange": "x"},
    {"km": 1e101, "at": "2024-05-01", "town": ["Kyjiw", "Roma", "new"], "gone": "x"},
    {"load": -0.0, "town": []},
    {},
]
"""Rows of all kinds of values."""


def scores_by_hand(parameters: Mapping[str, Any], row: Mapping[str, Any]) -> list[list[float]]:
    """Return the scores of each expert, one number after the other, as the page of the format describes it."""
    given = parameters["embeddings"]
    model = LinearPredictor(parameters)
    prepared = model._standardized._prepared(row)  # type: ignore[union-attr]
    distances = []
    for at, name in enumerate(parameters["fields"]):
        value, limit = prepared.get(name), parameters["limit"][at]
        is_number = isinstance(value, (int, float)) and abs(value) <= 1e100 and limit > 0
        distances.append(10 * np.clip(value - parameters["center"][at], -limit, limit) / limit if is_number else 0.0)
    fields: dict[int, list[int | None]] = {}
    for name, text in texts_of(prepared):
        if text is not None and (name not in given["text_fields"] or name not in parameters["text_fields"]):
            continue
        number = 0 if text is None else 1 + given["text_fields"].index(name)
        known = np.flatnonzero(given["keys"] == number << 52 | hash_in(name, text))
        fields.setdefault(number, []).append(int(known[0]) if len(known) else None)
    count = given.get("scores", 1)
    heads = [of_head(given, place, fields, distances) for place in range(len(given["experts"]))]
    return [heads[first : first + count] for first in range(0, len(heads), count)]


def of_head(
    given: Mapping[str, Any], place: int, fields: Mapping[int, list[int | None]], distances: list[float]
) -> float:
    expert, count = given["experts"][place], given.get("scores", 1)

    def row_of(field: int, feature: int | None) -> Any:
        rows = [] if feature is None else np.flatnonzero(given["admitted"] == given["keys"][feature])
        vector = expert["vectors"][rows[0]] if len(rows) else expert["commons"][field]
        if feature is not None and not len(rows) and len(given["early"]):
            own = given["early"][feature].reshape(count, FACTORS)[place % count].tolist()
            bits = [each % 16 if place < count else each // 16 for each in own]
            vector = vector.astype(float) + expert["early_steps"][bits]
        return np.append(0.0 if feature is None else expert["weights"][feature], vector.astype(float))

    nothing = [np.zeros(1 + FACTORS)]
    terms = [
        np.mean([row_of(field, each) for each in fields[field]] if field in fields else nothing, axis=0)
        for field in range(1 + len(FIELDS))
    ]
    inputs = np.concatenate([*(term[1:] for term in terms), distances])
    terms += [z * vector.astype(float) for z, vector in zip(distances, expert["numbers"], strict=True)]
    score = sum(term[0] for term in terms)
    if expert["products"]:
        score += sum(terms[a][1:] @ terms[b][1:] for a in range(len(terms)) for b in range(a))
    for number, layer in enumerate(expert["layers"]):
        inputs = inputs @ layer["weights"].astype(float) + layer["bias"]
        if number < len(expert["layers"]) - 1:
            inputs = np.maximum(inputs, 0)
        else:
            score += inputs[0]
    return float(expert["intercept"] + given["scale"] * score)


def texts_of(row: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield the texts of a prepared row, each once, and None for missing values."""
    for name, value in row.items():
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, list):
            yield from ((name, text) for text in dict.fromkeys(value))
        elif value is None or not abs(value) <= 1e100:
            yield name, None
