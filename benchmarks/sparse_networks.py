"""Train networks with a billion features, each in a process of its own.

The program ``python -m benchmarks.sparse_networks NETWORK NON-ZEROS`` prints the seconds and the CPU seconds of
``fit_network``, and the peak MB resident of the process.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from benchmarks.measuring import Figure, Stopwatch, Target
from benchmarks.session import PROJECT, Session
from streamiter.networks import LabelledRows, Network, fit_network
from streamiter.values.sparse_rows import SparseRows

__all__ = ["main", "networks_sparse"]

_FEATURES: Final = 10**9
_FIELDS: Final = 10
_FACTORS: Final = 8

_WIDE: Final = {"name": "wide", "type": "simpleinputlayer", "outputdim": 1}
_VECTORS: Final = {"name": "vectors", "type": "embedding", "numfactors": _FACTORS, "outputdim": _FIELDS * _FACTORS}
_CROSS: Final = {"name": "cross", "type": "biinnersumcross", "inputlayer": "vectors"}
_DEEP: Final = {
    "name": "deep",
    "type": "fclayer",
    "inputlayer": "vectors",
    "outputdims": [50, 1],
    "transfuncs": ["relu", "identity"],
}
_PARTS: Final = {"FM": [_WIDE, _VECTORS, _CROSS], "DeepFM": [_WIDE, _VECTORS, _CROSS, _DEEP]}
_NETWORKS: Final = {**_PARTS, "wide & deep": [_WIDE, _VECTORS, _DEEP]}

_SECONDS_BELOW: Final = 10.0
_MB_BELOW: Final = 1000.0


def networks_sparse(session: Session) -> Iterator[Figure]:
    """Networks for 10⁹ features with 8 factors learn 400,000 non-zeros in 40,000 rows: an epoch of 10 steps, Adam."""
    for name in _NETWORKS:
        command = [sys.executable, "-m", "benchmarks.sparse_networks", name, str(session.size(400_000, 4_000))]
        lines = [
            subprocess.run(command, cwd=PROJECT, capture_output=True, timeout=900, check=True).stdout.split()
            for _ in range(min(session.repeat, 3))
        ]
        seconds, cpu, megabytes = (tuple(float(line[place]) for line in lines) for place in range(3))
        yield Figure(name, "s", seconds, target=Target("figure", below=_SECONDS_BELOW))
        yield Figure(name, "CPU-s", cpu)
        yield Figure(name, "MB resident at most", megabytes, target=Target("figure", below=_MB_BELOW))


def _network(name: str) -> Network:
    layers: list[dict[str, Any]] = _NETWORKS[name]
    scores = [layer["name"] for layer in layers if layer is not _VECTORS]
    total = {"name": "score", "type": "sumpooling", "outputdim": 1, "inputlayers": scores}
    loss = {"name": "loss", "type": "simplelosslayer", "inputlayer": "score"}
    return Network.from_json(
        {
            "data": {"indexrange": _FEATURES},
            "model": {"modeltype": "T_FLOAT_SPARSE_LONGKEY"},
            "train": {"epoch": 1, "lr": 0.01},
            "default_optimizer": "Adam",
            "layers": [*layers, total, loss],
        }
    )


def _rows(non_zeros: int) -> LabelledRows:
    """Return rows with a feature in each field; nearly all features occur once."""
    random, count = np.random.default_rng(1), non_zeros // _FIELDS
    width = _FEATURES // _FIELDS
    features = random.integers(0, width, (count, _FIELDS)) + width * np.arange(_FIELDS)
    rows = SparseRows(np.arange(0, non_zeros + 1, _FIELDS), features.reshape(-1), np.ones(non_zeros), _FEATURES)
    return LabelledRows(rows, np.where(random.random(count) < 0.5, 1.0, -1.0))


def main(name: str, non_zeros: int) -> None:
    """Train once, and print the figures."""
    network, rows = _network(name), _rows(non_zeros)
    with Stopwatch() as watch:
        trained = fit_network(network, rows, seed=1, progress=False)
    assert len(trained.parameters["features"]) > 0.99 * non_zeros
    print(watch.seconds, watch.cpu_seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
