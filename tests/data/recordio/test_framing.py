"""The bytes of RecordIO are those of MXNet."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytrain.data.recordio.framing import (
    MAX_PAYLOAD,
    frame,
    pack_header,
    read_payload,
    unpack,
)
from steadytrain.data.recordio.index import scan
from steadytrain.errors import DataError

MAGIC = bytes.fromhex("0a23d7ce")
# Written by MXNet 1.9.1.
GOLDEN = {
    b"abcd" + MAGIC + b"ef": "0a23d7ce 04000020 61626364 0a23d7ce 02000060 65660000",
    MAGIC + MAGIC: "0a23d7ce 00000020 0a23d7ce 00000040 0a23d7ce 00000060",
    b"ab" + MAGIC + b"cd": "0a23d7ce 08000000 6162 0a23d7ce 6364",
}
PAYLOADS = st.lists(st.sampled_from([MAGIC, b"", b"a", b"bc", b"wxyz", b"\0" * 7]), max_size=9).map(b"".join)


@pytest.mark.parametrize("payload", GOLDEN)
def test_frames_are_those_of_mxnet(payload: bytes) -> None:
    assert frame(payload) == bytes.fromhex(GOLDEN[payload])


def test_headers_are_those_of_mxnet() -> None:
    golden = "00000000 00006041 20263301 00000000 0000000000000000"
    assert pack_header(14.0, id=20129312) == bytes.fromhex(golden)
    assert unpack(pack_header([1.0, 2.5, -3.0], id=8) + b"!").labels == (1.0, 2.5, -3.0)


@settings(deadline=None)
@given(st.lists(PAYLOADS, min_size=1, max_size=5))
def test_every_payload_comes_back_and_is_found(payloads: list[bytes]) -> None:
    file = memoryview(b"".join(frame(payload) for payload in payloads))
    assert [bytes(read_payload(file, int(at))) for at in scan(file)] == payloads


@settings(deadline=None)
@given(PAYLOADS)
def test_no_aligned_magic_is_left_inside_a_part(payload: bytes) -> None:
    framed = frame(payload)
    words = [framed[at : at + 4] for at in range(0, len(framed), 4)]
    at = 0
    parts = 0
    while at < len(framed):
        parts += 1
        at += 8 + ((int.from_bytes(framed[at + 4 : at + 8], "little") & MAX_PAYLOAD) + 3) // 4 * 4
    assert words.count(MAGIC) == parts


def test_short_payloads_are_named_as_such() -> None:
    with pytest.raises(DataError, match="10 bytes is too short for an image header"):
        unpack(b"0123456789")
    with pytest.raises(DataError, match="too short for the 2 labels"):
        unpack(pack_header([1.0, 2.0], id=0)[:-1])
