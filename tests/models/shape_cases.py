"""Tests of served tables share this code: random tables, and those of the executable reference as they are served."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from streamiter.models.shapes import EDGES, FINE, NO_EDGE, OF_PAIR, Shapes, TableMember
from streamiter.values.named_rows import place_of_text

REFERENCE = Path(__file__).parents[4] / "shared" / "reference" / "tables-learner" / "learner.py"
TOWNS = ["Kyjiw", "Ἀθῆναι", "𝄞", "Roma"]
BITS = 18


def reference() -> ModuleType:
    """Return the executable reference."""
    for path in (REFERENCE, Path("/work/shared/reference/tables-learner/learner.py")):
        if path.exists():
            pytest.importorskip("numba", reason="the reference is compiled by Numba")
            spec = importlib.util.spec_from_file_location("tables_learner_reference", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            return module
    pytest.skip("the executable reference of tables is not on this machine")


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


def random_shapes(seed: int, scores: int = 1, trees: int = 5, depth: int = 7) -> Shapes:
    """Return tables of two numbers, of the hour of a time, and of a town."""
    random = np.random.default_rng(seed)
    edges = np.full((4, EDGES), NO_EDGE)
    edges[0] = np.sort(random.normal(5, 3, EDGES))
    edges[1, :8] = [0.25] * 4 + [0.5] * 4
    edges[2] = np.linspace(1 / 60, 59 / 60, EDGES)
    places = sorted(place_of_text("town", town, BITS) for town in TOWNS[:3])

    def member(pairs: int, trees: int) -> TableMember:
        cells = 4 * FINE + pairs * OF_PAIR + trees * 2**depth
        return TableMember(
            tables=(random.normal(size=(cells, scores)) / 5).astype(np.float32),
            slopes=random.normal(size=(4, scores)) / 10 * np.array([1, 1, 0, 0])[:, None],
            intercept=random.normal(size=scores),
            pairs=np.array([(a, b) for a in range(4) for b in range(a + 1, 4)], np.intp)[:pairs],
            tree_columns=random.integers(0, 4, (trees, depth)),
            tree_bins=random.integers(0, FINE, (trees, depth)),
        )

    return Shapes(
        fields=["km", "load", "at[trend]", "town"],
        kinds=["number", "number", "period", "category"],
        edges=edges,
        period=np.array([0.0, 0.0, 1.0, 0.0]),
        center=np.array([5.0, 0.5, 0.0, 0.0]),
        limit=np.array([30.0, 5.0, 0.0, 0.0]),
        categories=np.array([[3, place, 1 + 4 * at] for at, place in enumerate(places)]),
        other=np.array([0, 0, 0, 60]),
        rows=random.integers(0, 100, (4, FINE)).astype(np.float32),
        mixture=np.array([0.2, 0.3, 0.5]),
        members=[member(0, 0), member(6, trees)],
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


def of_reference(model: Any, fields: list[str]) -> Shapes:
    """Return the tables of the executable reference, whose categories are the texts "0", "1", …, as they are served."""
    weight, columns = np.exp(model.mix), model.d
    served = sys.modules["tables_learner_reference"].Published(model)
    center, limit, slopes = np.zeros(columns), np.zeros(columns), np.zeros((columns, model.K))
    clip = np.where(np.isfinite(served.scale), served.scale, 0.0)
    center[model.numbers], limit[model.numbers] = served.center, 10.0 * clip
    slopes[model.numbers] = np.divide(
        model.tx[..., :6] @ weight, clip[:, None], out=np.zeros((len(clip), model.K)), where=clip[:, None] > 0
    )
    categories = [
        (column, place_of_text(fields[column], str(code), BITS), 1 + code % 15 * 4 + code // 15)
        for column in np.flatnonzero(model.iscat).tolist()
        for code in range(60)
    ]
    return Shapes(
        fields=fields,
        kinds=["category" if is_category else "number" for is_category in model.iscat],
        edges=model.edges,
        period=np.zeros(columns),
        center=center,
        limit=limit,
        categories=np.array(sorted(categories), np.intp).reshape(-1, 3),
        other=np.where(model.iscat, FINE - 1, 0),
        rows=np.ones((columns, FINE), np.float32),
        mixture=np.array([0.0, 1.0]),
        members=[
            TableMember.of_cells(
                model.t[..., :6].astype(np.float64) @ weight,
                slopes,
                offset=float(model.s[2]),
                pairs=model.pairs,
                tree_columns=model.tree_column,
                tree_bins=model.tree_at,
            )
        ],
    )
