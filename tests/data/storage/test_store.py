"""Requests to a store: faults that pass are survived, others are told in a line without credentials."""

from __future__ import annotations

import http.server
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store import Bucket, FaultProxy

from steadytrain.data.storage import store as store_module
from steadytrain.data.storage.object_cache import open_object, open_objects
from steadytrain.data.storage.store import ObjectFacts, ObjectPlace, Store
from steadytrain.errors import DataError, StorageError

pytest.importorskip("obstore")

SECRETS = ("AKIAWHOREADSTHIS", "not-to-be-shown", "s3cr3t")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PATIENCE_SECONDS", 3.0)
    monkeypatch.setattr(store_module, "SILENCE_SECONDS", 0.4)


def read(uri: str) -> tuple[bytes, int]:
    """All bytes of an object, and how many faults were survived for it."""
    store = Store(place := ObjectPlace.parse(uri))
    return bytes(store.read(place)[0]), store.num_repeats


SURVIVED: dict[str, tuple[int | tuple[int, str] | str, ...]] = {
    "slow down": ((503, "SlowDown"), 429, 503),
    "server error": (500, (502, "BadGateway")),
    "lost connection": ("reset", "reset"),
    "cut short": ("cut",),
    "timeout": ("stall",),
}


@pytest.mark.parametrize("fault", SURVIVED)
def test_a_fault_that_passes_is_survived(fault: str, bucket: Bucket, fault_proxy: FaultProxy) -> None:
    data = os.urandom(100_000)
    uri = bucket.put("train.rec", data)
    fault_proxy.faults = list(SURVIVED[fault])
    assert read(uri) == (data, len(SURVIVED[fault]))


TOLD = {
    "expired": ((400, "ExpiredToken"), StorageError, r"the credentials for s3://\w+ have expired: .*AWS_SESSION_TOKEN"),
    "refused": ((403, "AccessDenied"), DataError, r"refuses access to train\.rec \(status 403\)"),
    "unknown key": ((403, "InvalidAccessKeyId"), DataError, "does not accept these credentials .*AWS_ACCESS_KEY_ID"),
    "wrong secret": ((403, "SignatureDoesNotMatch"), DataError, "does not accept these credentials"),
    "wrong region": ((400, "AuthorizationHeaderMalformed"), DataError, "another region .*set AWS_REGION"),
    "wrong clock": ((403, "RequestTimeTooSkewed"), StorageError, "this machine's clock is wrong"),
    "no bucket": ((404, "NoSuchBucket"), DataError, r"there is no bucket s3://\w+: .*AWS_ENDPOINT_URL"),
    "nonsense": ((418, "Teapot"), StorageError, "answers status 418"),
}


@pytest.mark.parametrize("case", TOLD)
def test_a_fault_that_does_not_pass_is_told_at_once(case: str, bucket: Bucket, fault_proxy: FaultProxy) -> None:
    fault, kind, words = TOLD[case]
    uri = bucket.put("train.rec", b"x" * 100)
    fault_proxy.faults = [fault]
    with pytest.raises(kind, match=words) as caught:
        read(uri)
    assert len(fault_proxy.requests) == 1
    text = f"{caught.value}{caught.value.__cause__}"
    assert not any(secret in text for secret in SECRETS) and "\n" not in text


def test_a_store_that_does_not_come_back_is_told_with_the_number_of_attempts(
    bucket: Bucket, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "PATIENCE_SECONDS", 0.5)
    uri = bucket.put("train.rec", b"x" * 100)
    fault_proxy.faults = [503] * 100
    with pytest.raises(StorageError, match=r"does not answer: [2-9] requests .* failed in 0\.5 seconds, .*: slow down"):
        read(uri)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="no connection"):
        read(uri)


def test_another_object_of_the_same_name_is_never_taken_for_the_first(bucket: Bucket) -> None:
    place = ObjectPlace.parse(bucket.put("train.rec", b"a" * 1000))
    store = Store(place)
    facts = store.stat(place)
    assert bytes(store.read(place, 10, 20, expected=facts)[0]) == b"a" * 10
    bucket.put("train.rec", b"b" * 1000)
    with pytest.raises(StorageError, match="has changed since it was opened"):
        store.read(place, 10, 20, expected=facts)


def test_what_is_not_there_is_told(bucket: Bucket) -> None:
    with pytest.raises(DataError, match=rf"^there is no object s3://{bucket.name}/none\.rec$"):
        open_object(bucket.uri("none.rec"))
    with pytest.raises(DataError, match=r"there is no bucket s3://nowhere"):
        open_object("s3://nowhere/none.rec")
    with pytest.raises(DataError, match=r"there is no object .*none-\*\.rec"):
        open_objects(bucket.uri("none-*.rec"))


def test_missing_credentials_are_told_with_the_ways_to_give_some(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(DataError, match=r"there are no credentials for s3://\w+: set AWS_ACCESS_KEY_ID"):
        open_object(bucket.put("train.rec", b"x"))


def test_a_profile_of_the_aws_tools_is_used(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    profile = tmp_path / "credentials"
    profile.write_text("[lab]\naws_access_key_id = AKIAWHOREADSTHIS\naws_secret_access_key = s3cr3t\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert read(bucket.put("train.rec", b"xyz"))[0] == b"xyz"


def test_the_missing_extra_is_named(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(DataError, match=r'pip install "steadytrain\[storage\]"'):
        open_object(bucket.uri("train.rec"))


@pytest.mark.parametrize(
    "uri",
    [
        "https://me:s3cr3t@example.org/train.rec",
        "https://bucket.s3.amazonaws.com/train.rec?X-Amz-Credential=AKIAWHOREADSTHIS&X-Amz-Signature=s3cr3t",
        "s3://AKIAWHOREADSTHIS:s3cr3t@bucket/train.rec",
    ],
)
def test_credentials_in_a_uri_are_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(DataError) as caught:
        ObjectPlace.parse(uri)
    assert not any(secret in str(caught.value) for secret in SECRETS)
    assert "environment" in str(caught.value)


@pytest.mark.parametrize(
    "bucket", ["127.0.0.1:80#", "127.0.0.1:80?", "a\\", "a b", "a%2f", "\u24d0", "a;b", "a,b", "[a]"]
)
def test_a_bucket_has_a_plain_name(bucket: str) -> None:
    for scheme in ("s3", "gs", "az"):
        with pytest.raises(DataError, match="is in no bucket: the name of one has letters"):
            ObjectPlace.parse(f"{scheme}://{bucket}/x.rec")
    assert ObjectPlace.parse("az://$web/x").base == "az://$web"
    assert ObjectPlace.folder("s3://My_old.bucket-1").base == "s3://My_old.bucket-1"


class _WebServer:
    """A web server with ranges, which sends readers of ``/datasets/...`` on to ``/blob``, as Hugging Face's does."""

    def __init__(self, content: bytes) -> None:
        self.seen: list[tuple[str, str | None]] = []
        seen = self.seen

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seen.append((self.path, self.headers.get("Authorization")))
                if self.path.startswith("/datasets/"):
                    self.send_response(302)
                    self.send_header("Location", "/blob")
                    self.end_headers()
                    return
                first, last = map(int, self.headers.get("Range", f"bytes=0-{len(content) - 1}")[6:].split("-"))
                part = content[first : last + 1]
                self.send_response(206 if "Range" in self.headers else 200)
                self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
                self.send_header("Content-Length", str(len(part)))
                self.send_header("Last-Modified", "Wed, 25 Nov 2026 10:00:00 GMT")
                self.end_headers()
                self.wfile.write(part)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def web() -> Iterator[_WebServer]:
    server = _WebServer(bytes(range(256)) * 400)
    yield server
    server.close()


def test_a_web_server_is_read_by_ranges(web: _WebServer) -> None:
    place = ObjectPlace.parse(f"{web.address}/a%20file.rec")
    data, facts = Store(place).read(place, 256, 512)
    assert bytes(data) == bytes(range(256)) and facts.size == 102_400 and not facts.etag
    assert web.seen == [("/a%20file.rec", None)]


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (404, {}, "there is no object"),
        (403, {}, "refuses access to x.rec .status 403."),
        (412, {}, "has changed since it was opened"),
        (200, {}, "cannot give parts of a file"),
        (206, {"Content-Range": "bytes 5-6/10"}, "cannot give parts of a file"),
        (206, {"Content-Range": "bytes 0-0/" + "9" * 5000}, "cannot give parts of a file"),
        (503, {}, "does not answer: .* the last by: slow down"),
        (302, {"Location": "file:///etc/passwd"}, "answers status 302 to a request for x.rec"),
        (302, {"Location": "ftp://127.0.0.1/x"}, "is not read: it redirects to 'ftp://127.0.0.1/x', which is no web"),
        (302, {"Location": "http://me:word@127.0.0.1/x"}, "is not read: it holds a user or a password"),
        (302, {"Location": "/x.rec"}, "is not read: it redirects more than 5 times"),
    ],
)
def test_what_a_web_server_answers_is_told(status: int, headers: dict[str, str], message: str) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": "1", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"x")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            place = ObjectPlace.parse(f"http://127.0.0.1:{server.server_port}/x.rec")
            with pytest.raises((DataError, StorageError), match=message):
                Store(place, patience_seconds=0.2).read(place, 0, 1, expected=ObjectFacts(1, '"a"', ""))
        finally:
            server.shutdown()
            thread.join()


def test_a_folder_of_a_web_server_is_refused_without_asking(web: _WebServer) -> None:
    place = ObjectPlace.folder(f"{web.address}/photos/")
    with pytest.raises(DataError, match="is a folder, and http:// lists none: name its files one by one"):
        Store(place).list_all(place, list)
    assert not web.seen


def test_a_repository_of_hugging_face_is_read_with_the_token(
    web: _WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", web.address)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (tmp_path / "token").write_text("hf_s3cr3t\n")
    assert read("hf://datasets/me/photos@v1/sets/train.rec")[0] == bytes(range(256)) * 400
    assert web.seen[0] == ("/datasets/me/photos/resolve/v1/sets/train.rec", "Bearer hf_s3cr3t")


def test_a_fork_of_a_process_that_reads_is_refused_and_does_not_hang(bucket: Bucket) -> None:
    uri = bucket.put("train.rec", b"x" * 100)
    read(uri)
    child = os.fork()
    if child == 0:  # no return to pytest from here
        try:
            read(uri)
        except StorageError as error:
            os._exit(0 if "forked" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
