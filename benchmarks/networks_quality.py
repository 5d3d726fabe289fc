"""Measure the quality of networks on real data, compared with published results and with the same networks in numpy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.measuring import Figure, Target
from benchmarks.networks import DATA, OWN, PUBLISHED
from benchmarks.session import Session
from streamiter.networks.data import part, read_rows
from streamiter.networks.network import Network
from streamiter.networks.training import fit_network

__all__ = ["networks_quality"]

A9A: Final = "a9a/a9a_123d_train.libsvm", "a9a/a9a_123d_test.dummy"
CENSUS: Final = "census/census_148d_train.dummy", "census/census_148d_test.dummy"

# The largest difference to the same network in numpy, which shuffles in another order.
_NEAR: Final = 0.003


class Known(NamedTuple):
    """The results of a network in another implementation."""

    loss: float
    accuracy: float
    auc: float


@dataclass(frozen=True)
class Run:
    """A configuration and its known results. ``published`` and ``restated`` are results on the validation rows."""

    name: str
    config: Path
    files: tuple[str, str] = CENSUS
    """The files of training and of test."""
    init: str | None = None
    """The kind of initial values, if it is not the one of the configuration."""
    published: Known | None = None
    restated: Known | None = None
    restated_test: Known | None = None
    is_near: bool = False
    """Whether the target is the result of the same network in numpy."""
    auc_at_least: float | None = None
    """The target on the test file; the 2,280 validation rows are too few to judge by (± .009)."""


# Angel published its results on its own files. Restated results are those of the same networks and steps in numpy.
_DEEPFM: Final = Known(0.323, 0.853, 0.904), Known(0.331, 0.850, 0.900)
_DAW: Final = Known(0.323, 0.853, 0.904), Known(0.315, 0.851, 0.909)
_LOGREG: Final = PUBLISHED / "logreg.json"
_RUNS: Final = (
    Run(
        "a9a, logreg.json",
        _LOGREG,
        A9A,
        published=Known(0.342, 0.842, 0.899),
        restated=Known(0.339, 0.842, 0.901),
        restated_test=Known(0.325, 0.852, 0.902),
        is_near=True,
    ),
    Run(
        "census, logreg.json",
        _LOGREG,
        published=Known(0.333, 0.850, 0.900),
        restated=Known(0.330, 0.850, 0.901),
        is_near=True,
    ),
    Run("census, deepfm.json, init angel", PUBLISHED / "deepfm.json", CENSUS, "angel", *_DEEPFM),
    Run("census, deepfm.json", PUBLISHED / "deepfm.json", CENSUS, None, *_DEEPFM, auc_at_least=0.907),
    Run("census, daw.json, init angel", PUBLISHED / "daw.json", CENSUS, "angel", *_DAW),
    Run("census, daw.json", PUBLISHED / "daw.json", CENSUS, None, *_DAW, auc_at_least=0.907),
    Run("census, examples/networks/deepfm.json", OWN / "deepfm.json", auc_at_least=0.916),
    Run(
        "census, examples/networks/wide_and_deep.json",
        OWN / "wide_and_deep.json",
        restated_test=Known(0.302, 0.861, 0.919),
        auc_at_least=0.916,
    ),
    Run("census, examples/networks/pnn.json", OWN / "pnn.json", auc_at_least=0.907),
    Run("census, examples/networks/nfm.json", OWN / "nfm.json", auc_at_least=0.907),
)


def networks_quality(session: Session) -> Iterator[Figure]:
    """Networks are trained with three seeds, and judged on the validation rows and on the test file."""
    seeds = range(session.size(3, 1))
    for run in _RUNS:
        train, test = (DATA / name for name in run.files)
        if train.exists() and test.exists() and run.config.exists():
            yield from _judged(run, train, test, seeds)


def _judged(run: Run, train: Path, test: Path, seeds: range) -> Iterator[Figure]:
    network = Network.from_json(_document(run))
    settings = network.configuration.data
    data, held_out = (read_rows(path, settings, owner=run.name) for path in (train, test))
    parted = part(data, validate_ratio=settings.validate_ratio)
    found: dict[tuple[str, str], list[float]] = {}
    for seed in seeds:
        trained = fit_network(network, parted.training, parted.validation, seed=seed, progress=False)
        judged = {"validation": trained.results[-1].validation, "test": trained.evaluate(held_out)}
        for where, result in judged.items():
            assert result is not None
            for metric, value in result.metrics().items():
                found.setdefault((where, metric), []).append(value)
    for (where, metric), values in found.items():
        is_test = where == "test"
        published = None if is_test else run.published
        restated = run.restated_test if is_test else run.restated
        yield Figure(
            f"{run.name}: {where} {metric}",
            "",
            tuple(values),
            compared_with=_known_results(metric, published=published, restated=restated),
            target=_target(run, metric, restated, is_test=is_test),
        )


def _known_results(metric: str, **known: Known | None) -> str:
    return ", ".join(f"{name} {getattr(figures, metric):.3f}" for name, figures in known.items() if figures is not None)


def _target(run: Run, metric: str, restated: Known | None, *, is_test: bool) -> Target | None:
    if is_test and metric == "auc" and run.auc_at_least is not None:
        return Target("figure", at_least=run.auc_at_least)
    if not run.is_near or restated is None:
        return None
    if metric == "loss":
        return Target("figure", below=restated.loss + _NEAR)
    return Target("figure", at_least=getattr(restated, metric) - _NEAR)


def _document(run: Run) -> Mapping[str, Any]:
    document: dict[str, Any] = json.loads(run.config.read_text())
    if run.init is not None:
        document["model"] = {**document["model"], "init": run.init}
    return document
