"""Compile the functions that the service uses, and store them; the image runs this program when it is built.

Otherwise each new container would compile for ten seconds, and its event loop would wait meanwhile.
"""

from __future__ import annotations

import numpy as np

from streamiter import Columns
from streamiter.learn import AdaptiveLinearModel
from streamiter_kafka.record_columns import compile_it


def main() -> None:
    texts = Columns({"kind": np.full(1_000, "a")})  # A few texts are not hashed by compiled code.
    AdaptiveLinearModel().learn(texts, np.ones(1_000))
    compile_it()


if __name__ == "__main__":
    main()
