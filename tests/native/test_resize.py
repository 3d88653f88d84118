"""Resizing of RGB bytes: to the last bit what torch's kernel makes of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

jpeg = pytest.importorskip("steadytrain.native", reason="the native decoder is not built: no cargo")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(not jpeg.DECODES, reason="this processor has no AVX2")

Pixels = NDArray[np.uint8]
Size = tuple[int, int]


def noise(height: int, width: int, seed: int) -> Pixels:
    """Pixels of all values, or of the two extremes, which overshoot most."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.where(pixels > 127, 255, 0).astype(np.uint8) if seed % 2 else pixels


def by_torch(source: Pixels, size: Size, *, cubic: bool = False) -> Pixels:
    kernel = torch._C._nn._upsample_bicubic2d_aa if cubic else torch._C._nn._upsample_bilinear2d_aa
    pixels: Pixels = kernel(torch.from_numpy(source[None]).permute(0, 3, 1, 2), size, False)[0].permute(1, 2, 0).numpy()
    return pixels


def resized(
    source: Pixels, size: Size, window: tuple[int, int, int, int] | None = None, **options: bool
) -> tuple[bool, Pixels]:
    """Whether it was done, and the window (left, top, right, bottom) of the result, between bytes that must stay 99."""
    left, top, right, bottom = window or (0, 0, size[1], size[0])
    memory = np.full((bottom - top + 2, right - left + 2, 3), 99, np.uint8)
    out = memory[1:-1, 1:-1]
    down = jpeg.Axis(source.shape[0], size[0], top, bottom - top, source.shape[0] / size[0])
    across = jpeg.Axis(source.shape[1], size[1], left, right - left, source.shape[1] / size[1])
    done = jpeg.resize(out.ctypes.data, out.strides[0], source.ctypes.data, source.strides[0], down, across, **options)
    border = np.ones(memory.shape, np.bool_)
    border[1:-1, 1:-1] = False
    assert (memory[border] == 99).all()
    return done, out


SIDES = st.integers(1, 300)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch has no kernel for bytes here")
@given(height=SIDES, width=SIDES, down=st.integers(1, 240), across=st.integers(4, 240), seed=SIDES, cubic=st.booleans())
def test_bytes_are_those_of_torch(height: int, width: int, down: int, across: int, seed: int, cubic: bool) -> None:
    source = noise(height, width, seed)
    done, got = resized(source, (down, across), cubic=cubic)
    narrow = 2 if cubic else 1
    fits = max(height / down, width / across) <= 7 / narrow
    assert done or not fits
    if done:
        assert np.array_equal(got, by_torch(source, (down, across), cubic=cubic))


@given(
    height=st.integers(1, 120), width=st.integers(1, 120), data=st.data(), seed=SIDES,
    cubic=st.booleans(),
)  # fmt: skip
def test_a_window_is_that_part_of_the_whole(
    height: int, width: int, data: st.DataObject, seed: int, cubic: bool
) -> None:
    source = noise(height, width, seed)
    size = data.draw(st.tuples(st.integers(max(1, height // 3), 90), st.integers(max(4, width // 3), 90)))
    left, top = data.draw(st.integers(0, size[1] - 4)), data.draw(st.integers(0, size[0] - 1))
    right, bottom = data.draw(st.integers(left + 4, size[1])), data.draw(st.integers(top + 1, size[0]))
    whole = resized(source, size, cubic=cubic)[1][top:bottom, left:right]
    done, got = resized(source, size, (left, top, right, bottom), cubic=cubic)
    assert done
    assert np.array_equal(got, whole)


def test_rows_may_lie_anywhere() -> None:
    image = noise(90, 120, 2)
    part = image[10:60, 20:100]
    assert np.array_equal(resized(part, (40, 40))[1], resized(np.ascontiguousarray(part), (40, 40))[1])


def test_threads_do_not_disturb_each_other() -> None:
    sources = [noise(100 + number, 150 - number, number) for number in range(8)]
    expected = [resized(source, (64, 64))[1].copy() for source in sources]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            if not np.array_equal(resized(sources[number], (64, 64))[1], expected[number]):
                wrong.append(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not wrong


@pytest.mark.parametrize("size", [(3, 3), (1, 1), (10, 3)])
def test_too_narrow_for_it(size: Size) -> None:
    assert not resized(noise(20, 20, 0), size)[0]
