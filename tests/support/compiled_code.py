"""Compile all compiled functions once, in one process, and store them.

Numba stores the functions that it compiles. Without the stored functions, each process of the tests would compile the
same functions at the same time. ``make test`` runs this before the tests begin (``PYTHONPATH=tests``)::

    python -m support.compiled_code
"""

from operator import itemgetter

import numpy as np

from streamiter import Columns, Flow
from streamiter.learn import ADWIN, AdaptiveLinearModel, DelayedLabels, Embeddings, PageHinkley, train_online
from streamiter.learn.late_labels.key_places import KeyPlaces
from streamiter.learn.quality.drift import DriftWatch
from streamiter.parameter_server.storage.feature_table import FeatureTable
from streamiter.topics.json_columns import ColumnScanner
from streamiter_kafka.record_columns import compile_it

__all__ = ["store_compiled_functions"]


def store_compiled_functions() -> None:
    """Call each compiled function that the tests share, unless its code is stored already."""
    texts = Columns({"kind": np.full(1_000, "a")})  # A few texts are not hashed by compiled code.
    AdaptiveLinearModel().learn(texts, np.ones(1_000))
    AdaptiveLinearModel(embeddings=Embeddings(at_most="1 MB")).learn(texts, np.ones(1_000))
    pairs = Columns({"x": np.zeros(2), "y": np.zeros(2)})
    AdaptiveLinearModel(loss="absolute", crosses=[("x", "y")]).learn(pairs, [1.0, 2.0])  # Not the code of mean squares.
    keys = KeyPlaces()
    keys.forget(keys.of(np.arange(1_000)))
    table = FeatureTable(1, weights=1, admit=1, capacity=1)
    table.renew(table.touch([1], [1], 0.1)[0])
    table.restore(table.state())
    for detector in (ADWIN(), PageHinkley()):
        DriftWatch(detector)
    ColumnScanner([("text", np.dtype(str), None)]).scan([b'{"text": "a"}'])
    compile_it()
    labels = DelayedLabels(
        itemgetter("key"), itemgetter("answers"), ["x"], itemgetter("answers"), within_s=1, otherwise=False
    )
    flow = Flow("compiled code")
    events = flow.from_items([{"key": 0, "x": 1.0, "answers": answers} for answers in (False, True)])
    train_online(events, labels=labels)
    flow.run()


if __name__ == "__main__":
    store_compiled_functions()
