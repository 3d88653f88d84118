"""Requests to object stores, ``s3://``, ``gs://``, ``az://`` and ``hf://``, by obstore; and to web servers.

A request that fails for a reason that may pass (503, 429, a timeout, a lost connection, a body cut short) is made again
with growing pauses, for :data:`PATIENCE_SECONDS`. What will not pass is told in one line.
A message is made of the URI and of the kind of fault alone: what a store answers may hold parts of credentials.

Credentials come from the environment or from the machine, never from a URI: what names data is printed, and kept in
runs.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import importlib.util
import os
import random
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from steadytrain.data.filenames import braces
from steadytrain.errors import DataError, RecipeError, SteadyError, StorageError
from steadytrain.format import count
from steadytrain.machine.web import Origin, RefusedError, check_redirect, client, is_inner

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_WEB = ("http", "https")
SCHEMES = ("s3", "gs", "az", "hf", *_WEB)
PATIENCE_SECONDS = 120.0
"""Seconds for which a request is repeated before the store is given up."""
MOST_REQUESTS = 24
"""The most requests of one process on their way: a link of 1 Gbit/s and 20 ms needs as many for images of 110 kB."""
SILENCE_SECONDS = 20.0
"""A connection that brings nothing for so long is closed, and the request made again."""
WRITE_BYTES = 16 * 2**20
"""Bytes of a part of a large object."""
PARTS_AT_ONCE = 4
PART_REPEATS = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
_POLL_SECONDS = 0.02

T = TypeVar("T")


def is_uri(text: object) -> bool:
    """Return whether a name of data is the URI of an object in a store.

    >>> is_uri("s3://bucket/train.rec"), is_uri("photos/"), is_uri("file:///photos")
    (True, False, False)
    """
    return isinstance(text, str) and text.partition("://")[0].lower() in SCHEMES and "://" in text


def local_name(text: str) -> str:
    """Return the path of a ``file:`` URI; any other name as it is.

    Raises:
        DataError: it names another machine, or is a URI of another scheme, or a mistyped one.

    >>> local_name("file:///data/my%20photos"), local_name("file:a.rec"), local_name("s3://b/a.rec")
    ('/data/my photos', 'a.rec', 's3://b/a.rec')
    """
    if not text.lower().startswith("file:"):
        if not is_uri(text):
            mistyped = re.match(rf"(\w+://)|({'|'.join(SCHEMES)})(:/|//)", text)
            if mistyped and not os.path.lexists(text.partition("/")[0]):
                known = ", ".join(f"{name}://" for name in SCHEMES)
                raise DataError(f"{text} is no URI of a store here: they begin with one of {known}")
        return text
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise DataError(f"{text} names the machine {parts.netloc}: a file: URI can name files of this machine only")
    return unquote(parts.path)


def refuse_inner_addresses(values: Mapping[str, object]) -> None:
    """Refuse an address within this machine or its network that only a file names: what answers there trusts us.

    ``values``: keys of a recipe, as :data:`~.strangers.ADDRESS_KEYS`, -> what the file says. Raises RecipeError.
    """
    for key, value in values.items():
        for address in ",".join(braces(str(value or ""))).split(","):  # as a source is read
            if is_inner(address):
                raise RecipeError(
                    f"{key} of the recipe file leads to {address}, within this machine or its network, and this command"
                    f" does not name it; to read it, add --set {key}={value}"
                )


@dataclass(frozen=True)
class ObjectPlace:
    """An object, or a prefix of several: ``base`` is what a store is opened for, ``key`` is within it."""

    base: str
    key: str

    def __str__(self) -> str:
        return f"{self.base}/{self.key}"

    @property
    def scheme(self) -> str:
        return self.base.partition("://")[0]

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rstrip("/").rpartition("/")[2]

    def sibling(self, name: str) -> ObjectPlace:
        """Return the object of that name beside this one."""
        return ObjectPlace(self.base, self.key[: len(self.key) - len(self.name)] + name)

    def inside(self, name: str) -> ObjectPlace:
        """Return the object of that name below this prefix."""
        return ObjectPlace(self.base, self.key + name)

    @staticmethod
    def parse(uri: str) -> ObjectPlace:
        """Read a URI.

        Raises:
            DataError: it has a password, a signature or another query, or lacks a part.

        >>> ObjectPlace.parse("s3://bucket/sets/train.rec")
        ObjectPlace(base='s3://bucket', key='sets/train.rec')
        >>> ObjectPlace.parse("hf://datasets/me/photos/train.rec")
        ObjectPlace(base='hf://datasets/me/photos', key='train.rec')
        """
        return ObjectPlace._parse(uri, is_folder=False)

    @staticmethod
    def folder(uri: str) -> ObjectPlace:
        """Read the URI of a prefix, or of a whole bucket; its key is empty or ends with a slash.

        >>> ObjectPlace.folder("s3://bucket"), ObjectPlace.folder("s3://bucket/photos")
        (ObjectPlace(base='s3://bucket', key=''), ObjectPlace(base='s3://bucket', key='photos/'))
        """
        place = ObjectPlace._parse(uri, is_folder=True)
        return ObjectPlace(place.base, place.key.strip("/") and place.key.rstrip("/") + "/")

    @staticmethod
    def _parse(uri: str, *, is_folder: bool) -> ObjectPlace:
        scheme, _, rest = uri.partition("://")
        scheme = scheme.lower()
        host, _, key = rest.partition("/")
        shown = re.sub(r"^.*@", "", host) + "/" + re.split(r"[?#]", key)[0]
        if scheme != "hf" and "@" in host:
            raise DataError(
                f"{scheme}://...@{shown} holds a user or a password, which would be printed and kept in runs:"
                " leave it out, and give credentials in the environment"
            )
        if scheme in ("http", "https") and ("?" in key or "?" in host):
            raise DataError(
                f"{scheme}://{shown.partition('?')[0]}?... has a query, as signed addresses do, which would be printed"
                " and kept in runs: name the object by s3://, gs:// or az:// with credentials in the environment, or"
                " download it"
            )
        if scheme == "hf":
            parts = rest.split("/", 3)
            if parts[0] not in ("datasets", "models", "spaces") or len(parts) < 4 or not parts[3]:
                raise DataError(f"{uri} is no file of a repository: name it as hf://datasets/OWNER/NAME/PATH")
            return ObjectPlace(f"hf://{'/'.join(parts[:3])}", parts[3])
        if scheme in ("s3", "gs", "az") and not re.fullmatch(r"[\w.$-]*", host, re.ASCII):  # it may be a part of a host
            raise DataError(f"{shown} is in no bucket: the name of one has letters, digits, '.', '-' and '_' alone")
        if not host or not (key.strip("/") or is_folder):
            needed = "a host and a path" if scheme.startswith("http") else "a bucket and a name in it"
            raise DataError(f"{uri} names no object: give {needed}, such as {scheme}://photos/train.rec")
        return ObjectPlace(f"{scheme}://{host}", unquote(key) if scheme in ("http", "https") else key)


class NoObjectError(DataError):
    """An object does not exist."""


class ChangedError(StorageError):
    """An object has changed since it was opened."""


class TakenError(StorageError):
    """Somebody else has written an object that was to be new, or unchanged."""


@dataclass(frozen=True)
class ObjectFacts:
    """A store's account of an object: bytes, and what changes when its content does."""

    size: int
    etag: str
    modified: str

    def is_same(self, other: ObjectFacts) -> bool:
        """Return whether both are of one content: the same ETag; where a store gives none, the same time."""
        etag, other_etag = self.etag.strip('"'), other.etag.strip('"')  # some stores quote it only in some answers
        same = etag == other_etag if etag or other_etag else self.modified == other.modified
        return same and self.size == other.size


class Store:
    """One bucket or host. Safe from several threads; opened anew in each process that uses it.

    ``patience_seconds``: how long a request is repeated; None: :data:`PATIENCE_SECONDS`.
    """

    def __init__(self, place: ObjectPlace, *, patience_seconds: float | None = None) -> None:
        self.base = place.base
        self.num_repeats = 0
        """Requests that failed and were made again."""
        self.patience_seconds = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        self._stores: dict[int, ObjectStore] = {}
        self._process = 0
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()

    def read(
        self,
        place: ObjectPlace,
        start: int | None = None,
        end: int | None = None,
        *,
        expected: ObjectFacts | None = None,
    ) -> tuple[memoryview, ObjectFacts]:
        """Read bytes ``start`` to ``end`` of an object, or all of it, and what the store says of it.

        ``expected``: what it was; another content is refused.

        Raises:
            DataError: there is no such object, or the store refuses it.
            StorageError: the store does not answer, or the object has changed.
        """
        options: Any = {} if start is None else {"range": (start, end)}
        if expected is not None and expected.etag and not expected.etag.startswith("W/"):
            options["if_match"] = expected.etag

        def get(store: ObjectStore) -> tuple[memoryview, ObjectFacts]:
            if place.scheme in _WEB:
                data, facts = _read_web(place, start, end, options.get("if_match", ""))
                first, last = start or 0, facts.size if end is None else min(end, facts.size)
            else:
                result = store.get(place.key, options=options)
                data, facts, (first, last) = memoryview(result.bytes()), _facts(result.meta), result.range
            if expected is not None and not facts.is_same(expected):
                raise _changed(place, facts, expected)
            if len(data) != last - first or (end is not None and last != min(end, facts.size)):
                raise _CutShortError
            return data, facts

        return self._repeat(place, get)

    def stat(self, place: ObjectPlace) -> ObjectFacts:
        """Return what the store says of an object; errors as of :meth:`read`.

        Its first byte is asked for: what is wrong is told in the body of an answer, and one to HEAD has none.
        """
        return self.read(place, 0, 1)[1]

    def list_folder(self, folder: ObjectPlace) -> dict[str, ObjectFacts]:
        """List the objects in a folder (``folder.key`` ends with ``/``), not those of folders in it, sorted by name.

        Raises:
            DataError: the store cannot list, or refuses to.
            StorageError: it does not answer.
        """
        listing = self._repeat(folder, lambda store: store.list_with_delimiter(folder.key.rstrip("/") or None))
        return dict(sorted((meta["path"].rpartition("/")[2], _facts(meta)) for meta in listing["objects"]))

    def list_all(self, folder: ObjectPlace, collect: Callable[[Iterator[tuple[str, ObjectFacts]]], T]) -> T:
        """List all objects below a folder; return what ``collect`` makes of them.

        ``collect``: takes their names from the folder on, mostly sorted, and what the store says of each; called anew
        where a request fails.

        Raises:
            DataError: the store cannot list, or refuses to; a name is none that a file can have.
            StorageError: it does not answer.
        """

        def objects(store: ObjectStore) -> Iterator[tuple[str, ObjectFacts]]:
            for chunk in store.list(folder.key.rstrip("/") or None, chunk_size=1000):
                for meta in chunk:
                    name = meta["path"][len(folder.key) :]
                    if not name or name.endswith("/"):
                        continue
                    if not set(name.split("/")).isdisjoint({"", ".", ".."}) or "\0" in name:
                        raise DataError(f"{folder}{name} has a name that no file can have: rename it")
                    yield name, _facts(meta)

        return self._repeat(folder, lambda store: collect(objects(store)))

    def write(self, place: ObjectPlace, content: bytes | Path, replaces: str | None = None) -> str:
        """Write an object whole, from a file in parts; nothing is seen of it before. Return its ETag.

        Ctrl-C ends an upload in parts, of which some may then be there (:func:`abort_uploads`).

        ``replaces``: the ETag of what may be replaced, empty: nothing; None: whatever is there.

        Raises:
            DataError: the store refuses it.
            StorageError: the store does not answer, or somebody else wrote the object meanwhile (TakenError).
            OSError: the file cannot be read.
        """
        mode: Any = "overwrite" if replaces is None else {"e_tag": replaces} if replaces else "create"
        is_in_parts = isinstance(content, Path) and content.stat().st_size > WRITE_BYTES
        with contextlib.ExitStack() as stack:
            file = content if isinstance(content, bytes) else stack.enter_context(content.open("rb"))

            def put(store: ObjectStore) -> str:
                if not isinstance(file, bytes):
                    file.seek(0)
                try:
                    done = store.put(place.key, file, mode=mode, chunk_size=WRITE_BYTES, max_concurrency=PARTS_AT_ONCE)
                    return str(done["e_tag"] or "")
                except Exception as error:
                    if replaces is None or type(error).__name__ not in ("PreconditionError", "AlreadyExistsError"):
                        raise
                    # It may be this very request, of which the answer was lost.
                    there, facts = self.read(place)
                    if bytes(there) == content:
                        return facts.etag
                    raise TakenError(
                        f"{place} was written by another process meanwhile: two of them upload to {self.base}; end one"
                    ) from None

            if not is_in_parts:
                return self._repeat(place, put)
            # A part that fails is not to cost the others: obstore makes its request again, which nobody counts.
            return self._until_stopped(lambda: self._repeat(place, put, repeats=PART_REPEATS))

    def stop(self) -> None:
        """End the uploads in parts that other threads wait for, by StorageError."""
        self._is_stopped.set()

    def _until_stopped(self, request: Callable[[], T]) -> T:
        """Make a long request on a thread of its own, which neither Ctrl-C nor :meth:`stop` waits for."""
        answer: Future[T] = Future()

        def make() -> None:
            try:
                answer.set_result(request())
            except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
                answer.set_exception(error)

        threading.Thread(target=make, name="storage", daemon=True).start()
        while not answer.done():  # not a condition's wait, where Ctrl-C may meet its lock
            if self._is_stopped.is_set():
                raise StorageError(f"an upload to {self.base} was stopped")
            time.sleep(_POLL_SECONDS)
        return answer.result()

    def remove(self, place: ObjectPlace) -> None:
        """Remove an object, if it is there; errors as of :meth:`read`."""
        with contextlib.suppress(FileNotFoundError):
            self._repeat(place, lambda store: store.delete(place.key))

    def _repeat(self, place: ObjectPlace, request: Callable[[ObjectStore], T], *, repeats: int = 0) -> T:
        """Make a request until it succeeds; obstore repeats each that it consists of up to ``repeats`` times."""
        if place.scheme in (*_WEB, "hf") and place.key.rpartition("/")[2] == "":
            raise NoObjectError(f"{place} is a folder, and {place.scheme}:// lists none: name its files one by one")
        until, pause, attempts = 0.0, _FIRST_PAUSE, 0
        while True:
            attempts += 1
            try:
                return request(self._open(place, repeats))
            except (SteadyError, TypeError):  # of ours
                raise
            except _CutShortError:
                fault: str | SteadyError = "cut short"
            except Exception as error:  # noqa: BLE001 - obstore's errors have no common base with its OSErrors
                fault = _judge(error, place)
            if isinstance(fault, SteadyError):
                raise fault from None  # what a store answers is not to be shown
            self.num_repeats += 1
            until = until or time.monotonic() + self.patience_seconds  # what came before the first fault was no waiting
            if time.monotonic() + pause > until:
                raise StorageError(
                    f"{self.base} does not answer: {attempts} requests for {place} failed in"
                    f" {self.patience_seconds:g} seconds, the last by: {fault}. Run the same command again when it does"
                )
            time.sleep(pause * (0.5 + random.random()))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _open(self, place: ObjectPlace, repeats: int) -> ObjectStore:
        with self._lock:
            if self._process != os.getpid():
                if _used_by and _used_by[0] != os.getpid():
                    raise StorageError(
                        "this process was forked from one that reads from a store, and cannot read itself: start"
                        " processes by spawn or forkserver"
                    )
                _used_by[:] = [os.getpid()]
                self._stores, self._process = {}, os.getpid()
            if repeats not in self._stores:
                self._stores[repeats] = _open_store(place.base, repeats, _settings())
            return self._stores[repeats]


class _CutShortError(Exception):
    """Fewer bytes came than were asked for."""


@lru_cache(maxsize=16)
def _web_client(base: str, settings: tuple[object, ...]) -> urllib.request.OpenerDirector:
    """Return the client of a web server; one within a network, which only a user can name, may lead anywhere there."""
    trusted = None if is_inner(base) else frozenset[Origin]()
    check = partial(check_redirect, trusted=trusted, schemes="https" if base.startswith("https") else "http https")
    return client(trusted=trusted, on_redirect=check, kept=threading.local())


def _read_web(place: ObjectPlace, start: int | None, end: int | None, etag: str) -> tuple[memoryview, ObjectFacts]:
    """Read bytes of an object from a web server. Raises DataError, and what :func:`_judge` classifies."""
    headers = {"User-Agent": "steadytrain", "Accept-Encoding": "identity"} | ({"If-Match": etag} if etag else {})
    headers |= {} if start is None or end is None else {"Range": f"bytes={start}-{end - 1}"}
    request = urllib.request.Request(f"{place.base}/{quote(place.key)}", headers=headers)
    with _web_client(place.base, _settings()).open(request, timeout=SILENCE_SECONDS) as answer:
        part = re.fullmatch(rf"bytes {start}-\d+/(\d{{1,18}})", answer.headers.get("Content-Range", ""))
        if start is not None and part is None:
            raise _no_ranges(place)
        data = memoryview(answer.read() if end is None else answer.read(end - (start or 0)))
    modified = datetime.fromtimestamp(0, UTC)
    with contextlib.suppress(ValueError):
        modified = parsedate_to_datetime(answer.headers.get("Last-Modified", ""))
    return data, ObjectFacts(int(part[1]) if part else len(data), answer.headers.get("ETag", ""), modified.isoformat())


_used_by: list[int] = []  # the process whose threads obstore runs on; a fork of it has none of them, and would wait


def _settings() -> tuple[object, ...]:
    """Return what a store is opened with, apart from its name."""
    names = ("AWS_", "GOOGLE_", "AZURE_", "HF_", "HOME", "HTTP_", "HTTPS_", "http_", "https_")
    return SILENCE_SECONDS, PATIENCE_SECONDS, *sorted(item for item in os.environ.items() if item[0].startswith(names))


@lru_cache(maxsize=16)
def _open_store(base: str, repeats: int, settings: tuple[object, ...]) -> ObjectStore:
    """Open the store that all readers of this process share, and with it connections and credentials.

    Raises DataError where something is lacking in the environment.
    """
    place = ObjectPlace(base, "")
    try:
        from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store
    except ImportError:
        raise DataError(
            f'reading {place.scheme}:// needs the extra "storage": pip install "steadytrain[storage]"'
        ) from None
    bucket = place.base.partition("://")[2]
    endpoint = _endpoint(place)
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=min(10.0, SILENCE_SECONDS)),
        "read_timeout": timedelta(seconds=SILENCE_SECONDS),
        "timeout": timedelta(seconds=30 * SILENCE_SECONDS),
    }
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    retry: RetryConfig = {"max_retries": repeats, "retry_timeout": timedelta(seconds=PATIENCE_SECONDS)}
    try:
        match place.scheme:
            case "s3":
                # obstore finds keys itself that the environment has, or names.
                has_keys = any(map(os.environ.get, _AWS_KEYS)) or importlib.util.find_spec("boto3") is None
                credentials: dict[str, Any] = {} if has_keys else {"credential_provider": _aws_session(place)}
                return S3Store(bucket, client_options=client, retry_config=retry, **credentials)
            case "gs":
                return GCSStore(bucket, client_options=client, retry_config=retry)
            case "az":
                return AzureStore(bucket, client_options=client, retry_config=retry)
            case "hf":
                if token := _hugging_face_token():
                    client["default_headers"] = {"Authorization": f"Bearer {token}"}
                repository, _, revision = bucket.partition("@")
                root = f"{endpoint}/{repository.removeprefix('models/')}/resolve/{revision or 'main'}"
                return HTTPStore.from_url(root, client_options=client, retry_config=retry)
            case _:
                return HTTPStore.from_url(place.base, client_options=client, retry_config=retry)
    except SteadyError:
        raise
    except Exception as error:  # noqa: BLE001 - of what is configured, with its values
        if "account" in str(error).lower() and place.scheme == "az":
            raise DataError(f"{place.base}: set AZURE_STORAGE_ACCOUNT_NAME to the account of the container") from None
        raise DataError(
            f"{place.base} cannot be opened ({type(error).__name__}): a setting in the environment for it is wrong"
        ) from None


def _endpoint(place: ObjectPlace) -> str:
    """Return the address of a store, where it is known; it says whether plain http is wanted."""
    match place.scheme:
        case "s3":
            return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        case "az":
            return os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT") or ""
        case "hf":
            return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        case _:
            return place.base


def _hugging_face_token() -> str:
    if token := os.environ.get("HF_TOKEN"):
        return token
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    with contextlib.suppress(OSError):
        return (home / "token").read_text().strip()
    return ""


_AWS_KEYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)


def _aws_session(place: ObjectPlace) -> Any:
    """Return what gives credentials as the AWS tools find them: profiles, single sign-on, the machine's role."""
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider()
    except Exception:  # noqa: BLE001 - botocore's errors, of which some name keys
        raise _no_credentials(place) from None


def abort_uploads(
    place: ObjectPlace, names: Collection[str], say: Callable[[str], None], *, may_be_there: bool = True
) -> None:
    """Remove the parts that uploads of objects beside a place have left that did not end, which S3 keeps and bills.

    Args:
        say: takes a line about what was removed; or that something may be left, where that cannot be known.
        may_be_there: whether there was an upload that did not end, as far as is known here.
    """
    keys, bucket = {place.sibling(name).key for name in names}, place.base.partition("://")[2]
    left: list[Any] | None = None  # not known: elsewhere than in S3, without boto3, or where the store refuses to say
    # botocore's errors name keys, some of them; what is sent is not in danger.
    with contextlib.suppress(Exception):
        if place.scheme == "s3":
            boto3 = importlib.import_module("boto3")
            client = boto3.client("s3", endpoint_url=_endpoint(place) or None, region_name=os.environ.get("AWS_REGION"))
            listing = client.get_paginator("list_multipart_uploads")
            pages = listing.paginate(Bucket=bucket, Prefix=place.sibling("").key)
            begun = [upload for page in pages for upload in page.get("Uploads", ()) if upload["Key"] in keys]
            for upload in begun:
                client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
            left = begun
    if left:
        say(f"removed from {place.base} the parts of {count(len(left), 'upload')} that had been cut short")
    elif left is None and may_be_there:
        say(
            f"an upload that was cut short may have left parts in {place.base}: have it remove incomplete"
            " multipart uploads after a day"
        )


_RENEW = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), or AWS_PROFILE, or run aws sso"
    " login; AWS_SKIP_SIGNATURE=true reads a public bucket without any",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or run az login with AZURE_USE_AZURE_CLI=true",
    "hf": "set HF_TOKEN, or run hf auth login",
}
_EXPIRED = re.compile(r"ExpiredToken|TokenRefreshRequired|token has expired|AuthenticationFailed.*expired", re.S)
_WRONG_KEY = re.compile(r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|InvalidClientTokenId|AuthFailure")
_NO_KEY = re.compile(r"169\.254\.169\.254|169\.254\.170\.2|metadata\.google|instance metadata|MissingCredentials", re.I)
_REGION = re.compile(r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|BareRedirect")
_STATUS = re.compile(r"status code: (\d{3})|status: (\d{3})")


def _judge(error: Exception, place: ObjectPlace) -> str | SteadyError:
    """Classify an error of obstore: a fault that may pass, or the error to raise."""
    text, kind = str(error), type(error).__name__
    if isinstance(error, RefusedError):
        return DataError(f"{place} is not read: {error}")
    if isinstance(error, urllib.error.HTTPError):
        text = f"status code: {error.code}"
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            text += f" {error.read(10_000)!r}"
    elif isinstance(error, OSError | http.client.HTTPException):
        reason = getattr(error, "reason", error)
        text = f"{type(reason).__name__}: {reason}"
    if re.search("invalid peer certificate|CERTIFICATE_VERIFY_FAILED", text):
        return DataError(f"the certificate of {place.base} cannot be trusted: check the address, and the clock here")
    match = _STATUS.search(text)
    status = int(match[1] or match[2]) if match else 0
    remedy = _RENEW.get(place.scheme, "give an address that needs none")
    if kind == "PreconditionError" or status == 412:
        return _changed(place)
    if _EXPIRED.search(text):
        return StorageError(f"the credentials for {place.base} have expired: {remedy}; then run the same command again")
    if _NO_KEY.search(text):
        return _no_credentials(place)
    if "RequestTimeTooSkewed" in text:
        return StorageError(f"{place.base} refuses requests because this machine's clock is wrong: set it")
    if _WRONG_KEY.search(text):
        return DataError(f"{place.base} does not accept these credentials (status {status}): {remedy}")
    if _REGION.search(text):
        return DataError(f"{place.base} is in another region than this one asks: set AWS_REGION to the bucket's region")
    if "NoSuchBucket" in text:
        return DataError(
            f"there is no bucket {place.base}: check its name, and AWS_ENDPOINT_URL if the store is not AWS"
        )
    if isinstance(error, FileNotFoundError) or status == 404:
        return NoObjectError(f"there is no object {place}")
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
        code = status or 403
        return DataError(
            f"{place.base} refuses access to {place.key} (status {code}): you need the right to read it, and to write"
            f" it where it is written; {remedy}"
        )
    if kind == "NotSupportedError":
        return _no_ranges(place)
    if status in (429, 503):
        return "slow down"
    if status >= 500 or status == 408:
        return "server error"
    if status == 416:
        return NoObjectError(f"{place} is empty")
    if status:
        return StorageError(f"{place.base} answers status {status} to a request for {place.key}, which it should not")
    if re.search("kind: Timeout|TimedOut|TimeoutError", text):
        return "timeout"
    if re.search("IncompleteBody|IncompleteRead|UnexpectedEof", text):
        return "cut short"
    is_down = re.search("ConnectionRefused|dns error|gaierror|(?i:unreachable)", text)
    return "no connection" if is_down else "lost connection"


def _no_ranges(place: ObjectPlace) -> DataError:
    return DataError(f"{place.base} cannot give parts of a file (Range): download {place} and name the file")


def _no_credentials(place: ObjectPlace) -> DataError:
    return DataError(f"there are no credentials for {place.base}: {_RENEW.get(place.scheme, 'it needs some')}")


def _changed(place: ObjectPlace, now: ObjectFacts | None = None, before: ObjectFacts | None = None) -> ChangedError:
    sizes = f" ({before.size:,} bytes, now {now.size:,})" if now and before and now.size != before.size else ""
    return ChangedError(
        f"{place} has changed since it was opened{sizes}: nothing of the new object was used. Run the same command"
        " again to read the new one, or put the old one back"
    )


def _facts(meta: Any) -> ObjectFacts:
    return ObjectFacts(int(meta["size"]), meta["e_tag"] or "", meta["last_modified"].isoformat())
