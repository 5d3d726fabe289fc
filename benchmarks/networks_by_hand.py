"""Train a DeepFM in plain numpy, without layers, server and checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["train_deepfm"]

Floats = npt.NDArray[np.floating[Any]]

BY_FEATURE = ("wide.weight", "embedding.weight")


def train_deepfm(
    p: dict[str, Floats], features: npt.NDArray[np.intp], labels: Floats, *, epochs: int, updates: int, rate: float
) -> list[float]:
    """Train the parameters in place with Adam, and return the loss of each step.

    The parameters have the names of ``examples/networks/deepfm.json``.
    """
    m = {name: np.zeros_like(array) for name, array in p.items()}
    v = {name: np.zeros_like(array) for name, array in p.items()}
    batch = -(-len(labels) // updates)
    losses, step = [], 0
    for _ in range(epochs):
        for first in range(0, len(labels), batch):
            step += 1
            at = features[first : first + batch]
            loss, gradients = _gradients(p, at, labels[first : first + batch])
            losses.append(loss)
            present = np.flatnonzero(np.bincount(at.reshape(-1)))
            for name, gradient in gradients.items():
                if name in BY_FEATURE:  # absent features keep their values and their state of Adam
                    some = p[name][present], m[name][present], v[name][present]
                    _adam(some[0], gradient[present], *some[1:], rate, step)
                    p[name][present], m[name][present], v[name][present] = some
                else:
                    _adam(p[name], gradient, m[name], v[name], rate, step)
    return losses


def _gradients(p: dict[str, Floats], at: npt.NDArray[np.intp], labels: Floats) -> tuple[float, dict[str, Floats]]:
    rows, fields = at.shape
    count, factors = p["embedding.weight"].shape
    vectors = p["embedding.weight"][at]
    flat = vectors.reshape(rows, fields * factors)
    total = vectors.sum(axis=1)
    crosses = 0.5 * (np.einsum("ij,ij->i", total, total) - np.einsum("ij,ij->i", flat, flat))
    a0 = np.maximum(flat @ p["fclayer_0.weight"] + p["fclayer_0.bias"], 0)
    a1 = np.maximum(a0 @ p["fclayer_1.weight"] + p["fclayer_1.bias"], 0)
    deep = (a1 @ p["fclayer.weight"])[:, 0] + p["fclayer.bias"]
    wide = p["wide.weight"][:, 0][at].sum(axis=1) + p["wide.bias"]
    margins = labels * (wide + crosses + deep)
    small = np.exp(-np.abs(margins))
    loss = float(np.mean(np.log1p(small) + np.maximum(-margins, 0)))
    g = -labels * np.where(margins >= 0, small, 1) / (1 + small) / rows  # the derivative by the score
    column = g[:, None]
    g1 = (column @ p["fclayer.weight"].T) * (a1 > 0)
    g0 = (g1 @ p["fclayer_1.weight"].T) * (a0 > 0)
    by_vector = (g0 @ p["fclayer_0.weight"].T).reshape(rows, fields, factors)
    by_vector += column[:, :, None] * (total[:, None, :] - vectors)
    order = np.argsort(at.reshape(-1), kind="stable")
    present, starts = np.unique(at.reshape(-1)[order], return_index=True)
    embedding, wide_gradient = np.zeros_like(p["embedding.weight"]), np.zeros_like(p["wide.weight"])
    embedding[present] = np.add.reduceat(by_vector.reshape(-1, factors)[order], starts)
    wide_gradient[:, 0] = np.bincount(at.reshape(-1), np.repeat(g, fields), count)
    return loss, {
        "wide.weight": wide_gradient,
        "wide.bias": g.sum(keepdims=True),
        "embedding.weight": embedding,
        "fclayer_0.weight": flat.T @ g0,
        "fclayer_0.bias": g0.sum(axis=0),
        "fclayer_1.weight": a0.T @ g1,
        "fclayer_1.bias": g1.sum(axis=0),
        "fclayer.weight": a1.T @ column,
        "fclayer.bias": column.sum(axis=0),
    }


def _adam(w: Floats, g: Floats, m: Floats, v: Floats, rate: float, step: int) -> None:
    beta, gamma = 0.9, 0.99
    m *= beta
    m += (1 - beta) * g
    v *= gamma
    v += (1 - gamma) * g * g
    w -= rate * (m / (1 - beta**step)) / (np.sqrt(v / (1 - gamma**step)) + 1e-8)
