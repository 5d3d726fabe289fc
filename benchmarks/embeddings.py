"""Clicks with ten fields, learned by embeddings, compared with PyTorch by hand and with river."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Final

import numpy as np

from benchmarks.measuring import Figure, Stopwatch, Target, Trial, alternate, run_to_end
from benchmarks.session import Session
from streamiter import Flow
from streamiter.learn import Embeddings, train_online

__all__ = ["embeddings_speed"]

ROWS_OF_CPU: Final = "rows/CPU-s"
_SIZES: Final = (2, 5, 7, 24, 50, 200, 1_000, 5_000, 20_000, 50_000)
"""The numbers of texts of the fields; in each of them text n is as frequent as 1 / n."""
_FACTORS: Final = 8
_UNITS: Final = (32, 16)
# PyTorch learns in mini-batches, whose rows are predicted with vectors of before: 2,000 rows/s are .1 s of events.
_MINI_BATCH: Final = 200
_RIVER_ROWS: Final = 2_000

Record = dict[str, Any]


def clicks(count: int, seed: int = 1) -> list[Record]:
    """Return records of ten fields, and whether a click followed, which depends on single fields and on pairs."""
    draw = np.random.default_rng(seed)
    columns = []
    for size in _SIZES:
        shares = np.cumsum(1.0 / np.arange(1, size + 1))
        columns.append(np.searchsorted(shares / shares[-1], draw.random(count)))
    effects = [draw.normal(size=(size, 3)) for size in _SIZES]
    scores = sum(0.3 * effect[column, 0] for effect, column in zip(effects, columns, strict=True)) - 1.0
    for first, other in ((0, 5), (1, 6), (4, 7), (5, 8)):
        scores += 0.5 * (effects[first][columns[first], 1:] * effects[other][columns[other], 1:]).sum(axis=1)
    labels = (draw.random(count) < 1 / (1 + np.exp(-scores))).tolist()
    names = [f"field{number}" for number in range(len(_SIZES))]
    texts = [[f"t{text}" for text in column.tolist()] for column in columns]
    return [
        {**dict(zip(names, row, strict=True)), "click": label}
        for row, label in zip(zip(*texts, strict=True), labels, strict=True)
    ]


def embeddings_speed(session: Session) -> Iterator[Figure]:
    """DeepFM of ten fields with eight factors learns clicks; the rows are dicts of texts for all."""
    rows = clicks(session.size(100_000, 4_000))

    def ours(**options: Any) -> Callable[[], Trial]:
        def run() -> Trial:
            flow = Flow("clicks")
            training = train_online(flow.from_items(rows, parallelism=1), label="click", report_every=10**6, **options)
            reports = training.validation.collect()
            with Stopwatch() as watch:
                run_to_end(flow)
            return Trial(watch.rates(len(rows), "rows") | {"log loss": reports.items[-1]["loss"]})

        return run

    deepfm = Embeddings(kind="deepfm", factors=_FACTORS, hidden=_UNITS)
    name, bare, alone = "train_online, DeepFM", "PyTorch by hand, DeepFM", "train_online, linear member alone"
    contenders = {name: ours(embeddings=deepfm, shapes=False), alone: ours(shapes=False)}
    contenders["train_online, DeepFM and tables"] = ours(embeddings=deepfm)
    if has_torch := find_spec("torch") is not None:
        contenders[bare] = lambda: _with_torch(rows)
    else:
        print("PyTorch is not installed: no comparison with it (pip install torch)", file=sys.stderr)
    river, has_river = "river, factorization machine", find_spec("river") is not None
    if has_river:
        contenders[river] = lambda: _with_river(rows[:_RIVER_ROWS])
    for contender in contenders.values():
        contender()  # All is compiled, and imported.
    series = alternate(contenders, repeat=session.repeat)
    for contender in contenders:
        yield series.figure(contender, "log loss")
    for contender in (alone, "train_online, DeepFM and tables", *([bare] if has_torch else [])):
        yield series.figure(contender, ROWS_OF_CPU)
    if has_river:
        yield series.figure(river, ROWS_OF_CPU)
        yield series.figure(name, ROWS_OF_CPU, compared_with=river, target=Target("ratio", at_least=10.0))
    if has_torch:
        target = Target("ratio", at_least=1.0)
        yield series.figure(name, ROWS_OF_CPU, compared_with=bare, target=target)


def _with_river(rows: list[Record]) -> Trial:
    from river import facto

    model = facto.FMClassifier(n_factors=_FACTORS)
    total, given = 0.0, [({name: row[name] for name in row if name != "click"}, row["click"]) for row in rows]
    with Stopwatch() as watch:
        for row, label in given:
            total -= np.log(max(model.predict_proba_one(row).get(label, 0.5), 1e-9))
            model.learn_one(row, label)
    return Trial(watch.rates(len(rows), "rows") | {"log loss": total / len(rows)})


def _with_torch(rows: list[Record]) -> Trial:
    """Predict, then learn, mini-batches: sparse embeddings and a network, each with its Adam; ids come as they come."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    nn, fields = torch.nn, len(_SIZES)
    room = sum(_SIZES)
    vectors, weights = nn.Embedding(room, _FACTORS, sparse=True), nn.Embedding(room, 1, sparse=True)
    nn.init.normal_(vectors.weight, std=0.02)
    nn.init.zeros_(weights.weight)
    sizes = (fields * _FACTORS, *_UNITS)
    layers = [part for one, other in pairwise(sizes) for part in (nn.Linear(one, other), nn.ReLU())]
    network = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))
    sparse = torch.optim.SparseAdam([*vectors.parameters(), *weights.parameters()], lr=0.01)
    dense = torch.optim.Adam(network.parameters(), lr=0.001)
    loss_of = nn.BCEWithLogitsLoss()
    ids: dict[tuple[str, str], int] = {}
    names, total = [name for name in rows[0] if name != "click"], 0.0
    with Stopwatch() as watch:
        for start in range(0, len(rows), _MINI_BATCH):
            some = rows[start : start + _MINI_BATCH]
            indices = torch.tensor([[ids.setdefault((name, row[name]), len(ids)) for name in names] for row in some])
            labels = torch.tensor([float(row["click"]) for row in some])
            own = vectors(indices)
            pairs = 0.5 * (own.sum(1).square() - own.square().sum(1)).sum(1)
            scores = weights(indices).sum((1, 2)) + pairs + network(own.flatten(1)).squeeze(1)
            loss = loss_of(scores, labels)
            sparse.zero_grad()
            dense.zero_grad()
            loss.backward()
            sparse.step()
            dense.step()
            total += float(loss) * len(some)
    return Trial(watch.rates(len(rows), "rows") | {"log loss": total / len(rows)})
