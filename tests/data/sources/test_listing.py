"""Bytes that lie inside other files: what is there comes out, what is not is named and costs one image."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from tests.data.sources.samples import encoded

from steadytrain.data.packing.pack import pack
from steadytrain.data.sources.listing import Piece, Pieces, Pixels


def test_planes_and_pixels_are_put_in_order() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    planes = pixels.transpose(2, 0, 1)
    assert np.array_equal(Pixels(2, 4, 3).of(pixels.tobytes()), pixels)
    assert np.array_equal(Pixels(2, 4, 3, planar=True).of(planes.tobytes()), pixels)
    assert Pixels(4, 6, 1).of(pixels.tobytes()).shape == (4, 6)


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


def test_bytes_that_are_not_those_of_the_checksum_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"an image")
    whole = Piece(str(tmp_path / "a.zip"), 0, 8, crc=zlib.crc32(b"an image"))
    assert whole.read() == b"an image"
    with pytest.raises(OSError, match=r"damaged: its checksum differs from the one in a\.zip"):
        whole._replace(crc=whole.crc ^ 1).read()


def test_a_bomb_in_a_zip_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadytrain.data.sources.listing.MOST_INFLATED", 1 << 20)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for number in range(4):
            file.writestr(f"{'ab'[number % 2]}/{number}.png", encoded(number))
        file.writestr("a/bomb.png", encoded(9) + bytes(30 << 20))
    [(_, card)] = pack(tmp_path / "a.zip", tmp_path / "out")
    assert card.counts == (2, 2)
    assert card.rejected == (("a/bomb.png", "damaged in the archive: it decompresses to more than 1,048,576 bytes"),)
