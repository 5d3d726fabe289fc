"""The canonical form of a configuration: defaults filled in, types as Angel spells them, layers in order."""

from __future__ import annotations

import json
from typing import Any

from streamiter.networks.configuration.sections import OPTIMIZERS
from streamiter.networks.configuration.settings import (
    LAYER_KINDS,
    Configuration,
    FunctionSettings,
    LayerConfiguration,
)

__all__ = ["as_text", "canonical"]


def canonical(configuration: Configuration) -> dict[str, Any]:
    """What Angel saves beside a model: read again it is the same configuration, and the same canonical form.

    The same for files that differ only in the order of their layers, in case, in what they leave to defaults, or in
    whether optimizers and functions are names or objects.
    """
    return {
        "data": _data(configuration),
        "model": _model(configuration),
        "train": _train(configuration),
        "layers": _layers(configuration.layers),
    }


def as_text(document: dict[str, Any]) -> str:
    """JSON as people read it."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _data(configuration: Configuration) -> dict[str, Any]:
    data = configuration.data
    return {
        **({} if data.path is None else {"path": data.path}),
        "format": data.format,
        "indexrange": data.index_range,
        "numfield": data.num_field,
        "validateratio": data.validate_ratio,
        "sampleratio": data.sample_ratio,
        "useshuffle": data.use_shuffle,
        "posnegratio": data.pos_neg_ratio,
        "translabel": data.trans_label,
    }


def _model(configuration: Configuration) -> dict[str, Any]:
    model = configuration.model
    document: dict[str, Any] = {
        "modeltype": model.model_type,
        "modelsize": model.model_size,
        "blockSize": model.block_size,
    }
    # Left out where they say nothing, so that what Angel saved stays as it is.
    if model.load_path is not None:
        document["loadpath"] = model.load_path
    if model.save_path is not None:
        document["savepath"] = model.save_path
    if model.init != "xavier":
        document["init"] = model.init
    return document


def _train(configuration: Configuration) -> dict[str, Any]:
    train = configuration.train
    return {
        "epoch": train.epoch,
        "numupdateperepoch": train.num_update_per_epoch,
        "batchsize": train.batch_size,
        "lr": train.lr,
        "decayclass": train.decay_class,
        "decayalpha": train.decay_alpha,
        "decaybeta": train.decay_beta,
    }


# ---- layers


def _layers(layers: tuple[LayerConfiguration, ...]) -> list[dict[str, Any]]:
    """Folded ones as one again, where the last of them stands."""
    parts: dict[str, list[LayerConfiguration]] = {}
    for layer in layers:
        parts.setdefault(layer.declared, []).append(layer)
    return [_layer(parts[layer.name]) for layer in layers if layer.name == layer.declared]


def _layer(parts: list[LayerConfiguration]) -> dict[str, Any]:
    first, last = parts[0], parts[-1]
    kind = LAYER_KINDS[last.type]
    document: dict[str, Any] = {"name": last.name, "type": last.type}
    if kind.folded:
        document["outputdims"] = [part.output_dim for part in parts]
    else:
        document["outputdim"] = last.output_dim
    if last.num_factors is not None:
        document["numfactors"] = last.num_factors
    if kind.inputs == "one":
        document["inputlayer"] = first.inputs[0]
    elif kind.inputs == "many":
        document["inputlayers"] = list(last.inputs)
    functions = [_function(part.transfer_function) for part in parts if part.transfer_function is not None]
    if kind.folded:
        document["transfuncs"] = functions
    elif functions:
        document["transfunc"] = functions[0]
    if last.weight_dim is not None:
        document["weightdims"] = [part.weight_dim for part in parts]
    if last.optimizer_settings is not None:
        document["optimizer"] = _function(last.optimizer_settings)
    if last.loss is not None:
        document["lossfunc"] = _function(last.loss)
    return document


def _function(settings: FunctionSettings) -> dict[str, Any]:
    unsaid = OPTIMIZERS.unsaid_when_0
    said = {name: number for name, number in settings.parameters.items() if number or name not in unsaid}
    return {"type": settings.type, **said}
