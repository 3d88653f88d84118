//! Weights of antialiased resizing: how much pixels of the input count for one of the output.

use crate::bits::Fault;

/// Weights that are worked at together.
pub const TAPS: usize = 4;
const MOST_PLACES: u32 = 22; // binary

/// One direction.
#[derive(Clone, Copy)]
pub struct Axis {
    pub input: usize,
    /// What the input is resized to, of which `count` from `first` on are made.
    pub output: usize,
    pub first: usize,
    pub count: usize,
    /// Input pixels for each of the output.
    pub scale: f64,
}

impl Axis {
    fn support(&self, is_cubic: bool) -> f64 {
        let narrow = if is_cubic { 2.0 } else { 1.0 };
        if self.scale >= 1.0 {
            narrow * self.scale
        } else {
            narrow
        }
    }

    /// Pixels of the input that count for one of the output, at most.
    fn most(&self, is_cubic: bool) -> usize {
        let support = self.support(is_cubic);
        let whole = support as usize;
        2 * (whole + ((whole as f64) < support) as usize) + 1
    }
}

/// What counts for one pixel: pixels of the input, and where their weights begin.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct Reach {
    pub first: u32,
    pub count: u32,
}

/// Weights of one direction, `taps` (a multiple of `TAPS`) for each pixel; those beyond its reach are zero.
pub struct Weights<'a> {
    pub taps: usize,
    pub places: u32,
    pub reach: &'a [Reach],
    pub weights: &'a [i16],
}

fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

fn triangle(x: f64) -> f64 {
    let x = x.abs();
    if x < 1.0 {
        1.0 - x
    } else {
        0.0
    }
}

/// The first of so many of a kind in memory, and what is left of it.
pub fn carve<T>(memory: &mut [u8], count: usize) -> Result<(&mut [T], &mut [u8]), Fault> {
    let start = memory.as_ptr().align_offset(core::mem::align_of::<T>());
    let size = count.checked_mul(core::mem::size_of::<T>()).ok_or(Fault::Room)?;
    let rest = memory.get_mut(start..).ok_or(Fault::Room)?;
    let (made, rest) = rest.split_at_mut_checked(size).ok_or(Fault::Room)?;
    // SAFETY: aligned, as large as they are, and any bytes are numbers.
    Ok((unsafe { core::slice::from_raw_parts_mut(made.as_mut_ptr().cast(), count) }, rest))
}

/// Compute the weights of one direction.
pub fn weigh<'a>(axis: &Axis, is_cubic: bool, memory: &'a mut [u8]) -> Result<(Weights<'a>, &'a mut [u8]), Fault> {
    let most = axis.most(is_cubic);
    let taps = most.div_ceil(TAPS) * TAPS;
    let (reach, memory) = carve::<Reach>(memory, axis.count)?;
    let (weights, memory) = carve::<i16>(memory, axis.count.checked_mul(taps).ok_or(Fault::Room)?)?;
    let (exact, _) = carve::<f64>(memory, axis.output.checked_mul(most).ok_or(Fault::Room)?)?;
    let (support, shrink) = (axis.support(is_cubic), if axis.scale >= 1.0 { 1.0 / axis.scale } else { 1.0 });
    let reach_of = |pixel: usize| {
        let centre = axis.scale * (pixel as f64 + 0.5);
        let first = ((centre - support + 0.5) as i64).max(0);
        let end = ((centre + support + 0.5) as i64).min(axis.input as i64);
        (centre, first, (end - first).max(0).min(most as i64) as usize)
    };
    let mut largest = 0.0f64;
    for (pixel, row) in exact.chunks_exact_mut(most.max(1)).enumerate() {
        let (centre, first, count) = reach_of(pixel);
        let row = row.get_mut(..count).ok_or(Fault::Room)?;
        let mut total = 0.0;
        for (number, weight) in row.iter_mut().enumerate() {
            let from = ((number as i64 + first) as f64 - centre + 0.5) * shrink;
            *weight = if is_cubic { cubic(from) } else { triangle(from) };
            total += *weight;
        }
        if total != 0.0 {
            for weight in row.iter_mut() {
                *weight /= total;
                largest = largest.max(*weight);
            }
        }
    }
    // As many places as leave the largest weight within 16 bits.
    let mut places = 0;
    while places < MOST_PLACES && ((0.5 + largest * (1u64 << (places + 1)) as f64) as i64) < 1 << 15 {
        places += 1;
    }
    let one = (1u64 << places) as f64;
    weights.fill(0);
    let rows = exact.chunks_exact(most.max(1)).enumerate().skip(axis.first);
    for (((pixel, row), reach), weights) in rows.zip(reach.iter_mut()).zip(weights.chunks_exact_mut(taps.max(1))) {
        let (_, first, count) = reach_of(pixel);
        *reach = Reach { first: first as u32, count: count as u32 };
        for (weight, exact) in weights.iter_mut().zip(row.iter().take(count)) {
            let scaled = exact * one;
            *weight = if scaled < 0.0 { (scaled - 0.5) as i64 } else { (scaled + 0.5) as i64 } as i16;
        }
    }
    Ok((Weights { taps, places, reach, weights }, memory))
}
