"""Configuration files of networks: read and checked completely before anything runs, and written as canonical JSON."""

from streamiter.networks.configuration.reading import canonical, json_text, read_configuration
from streamiter.networks.settings import (
    Configuration,
    DataSettings,
    FunctionSettings,
    LayerConfiguration,
    ModelSettings,
    TrainSettings,
)

__all__ = [
    "Configuration",
    "DataSettings",
    "FunctionSettings",
    "LayerConfiguration",
    "ModelSettings",
    "TrainSettings",
    "canonical",
    "json_text",
    "read_configuration",
]
