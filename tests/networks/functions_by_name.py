"""The functions and layers of networks by their names in configuration files, in lower case."""

from streamiter.networks.configuration import sections
from streamiter.networks.configuration.layer_kinds import ALIASES, LAYER_KINDS

__all__ = ["LAYER_TYPES", "LOSSES", "TRANSFER_FUNCTIONS"]

LOSSES = {name.lower(): make for name, (make, _) in sections.LOSSES.kinds.items()}
TRANSFER_FUNCTIONS = {name.lower(): make for name, (make, _) in sections.TRANSFER_FUNCTIONS.kinds.items()}
_TYPES = {name.lower(): kind.layer for name, kind in LAYER_KINDS.items()}
LAYER_TYPES = _TYPES | {alias: _TYPES[name.lower()] for alias, name in ALIASES.items()}
