"""The stream of these examples: points in a square, whose classes are divided by a circle that moves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

ROWS = 4_000
SEED = 1


def points(rows: int = ROWS, seed: int = SEED) -> list[dict[str, Any]]:
    """Return points with ``inside``: whether the point is inside the circle, whose centre moves with time."""
    generator = np.random.default_rng(seed)
    places = generator.uniform(-1.0, 1.0, size=(rows, 2)).tolist()
    centres = [0.5 * math.sin(2 * math.pi * row / rows) for row in range(rows)]
    return [
        {"x": x, "y": y, "inside": (x - centre) ** 2 + y**2 < 0.3}
        for (x, y), centre in zip(places, centres, strict=True)
    ]
