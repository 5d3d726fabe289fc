"""The sections ``data``, ``model`` and ``train`` of a configuration file."""

from __future__ import annotations

import math
from typing import Any, Final, get_args

from streamiter.networks.configuration.keys import Keys
from streamiter.networks.configuration.optimizers import DECAY_ALIASES, DECAYS
from streamiter.networks.configuration.settings import (
    DataFormat,
    DataSettings,
    InitialWay,
    LabelTransformation,
    ModelSettings,
    TrainSettings,
)
from streamiter.networks.configuration.where import Where

__all__ = ["read_data", "read_model", "read_train"]

_MODEL_TYPES: Final = [
    f"T_{number}_{storage}"
    for number in ("FLOAT", "DOUBLE")
    for storage in ("DENSE", "SPARSE", "SPARSE_LONGKEY")
]


def read_data(given: Any, where: Where) -> tuple[DataSettings, list[str]]:
    """``data``, and a warning for each unknown key."""
    keys, default = Keys(given, where), DataSettings()
    settings = DataSettings(
        format=keys.choice("format", default.format, get_args(DataFormat)),  # type: ignore[arg-type]
        path=keys.text("path", default.path),
        index_range=keys.whole("indexrange", default.index_range, 1, off=-1),
        num_field=keys.whole("numfield", default.num_field, 1, off=-1),
        validate_ratio=keys.number(
            "validateratio",
            default.validate_ratio,
            "a number from 0 to below 1",
            lambda ratio: 0.0 <= ratio < 1.0,
        ),
        sample_ratio=keys.number(
            "sampleratio",
            default.sample_ratio,
            "a number above 0, of at most 1",
            lambda ratio: 0.0 < ratio <= 1.0,
        ),
        use_shuffle=keys.flag("useshuffle", default.use_shuffle),
        pos_neg_ratio=keys.number(
            "posnegratio",
            default.pos_neg_ratio,
            "a number above 0, or -1",
            lambda ratio: ratio > 0.0 or ratio == -1.0,
        ),
        trans_label=keys.choice(  # type: ignore[arg-type]
            "translabel", default.trans_label, get_args(LabelTransformation)
        ),
    )
    return settings, keys.unknown()


def read_model(given: Any, where: Where) -> tuple[ModelSettings, list[str]]:
    """``model``, and a warning for each unknown key."""
    keys, default = Keys(given, where), ModelSettings()
    settings = ModelSettings(
        model_type=keys.choice("modeltype", default.model_type, _MODEL_TYPES),
        model_size=keys.whole("modelsize", default.model_size, 1, off=-1),
        block_size=keys.whole("blockSize", default.block_size, 1),
        load_path=keys.text("loadpath", default.load_path),
        save_path=keys.text("savepath", default.save_path),
        init=keys.choice("init", default.init, get_args(InitialWay)),  # type: ignore[arg-type]
    )
    return settings, keys.unknown()


def read_train(given: Any, where: Where) -> tuple[TrainSettings, list[str]]:
    """``train``, and a warning for each unknown key."""
    keys, default = Keys(given, where), TrainSettings()
    decay = keys.choice("decayclass", default.decay_class, (*DECAYS, *DECAY_ALIASES))
    settings = TrainSettings(
        epoch=keys.whole("epoch", default.epoch, 1),
        num_update_per_epoch=keys.whole("numupdateperepoch", default.num_update_per_epoch, 1),
        batch_size=keys.whole("batchsize", default.batch_size, 1),
        lr=keys.number("lr", default.lr, "a number above 0", lambda rate: 0.0 < rate < math.inf),
        decay_class=DECAY_ALIASES.get(decay, decay),
        decay_alpha=keys.number(
            "decayalpha", default.decay_alpha, "a number of 0 or more", lambda alpha: alpha >= 0.0
        ),
        decay_beta=keys.number(
            "decaybeta", default.decay_beta, "a number from 0 to below 1", lambda beta: 0.0 <= beta < 1.0
        ),
    )
    return settings, keys.unknown()
