"""``embeddings_from``: embeddings of the ready-made learner with the sizes of a network from a configuration file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import pairwise
from os import PathLike
from typing import Any, Final, NoReturn

from streamiter.errors import ConfigurationError
from streamiter.learn.ready_made.embeddings import Embeddings
from streamiter.models.published_embeddings import EmbeddingKind
from streamiter.networks.configuration import Configuration, LayerConfiguration, read_configuration

_log = logging.getLogger("streamiter.networks")

_KINDS: Final[Mapping[tuple[bool, bool], EmbeddingKind]] = {
    (True, False): "fm",
    (True, True): "deepfm",
    (False, True): "wide and deep",
}
"""The kind for a file that has products of vectors, and fully connected layers."""
_LOSSES: Final = ("LogLoss", "L2Loss")
"""The losses that the ready-made learner minimizes: the first one for two labels, the other one for numbers."""


def embeddings_from(source: str | PathLike[str] | Mapping[str, object], **settings: Any) -> Embeddings:
    """Return embeddings with the kind, the factors and the hidden layers of a network of Angel's form.

    ``source`` is a JSON file, or its content, as for ``Network``; ``settings`` are others of ``Embeddings``, such as
    ``expire``. The file has one embedding layer; products of its vectors (``BiInnerSumCross``), fully connected layers
    on it (``FCLayer``, hidden ones with ``relu``), or both; and a sum of these with the weights of features
    (``SimpleInputLayer``). Only its layers count: features need no index range, and learning rates and optimizers are
    those of the ready-made learner, which the log says. ``train_network_online`` trains networks of any form.

    Raises ConfigurationError for other networks, and SettingsError for a file that cannot be read.

    >>> embeddings_from({"layers": [
    ...     {"type": "Embedding", "name": "vectors", "numfactors": 4, "outputdim": 12},
    ...     {"type": "FCLayer", "name": "deep", "inputlayer": "vectors", "outputdims": [16, 1],
    ...      "transfuncs": ["relu", "identity"]},
    ...     {"type": "SimpleLossLayer", "name": "loss", "lossfunc": "logloss", "inputlayer": "deep"},
    ... ]}, expire="30d", time="at").hidden
    (16,)
    """
    configuration = read_configuration(source)
    network = _Layers(configuration)
    kind = network.kind()
    sizes: dict[str, Any] = {"kind": kind, "factors": network.vectors.num_factors or 1}
    if kind != "fm":
        sizes["hidden"] = network.hidden()
    _log.info(
        "%s: the layers are used; the rows, learning rates and optimizers of the file are not, since the ready-made "
        "learner has its own",
        configuration.source,
    )
    return Embeddings(**(sizes | settings))


class _Layers:
    """The layers of a file by what embeddings make of them; other layers are refused."""

    def __init__(self, configuration: Configuration) -> None:
        self._source = configuration.source
        *layers, loss = configuration.layers
        self._by_type: dict[str, list[LayerConfiguration]] = {}
        for layer in layers:
            self._by_type.setdefault(layer.type, []).append(layer)
        for layer in layers:
            if layer.type not in ("SimpleInputLayer", "Embedding", "FCLayer", "BiInnerSumCross", "SumPooling"):
                self._refuse("layers of embeddings", f"{layer.name!r} of the type {layer.type}")
            if layer.type != "FCLayer" and len(self._by_type[layer.type]) > 1:
                self._refuse(f"one layer of the type {layer.type}", str(len(self._by_type[layer.type])))
        if "Embedding" not in self._by_type:
            self._refuse("a layer of the type Embedding", "none")
        if loss.loss is None or loss.loss.type not in _LOSSES:
            self._refuse(
                f"one of the losses {', '.join(_LOSSES)}, with LogLoss for any number of classes", str(loss.loss)
            )
        [self.vectors] = self._by_type["Embedding"]
        self._dense = self._by_type.get("FCLayer", [])
        self._crosses = self._by_type.get("BiInnerSumCross", [])
        self._check_inputs()

    def kind(self) -> EmbeddingKind:
        """Return the kind of embeddings that has these layers."""
        try:
            return _KINDS[bool(self._crosses), bool(self._dense)]
        except KeyError:
            self._refuse("a layer on the vectors, of the type BiInnerSumCross or FCLayer", "none")

    def hidden(self) -> tuple[int, ...]:
        """Return the numbers of units of the hidden layers."""
        *hidden, output = self._dense
        functions = [layer.transfer_function.type for layer in hidden if layer.transfer_function is not None]
        if not hidden or set(functions) != {"Relu"}:
            self._refuse("hidden fully connected layers with relu", ", ".join(functions) or "no hidden layer")
        is_linear = output.transfer_function is not None and output.transfer_function.type == "Identity"
        if output.output_dim != 1 or not is_linear:
            given = f"{output.output_dim} with {output.transfer_function}"
            self._refuse("one output with identity of the last fully connected layer", given)
        return tuple(layer.output_dim for layer in hidden)

    def _check_inputs(self) -> None:
        """Refuse layers whose inputs are others than those of embeddings."""
        pairs = [*pairwise((self.vectors, *self._dense)), *((self.vectors, layer) for layer in self._crosses)]
        for below, layer in pairs:
            if layer.inputs != (below.name,):
                self._refuse(f"{layer.name!r} on {below.name!r}", ", ".join(layer.inputs))
        for pooling in self._by_type.get("SumPooling", []):
            parts = [*self._by_type.get("SimpleInputLayer", []), *self._crosses, *self._dense[-1:]]
            if set(pooling.inputs) != {layer.name for layer in parts}:
                given = ", ".join(pooling.inputs)
                self._refuse(f"the sum of {', '.join(layer.name for layer in parts)} in {pooling.name!r}", given)

    def _refuse(self, expected: str, given: str) -> NoReturn:
        raise ConfigurationError(
            f"{self._source}: embeddings have the form of fm, deepfm or wide and deep; expected {expected}, given "
            f"{given}; change the file, or train it with train_network_online, which takes any network"
        )
