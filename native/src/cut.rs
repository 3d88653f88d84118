//! Squares of several JPEGs: decoded, cut, resized and mirrored, one after the other.

use crate::bits::Fault;
use crate::part::{self, decode};
use crate::resize::{self, resize};
use crate::scan::Tables;
use crate::weights::Axis;
use core::arch::x86_64::_rdtsc;

const COLOURS: usize = 3;

/// What is to be made of an image: numbers of pixels, but for the first two.
///
/// Where its bytes begin and how many they are; what of it counts, and the box that is resized (left, top, right,
/// bottom); height and width that the box becomes, and row and column of that where the square begins; whether it is
/// mirrored.
pub type Square = [i64; 15];

/// Memory to work in, of one thread.
pub struct Desk<'a> {
    pub clean: &'a mut [u8],
    pub pixels: &'a mut [u8],
    pub work: &'a mut [u8],
    pub tables: &'a mut Tables,
    /// Of the processor's clock, spent on decoding.
    pub ticks: u64,
}

/// Of the processor's clock, so far.
fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has it.
    unsafe { _rdtsc() }
}

fn whole(number: i64) -> Result<usize, Fault> {
    usize::try_from(number).map_err(|_| Fault::Unsupported)
}

/// Make a square of `side` pixels, red first, its rows one behind the other.
#[target_feature(enable = "avx2,bmi1,bmi2")]
pub fn cut(memory: &[u8], square: &Square, side: usize, is_cubic: bool, out: &mut [u8], desk: &mut Desk) -> Result<(), Fault> {
    let [at, size, left, top, right, bottom, x0, y0, x1, y1, high, wide, row, column, flip] = *square;
    let (at, size) = (whole(at)?, whole(size)?);
    let data = memory.get(at..at.checked_add(size).ok_or(Fault::Unsupported)?).ok_or(Fault::Unsupported)?;
    let clean = desk.clean.get_mut(..size + 16).ok_or(Fault::Room)?;
    let (left, top, width, height) = (whole(left)?, whole(top)?, whole(right - left)?, whole(bottom - top)?);
    let (x0, y0, box_width, box_height) = (whole(x0)?, whole(y0)?, whole(x1 - x0)?, whole(y1 - y0)?);
    let (high, wide, is_flipped) = (whole(high)?, whole(wide)?, flip != 0);
    let (row, column) = (whole(row)?, whole(column)?);
    // Elsewhere there is padding.
    if row + side > high || column + side > wide {
        return Err(Fault::Unsupported);
    }
    let wanted = part::Wanted { left, top, width, height, channels: COLOURS };
    let (down, across) = if (box_height, box_width) == (high, wide) {
        // Only moved.
        if (height, width) != (side, side) {
            return Err(Fault::Unsupported);
        }
        let since = ticks();
        let into = if is_flipped { &mut *desk.pixels } else { &mut *out };
        let made = decode(data, wanted, into, side * COLOURS, clean, desk.work, desk.tables);
        desk.ticks = desk.ticks.wrapping_add(ticks().wrapping_sub(since));
        made?;
        if !is_flipped {
            return Ok(());
        }
        let axis = Axis { input: side, output: side, first: 0, count: side, scale: 1.0 };
        (axis, axis)
    } else {
        let is_inside = left >= x0 && top >= y0 && left + width <= x0 + box_width && top + height <= y0 + box_height;
        if !is_inside {
            return Err(Fault::Unsupported);
        }
        // The box is resized as a whole. What does not count of it is what was there before, and has no bearing.
        let stride = box_width * COLOURS;
        let pixels = desk.pixels.get_mut((top - y0) * stride + (left - x0) * COLOURS..).ok_or(Fault::Room)?;
        let since = ticks();
        let made = decode(data, wanted, pixels, stride, clean, desk.work, desk.tables);
        desk.ticks = desk.ticks.wrapping_add(ticks().wrapping_sub(since));
        made?;
        let axis = |input: usize, output: usize, first| {
            Axis { input, output, first, count: side, scale: input as f64 / output as f64 }
        };
        (axis(box_height, high, row), axis(box_width, wide, column))
    };
    let stride = across.input * COLOURS;
    let from = desk.pixels.get(..down.input.saturating_mul(stride)).ok_or(Fault::Room)?;
    let wanted = resize::Wanted { down, across, is_cubic, is_mirrored: is_flipped };
    resize(from, stride, &wanted, out, side * COLOURS, desk.work)
}

/// Make squares of `count` images, `step` bytes apart; in `done` 1 for each that could be made, and 0 where `out` is left
/// undefined. Returns the share of the time that decoding took.
///
/// # Safety
///
/// `memory` has `size` bytes, `out` has room for all squares, `squares` and `done` have `count`; `clean`, `pixels` and
/// `work` are as large as `rooms` tells, in this order, all of them apart; no other thread is using `tables`; and
/// `steadytrain_decodes` has said yes.
#[no_mangle]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn steadytrain_cut(
    memory: *const u8,
    size: usize,
    squares: *const Square,
    count: usize,
    out: *mut u8,
    step: usize,
    side: usize,
    is_cubic: u32,
    clean: *mut u8,
    pixels: *mut u8,
    work: *mut u8,
    rooms: *const [usize; 3],
    tables: *mut Tables,
    done: *mut u8,
) -> f64 {
    let memory = core::slice::from_raw_parts(memory, size);
    let mut desk = Desk {
        clean: core::slice::from_raw_parts_mut(clean, (*rooms)[0]),
        pixels: core::slice::from_raw_parts_mut(pixels, (*rooms)[1]),
        work: core::slice::from_raw_parts_mut(work, (*rooms)[2]),
        tables: &mut *tables,
        ticks: 0,
    };
    let since = ticks();
    for number in 0..count {
        let out = core::slice::from_raw_parts_mut(out.add(number * step), side * side * COLOURS);
        let made = cut(memory, &*squares.add(number), side, is_cubic != 0, out, &mut desk);
        *done.add(number) = made.is_ok() as u8;
    }
    // The counter goes on at the same rate on every core; should it not, all of the time is decoding.
    let all = ticks().wrapping_sub(since);
    if all == 0 || desk.ticks > all {
        return 1.0;
    }
    desk.ticks as f64 / all as f64
}
