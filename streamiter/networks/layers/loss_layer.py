"""Where the graph ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from streamiter.errors import ModelError
from streamiter.networks.diverging import Diverged
from streamiter.networks.layers.checks import only_input
from streamiter.networks.layers.layer import Layer
from streamiter.networks.losses import Loss, Predictions
from streamiter.networks.parameters import Array

if TYPE_CHECKING:
    from streamiter.networks.layers.settings import LayerSettings
    from streamiter.networks.place_holder import PlaceHolder

__all__ = ["LossLayer", "SimpleLossLayer"]


class LossLayer(Layer):
    """Its output is that of its input, the scores; the mean of the loss over the batch is what all gradients are of."""

    type_name: ClassVar[str] = "losslayer"

    def __init__(self, name: str, source: Layer, loss: Loss, place_holder: PlaceHolder) -> None:
        super().__init__(name, source.output_dim, [source])
        loss.check_outputs(f"layer {name!r}", source.output_dim)
        self.loss = loss
        self._place_holder = place_holder

    @classmethod
    def from_settings(
        cls, settings: LayerSettings, inputs: Sequence[Layer], place_holder: PlaceHolder
    ) -> LossLayer:
        source = only_input(settings.name, inputs)
        return cls(settings.name, source, settings.loss, place_holder)

    def check_labels(self) -> None:
        """``BadRows`` for labels that the loss does not know."""
        if self._place_holder.labels is not None and self.loss.needs_labels:
            self.loss.check_labels(f"layer {self.name!r}", self._place_holder.labels, self.output_dim)

    def mean_loss(self) -> float:
        """The mean over the batch. Raises ModelError without labels, ``Diverged`` where it is not finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            mean = self.loss.mean(self.scores(), self._labels())
        if not np.isfinite(mean):
            raise Diverged(f"layer {self.name!r}: expected a finite loss, given {mean}")
        return mean

    def scores(self) -> Array:
        """The scores, whatever steps came after them."""
        return self.cal_output() if self._output is None else self._output

    def predictions(self) -> Predictions:
        """What the loss makes of the scores."""
        return self.loss.predictions(self.scores())

    def _forward(self, inputs: list[Array]) -> Array:
        return inputs[0]

    def _gathered_gradient(self) -> Array:
        return self.loss.gradient(self.output, self._labels())

    def _backward(self, gradient: Array) -> list[Array]:
        return [gradient]

    def _labels(self) -> Array:
        if not self.loss.needs_labels:
            return np.zeros(self._place_holder.batch_size, dtype=self._place_holder.dtype)
        if self._place_holder.labels is None:
            raise ModelError(
                f"layer {self.name!r}: expected labels for the loss, given none; feed the mini-batch with labels"
            )
        return self._place_holder.labels


class SimpleLossLayer(LossLayer):
    """The same; files have both names."""

    type_name: ClassVar[str] = "simplelosslayer"
