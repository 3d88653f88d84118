"""A file comes whole and right, whatever its servers do, or the command says why each of them could not give it."""

from __future__ import annotations

import hashlib
import random
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.data.fetching.server import Fault, Server, serve

from steadytrain.data.fetching import download as module
from steadytrain.data.fetching.download import WebFile, download, mirror_urls
from steadytrain.errors import FailedError, InputError, StorageError

DATA = random.Random(0).randbytes(300_000)
OTHER = random.Random(1).randbytes(300_000)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up soon."""
    for name, value in {"TIMEOUT_SECONDS": 5, "MOST_ATTEMPTS": 3, "FIRST_PAUSE": 0.001, "LONGEST_PAUSE": 0.01}.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def server() -> Iterator[Server]:
    with serve({"a.bin": DATA}) as served:
        yield served


def remote(data: bytes = DATA, **values: object) -> WebFile:
    fields: dict[str, object] = {"name": "a.bin", "urls": (), "md5": hashlib.md5(data).hexdigest(), "bytes": len(data)}
    return WebFile(**fields | values)  # type: ignore[arg-type]


def fetch(server: Server, folder: Path, file: WebFile | None = None, *more: str) -> tuple[bytes, list[str]]:
    """The bytes that came, and what was said."""
    messages: list[str] = []
    mirrors = [server.address, *more]
    path = download(file or remote(), folder, mirrors=mirrors, say=messages.append)
    assert sorted(p.name for p in folder.iterdir()) == ["a.bin"]
    return path.read_bytes(), messages


def test_a_file_that_is_there_and_right_is_not_asked_for_again(server: Server, tmp_path: Path) -> None:
    assert fetch(server, tmp_path)[0] == DATA
    assert fetch(server, tmp_path) == (DATA, [])
    assert len(server.asked) == 1
    (tmp_path / "a.bin").write_bytes(b"damaged")
    data, (said,) = fetch(server, tmp_path)
    assert data == DATA and "is not what it should be (md5 " in said


def test_a_cut_connection_goes_on_where_it_ended(server: Server, tmp_path: Path) -> None:
    server.faults = [Fault(cut=100_000), Fault(cut=50_000)]
    data, messages = fetch(server, tmp_path)
    assert data == DATA
    assert server.ranges == ["", "bytes=100000-", "bytes=150000-"]
    assert [headers.get("If-Range") for _, headers in server.asked] == [None, '"1"', '"1"']
    assert "the connection ended after 100.0 kB of 300.0 kB" in messages[0]


def test_many_cuts_that_each_bring_something_are_no_reason_to_give_up(server: Server, tmp_path: Path) -> None:
    server.faults = [Fault(cut=20_000)] * 14
    assert fetch(server, tmp_path)[0] == DATA


def test_a_server_without_ranges_begins_again(server: Server, tmp_path: Path) -> None:
    server.faults = [Fault(cut=100_000), Fault(no_ranges=True)]
    assert fetch(server, tmp_path)[0] == DATA


def test_a_file_that_changed_meanwhile_is_fetched_anew(server: Server, tmp_path: Path) -> None:
    server.faults = [Fault(cut=100_000, status=0)]
    with pytest.raises(FailedError):
        server.every = Fault(status=404)
        fetch(server, tmp_path, remote(OTHER))
    server.files["a.bin"], server.etags["a.bin"], server.every = OTHER, '"2"', Fault()
    assert fetch(server, tmp_path, remote(OTHER))[0] == OTHER
    assert server.asked[-1][1]["If-Range"] == '"1"'


def test_pieces_of_two_files_are_noticed_and_fetched_again(server: Server, tmp_path: Path) -> None:
    server.faults = [Fault(cut=100_000), Fault(cut=1000)]
    with pytest.raises(FailedError):
        server.every = Fault(status=404)
        fetch(server, tmp_path, remote(OTHER))
    server.files["a.bin"], server.every = OTHER, Fault()
    server.faults = [Fault(ignores_if_range=True)]
    data, messages = fetch(server, tmp_path, remote(OTHER))
    assert data == OTHER and "from the beginning" in messages[-1]


def test_a_busy_server_is_given_the_time_that_it_asks_for(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("steadytrain.data.fetching.download.time.sleep", waited.append)
    server.faults = [Fault(status=503, headers={"Retry-After": "7"}), Fault(status=500)]
    data, messages = fetch(server, tmp_path)
    assert data == DATA and waited[0] >= 7 > waited[1]
    assert "HTTP 503; going on in 7" in messages[0]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(status=404), "HTTP 404"),
        (Fault(status=403), "HTTP 403"),
        (Fault(status=503), "HTTP 503, 3 times in a row"),
        (Fault(status=429, headers={"Retry-After": "86400"}), "asks to wait 1 d 00 h"),
        (Fault(redirect="http://169.254.169.254/latest/a.bin"), "not https: refused"),
        (Fault(redirect="https://169.254.169.254/latest/a.bin"), "not of the internet: refused"),
        (Fault(redirect="https://10.1.2.3/a.bin"), "not of the internet: refused"),
        (Fault(redirect="https://[::1]/a.bin"), "not of the internet: refused"),
        (Fault(redirect="https://localhost/a.bin"), "not of the internet: refused"),
        (Fault(redirect="file:///etc/passwd"), "is not allowed"),
        (Fault(redirect="/again/a.bin"), "redirect"),
    ],
)
def test_another_place_is_tried_where_one_cannot_give_it(
    server: Server, tmp_path: Path, fault: Fault, reason: str
) -> None:
    server.every = fault
    with serve({"a.bin": DATA}) as second:
        data, messages = fetch(server, tmp_path, None, second.address)
    assert data == DATA
    assert any(reason in line and "the next place is tried" in line for line in messages)


def test_a_redirect_to_another_server_of_this_machine_is_refused_unless_it_is_a_mirror(
    server: Server, tmp_path: Path
) -> None:
    with serve({"a.bin": DATA}) as hidden:
        server.every = Fault(redirect=f"{hidden.address}/a.bin")
        with pytest.raises(FailedError, match="refused"):
            fetch(server, tmp_path)
        assert not hidden.asked
        assert fetch(server, tmp_path, None, hidden.address)[0] == DATA


def test_wrong_bytes_are_thrown_away_and_every_place_has_its_reason(server: Server, tmp_path: Path) -> None:
    with serve({"a.bin": OTHER}) as wrong:
        data, messages = fetch(wrong, tmp_path, None, server.address)
        assert data == DATA and "other bytes than it should (md5 " in messages[0]
    (tmp_path / "a.bin").unlink()
    server.files["a.bin"], server.faults = OTHER, [Fault(), Fault(status=404)]
    with pytest.raises(FailedError, match=r"other bytes .*; .*HTTP 404.*run the same command again"):
        fetch(server, tmp_path, None, f"{server.address}/none/x")
    assert not list(tmp_path.glob("a.bin"))


def test_a_file_far_longer_than_it_should_be_is_refused(server: Server, tmp_path: Path) -> None:
    server.files["a.bin"] = bytes(40 << 20)
    with pytest.raises(FailedError, match=r"41\.9 MB, and not about 1\.0 kB"):
        fetch(server, tmp_path, remote(bytes=1000))


def test_a_crawling_connection_is_opened_again(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.1)
    server.faults = [Fault(drip=0.02)]
    data, messages = fetch(server, tmp_path)
    assert data == DATA and "fewer than 1.0 kB a second" in messages[0]


def test_full_disk_is_an_error_before_the_download(server: Server, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"free, and a.bin with what is made of it takes 1,000,000.0 TB"):
        fetch(server, tmp_path, remote(bytes=10**18))
    assert not server.asked


@pytest.mark.parametrize(
    "mirror", ["ftp://example.org/a", "example.org/a", "http://", "http://93.184.215.14/a", "https://"]
)
def test_a_mirror_is_https_or_near(mirror: str) -> None:
    with pytest.raises(InputError, match="--mirror"):
        mirror_urls([mirror], "a.bin")


def test_a_certificate_decides_whether_a_server_is_believed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("openssl, which makes a certificate, is not here")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    new = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    new += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([openssl, *new], check=True, capture_output=True)
    (tmp_path / "in").mkdir()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serve({"a.bin": DATA}, context=context) as served:
        assert served.address.startswith("https://")
        with pytest.raises(FailedError, match="its certificate cannot be trusted"):
            fetch(served, tmp_path / "in")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert fetch(served, tmp_path / "in")[0] == DATA


def test_refused_connection_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match="the connection failed"):
        download(remote(), tmp_path, mirrors=["http://127.0.0.1:9"])
