"""The graph of a configuration."""

from __future__ import annotations

from dataclasses import replace

import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.networks.configuration.settings import Configuration, FunctionSettings, LayerConfiguration
from streamiter.networks.graph import Graph
from streamiter.networks.layers import LAYER_TYPES, Layer, LossLayer
from streamiter.networks.layers.settings import LayerSettings
from streamiter.networks.losses import LOSSES, Loss
from streamiter.networks.place_holder import PlaceHolder
from streamiter.networks.transfer_functions import TRANSFER_FUNCTIONS, TransferFunction

__all__ = ["build"]


def build(configuration: Configuration, features: int, dtype: npt.DTypeLike, *, seed: int) -> Graph:
    """Layers for the mini-batches of one worker; their parameters have no values yet."""
    place_holder = PlaceHolder(features=features, dtype=dtype)
    layers: dict[str, Layer] = {}
    for layer in configuration.layers:
        inputs = [layers[name] for name in layer.inputs]
        try:
            layers[layer.name] = LAYER_TYPES[layer.key].from_settings(_settings(layer), inputs, place_holder)
        except ConfigurationError as error:
            raise ConfigurationError(f"{configuration.source}: {error}") from error
    loss_layer = layers[configuration.loss_layer.name]
    assert isinstance(loss_layer, LossLayer)
    return Graph(list(layers.values()), place_holder, loss_layer, seed=seed)


def _settings(layer: LayerConfiguration) -> LayerSettings:
    settings = LayerSettings(
        name=layer.name,
        output_dim=layer.output_dim,
        optimizer=layer.optimizer,
        factors=layer.num_factors,
        weight_dim=layer.weight_dim,
    )
    if layer.transfer_function is not None:
        settings = replace(settings, transfer_function=_transfer_function(layer.transfer_function))
    if layer.loss is not None:
        settings = replace(settings, loss=_loss(layer.loss))
    return settings


def _transfer_function(settings: FunctionSettings) -> TransferFunction:
    return TRANSFER_FUNCTIONS[settings.key](**settings.parameters)


def _loss(settings: FunctionSettings) -> Loss:
    return LOSSES[settings.key](**settings.parameters)
