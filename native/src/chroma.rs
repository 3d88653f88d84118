//! Chroma of a part: planes of fewer samples than there are pixels, and pixels from them and luma.

use crate::bits::Fault;
use crate::colour::{pixels, sums, widened, Sampling, Strip, STRIP};
use crate::part::Grid;

/// Two planes of chroma, and the sums of a row of each.
pub struct Chroma<'a> {
    sampling: Sampling,
    planes: [&'a [u8]; 2],
    sums: [&'a mut [u16]; 2],
    stride: usize,
    /// The image's row that stands first in the planes, and the last one of the image.
    top: usize,
    last: usize,
    /// Where the samples and their neighbours begin and end, in a row of the planes.
    from: usize,
    to: usize,
    /// Whether the first and the last sample have a neighbour.
    inside: (bool, bool),
    /// Pixels that are made to the left of the part.
    pub before: usize,
}

impl<'a> Chroma<'a> {
    pub fn new(grid: &Grid, planes: &'a [u8], memory: &'a mut [u8]) -> Result<Chroma<'a>, Fault> {
        let (stride, size) = grid.chroma();
        let luma = grid.luma().1;
        let (blue, red) = (planes.get(luma..luma + size), planes.get(luma + size..luma + 2 * size));
        let wanted = &grid.wanted;
        let halved = (grid.each.1 == 16) as usize; // times
        let (first, end) = (wanted.left >> halved, (wanted.left + wanted.width + halved) >> halved);
        let has_neighbours = grid.sampling != Sampling::Full;
        let inside = (has_neighbours && first > 0, has_neighbours && end < grid.chroma.1);
        let start = grid.first.1 * 8;
        // SAFETY: any bytes are numbers.
        let (_, sums, _) = unsafe { memory.align_to_mut::<u16>() };
        let room = end - first + 2 + STRIP;
        let (one, rest) = sums.split_at_mut_checked(room).ok_or(Fault::Room)?;
        let two = rest.get_mut(..room).ok_or(Fault::Room)?;
        Ok(Chroma {
            sampling: grid.sampling,
            planes: [blue.ok_or(Fault::Room)?, red.ok_or(Fault::Room)?],
            sums: [one, two],
            stride,
            top: grid.first.0 * 8,
            last: grid.chroma.0 - 1,
            from: first - inside.0 as usize - start,
            to: end + inside.1 as usize - start,
            inside,
            before: wanted.left & halved,
        })
    }

    /// Have the sums for a row of the image.
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    pub fn ready(&mut self, y: usize) -> Result<(), Fault> {
        let near = if self.sampling == Sampling::Both { y / 2 } else { y };
        // The other row is the one above an upper pixel, or below a lower one; the image's first and last have none.
        let other = if y % 2 == 0 { near.saturating_sub(1) } else { (near + 1).min(self.last) };
        let other = if self.sampling == Sampling::Both { other } else { near };
        let size = self.to - self.from;
        let at = (self.sampling != Sampling::Full && !self.inside.0) as usize;
        for (plane, made) in self.planes.iter().zip(self.sums.iter_mut()) {
            let [near, other] = [near, other].map(|row| {
                let at = (row - self.top) * self.stride + self.from;
                plane.get(at..at + size)
            });
            let places = made.get_mut(at..at + size).ok_or(Fault::Room)?;
            sums(near.ok_or(Fault::Room)?, other.ok_or(Fault::Room)?, self.sampling, places);
            if self.sampling != Sampling::Full {
                copy(made, 1, 0, !self.inside.0);
                copy(made, at + size - 1, at + size, !self.inside.1);
            }
        }
        Ok(())
    }

    /// A row of pixels; `luma` from where strips begin.
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    pub fn row(&self, luma: &[u8], out: &mut [u8]) -> Result<(), Fault> {
        let step = if self.sampling == Sampling::Full { STRIP } else { STRIP / 2 };
        let (mut skip, mut out) = (3 * self.before, out);
        for (number, luma) in luma.chunks_exact(STRIP).enumerate() {
            if out.is_empty() {
                break;
            }
            let luma: &Strip = luma.try_into().map_err(|_| Fault::Room)?;
            let blue = widened(self.sums[0], number * step, self.sampling).ok_or(Fault::Room)?;
            let red = widened(self.sums[1], number * step, self.sampling).ok_or(Fault::Room)?;
            let made = pixels(luma, blue, red);
            let size = (made.len() - skip).min(out.len());
            let (now, later) = out.split_at_mut_checked(size).ok_or(Fault::Room)?;
            if let Ok(now) = <&mut [u8; 3 * STRIP]>::try_from(&mut *now) {
                *now = made;
            } else {
                now.copy_from_slice(made.get(skip..skip + size).ok_or(Fault::Room)?);
            }
            (out, skip) = (later, 0);
        }
        Ok(())
    }
}

fn copy(row: &mut [u16], from: usize, to: usize, is_wanted: bool) {
    if let (true, Some(&sum)) = (is_wanted, row.get(from)) {
        if let Some(place) = row.get_mut(to) {
            *place = sum;
        }
    }
}
