"""The layers as a whole: one step of training, or a prediction, for the mini-batch at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from streamiter.errors import ConfigurationError, ModelError
from streamiter.learn.rows import BadRows
from streamiter.networks.layers.layer import Layer, LossLayer
from streamiter.networks.mini_batches import PlaceHolder
from streamiter.networks.parameters import Array, Parameter

if TYPE_CHECKING:
    import numpy.typing as npt

    from streamiter.networks.losses import Predictions
    from streamiter.sparse_rows import SparseRows

__all__ = ["LayerGraph"]


class LayerGraph:
    """Layers in topological order: each behind its inputs, the loss layer last.

    A training step is: ``feed_data(rows, labels, training=True)``, set ``values`` of all ``parameters``, ``loss()``,
    ``backward()``, ``gradients()``, and after the optimizer's step ``update()``. ``seed`` is where dropout draws from.

    >>> from streamiter.networks.layers import LAYER_TYPES
    >>> from streamiter.networks.layers.layer import LayerSettings
    >>> from streamiter.optimizers import SGD
    >>> place_holder = PlaceHolder(features=2, dtype="float64")
    >>> wide = LAYER_TYPES["simpleinputlayer"].from_settings(
    ...     LayerSettings("wide", output_dim=1, optimizer=SGD(0.5)), [], place_holder)
    >>> end = LAYER_TYPES["simplelosslayer"].from_settings(LayerSettings("end"), [wide], place_holder)
    >>> graph = LayerGraph([wide, end], place_holder, end)
    >>> graph.feed_data([[1.0, 0.0], [1.0, 2.0]], [1, -1], training=True)
    >>> for parameter in graph.parameters:
    ...     parameter.values = np.zeros(graph.shape_of(parameter))
    >>> round(graph.loss(), 4)
    0.6931
    >>> graph.backward()
    >>> [(parameter.name, parameter.gradient.ravel().tolist()) for parameter in graph.gradients()]
    [('wide.weight', [0.0, 0.5]), ('wide.bias', [0.0])]
    """

    def __init__(
        self, layers: Sequence[Layer], place_holder: PlaceHolder, loss_layer: LossLayer, *, seed: int = 0
    ) -> None:
        self.layers = list(layers)
        self.place_holder = place_holder
        self.loss_layer = loss_layer
        self._check()
        self.parameters: list[Parameter] = [
            parameter for layer in self.layers for parameter in layer.parameters
        ]
        self._seed = seed
        self._mini_batches = 0
        """That were fed to learn from."""

    def feed_data(
        self,
        rows: SparseRows | npt.ArrayLike,
        labels: npt.ArrayLike | None = None,
        *,
        indices: npt.NDArray[np.int64] | None = None,
        training: bool = False,
        number: int | None = None,
    ) -> None:
        """The next mini-batch; nothing of it is computed yet. Arguments are those of ``PlaceHolder.feed_data``.

        What dropout leaves out depends on ``seed`` and ``number`` only, the number of the mini-batch; where
        none is given the graph counts those that are learned from. Raises ModelError for rows that do not fit, and
        ``BadRows`` for labels that the loss does not know.
        """
        self.place_holder.feed_data(rows, labels, indices=indices, training=training)
        for position, layer in enumerate(self.layers):
            layer.reset()
            draws = training and layer.transfer is not None and layer.transfer.draws
            layer.generator = self._generator(position, number) if draws else None
        try:
            self.loss_layer.check_labels()
        except BadRows:
            self.place_holder.labels = None
            raise
        self._mini_batches += training

    def shape_of(self, parameter: Parameter) -> tuple[int, ...]:
        """What its ``values`` must be of: where it is by feature, one row for each feature in the mini-batch."""
        if parameter.by_feature:
            return (len(self.place_holder.indices), *parameter.shape[1:])
        return parameter.shape

    def forward(self) -> Array:
        """The scores: (rows, outputs)."""
        self._check_values()
        with np.errstate(over="ignore", invalid="ignore"):
            for layer in self.layers:
                layer.cal_output()
        return self.loss_layer.output

    def loss(self) -> float:
        """The mean over the batch, of the scores, which are computed where they are not yet."""
        self._forward_unless_done()
        return self.loss_layer.mean_loss()

    def predictions(self) -> Predictions:
        """What the loss function makes of the scores."""
        self._forward_unless_done()
        return self.loss_layer.predictions()

    def backward(self) -> None:
        """From the loss to the inputs. ModelError for a mini-batch that was fed for prediction only."""
        if not self.place_holder.training:
            raise ModelError(
                "Graph.backward: expected a mini-batch to learn from, given one for prediction; "
                "feed_data(rows, labels, training=True)"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            for layer in reversed(self.layers):
                layer.cal_backward()

    def gradients(self) -> list[Parameter]:
        """All parameters, each with its ``gradient``."""
        with np.errstate(over="ignore", invalid="ignore"):
            for layer in self.layers:
                layer.cal_gradients()
        return self.parameters

    def update(self) -> None:
        """The optimizer has made its step."""
        for layer in self.layers:
            layer.update()

    def _forward_unless_done(self) -> None:
        if self.loss_layer.status == 0:
            self.forward()

    def _generator(self, layer: int, number: int | None) -> np.random.Generator:
        return np.random.default_rng([self._seed, layer, self._mini_batches if number is None else number])

    def _check_values(self) -> None:
        for parameter in self.parameters:
            values, expected = parameter.values, self.shape_of(parameter)
            if values is not None and values.shape == expected and values.dtype == self.place_holder.dtype:
                continue
            given = "none" if values is None else f"{values.dtype} of shape {values.shape}"
            raise ModelError(
                f"parameter {parameter.name!r}: expected values of shape {expected} in {self.place_holder.dtype}, "
                f"given {given}; set those of this mini-batch"
            )

    def _check(self) -> None:
        seen: set[int] = set()
        for layer in self.layers:
            for source in layer.inputs:
                if id(source) not in seen:
                    raise ConfigurationError(
                        f"layer {layer.name!r}: expected its input {source.name!r} before it, given it behind "
                        "or not at all; give the layers in topological order"
                    )
            seen.add(id(layer))
        if not self.layers or self.layers[-1] is not self.loss_layer:
            given = repr(self.layers[-1].name) if self.layers else "none"
            raise ConfigurationError(
                f"Graph: expected the loss layer {self.loss_layer.name!r} as the last, given {given}"
            )
