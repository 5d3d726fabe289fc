"""Tests of served tables share this code: random tables, and those of the executable reference as they are served."""

from typing import Any

import numpy as np
from support.tables_reference import tables_reference

from streamiter.models.shapes import CELLS_OF_PAIR, EDGES_OF_COLUMN, FINE_BINS, Shapes, TableMember
from streamiter.values.hashes import place_of_text

TOWNS = ["Kyjiw", "Ἀθῆναι", "𝄞", "Roma"]
BITS = 18


def linear_part(link: str, scores: int = 1) -> dict[str, Any]:
    """Return the parameters of a linear member with two numbers, a time and a town."""
    random = np.random.default_rng(3)
    places = sorted(place_of_text("town", town, BITS) for town in TOWNS)
    columns = 3 + len(places)
    parameters: dict[str, Any] = {
        "fields": ["km", "load", "at[trend]"],
        "text_fields": ["at[hour]", "at[month]", "at[weekday]", "town"],
        "kinds": {"at": "time"},
        "places": np.array(places),
        "center": np.concatenate([[5.0, 0.5, 19_800.0], np.zeros(len(places))]),
        "limit": np.concatenate([[30.0, 5.0, 900.0], np.ones(len(places))]),
        "weights": random.normal(size=(columns, scores)) / 10,
        "intercept": random.normal(size=scores),
        "bits": BITS,
        "link": link,
    }
    if link == "softmax":
        return parameters | {"classes": ["früh", "spät", "nie"][:scores]}
    one = {"weights": parameters["weights"][:, 0], "intercept": float(parameters["intercept"][0])}
    return parameters | one | ({} if link == "logit" else {"lowest": -2.5, "highest": 9.0})


def random_shapes(seed: int, scores: int = 1, fields: int = 3, places: int = len(TOWNS)) -> Shapes:
    """Return tables of the two numbers and the town of :func:`linear_part`, and of a field that it does not have."""
    random = np.random.default_rng(seed)
    edges = np.full((4, EDGES_OF_COLUMN), np.inf)
    edges[0] = np.sort(random.normal(5, 3, EDGES_OF_COLUMN))
    edges[1, :8] = [0.25] * 4 + [0.5] * 4

    def member(pairs: int, trees: int, depth: int) -> TableMember:
        cells = 4 * FINE_BINS + pairs * CELLS_OF_PAIR + trees * 2**depth
        return TableMember(
            tables=(random.normal(size=(cells, scores)) / 5).astype(np.float32),
            slopes=random.normal(size=(fields, scores)) / 100,
            intercept=random.normal(size=scores),
            pairs=np.array([(a, b) for a in range(4) for b in range(a + 1, 4)], np.intp)[:pairs],
            tree_columns=random.integers(0, 4, (trees, depth)),
            tree_bins=random.integers(0, FINE_BINS, (trees, depth)),
        )

    categories = 61 * 3 + 1 + 4 * np.arange(places)
    categories[-1] = 0
    rows = random.integers(1, 100, (4, FINE_BINS)).astype(np.float32)
    rows[1:, 1:] = 0
    rows[1, [1, 5, 9]], rows[3, categories[:-1] - 61 * 3] = 30, 20
    return Shapes(
        fields=["km", "load", "unknown", "town"],
        kinds=["number", "number", "number", "category"],
        edges=edges,
        categories=categories,
        rows=rows,
        mixture=np.array([0.2, 0.3, 0.5]),
        members=[member(0, 0, 1), member(6, 5, 7)],
    )


def shaped(link: str, seed: int = 1, scores: int = 1) -> dict[str, Any]:
    """Return the parameters of a model with a linear member and two members with tables."""
    return linear_part(link, scores) | {"shapes": random_shapes(seed, scores).published()}


ROWS: list[dict[str, Any]] = [
    {"km": 7.25, "load": 0.5, "at": "2024-05-01T23:30", "town": "Ἀθῆναι"},
    {"km": -1e9, "load": True, "at": "1969-12-31T01:00", "town": "never seen"},
    {"km": None, "load": None, "at": None, "town": None},
    {"km": 1e101, "load": 10**310, "at": "2024-05-01", "town": ["Roma", "𝄞"], "other": "x"},
    {"km": 0, "load": 0.25, "at": 1_700_000_000, "town": []},
    {"load": -0.0, "town": ["𝄞"]},
    {},
]
"""Rows of all kinds of values."""


def of_reference(model: Any, fields: list[str], link: str) -> dict[str, Any]:
    """Return what is served of the executable reference, whose categories are the texts "0", "1", …."""
    weight, columns, scores = np.exp(model.mix), model.d, model.K
    served = tables_reference().Published(model)
    clip = np.where(np.isfinite(served.scale), served.scale, 0.0)
    codes = {
        place_of_text(fields[column], str(code), BITS): FINE_BINS * column + 1 + code % 15 * 4 + code // 15
        for column in np.flatnonzero(model.iscat).tolist()
        for code in range(60)
    }
    places, shape = sorted(codes), (-1, scores)
    cells = np.split(model.t[..., :6].astype(np.float64) @ weight, [model.at_pairs, model.at_trees, model.size])
    inverse = np.divide(1.0, clip, out=np.zeros_like(clip), where=clip > 0)
    member = TableMember.of_tables(
        cells[0].reshape(columns, *shape),
        cells[1].reshape(len(model.pairs), *shape),
        cells[2].reshape(len(model.tree_at), *shape),
        slopes=model.tx[..., :6] @ weight * inverse[:, None],
        intercept=cells[3][0] + model.s[2],
        pairs=model.pairs,
        tree_columns=model.tree_column,
        tree_bins=model.tree_at,
    )
    shapes = Shapes(
        fields=fields,
        kinds=["category" if is_category else "number" for is_category in model.iscat],
        edges=model.edges,
        categories=np.array([codes[place] for place in places]),
        rows=np.ones((columns, FINE_BINS), np.float32),
        mixture=np.array([0.0, 1.0]),
        members=[member],
    )
    count = len(clip) + len(places)
    return linear_part(link, scores) | {
        "fields": [fields[column] for column in model.numbers],
        "text_fields": [fields[column] for column in np.flatnonzero(model.iscat)],
        "kinds": {},
        "places": np.array(places),
        "center": np.append(served.center, np.zeros(len(places))),
        "limit": np.append(10.0 * clip, np.ones(len(places))),
        "weights": np.zeros((count, scores) if link == "softmax" else count),
        "shapes": shapes.published(),
    }
