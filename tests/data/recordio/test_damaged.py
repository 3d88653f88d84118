"""Walking damaged record files: what is damaged is told by its byte, and all else is found."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.data.recordio.damage import Original, made_of, read_original

from steadytrain.data.recordio.damaged import ByteSource, Gap, whole_records
from steadytrain.errors import DataError

MAGIC = bytes.fromhex("0a23d7ce")
# Records of many lengths, two of them in parts, with the magic where it is no beginning as well.
SMALL = made_of(
    b"",
    b"a",
    b"abcd" * 20,
    MAGIC,
    b"abcd" + MAGIC * 2 + b"ef",
    b"x" + MAGIC + b"yz",
    b"0123456789" * 30,
    bytes(64),
    b"end",
)


@pytest.fixture(scope="module")
def cifar(data_folder: Path) -> Original:
    return read_original(data_folder / "mxnet-rec" / "im2rec" / "cifar120.rec")


def _walk(path: Path, data: bytes) -> tuple[list[bytes], list[Gap]]:
    """Framed records and gaps, after making sure that they are all of the file, in its order."""
    path.write_bytes(data)
    records, gaps, at = [], [], 0
    with ByteSource(path, digested=True) as source:
        for step in whole_records(source):
            assert at == step.start < step.end
            at = step.end
            if isinstance(step, Gap):
                gaps.append(step)
            else:
                records.append(data[step.start : step.end])
        assert source.digest() == hashlib.sha256(data).hexdigest()
    assert at == len(data)
    return records, gaps


@pytest.mark.parametrize("original", [made_of(), SMALL], ids=["empty", "small"])
def test_a_sound_file_has_its_records_and_no_gap(original: Original, tmp_path: Path) -> None:
    records, gaps = _walk(tmp_path / "a.rec", original.data)
    assert records == [original.framed(number) for number in range(original.num)]
    assert not gaps


def test_what_mxnet_wrote_is_sound(data_folder: Path, tmp_path: Path) -> None:
    for path in sorted((data_folder / "mxnet-rec").glob("*/*.idx")):
        original = read_original(path.with_suffix(".rec"))
        records, gaps = _walk(tmp_path / "a.rec", original.data)
        assert len(records) == original.num
        assert not gaps


def test_a_record_longer_than_what_is_read_at_a_time_is_found(tmp_path: Path) -> None:
    original = made_of(b"a", bytes(3 << 20), MAGIC * 3 + bytes(5 << 20), b"b")
    records, gaps = _walk(tmp_path / "a.rec", original.data)
    assert [len(record) for record in records] == [len(original.framed(number)) for number in range(4)]
    assert not gaps


# Each: what is done to record 7 of MXNet's file, and where the one gap begins and ends relative to the records 7 and 8.
DAMAGE: dict[str, tuple[Callable[[Original], bytes], int, int]] = {
    "magic": (lambda o: o.with_bytes(o.offsets[7], b"\x0b"), 0, 0),
    "length, up": (lambda o: o.with_frame(7, lambda c, n: (c, n + 4096)), 0, 0),
    "length, beyond the file": (lambda o: o.with_frame(7, lambda c, n: (c, 2**29 - 1)), 0, 0),
    "cflag, none": (lambda o: o.with_frame(7, lambda c, n: (5, n)), 0, 0),
    "cflag, beginning": (lambda o: o.with_frame(7, lambda c, n: (1, n)), 0, 0),
    "cflag, middle": (lambda o: o.with_frame(7, lambda c, n: (2, n)), 0, 0),
    "wiped": (lambda o: o.with_bytes(o.offsets[7], bytes(len(o.framed(7)))), 0, 0),
    "5 bytes lost": (lambda o: o.without(o.offsets[7] + 99, o.offsets[7] + 104), 0, -5),
    "8 bytes lost": (lambda o: o.without(o.offsets[7] + 96, o.offsets[7] + 104), 0, -8),
    "frame lost": (lambda o: o.without(o.offsets[7], o.offsets[7] + 8), 0, -8),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_in_one_record_costs_that_record_alone(cifar: Original, tmp_path: Path, name: str) -> None:
    change, start, end = DAMAGE[name]
    records, [gap] = _walk(tmp_path / "a.rec", change(cifar))
    assert records == cifar.untouched(cifar.offsets[7], cifar.offsets[8])
    assert (gap.needed, gap.start, gap.end) == (0, cifar.offsets[7] + start, cifar.offsets[8] + end)


def test_a_lost_record_is_named_by_its_id_where_the_header_is_left(cifar: Original, tmp_path: Path) -> None:
    _, [gap] = _walk(tmp_path / "a.rec", cifar.with_bytes(cifar.offsets[7], b"\0"))
    assert gap.id == int.from_bytes(cifar.framed(7)[16:24], "little")


@pytest.mark.parametrize("junk", [b"\0" * 4, b"<html>404</html>", b"\xef\xbb\xbf", MAGIC, MAGIC[:3], MAGIC + b"\0\0\0"])
@pytest.mark.parametrize("number", [0, 7, 120])
def test_bytes_between_records_are_told_and_cost_none(
    cifar: Original, tmp_path: Path, junk: bytes, number: int
) -> None:
    at = cifar.offsets[number]
    records, [gap] = _walk(tmp_path / "a.rec", cifar.data[:at] + junk + cifar.data[at:])
    assert len(records) == 120
    assert (gap.start, gap.end) == (at, at + len(junk))


@pytest.mark.parametrize("missing", [1, 8, 1000])
def test_a_last_record_that_is_cut_short_is_told_with_what_it_needs(
    cifar: Original, tmp_path: Path, missing: int
) -> None:
    records, [gap] = _walk(tmp_path / "a.rec", cifar.data[:-missing])
    size = len(cifar.framed(119))
    assert len(records) == 119
    assert (gap.start, gap.needed) == (cifar.offsets[119], size)


def test_a_length_too_small_leaves_the_rest_as_bytes_that_belong_to_none(cifar: Original, tmp_path: Path) -> None:
    records, [gap] = _walk(tmp_path / "a.rec", cifar.with_frame(7, lambda cflag, n: (cflag, n - 100)))
    assert len(records) == 120
    assert (gap.needed, gap.end) == (0, cifar.offsets[8])


def test_records_that_a_wrong_length_would_swallow_are_found(tmp_path: Path) -> None:
    original = made_of(*(bytes([number]) * 56 for number in range(9)))  # 64 bytes each: 3 records on is a good place
    records, [gap] = _walk(tmp_path / "a.rec", original.with_frame(2, lambda cflag, n: (cflag, n + 3 * 64)))
    assert len(records) == 8
    assert (gap.needed, gap.start, gap.end) == (0, 128, 192)


def test_a_missing_part_costs_the_whole_record(tmp_path: Path) -> None:
    at = SMALL.offsets[4] + 12  # the second of three parts
    records, [gap] = _walk(tmp_path / "a.rec", SMALL.with_bytes(at, b"\0"))
    assert records == SMALL.untouched(at, at + 1)
    assert (gap.needed, gap.start, gap.end) == (0, SMALL.offsets[4], SMALL.offsets[5])


def _lost(original: Original, data: bytes, start: int, end: int, path: Path) -> list[bytes]:
    """Records that no damage touched, and that are not found all the same."""
    records, _ = _walk(path, data)
    for record in records:
        if record in (left := original.untouched(start, end)):
            left.remove(record)
    return [record for record in original.untouched(start, end) if record not in records]


@given(at=st.integers(0, len(SMALL.data) - 1), value=st.integers(0, 255))
def test_any_byte_may_change(tmp_path_factory: pytest.TempPathFactory, at: int, value: int) -> None:
    path = tmp_path_factory.getbasetemp() / "byte.rec"
    assert not _lost(SMALL, SMALL.with_bytes(at, bytes([value])), at, at + 1, path)


@given(start=st.integers(0, len(SMALL.data) - 1), size=st.integers(1, 200))
@example(start=28, size=57)  # the magic inside a payload then stands where a record that lost bytes would end
def test_any_bytes_may_be_missing(tmp_path_factory: pytest.TempPathFactory, start: int, size: int) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.rec"
    assert not _lost(SMALL, SMALL.without(start, start + size), start, start + size, path)


@given(at=st.integers(0, len(SMALL.data)), junk=st.binary(min_size=1, max_size=50))
def test_any_bytes_may_be_added(tmp_path_factory: pytest.TempPathFactory, at: int, junk: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.rec"
    assert not _lost(SMALL, SMALL.data[:at] + junk + SMALL.data[at:], at, at, path)


@given(data=st.lists(st.one_of(st.just(MAGIC), st.binary(max_size=8))).map(b"".join))
def test_any_bytes_at_all_are_walked_to_their_end(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    _walk(tmp_path_factory.getbasetemp() / "any.rec", data)


def test_a_file_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nothing\.rec: No such file"):
        ByteSource(tmp_path / "nothing.rec")
