"""Rows, parameters and updates that are refused, with the texts in ``refusals.txt``.

``PYTHONPATH=tests python tests/models/test_refusals.py`` writes the texts as they are now.
"""

from pathlib import Path

import numpy as np
import pandas
import polars
from models.embedding_cases import embedded
from models.model_case import encoder
from models.shape_cases import shaped
from support.refusals import refusals_test, write

from streamiter import topic
from streamiter.learn import AdaptiveLinearModel
from streamiter.models import LinearPredictor, ModelSnapshot, model_updates
from streamiter.values.sparse_rows import SparseRows

FILE = Path(__file__).with_name("refusals.txt")
NAMES = {"np": np, "pandas": pandas, "polars": polars, "SparseRows": SparseRows, "LinearPredictor": LinearPredictor}
NAMES |= {"encoder": encoder, "model_updates": model_updates, "topic": topic, "embedded": embedded, "shaped": shaped}
NAMES["USER"] = {"user": 1}
NAMES |= {"ModelSnapshot": ModelSnapshot}


async def where_written(code: str) -> object:
    """Evaluate a call with the parameters of a model of three fields, or of two."""
    rows = [{"km": 1.0, "wind": 2, "sky": "sun"}, {"km": 2.0, "wind": 3, "sky": "rain"}]
    three, two = AdaptiveLinearModel(bits=6), AdaptiveLinearModel(bits=6)
    three.learn(rows, [0, 1])
    two.learn([{"km": row["km"], "sky": row["sky"]} for row in rows], [0, 1])

    def with_tables(**changed: object) -> dict[str, object]:
        parameters = shaped("logit")
        return parameters | {"shapes": parameters["shapes"] | changed}

    parameters = {"with_tables": with_tables, "of_three_fields": three.parameters(), "of_two_fields": two.parameters()}
    return eval(code, {**NAMES, **parameters})


async def of_an_encoder(code: str) -> object:
    one = encoder(generation=2, next_version=17)
    try:
        return eval(code, {**NAMES, "one": one})
    finally:
        assert one.next_version == 17


CALLS = {"rows and parameters": where_written, "updates, which use up no version": of_an_encoder}

test_wrong_rows_and_models_are_refused_with_their_texts = refusals_test(FILE, CALLS)


if __name__ == "__main__":
    write(FILE, CALLS)
