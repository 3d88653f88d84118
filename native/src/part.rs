//! A part of a baseline JPEG, decoded: the pixels that libjpeg-turbo gives it, to the last bit.
//!
//! Blocks that the part does not show are passed over without being decoded, as far as differences allow, and intervals
//! between restart markers without being looked at. What is odd or damaged is left to a full decoder: there is an error.

use crate::bits::{Fault, Reader};
use crate::chroma::Chroma;
use crate::colour::{Sampling, STRIP};
use crate::frame::Frame;
use crate::scan::{Scan, Tables};

/// Which pixels are wanted, and how.
#[derive(Clone, Copy)]
pub struct Wanted {
    pub left: usize,
    pub top: usize,
    pub width: usize,
    pub height: usize,
    /// 1 (grey) or 3.
    pub channels: usize,
}

/// Decode a part.
///
/// `out` has rows of `stride` bytes, of which the part takes the first. `clean` is memory to work in, 16 bytes more than
/// `data` have; `memory` as well: `Fault::Room` where it is too small.
#[target_feature(enable = "avx2,bmi1,bmi2")]
pub fn decode(
    data: &[u8],
    wanted: Wanted,
    out: &mut [u8],
    stride: usize,
    clean: &mut [u8],
    memory: &mut [u8],
    tables: &mut Tables,
) -> Result<(), Fault> {
    let frame = Frame::read(data)?;
    let grid = Grid::of(&frame, wanted)?;
    tables.make(&frame)?;
    let (planes, sums) = memory.split_at_mut_checked(grid.planes()).ok_or(Fault::Room)?;
    let mut scan = Scan::new(&frame, tables, Reader::new(data, frame.scan, clean), grid.each.1)?;
    scan.planes(&grid, planes)?;
    grid.rows(planes, sums, out, stride)
}

/// Where the part lies in the image, in MCUs, and in the planes that are decoded.
pub struct Grid {
    pub wanted: Wanted,
    pub sampling: Sampling,
    num_colours: usize,
    /// MCUs that are looked at: the part's, and those of its chroma's neighbours.
    pub first: (usize, usize),
    pub end: (usize, usize),
    /// Pixels of an MCU, down and across.
    pub each: (usize, usize),
    /// Rows and columns of the image's chroma.
    pub chroma: (usize, usize),
}

impl Grid {
    fn of(frame: &Frame, wanted: Wanted) -> Result<Grid, Fault> {
        let sampling = match (frame.num_colours, frame.colours.map(|c| (c.across, c.down))) {
            (1, _) => Sampling::Full,
            (_, [(1, 1), (1, 1), (1, 1)]) => Sampling::Full,
            (_, [(2, 1), (1, 1), (1, 1)]) => Sampling::Across,
            (_, [(2, 2), (1, 1), (1, 1)]) => Sampling::Both,
            _ => return Err(Fault::Unsupported),
        };
        let (height, width) = (frame.height as usize, frame.width as usize);
        let each = match sampling {
            Sampling::Full => (8, 8),
            Sampling::Across => (8, 16),
            Sampling::Both => (16, 16),
        };
        let (bottom, right) = (wanted.top.wrapping_add(wanted.height), wanted.left.wrapping_add(wanted.width));
        let is_inside = wanted.height > 0 && wanted.width > 0 && wanted.top < height && wanted.left < width;
        let is_known = frame.num_colours == 1 || frame.is_ycbcr();
        let chroma = (height.div_ceil(each.0 / 8), width.div_ceil(each.1 / 8));
        // libjpeg interpolates no chroma of one or two columns.
        if !is_inside || bottom > height || right > width || !is_known || (sampling != Sampling::Full && chroma.1 < 3) {
            return Err(Fault::Unsupported);
        }
        let (down, across) = (each.0 / 8 - 1, each.1 / 8 - 1);
        let margins = if wanted.channels == 1 { (0, 0) } else { (2 * down, 2 * across) };
        let first = (wanted.top.saturating_sub(margins.0) / each.0, wanted.left.saturating_sub(margins.1) / each.1);
        let end = (
            (bottom + margins.0).min(height).div_ceil(each.0),
            (right + margins.1).min(width).div_ceil(each.1),
        );
        Ok(Grid { wanted, sampling, num_colours: frame.num_colours, first, end, each, chroma })
    }

    /// Bytes of a row of luma and of all of it.
    pub fn luma(&self) -> (usize, usize) {
        let stride = (self.end.1 - self.first.1) * self.each.1 + STRIP;
        (stride, stride * (self.end.0 - self.first.0) * self.each.0)
    }

    /// The same of one plane of chroma.
    pub fn chroma(&self) -> (usize, usize) {
        let stride = (self.end.1 - self.first.1) * 8 + STRIP;
        (stride, stride * (self.end.0 - self.first.0) * 8)
    }

    pub fn has_chroma(&self) -> bool {
        self.num_colours == 3 && self.wanted.channels == 3
    }

    /// Bytes of all planes.
    fn planes(&self) -> usize {
        self.luma().1 + if self.has_chroma() { 2 * self.chroma().1 } else { 0 }
    }

    /// Whether a block of luma shows anything of the part; `y` and `x` in pixels of the image.
    pub fn shows(&self, y: usize, x: usize) -> bool {
        let wanted = &self.wanted;
        y + 8 > wanted.top && y < wanted.top + wanted.height && x + 8 > wanted.left && x < wanted.left + wanted.width
    }

    /// Make the part's rows from the planes.
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    fn rows(&self, planes: &[u8], sums: &mut [u8], out: &mut [u8], stride: usize) -> Result<(), Fault> {
        let wanted = &self.wanted;
        let (luma_stride, luma_size) = self.luma();
        let luma = planes.get(..luma_size).ok_or(Fault::Room)?;
        let row_size = wanted.width * wanted.channels;
        let x = wanted.left - self.first.1 * self.each.1;
        let mut chroma = if self.has_chroma() { Some(Chroma::new(self, planes, sums)?) } else { None };
        for row in 0..wanted.height {
            let y = wanted.top - self.first.0 * self.each.0 + row;
            let out = out.get_mut(row * stride..row * stride + row_size).ok_or(Fault::Room)?;
            let from = luma.get(y * luma_stride..(y + 1) * luma_stride).ok_or(Fault::Room)?;
            match &mut chroma {
                None if wanted.channels == 1 => out.copy_from_slice(from.get(x..x + row_size).ok_or(Fault::Room)?),
                None => {
                    for (pixel, &grey) in out.chunks_exact_mut(3).zip(from.iter().skip(x)) {
                        pixel.fill(grey);
                    }
                }
                Some(chroma) => {
                    chroma.ready(wanted.top + row)?;
                    chroma.row(from.get(x - chroma.before..).ok_or(Fault::Room)?, out)?;
                }
            }
        }
        Ok(())
    }
}

/// Bytes of tables, which are all zeros at first and aligned to eight bytes; one for each thread.
#[no_mangle]
pub extern "C" fn steadytrain_tables() -> usize {
    core::mem::size_of::<Tables>()
}

/// Decode a part of a JPEG: 0, or a fault's number, and then `out` is undefined.
///
/// # Safety
///
/// `data` has `size` bytes, `out` has `height` rows `stride` bytes apart, of which the last is `width * channels` long;
/// `clean` has `size + 16` bytes and `memory` has `room`, all of them apart; no other thread is using `tables`; and
/// `steadytrain_decodes` has said yes.
#[no_mangle]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn steadytrain_decode(
    data: *const u8,
    size: usize,
    left: u32,
    top: u32,
    width: u32,
    height: u32,
    channels: u32,
    out: *mut u8,
    stride: usize,
    clean: *mut u8,
    memory: *mut u8,
    room: usize,
    tables: *mut Tables,
) -> isize {
    let [left, top, width, height, channels] = [left, top, width, height, channels].map(|number| number as usize);
    let wanted = Wanted { left, top, width, height, channels };
    let rows = height.wrapping_sub(1).checked_mul(stride).and_then(|above| above.checked_add(width * channels));
    let Some(room_out) = rows.filter(|&all| all <= isize::MAX as usize) else { return Fault::Unsupported as isize };
    if height == 0 || (channels != 1 && channels != 3) || stride < width * channels {
        return Fault::Unsupported as isize;
    }
    let data = core::slice::from_raw_parts(data, size);
    let out = core::slice::from_raw_parts_mut(out, room_out);
    let clean = core::slice::from_raw_parts_mut(clean, size + 16);
    let memory = core::slice::from_raw_parts_mut(memory, room);
    match decode(data, wanted, out, stride, clean, memory, &mut *tables) {
        Ok(()) => 0,
        Err(fault) => fault as isize,
    }
}
