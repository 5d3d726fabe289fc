"""What ``streamiter train`` is told, made into what training takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from streamiter.errors import ConfigurationError
from streamiter.numbers import whole_number_in

if TYPE_CHECKING:
    from streamiter.networks.data import LabelledRows
    from streamiter.networks.network import Network
    from streamiter.networks.starting import Start
    from streamiter.parameter_server.consistency.settings import Consistency

__all__ = ["consistency_of", "initial_of", "rows_of"]


def consistency_of(given: str) -> Consistency:
    """``bsp``, ``asp`` or ``ssp:`` and the staleness.

    >>> consistency_of("ssp:2")
    SSP(staleness=2)
    """
    from streamiter.parameter_server.consistency.settings import ASP, BSP, SSP

    name, _, staleness = given.lower().partition(":")
    if name == "bsp" and not staleness:
        return BSP()
    if name == "asp" and not staleness:
        return ASP()
    if name == "ssp" and (mini_batches := whole_number_in(staleness)) is not None:
        return SSP(staleness=mini_batches)
    raise ConfigurationError(
        f"--consistency: expected bsp, asp, or ssp: and how many mini-batches a worker may be ahead, as ssp:2, given "
        f"{given!r}"
    )


def initial_of(network: Network, start: Path | None) -> tuple[Network, Start]:
    """The parameters of a saved model to go on from, where one is named; the network then has its features."""
    from streamiter.networks.saved_models import load_network

    named = network.configuration.model.load_path
    folder = start if start is not None else None if named is None else Path(named)
    if folder is None:
        return network, None
    saved = load_network(folder)
    features = saved.network.features
    if network.features is None and features is not None:
        network = network.with_features(features)
    return network, saved.parameters


def rows_of(network: Network, data: str | None, validate: str | None) -> tuple[LabelledRows, LabelledRows]:
    """What is learned from, and what is judged by; both checked, for the message then names the file's option."""
    from streamiter.networks.data import part, read_rows
    from streamiter.networks.row_checks import RowChecks
    from streamiter.networks.training import sized

    settings = network.configuration.data
    source = data or settings.path
    if source is None:
        raise ConfigurationError(
            "--data: expected a file of rows, given none, and no path in the data section of the network; "
            "write --data FILE"
        )
    rows = read_rows(source, settings, owner="--data")
    checks = RowChecks(sized(network, rows))
    rows = rows.widened(checks.features, "--data")
    checks.check("--data", rows)
    if validate is None:
        parted = part(rows, validate_ratio=settings.validate_ratio)
        return parted.training, parted.validation
    held_out = read_rows(validate, settings, owner="--validate").widened(checks.features, "--validate")
    checks.check("--validate", held_out)
    return rows, held_out
