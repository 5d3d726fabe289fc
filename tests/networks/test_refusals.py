"""Configurations and rows of networks that are refused, with the texts in ``refusals.txt``.

``PYTHONPATH=tests python tests/networks/test_refusals.py`` writes the texts as they are now.
"""

import json
import math
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from networks.configuration.refusals import added, at_top, replaced, small, within
from networks.functions_by_name import LOSSES
from networks.published import deep_fm, layer
from networks.training_support import network, rows
from support.refusals import refusals_test, write

from streamiter import Flow
from streamiter.errors import ConfigurationError
from streamiter.learn.rows import BadRows
from streamiter.networks import NetworkPredictor, train_network_online
from streamiter.networks.configuration import read_configuration
from streamiter.networks.data import LabelledRows, PlaceHolder, part
from streamiter.networks.embeddings import embeddings_from
from streamiter.networks.network import Network
from streamiter.networks.serving import check_folder, checked_arrays, network_of_version, version_of
from streamiter.networks.training import fit_network
from streamiter.parameter_server import ASP, ParameterServer
from streamiter.values.sparse_rows import SparseRows

FILE = Path(__file__).with_name("refusals.txt")
NAMES: dict[str, Any] = {
    "added": added,
    "at_top": at_top,
    "replaced": replaced,
    "small": small,
    "within": within,
    "layer": layer,
}


def two_scores(loss: str) -> dict[str, Any]:
    wide = {"name": "wide", "type": "simpleinputlayer", "outputdim": 2}
    return small(wide, {"name": "loss", "type": "losslayer", "lossfunc": loss, "inputlayer": "wide"})


NAMES |= {"two_scores": two_scores, "LabelledRows": LabelledRows, "np": np, "rows": rows}


async def of_a_text(code: str) -> object:
    """Read a file called net.json with this text."""
    return read_file(eval(code))


def read_file(text: str) -> object:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.json"
        path.write_text(text, encoding="utf-8")
        return read_configuration(path)


async def of_a_deep_fm(code: str) -> object:
    """Read a file with a DeepFM that a function changes; as a dict it must have the same error."""
    document: dict[str, Any] = deep_fm()
    eval(code, NAMES)(document)
    with pytest.raises(ConfigurationError) as of_file:
        read_file(json.dumps(document, indent=1))
    said = re.sub(r"net\.json(:\d+)?: ", "", str(of_file.value))
    with pytest.raises(ConfigurationError) as of_dict:
        read_configuration(document)
    assert str(of_dict.value).replace("configuration: ", "") == said
    raise of_file.value


async def of_embeddings(code: str) -> object:
    """Ask for embeddings with the sizes of a DeepFM that a function changes."""
    document: dict[str, Any] = deep_fm()
    eval(code, NAMES)(document)
    return embeddings_from(document)


async def of_a_document(code: str) -> object:
    return read_configuration(eval(code, NAMES))


async def where_written(code: str) -> object:
    return eval(code, NAMES)


async def of_a_loss(code: str) -> object:
    """Give labels to a loss, which must refuse the second one."""
    name, labels = eval(code, NAMES)
    with pytest.raises(BadRows) as bad:
        LOSSES[name]().check_labels("layer 'end'", np.array(labels, dtype=float), 4)
    assert bad.value.rows == (1,)
    raise bad.value


async def of_a_place_holder(code: str) -> object:
    """Give a mini-batch to a place holder, which must keep the one before."""
    place_holder = PlaceHolder(4, "float64")
    place_holder.feed_data([[1, 2, 3, 4]], [7])
    try:
        return eval(code, {**NAMES, "place_holder": place_holder})
    finally:
        assert (place_holder.rows.tolist(), place_holder.labels.tolist()) == ([[1, 2, 3, 4]], [7])
        assert not place_holder.training


def sparse(rows: list[dict[int, float]], width: int) -> SparseRows:
    return SparseRows.from_rows([(sorted(row), [row[at] for at in sorted(row)]) for row in rows], width)


def single() -> Network:
    """Return a network in single precision."""
    return network(model={"modeltype": "T_FLOAT_DENSE"})


NAMES |= {
    "math": math,
    "sparse": sparse,
    "SparseRows": SparseRows,
    "fit": partial(fit_network, progress=False),
    "single": single,
    "Flow": Flow,
}
NAMES |= {"network": network, "train_network_online": train_network_online, "ASP": ASP, "part": part}
NAMES |= {"ParameterServer": ParameterServer, "check_folder": check_folder, "checked_arrays": checked_arrays}
NAMES["predict"] = NetworkPredictor(network(), network().initial_parameters(seed=1))
NAMES["version"] = version_of(network(), network().initial_parameters(seed=1))
NAMES["network_of_version"] = network_of_version
CALLS = {
    "a change of a DeepFM, read from a file and as a dict": of_a_deep_fm,
    "embeddings with the sizes of a changed DeepFM": of_embeddings,
    "documents": of_a_document,
    "texts of a file": of_a_text,
    "rows and labels": where_written,
    "rows, parameters and folders, before anything runs": where_written,
    "labels, of which a loss does not know the second": of_a_loss,
    "mini-batches, of which a place holder has one": of_a_place_holder,
}

test_wrong_configurations_and_rows_are_refused_with_their_texts = refusals_test(FILE, CALLS)


if __name__ == "__main__":
    write(FILE, CALLS)
