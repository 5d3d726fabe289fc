"""Train online from topic to topic and follow rollbacks, as a program that a test kills.

``rolled_back_trainer.py EVENTS UPDATES FOLDER``: the topics of the rows and of the updates, the checkpoints.
"""

import sys

from streamiter import Checkpoints, Flow, topic
from streamiter.learn import train_online
from streamiter.models import Rollbacks


def main() -> None:
    events, updates, folder = sys.argv[1:]
    flow = Flow("rolled back")
    rows = flow.source(topic(events), name="rows", parallelism=1)
    models = topic(updates)
    training = train_online(rows, label="late", rollbacks=Rollbacks(models, "flights"), workers=1)
    training.models.publish_model(models, model="flights")
    flow.run(checkpoints=Checkpoints(folder, interval_s=0.2))


if __name__ == "__main__":
    main()
