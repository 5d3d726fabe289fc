"""Networks from configuration files: layers with parameters, trained by workers that share a parameter server.

``Network`` reads a file, and ``fit_network`` trains it on rows in memory. ``train_network`` and
``train_network_online`` add the training to a flow of your own. Public names are imported from here.

======================  ===================================================================================
``configuration``       the file: read, checked completely, written as canonical JSON
``network``             ``Network``; the graph of layers that runs; its summary and its picture
``layers``              the types of layers
``transfer_functions``  functions that a layer applies to its outputs
``losses``              what training minimizes
``parameters``          arrays by name, their initial values, their place on the parameter server
``data``                ``LabelledRows``: rows with labels, from files and arrays
``mini_batches``        the steps of an epoch, and the current mini-batch of a worker
``learner``             a network as a learner on the parameter server; published versions
``training``            ``train_network``, ``train_network_online`` and ``fit_network``
``serving``             predictions, evaluation, saved networks, networks that follow a topic
======================  ===================================================================================
"""

from streamiter.networks.data import LabelledRows, part, read_rows
from streamiter.networks.learner import Published
from streamiter.networks.losses import Diverged
from streamiter.networks.network import ConfigurationWarning, Network
from streamiter.networks.serving import (
    EpochResult,
    Evaluation,
    NetworkPredictor,
    SavedNetwork,
    ServedNetwork,
    load_network,
    save_network,
)
from streamiter.networks.training import (
    NetworkTraining,
    TrainedNetwork,
    fit_network,
    train_network,
    train_network_online,
)

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
    "fit_network",
    "load_network",
    "part",
    "read_rows",
    "save_network",
    "train_network",
    "train_network_online",
]
