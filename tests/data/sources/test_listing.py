"""Bytes that lie inside other files: what is there comes out, what is not is named and costs one image."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from tests.data.sources.samples import encoded

from steadytrain.data.packing.pack import pack
from steadytrain.data.sources.listing import Piece, Pieces, PixelShape


def test_planes_and_pixels_are_put_in_order() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    planes = pixels.transpose(2, 0, 1)
    assert np.array_equal(PixelShape(2, 4, 3).of(pixels.tobytes()), pixels)
    assert np.array_equal(PixelShape(2, 4, 3, planar=True).of(planes.tobytes()), pixels)
    assert PixelShape(4, 6, 1).of(pixels.tobytes()).shape == (4, 6)


def test_some_pieces_in_another_order() -> None:
    deflated = np.array([False, True, False])
    pieces = Pieces(["a", "b"], np.array([0, 1, 1], np.int32), np.array([5, 6, 7]), np.array([1, 2, 3]), deflated)
    taken = pieces.take(np.array([2, 1]))
    assert [taken[number] for number in range(2)] == [Piece("b", 7, 3), Piece("b", 6, 2, deflated=True)]


def test_a_piece_beyond_the_end_of_its_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(10))
    with pytest.raises(OSError, match=r"cut short: a\.bin ends within it"):
        Piece(str(tmp_path / "a.bin"), 8, 3).read()


@pytest.mark.parametrize("spoil", [lambda data: data[:-3], lambda data: b"\xff" + data[1:]])
def test_damaged_deflated_bytes_are_refused(tmp_path: Path, spoil: object) -> None:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    data = packer.compress(b"an image" * 99) + packer.flush()
    assert callable(spoil)
    (tmp_path / "a").write_bytes(data + spoil(data))
    assert Piece(str(tmp_path / "a"), 0, len(data), deflated=True).read() == b"an image" * 99
    with pytest.raises(zlib.error):
        Piece(str(tmp_path / "a"), len(data), len(spoil(data)), deflated=True).read()


def test_bytes_with_a_wrong_checksum_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"an image")
    whole = Piece(str(tmp_path / "a.zip"), 0, 8, crc=zlib.crc32(b"an image"))
    assert whole.read() == b"an image"
    with pytest.raises(OSError, match=r"damaged: its checksum differs from the one in a\.zip"):
        whole._replace(crc=whole.crc ^ 1).read()


def test_a_bomb_in_a_zip_is_left_out_by_name_and_not_inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadytrain.data.sources.listing._FREE_OF_RATIO", 1 << 20)
    monkeypatch.setattr("zlib.decompressobj", None)  # all other members are stored
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        for number in range(4):
            file.writestr(f"{'ab'[number % 2]}/{number}.png", encoded(number))
        file.writestr("a/bomb.png", bytes(30 << 20), zipfile.ZIP_DEFLATED)
    stored = zipfile.ZipFile(tmp_path / "a.zip").getinfo("a/bomb.png").compress_size
    [(_, card)] = pack(tmp_path / "a.zip", tmp_path / "out")
    assert card.counts == (2, 2)
    reason = f"it decompresses to 31,457,280 bytes, more than {200 * stored:,}: unzip it yourself"
    assert card.rejected == (("a/bomb.png", f"damaged in the archive: {reason}"),)


def test_a_member_that_inflates_to_more_than_it_states_is_refused(tmp_path: Path) -> None:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    data = packer.compress(bytes(5000)) + packer.flush()
    (tmp_path / "a").write_bytes(data)
    piece = Piece(str(tmp_path / "a"), 0, len(data), deflated=True)
    assert piece.read() == piece._replace(inflated=5000).read() == bytes(5000)
    for stated in (0, 100, 4999):
        with pytest.raises(zlib.error, match=f"more than {stated:,} bytes"):
            piece._replace(inflated=stated).read()


def test_a_bomb_whose_size_is_not_stated_is_inflated_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadytrain.data.sources.listing._FREE_OF_RATIO", 1 << 20)
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    data = packer.compress(bytes(30 << 20)) + packer.flush()
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(zlib.error, match=f"more than {200 * len(data):,} bytes"):
        Piece(str(tmp_path / "a"), 0, len(data), deflated=True).read()
