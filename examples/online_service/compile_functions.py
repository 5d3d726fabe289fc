"""Compile the functions that the service uses, and store them; the image runs this program when it is built.

Otherwise each new container would compile for some ten seconds before its first rows are read and learned.
"""

from __future__ import annotations

from operator import itemgetter

import numpy as np

from streamiter import Columns, Flow
from streamiter.learn import AdaptiveLinearModel, DelayedLabels, Embeddings, train_online
from streamiter_kafka.record_columns import compile_it


def main() -> None:
    texts = Columns({"kind": np.full(1_000, "a")})  # A few texts are not hashed by compiled code.
    AdaptiveLinearModel().learn(texts, np.ones(1_000))
    AdaptiveLinearModel(embeddings=Embeddings(at_most="1 MB")).learn(texts, np.arange(1_000) % 2 == 0)
    compile_it()
    key, answers = itemgetter("key"), itemgetter("answers")
    labels = DelayedLabels(key, answers, ["x"], answers, within_s=1, otherwise=False, time="processing")
    flow = Flow("labels that come later")
    events = flow.from_items([{"key": 0, "x": 1.0, "answers": answers} for answers in (False, True)])
    train_online(events, labels=labels)
    flow.run()


if __name__ == "__main__":
    main()
