//! Antialiased resizing of RGB bytes: to the last bit what torch's kernel for bytes gives, where a processor has AVX2.
//!
//! That is Pillow's way: first across, then down, with a triangle or a cubic as wide as what a pixel stands for (P.
//! Heckbert's filtered resizing), weights of 16 bits, sums of 32, and bytes in between. Only a window of the result is
//! made, of what it needs, and mirrored at once where that is wanted.

use crate::bits::Fault;
use crate::weights::{carve, weigh, Axis, Reach, Weights, TAPS};
use core::arch::x86_64::*;

const COLOURS: usize = 3;
const PIXELS: usize = 4; // the same
const WIDTH: usize = 16; // bytes
const WIDE: usize = 32;
const ROWS: usize = 64; // that are resized across at a time: they stay in the nearest cache

/// How to resize.
#[derive(Clone, Copy)]
pub struct Wanted {
    pub down: Axis,
    pub across: Axis,
    pub is_cubic: bool,
    /// Left and right change places.
    pub is_mirrored: bool,
}

/// Resize, from rows `from_stride` bytes apart to rows `stride` bytes apart.
#[target_feature(enable = "avx2")]
pub fn resize(
    from: &[u8],
    from_stride: usize,
    wanted: &Wanted,
    out: &mut [u8],
    stride: usize,
    memory: &mut [u8],
) -> Result<(), Fault> {
    let (down, across) = (wanted.down, wanted.across);
    let is_inside = |axis: &Axis| axis.count > 0 && axis.first + axis.count <= axis.output && axis.input > 0;
    if !is_inside(&down) || !is_inside(&across) || across.count < PIXELS || across.input * COLOURS > from_stride {
        return Err(Fault::Unsupported);
    }
    let (columns, memory) = weigh(&across, wanted.is_cubic, memory)?;
    let (rows, memory) = weigh(&down, wanted.is_cubic, memory)?;
    let is_kept = down.input == down.output; // rows stay as they are
    let (first, end) = if is_kept {
        (down.first, down.first + down.count)
    } else {
        let ends = rows.reach.iter().map(|reach| (reach.first + reach.count) as usize);
        (rows.reach.first().map_or(0, |reach| reach.first as usize), ends.max().unwrap_or(0))
    };
    let size = across.count * COLOURS;
    let room = size + WIDE;
    let (made, memory) = carve::<u8>(memory, room.checked_mul(end - first + 1).ok_or(Fault::Room)?)?;
    let line = across.input * COLOURS;
    let behind = columns.taps * COLOURS + WIDTH;
    let (padded, _) = carve::<u8>(memory, line + behind)?;
    let order = places(wanted);
    let mut row = first;
    while row < end {
        let from = from.get(row * from_stride..).ok_or(Fault::Room)?;
        let made = made.get_mut((row - first) * room..).ok_or(Fault::Room)?;
        // Rows behind which there are bytes, which are read though not used; and then one at a time.
        let num = from.len().saturating_sub(line + behind).checked_div(from_stride).map_or(0, |rows| rows + 1);
        let num = if from.len() < line + behind { 0 } else { num.min(end - row).min(ROWS) };
        if across.input == across.output {
            copy(from.get(..line).ok_or(Fault::Room)?, made, &across, wanted);
            row += 1;
        } else if num > 0 {
            horizontal(from, from_stride, num, made, room, &columns, order, wanted.is_mirrored)?;
            row += num;
        } else {
            let place = padded.get_mut(..line).ok_or(Fault::Room)?;
            place.copy_from_slice(from.get(..line).ok_or(Fault::Room)?);
            horizontal(padded, 0, 1, made, room, &columns, order, wanted.is_mirrored)?;
            row += 1;
        }
    }
    for (number, out) in out.chunks_mut(stride.max(1)).take(down.count).enumerate() {
        let out = out.get_mut(..size).ok_or(Fault::Room)?;
        if is_kept {
            let at = number * room;
            out.copy_from_slice(made.get(at..at + size).ok_or(Fault::Room)?);
        } else {
            vertical(made, room, first, &rows, number, out)?;
        }
    }
    Ok(())
}

/// A row that is not resized.
fn copy(line: &[u8], made: &mut [u8], across: &Axis, wanted: &Wanted) {
    let pixels = line.chunks_exact(COLOURS).skip(across.first).take(across.count);
    let put = |(place, pixel): (&mut [u8], &[u8])| {
        for (colour, &byte) in pixel.iter().enumerate() {
            if let Some(place) = place.get_mut(colour) {
                *place = byte;
            }
        }
    };
    let places = made.get_mut(..across.count * COLOURS).unwrap_or(&mut []).chunks_exact_mut(COLOURS);
    if wanted.is_mirrored {
        places.rev().zip(pixels).for_each(put);
    } else {
        places.zip(pixels).for_each(put);
    }
}

/// Where the bytes of four pixels come from, in the order that is wanted: from the first, third, second and fourth pixel,
/// of four bytes each.
fn places(wanted: &Wanted) -> [i8; WIDTH] {
    let mut made = [-1; WIDTH];
    for (byte, place) in made.iter_mut().take(PIXELS * COLOURS).enumerate() {
        let (pixel, colour) = (byte / COLOURS, byte % COLOURS);
        let pixel = if wanted.is_mirrored { PIXELS - 1 - pixel } else { pixel };
        let lies = [0, 2, 1, 3][pixel & 3];
        *place = (lies * 4 + colour) as i8;
    }
    made
}

/// Two neighbours of each colour side by side, as numbers of 16 bits: the first two of four pixels, and the others.
const NEIGHBOURS: [i8; 2 * WIDTH] = [
    0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1, // the first two
    6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1,
];

/// Resize rows, `stride` bytes apart; behind the last of their pixels there are bytes more, which are read.
#[target_feature(enable = "avx2")]
#[allow(clippy::too_many_arguments)]
fn horizontal(
    from: &[u8],
    stride: usize,
    rows: usize,
    made: &mut [u8],
    room: usize,
    weights: &Weights,
    order: [i8; WIDTH],
    is_mirrored: bool,
) -> Result<(), Fault> {
    let half = _mm256_set1_epi32(1 << weights.places >> 1);
    let drop = _mm_cvtsi32_si128(weights.places as i32);
    // SAFETY: as many as are read.
    let order = unsafe { _mm_loadu_si128(order.as_ptr().cast()) };
    let count = weights.reach.len();
    let taps = weights.taps;
    let mut at = 0;
    while at < count {
        let start = at.min(count.saturating_sub(PIXELS)); // the last pixels may be made twice
        let place = if is_mirrored { count - PIXELS - start } else { start } * COLOURS;
        let reach: &[Reach; PIXELS] = weights.reach.get(start..).and_then(|reach| reach.first_chunk()).ok_or(Fault::Room)?;
        let first = reach.map(|reach| reach.first as usize * COLOURS);
        let most = reach.iter().map(|reach| reach.count as usize).max().unwrap_or(0);
        let weights = weights.weights.get(start * taps..(start + PIXELS) * taps).ok_or(Fault::Room)?;
        let groups = most.div_ceil(TAPS);
        let read = first.into_iter().max().unwrap_or(0) + groups * TAPS * COLOURS + WIDTH;
        let last = rows.saturating_sub(1);
        if last * stride + read > from.len() || last * room + place + PIXELS * COLOURS > made.len() {
            return Err(Fault::Room);
        }
        let four = Four { first, weights, taps, drop, half, order };
        let to = made.get_mut(place..).ok_or(Fault::Room)?;
        // SAFETY: all that is read and written was looked at above.
        unsafe {
            match groups {
                1 => four.columns::<1>(from.as_ptr(), stride, rows, to.as_mut_ptr(), room)?,
                2 => four.columns::<2>(from.as_ptr(), stride, rows, to.as_mut_ptr(), room)?,
                3 => four.columns::<3>(from.as_ptr(), stride, rows, to.as_mut_ptr(), room)?,
                4 => four.columns::<4>(from.as_ptr(), stride, rows, to.as_mut_ptr(), room)?,
                _ => return Err(Fault::Unsupported),
            }
        }
        at += PIXELS;
    }
    Ok(())
}

/// Four pixels of the result: where their reach begins in a row, in bytes, and their weights.
struct Four<'a> {
    first: [usize; PIXELS],
    weights: &'a [i16],
    taps: usize,
    half: __m256i,
    drop: __m128i,
    order: __m128i,
}

impl Four<'_> {
    /// Make them for some rows. Each pixel reaches `GROUPS` times `TAPS` pixels.
    #[target_feature(enable = "avx2")]
    unsafe fn columns<const GROUPS: usize>(
        &self,
        from: *const u8,
        stride: usize,
        rows: usize,
        made: *mut u8,
        room: usize,
    ) -> Result<(), Fault> {
        let neighbours = _mm256_loadu_si256(NEIGHBOURS.as_ptr().cast());
        let mut weights = [[_mm256_setzero_si256(); GROUPS]; PIXELS];
        for (pixel, weights) in weights.iter_mut().enumerate() {
            for (group, weights) in weights.iter_mut().enumerate() {
                let at = pixel * self.taps + group * TAPS;
                let four: &[i16; TAPS] = self.weights.get(at..).and_then(|w| w.first_chunk()).ok_or(Fault::Room)?;
                let four = _mm_loadl_epi64(four.as_ptr().cast());
                let (low, high) = (_mm_shuffle_epi32::<0>(four), _mm_shuffle_epi32::<0x55>(four));
                *weights = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
            }
        }
        for row in 0..rows {
            let line = from.add(row * stride);
            let mut sums = [_mm256_setzero_si256(); PIXELS];
            for pixel in 0..PIXELS {
                for group in 0..GROUPS {
                    let bytes = _mm_loadu_si128(line.add(self.first[pixel] + group * TAPS * COLOURS).cast());
                    let pairs = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), neighbours);
                    sums[pixel] = _mm256_add_epi32(sums[pixel], _mm256_madd_epi16(pairs, weights[pixel][group]));
                }
            }
            // The two halves of each are sums of other neighbours.
            let two = |a, b| {
                let (low, high) = (_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b));
                _mm256_sra_epi32(_mm256_add_epi32(_mm256_add_epi32(low, high), self.half), self.drop)
            };
            let words = _mm256_packs_epi32(two(sums[0], sums[1]), two(sums[2], sums[3]));
            let bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            let bytes = _mm_shuffle_epi8(bytes, self.order);
            let place = made.add(row * room);
            _mm_storel_epi64(place.cast(), bytes);
            place.add(8).cast::<i32>().write_unaligned(_mm_extract_epi32::<2>(bytes));
        }
        Ok(())
    }
}

/// Make a row of the result; `made` are rows `room` bytes apart, the first of which is row `first` of the input.
#[target_feature(enable = "avx2")]
fn vertical(
    made: &[u8],
    room: usize,
    first: usize,
    weights: &Weights,
    number: usize,
    out: &mut [u8],
) -> Result<(), Fault> {
    let reach = weights.reach.get(number).ok_or(Fault::Room)?;
    let taps = weights.taps;
    let all = weights.weights.get(number * taps..(number + 1) * taps).ok_or(Fault::Room)?;
    let top = (reach.first as usize).wrapping_sub(first);
    let half = _mm256_set1_epi32(1 << weights.places >> 1);
    let drop = _mm_cvtsi32_si128(weights.places as i32);
    let pairs = (reach.count as usize).div_ceil(2);
    // A row beyond the reach has no weight; there is one more than are made.
    let rows = made.get(top * room..(top + 2 * pairs) * room).ok_or(Fault::Room)?;
    let zero = _mm256_setzero_si256();
    for (chunk, out) in out.chunks_mut(WIDE).enumerate() {
        let mut sums = [half; 4];
        if (chunk + 1) * WIDE > room {
            return Err(Fault::Room);
        }
        for (pair, two) in all.chunks_exact(2).take(pairs).enumerate() {
            let at = 2 * pair * room + chunk * WIDE;
            // SAFETY: each row has as many behind the chunk's first.
            let (a, b): (__m256i, __m256i) = unsafe {
                let at = rows.as_ptr().add(at);
                (_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(room).cast()))
            };
            let two = _mm256_set1_epi32(two[0] as u16 as i32 | (two[1] as i32) << 16);
            let (low, high) = (_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b));
            let wide = [
                _mm256_unpacklo_epi8(low, zero),
                _mm256_unpackhi_epi8(low, zero),
                _mm256_unpacklo_epi8(high, zero),
                _mm256_unpackhi_epi8(high, zero),
            ];
            for (sum, wide) in sums.iter_mut().zip(wide) {
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(wide, two));
            }
        }
        let [a, b, c, d] = sums.map(|sum| _mm256_sra_epi32(sum, drop));
        let bytes = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        if let Ok(whole) = <&mut [u8; WIDE]>::try_from(&mut *out) {
            // SAFETY: as many as are written.
            unsafe { _mm256_storeu_si256(whole.as_mut_ptr().cast(), bytes) };
        } else {
            let mut some = [0u8; WIDE];
            // SAFETY: as many as are written.
            unsafe { _mm256_storeu_si256(some.as_mut_ptr().cast(), bytes) };
            out.copy_from_slice(some.get(..out.len()).ok_or(Fault::Room)?);
        }
    }
    Ok(())
}

/// What `steadytrain_resize` is told, number by number.
#[repr(C)]
pub struct Told {
    /// Input, output, first and count, down and then across.
    numbers: [u32; 8],
    scales: [f64; 2],
    is_cubic: u32,
}

/// Resize a window of RGB bytes: 0, or a fault's number, and then `out` is undefined.
///
/// # Safety
///
/// `from` has rows `from_stride` bytes apart, the last of which is as long as its pixels; `out` has `stride` times as many
/// bytes as there are rows, less what the last one does not need; `memory` has `room`; and `steadytrain_decodes` has
/// said yes.
#[no_mangle]
pub unsafe extern "C" fn steadytrain_resize(
    from: *const u8,
    from_stride: usize,
    out: *mut u8,
    stride: usize,
    told: *const Told,
    memory: *mut u8,
    room: usize,
) -> isize {
    let told = &*told;
    let axis = |at: usize, scale: f64| {
        let [input, output, first, count] = core::array::from_fn(|number| told.numbers[(at + number) & 7] as usize);
        Axis { input, output, first, count, scale }
    };
    let (down, across) = (axis(0, told.scales[0]), axis(4, told.scales[1]));
    if down.input == 0 || down.count == 0 {
        return Fault::Unsupported as isize;
    }
    let wanted = Wanted {
        down,
        across,
        is_cubic: told.is_cubic != 0,
        is_mirrored: false,
    };
    let from = core::slice::from_raw_parts(from, (down.input - 1) * from_stride + across.input * COLOURS);
    let out = core::slice::from_raw_parts_mut(out, (down.count - 1) * stride + across.count * COLOURS);
    match resize(from, from_stride, &wanted, out, stride, core::slice::from_raw_parts_mut(memory, room)) {
        Ok(()) => 0,
        Err(fault) => fault as isize,
    }
}
