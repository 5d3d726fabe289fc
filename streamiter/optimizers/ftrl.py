"""Follow the regularized leader."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from streamiter.numbers import not_negative, positive
from streamiter.optimizers.optimizer import Floats, FloatView, Indices, Numbers, Optimizer, Slots, Views

__all__ = ["FTRL"]


@dataclass(frozen=True)
class FTRL(Optimizer):
    """Follow the regularized leader, per coordinate (McMahan et al. 2013, "Ad click prediction").

    ``δ = (√(n + g²) − √n)/α``; ``n += g²``; ``z += g − δ·w``; ``w = 0`` where ``|z| ≤ l1``, else
    ``w = −(z − sign(z)·l1) / (l2 + (β + √n)/α)``.

    A gradient of 0 changes nothing, so dense and sparse updates are the same. z and n start at 0 also
    for weights that start elsewhere: those count in the gradient and in ``δ·w`` until their coordinate
    gets its first gradient, and are given up for what the formula says then. ``keep_start=True``
    chooses z so that the formula gives the start weights back, and learning goes on from there, as it
    does in any case after a warm start from a published model.
    """

    alpha: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    keep_start: bool = False

    name: ClassVar[str] = "ftrl"
    slot_names: ClassVar[tuple[str, ...]] = ("z", "n")

    def __post_init__(self) -> None:
        self._check_settings(positive, "alpha")
        self._check_settings(not_negative, "beta", "l1", "l2")

    def new_slots(self, weights: Floats) -> dict[str, Floats]:
        return self.slots_to_go_on(weights) if self.keep_start else super().new_slots(weights)

    def slots_to_go_on(self, weights: Floats) -> dict[str, Floats]:
        slots = super().new_slots(weights)
        slots["z"] -= weights * (self.l2 + self.beta / self.alpha) + np.sign(weights) * self.l1
        return slots

    def update(self, weights: Floats, gradient: Floats, slots: Slots, step: int) -> None:
        z, n = slots["z"], slots["n"]
        work, root = np.sqrt(n), gradient * gradient
        n += root
        np.sqrt(n, out=root)
        np.subtract(root, work, out=work)  # δ·α
        work /= self.alpha
        work *= weights
        np.subtract(gradient, work, out=work)
        z += work
        np.abs(z, out=work)
        work -= self.l1
        np.maximum(work, 0.0, out=work)
        np.copysign(work, z, out=work)
        # 0 − x and not −x: a weight of −0.0 would look odd in a published model. Where n is 0 there
        # never was a gradient: the start weight stays, and a beta of 0 would divide by 0.
        np.subtract(0.0, work, out=work)
        root += self.beta
        root /= self.alpha
        root += self.l2
        np.divide(work, root, out=weights, where=n > 0.0)

    def update_few(
        self, indices: Indices, weights: FloatView, gradient: Numbers, slots: Views, step: int
    ) -> None:
        alpha, beta, l1, l2 = self.alpha, self.beta, self.l1, self.l2
        all_z, all_n = slots
        for index, slope in zip(indices, gradient, strict=True):
            n_before = all_n[index]
            n = n_before + slope * slope
            root = math.sqrt(n)
            z = all_z[index] + (slope - (root - math.sqrt(n_before)) / alpha * weights[index])
            all_z[index], all_n[index] = z, n
            if n > 0.0:
                shrunk = z - l1 if z > l1 else z + l1 if z < -l1 else 0.0
                weights[index] = (0.0 - shrunk) / (l2 + (beta + root) / alpha)

    def without_regularization(self) -> FTRL:
        return replace(self, l1=0.0, l2=0.0)
