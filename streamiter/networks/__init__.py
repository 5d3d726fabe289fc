"""Networks from configuration files: layers with parameters, trained by workers that share a parameter server.

``Network`` reads a file, and ``fit_network`` trains it on rows in memory. ``train_network`` and
``train_network_online`` add the training to a flow of your own. Public names are imported from here.

=================  ========================================================================================
``configuration``  the file: read, checked completely, written as canonical JSON
``network``        ``Network``; the graph of layers that runs; its summary and its picture
``layers``         the types of layers
``functions``      transfer functions, which a layer applies to its outputs, and losses, which training minimizes
``data``           ``LabelledRows``: rows with labels, from files and arrays; the mini-batches of an epoch
``sparse``         networks that store only the features that occur
``serving``        predictions, evaluation, saved and published networks, networks that follow a topic
``embeddings``     embeddings of the ready-made learner, with the sizes of a network
``learner``        a network as a learner on the parameter server
``training``       ``train_network``, ``train_network_online`` and ``fit_network``
=================  ========================================================================================
"""

from streamiter.networks.data import LabelledRows, part, read_rows
from streamiter.networks.embeddings import embeddings_from
from streamiter.networks.learner import Published
from streamiter.networks.network import ConfigurationWarning, Network
from streamiter.networks.serving import (
    Diverged,
    EpochResult,
    Evaluation,
    NetworkPredictor,
    SavedNetwork,
    ServedNetwork,
    TrainedNetwork,
    load_network,
    save_network,
)
from streamiter.networks.training import NetworkTraining, fit_network, train_network, train_network_online

__all__ = [
    "ConfigurationWarning",
    "Diverged",
    "EpochResult",
    "Evaluation",
    "LabelledRows",
    "Network",
    "NetworkPredictor",
    "NetworkTraining",
    "Published",
    "SavedNetwork",
    "ServedNetwork",
    "TrainedNetwork",
    "embeddings_from",
    "fit_network",
    "load_network",
    "part",
    "read_rows",
    "save_network",
    "train_network",
    "train_network_online",
]
