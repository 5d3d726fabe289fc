"""Networks on disk: a folder with the canonical JSON and the parameters.

=========================  ==========================================================================
``network.json``           the network, its number of features included
``parameters.safetensors`` the parameters by name, which any safetensors library reads
``results.json``           how its epochs went
=========================  ==========================================================================

What optimizers remember is not kept: training that goes on from a saved model begins with new slots, at step 1.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import safetensors.numpy
from safetensors import SafetensorError

from streamiter.errors import ModelError
from streamiter.networks.network import Network
from streamiter.networks.parameters import Array
from streamiter.networks.prediction import NetworkPredictor
from streamiter.networks.results import EpochResult
from streamiter.networks.versions import checked_arrays

__all__ = ["SavedNetwork", "check_folder", "is_saved_network", "load_network", "save_network"]

_NETWORK: Final = "network.json"
_PARAMETERS: Final = "parameters.safetensors"
_RESULTS: Final = "results.json"


@dataclass(frozen=True, eq=False)
class SavedNetwork:
    """What a folder held: for prediction, or as ``start=`` of another training."""

    network: Network
    parameters: dict[str, Array]

    @property
    def predictor(self) -> NetworkPredictor:
        """Predicts with these parameters."""
        return NetworkPredictor(self.network, self.parameters)


def check_folder(directory: str | os.PathLike[str]) -> None:
    """Raise ModelError where a model cannot be saved, for something else is there, or nothing can be written.

    To be asked before it is trained: what was learned would be lost.
    """
    folder = Path(directory)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if there == folder:
        fits = folder.is_dir() and (is_saved_network(folder) or not any(folder.iterdir()))
        given = "something else"
    else:
        fits, given = there.is_dir(), f"a path below {str(there)!r}, which is a file"
    if not fits:
        raise ModelError(
            f"model {str(folder)!r}: expected a new folder, an empty one, or one with {_NETWORK}, given {given}; "
            "save it elsewhere"
        )
    try:
        tempfile.TemporaryDirectory(dir=there).cleanup()  # Permissions tell less: root has all of them.
    except OSError as error:
        raise _cannot_be_written(folder, error) from error


def save_network(
    directory: str | os.PathLike[str],
    network: Network,
    parameters: Mapping[str, Array],
    results: Sequence[EpochResult] = (),
) -> None:
    """Write a folder, or replace what an earlier call wrote into it; each file is whole at any moment.

    Raises ModelError where something else is in the folder, where it cannot be written, and where a parameter is
    missing, of another shape, or none of the network's.
    """
    folder = Path(directory)
    arrays = checked_arrays(network, parameters, f"model {str(folder)!r}")
    check_folder(folder)
    files = {
        _RESULTS: _as_json([asdict(result) for result in results]),
        _NETWORK: _as_json(network.to_json()),
        _PARAMETERS: safetensors.numpy.save({name: array.copy() for name, array in arrays.items()}),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _replace(folder / name, content)
    except OSError as error:
        raise _cannot_be_written(folder, error) from error


def load_network(directory: str | os.PathLike[str]) -> SavedNetwork:
    """What :func:`save_network` wrote. Raises ModelError for a folder that holds no such model."""
    folder = Path(directory)
    subject = f"model {str(folder)!r}"
    if not is_saved_network(folder):
        raise ModelError(
            f"{subject}: expected a folder with {_NETWORK} and {_PARAMETERS}, given "
            f"{'a folder without them' if folder.is_dir() else 'no folder'}; streamiter train --model makes one"
        )
    network = Network.from_json(folder / _NETWORK)
    try:
        arrays = safetensors.numpy.load((folder / _PARAMETERS).read_bytes())
    except (SafetensorError, ValueError) as error:
        raise ModelError(
            f"{subject}: expected parameters in {_PARAMETERS}, given a broken file: {error}"
        ) from error
    except KeyError as error:
        raise ModelError(
            f"{subject}: expected parameters in {_PARAMETERS} in float32 or float64, given numbers of type {error}, "
            "which numpy has not; convert them"
        ) from error
    return SavedNetwork(network, checked_arrays(network, arrays, subject))


def is_saved_network(folder: Path) -> bool:
    """Whether a saved network is in it."""
    return (folder / _NETWORK).is_file() and (folder / _PARAMETERS).is_file()


def _cannot_be_written(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"model {str(folder)!r}: expected a folder that can be written, given: {error.strerror}; save it elsewhere"
    )


def _as_json(document: Any) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
