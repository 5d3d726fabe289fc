"""Random histories of a table of features, and a model of the table in plain Python."""

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

from streamiter.parameter_server.storage.feature_table import FeatureCounts, FeatureTable
from streamiter.values.plain_data import PlainData

WIDTH = 2
WEIGHTS = 1
SQUARES = 0.25
EARLY = 3


@dataclass
class Settings:
    """The settings of a table."""

    admit: int
    expire_ms: int
    capacity: int
    rows: int

    def table(self, capacity: int = 0, rows: int = 0) -> FeatureTable:
        """Return a table with these settings, or with another capacity."""
        capacity, rows = capacity or self.capacity, rows or self.rows
        admit, expire_ms = self.admit, self.expire_ms
        room = {"capacity": capacity, "rows": rows, "early": EARLY}
        return FeatureTable(WIDTH, weights=WEIGHTS, admit=admit, expire_ms=expire_ms, **room)


@dataclass
class History:
    """Occurrences of keys at times, in order."""

    settings: Settings
    keys: list[int]
    times: list[int]
    cuts: list[int]
    """Where mini-batches end."""


@dataclass
class Feature:
    """A feature of the model."""

    count: int
    last_ms: int
    weights: list[float]
    early: list[int]
    row: list[float] | None = None


@dataclass
class ModelOfTable:
    """What a table must do: a dict in the order of the last occurrences, the oldest first."""

    settings: Settings
    features: OrderedDict[int, Feature] = field(default_factory=OrderedDict)
    expired: int = 0
    evicted: int = 0

    def touch(self, key: int, now_ms: int) -> Feature:
        """Count an occurrence."""
        self._remove_expired(now_ms)
        found = self.features.pop(key, None)
        if found is not None and self._is_expired(found, now_ms):
            self.expired += 1
            found = None
        elif found is None and len(self.features) == self.settings.capacity:
            self._evict()
        feature = found or Feature(0, now_ms, [0.0] * WEIGHTS + [SQUARES] * WEIGHTS, [0] * EARLY)
        feature.count, feature.last_ms = feature.count + 1, max(now_ms, feature.last_ms)
        if feature.row is None and feature.count >= self.settings.admit:
            while self.counts().admitted == self.settings.rows:
                self._evict()
            feature.row = [0.0] * WIDTH + [SQUARES] * WIDTH
        self.features[key] = feature
        return feature

    def _evict(self) -> None:
        self.features.popitem(last=False)
        self.evicted += 1

    def _remove_expired(self, now_ms: int) -> None:
        for _ in range(2 if self.settings.expire_ms else 0):
            if self.features:
                key, oldest = next(iter(self.features.items()))
                if oldest.last_ms - now_ms > self.settings.expire_ms:
                    oldest.last_ms = now_ms
                    self.features.move_to_end(key)
                elif self._is_expired(oldest, now_ms):
                    del self.features[key]
                    self.expired += 1

    def _is_expired(self, feature: Feature, now_ms: int) -> bool:
        return 0 < self.settings.expire_ms < now_ms - feature.last_ms

    def finds(self, key: int, now_ms: int) -> bool:
        """Whether the feature is there, and not expired at this time."""
        found = self.features.get(key)
        return found is not None and not self._is_expired(found, now_ms)

    def counts(self) -> FeatureCounts:
        admitted = sum(feature.row is not None for feature in self.features.values())
        return FeatureCounts(len(self.features), admitted, self.expired, self.evicted)


def history(random: Random) -> History:
    """Return a history of a small table: keys whose places collide and wrap around, expiry, wrong times, no room."""
    capacity = random.randint(1, 9)
    rows = random.randint(1, capacity)
    settings = Settings(random.randint(1, 3), random.choice([0, 1, 10, 10**9]), capacity, rows)
    pool = [random.choice([random.randrange(2**62), number << 20, number, -number]) for number in range(20)]
    pool = pool[: random.randint(1, 20)]
    now_ms, keys, times = random.choice([0, 1_700_000_000_000]), [], []
    for _ in range(random.randint(0, 60)):
        now_ms += random.choice([0, 0, 1, 3, 12])
        wrong = random.choice([-(2**61), 0, now_ms - 5, now_ms + 2**61])
        keys.append(random.choice(pool))
        times.append(wrong if random.random() < 0.05 else now_ms)
    cuts = sorted(random.randint(0, len(keys)) for _ in range(random.randint(0, 3)))
    return History(settings, keys, times, cuts)


def touch(table: FeatureTable, key: int, now_ms: int) -> int:
    """Touch a key; return its entry."""
    [entry] = table.touch([key], [now_ms], SQUARES)[0].tolist()
    return int(entry)


def learn(table: FeatureTable, given: History, first: int, stop: int) -> None:
    """Touch the keys from ``first`` to ``stop``; all numbers of each grow by the number of the occurrence."""
    for number in range(first, stop):
        entry = touch(table, given.keys[number], given.times[number])
        table.weights()[entry] += number
        if row := table.arrays.row_of[entry]:
            table.rows()[row] += number
        else:
            table.early()[entry] += number % 40


def state_bytes(table: FeatureTable) -> bytes:
    """Return the encoding of a table's state."""
    return PlainData().encode(table.state())


def digest_of_histories(count: int) -> str:
    """Return one number for the states after many histories."""
    digest = sha256()
    for seed in range(count):
        given = history(Random(seed))
        table = given.settings.table()
        learn(table, given, 0, len(given.keys))
        digest.update(state_bytes(table))
        digest.update(table.find(given.keys, given.times).astype(bool).tobytes())
    return digest.hexdigest()
