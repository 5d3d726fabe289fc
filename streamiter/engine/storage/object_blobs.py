"""Blobs in an object store: S3 and its relatives, Google Cloud Storage, Azure. It is imported when a URL is given.

Messages show the URL without its options, and of an answer of the server only its status and code: its text may repeat
a key.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, TypeAlias, cast
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import AzureStore, GCSStore, S3Store

from streamiter.engine.storage.blobs import Blob, BlobChanged, BlobReader, Blobs, missing
from streamiter.engine.storage.folder_blobs import FileReader
from streamiter.errors import ConfigurationError, StoreUnavailable
from streamiter.topics.urls import options_from, shown_url
from streamiter.values.helpers.closing import undone_on_failure
from streamiter.values.helpers.files import errors_of_writing

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import ClientConfig, RetryConfig

ObjectStoreClient: TypeAlias = S3Store | GCSStore | AzureStore


@dataclass(frozen=True, slots=True)
class ObjectStoreOptions:
    """The options of each URL of an object store."""

    give_up_after_s: float = field(default=30.0, metadata={"above": 0})
    """Seconds after which the store counts as unavailable."""


@dataclass(frozen=True, slots=True)
class S3Options(ObjectStoreOptions):
    """The options of ``s3://``."""

    region: str | None = None
    """The region; by default the region that the environment names."""
    endpoint: str | None = None
    """The address of a server other than AWS, such as ``http://127.0.0.1:9000``."""


@dataclass(frozen=True, slots=True)
class AzureOptions(ObjectStoreOptions):
    """The options of ``az://``."""

    account_name: str | None = None
    """The name of the storage account; by default the account that the environment names."""
    endpoint: str | None = None
    """The address of a server other than Azure."""


_KINDS: Final = {"s3": S3Options, "gs": ObjectStoreOptions, "az": AzureOptions}
_VARIABLES: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}

# The retries of the client wait up to this long; a store that is restarted is found again within it.
_BACKOFF_MAX_S: Final = 2.0
_CONNECT_S: Final = 5.0

# S3 allows 10,000 parts of an upload: snapshots of up to 80 GB. This many parts are in memory at the same time.
_PART_BYTES: Final = 8 << 20
_PARTS_AT_ONCE: Final = 3

# The manifest of some hundred parts, which is all that lists of checkpoints read.
_RANGE_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class ObjectStoreUrl:
    """The parts of a URL such as ``s3://bucket/prefix?region=eu-central-1``."""

    scheme: str
    bucket: str
    prefix: str
    options: ObjectStoreOptions

    @classmethod
    def of(cls, url: str) -> ObjectStoreUrl:
        """Return the parts of a URL; raise ``ConfigurationError``, also for credentials in it.

        >>> ObjectStoreUrl.of("s3://state/clicks?region=eu-central-1").place
        's3://state/clicks'
        >>> ObjectStoreUrl.of("s3://AKIA7:hush@state")
        Traceback (most recent call last):
        ...
        streamiter.errors.ConfigurationError: checkpoints in 's3://…@state': expected credentials in the environment \
(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), given some in the URL; remove them from it
        """
        subject = f"checkpoints in {shown_url(url)!r}"
        scheme, _, rest = url.partition(":")
        if scheme not in _KINDS or not rest.startswith("//"):
            raise ConfigurationError(
                f"{subject}: expected a folder, or a URL with one of {', '.join(f'{each}://' for each in _KINDS)}, "
                f"given {scheme}:{'//' if rest.startswith('//') else ''}"
            )
        place, _, query = rest[2:].partition("?")
        bucket, _, prefix = place.rstrip("/").partition("/")
        options = options_from(_KINDS[scheme], dict(parse_qsl(query, keep_blank_values=True)), subject)
        endpoint = getattr(options, "endpoint", None) or ""
        if "@" in place or "@" in endpoint:
            raise ConfigurationError(
                f"{subject}: expected credentials in the environment ({_VARIABLES[scheme]}), given some in the URL; "
                "remove them from it"
            )
        segments = prefix.split("/") if prefix else []
        if not re.fullmatch(r"[\w.-]+", bucket) or {"", ".", ".."} & set(segments) or re.search(r"[#\\\s]", prefix):
            raise ConfigurationError(
                f"{subject}: expected the name of a bucket and a prefix, as in {scheme}://bucket/prefix, given others"
            )
        if endpoint and not (endpoint.startswith(("http://", "https://")) and urlsplit(endpoint).netloc):
            raise ConfigurationError(f"{subject}, option endpoint: expected http://host:port or https://host:port")
        return cls(scheme, bucket, prefix, options)

    @property
    def place(self) -> str:
        """Return the URL without its options."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    def client(self) -> ObjectStoreClient:
        """Return a client; this connects to no server."""
        limit_s = self.options.give_up_after_s
        retry: RetryConfig = {
            "max_retries": 1000,  # the time decides
            "retry_timeout": timedelta(seconds=limit_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=_BACKOFF_MAX_S),
                "base": 2,
            },
        }
        client: ClientConfig = {
            "timeout": timedelta(seconds=limit_s),
            "connect_timeout": timedelta(seconds=min(_CONNECT_S, limit_s)),
        }
        given = {name: value for name, value in asdict(self.options).items() if isinstance(value, str)}
        if given.get("endpoint", "").startswith("http://"):
            client["allow_http"] = True
        store = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[self.scheme]
        try:
            made: ObjectStoreClient = store(
                self.bucket, prefix=self.prefix or None, config=given, client_options=client, retry_config=retry
            )
            return made
        except (BaseError, ValueError, OSError) as error:
            raise ConfigurationError(
                f"checkpoints in {self.place!r}: expected settings in the environment that obstore accepts, given "
                f"others ({type(error).__name__}); check {_VARIABLES[self.scheme]}, and the options of the URL"
            ) from None


class ObjectBlobs(Blobs):
    """Objects below the prefix of a URL.

    Several processes exclude each other only by means of ``replace``. Snapshots pass through a temporary file.
    """

    def __init__(self, url: ObjectStoreUrl) -> None:
        self._url = url
        self._client = url.client()
        self.place = url.place

    def folders(self) -> list[str]:
        return sorted(obstore.list_with_delimiter(self._client)["common_prefixes"])

    def names(self, folder: str) -> list[str]:
        found = obstore.list(self._client, folder).collect()
        names = (each["path"].removeprefix(f"{folder}/") for each in found)
        return sorted(name for name in names if "/" not in name)

    def size(self, name: str) -> int | None:
        try:
            return obstore.head(self._client, name)["size"]
        except FileNotFoundError:
            return None

    def read(self, name: str) -> Blob | None:
        try:
            found = obstore.get(self._client, name)
            return Blob(bytes(found.bytes()), json.dumps([found.meta["e_tag"], found.meta["version"]]))
        except FileNotFoundError:
            return None

    def replace(self, name: str, content: bytes, version: str | None) -> None:
        e_tag, number = (None, None) if version is None else json.loads(version)
        # A version that is None must be left out.
        known: UpdateVersion = {"e_tag": e_tag} if number is None else {"e_tag": e_tag, "version": number}
        try:
            obstore.put(self._client, name, content, mode="create" if version is None else known)
        except (AlreadyExistsError, PreconditionError):
            raise BlobChanged from None
        except FileNotFoundError:
            if version is None:
                raise
            raise BlobChanged from None  # It was deleted.

    def create(self, name: str) -> BinaryIO:
        return _temporary_file()

    def publish(self, file: BinaryIO, name: str) -> None:
        file.seek(0)
        obstore.put(self._client, name, file, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

    def adopt(self, path: Path, name: str) -> None:
        with open(path, "rb") as file:  # Without a temporary file.
            self.publish(file, name)

    def abandon(self, file: BinaryIO, name: str, *, is_published: bool) -> None:
        with contextlib.suppress(OSError):  # a full disk, for the bytes in the buffer
            file.close()
        if is_published:
            self.delete(name)

    def open(self, name: str) -> BlobReader:
        file = _temporary_file()
        with undone_on_failure(file.close):
            reader, offset = self.peek(name), 0
            while piece := reader.read(offset, _PART_BYTES):
                file.write(piece)
                offset += len(piece)
            file.flush()
        return FileReader(self.place_of(name), file)

    def peek(self, name: str) -> BlobReader:
        return ObjectReader(self.place_of(name), self._client, name)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self._client, name)

    def check_versions(self, name: str) -> None:
        if (blob := self.read(name)) is None:
            return
        with contextlib.suppress(BlobChanged):
            self.replace(name, blob.content, None)
            raise ConfigurationError(
                f"checkpoints in {self.place}: expected a server with conditional writes, given one that has replaced "
                f"{self.place_of(name)} despite If-None-Match: *, so it could not keep two runs apart; use a newer "
                "version of the server, another one, or a folder"
            )

    def living_run(self, folder: str) -> str | None:
        return "a store that does not show whether one is alive; start the flow: its next checkpoint removes them"

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        with errors_of_writing(what, tempfile.gettempdir(), "set TMPDIR to a folder with more room"):
            try:
                yield
            except (BaseError, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # It is about the temporary file.
                raise self._explanation(what, error) from None

    def _explanation(self, what: str, error: Exception) -> Exception:
        """Return the error for a request that failed; the text of ``error`` may contain keys."""
        status = re.search(r"status code: (\d{3})", str(error))
        code = re.search(r"<Code>(\w{1,60})</Code>", str(error))
        shown = " ".join(found[1] for found in (status, code) if found) or type(error).__name__
        if _OTHER_REGION in str(error):
            return ConfigurationError(
                f"{what}: expected the region of the bucket of {self.place}, given another one; add ?region=… to the "
                "URL, or set AWS_REGION"
            )
        if status is not None and status[1] in _REFUSALS:
            return ConfigurationError(
                f"{what}: expected an object store for checkpoints that this process may read and write, given "
                f"{self.place} (answer {shown}); check the bucket, and the credentials in the environment "
                f"({_VARIABLES[self._url.scheme]})"
            )
        given = f"answer {shown}" if status else f"no answer for {self._url.options.give_up_after_s:g} s"
        return StoreUnavailable(
            f"{what}: expected the object store {self.place} to keep checkpoints, given {given}; what was committed "
            "before is as it was: check the store, the network and the credentials"
        )


# What the client says when S3 redirects it without an address.
_OTHER_REGION: Final = "incorrectly configured region"

# A wrong bucket, a wrong key, a server without conditional requests: errors that do not go away with time.
_REFUSALS: Final = frozenset({"400", "401", "403", "404", "405", "501"})


def _temporary_file() -> BinaryIO:
    return cast("BinaryIO", tempfile.TemporaryFile(prefix="streamiter-"))


class ObjectReader(BlobReader):
    """Reads an object by ranges."""

    def __init__(self, place: str, client: ObjectStoreClient, name: str) -> None:
        with _removed(place):
            self._file = obstore.open_reader(client, name, buffer_size=_RANGE_BYTES)
            super().__init__(place, self._file.size)

    def read(self, offset: int, length: int) -> bytes:
        with _removed(self.place):
            self._file.seek(offset)
            return bytes(self._file.read(length))

    def close(self) -> None:
        """Do nothing: no connection is kept."""


@contextlib.contextmanager
def _removed(place: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise missing(place) from None
