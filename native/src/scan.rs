//! The blocks of a scan: decoded, or passed over.

use crate::bits::{restart_marker, Fault, Reader};
use crate::frame::{Colour, Frame};
use crate::huffman::{extended, read_value, Table, ENDS, LAST, MOST_VALUE};
use crate::idct::{self, LARGEST};
use crate::part::Grid;

/// Tables of the image before: most of a set share theirs. All zeros to begin with.
#[repr(C)]
pub struct Tables {
    dc: [Table; 4],
    ac: [Table; 4],
}

impl Tables {
    /// Make them ready for an image.
    pub fn make(&mut self, frame: &Frame) -> Result<(), Fault> {
        for colour in frame.colours.iter().take(frame.num_colours) {
            let (dc, ac) = (colour.dc as usize & 3, colour.ac as usize & 3);
            self.dc[dc].make(&frame.dc[dc], false)?;
            self.ac[ac].make(&frame.ac[ac], true)?;
        }
        Ok(())
    }
}

/// The order in which coefficients are stored (ITU-T T.81, 1992, figure A.6).
const ORDER: [u8; 64] = [
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7, 14, 21, 28,
    35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47,
    55, 62, 63,
];

/// A coefficient's place in its block, and the step that it is told in.
#[derive(Clone, Copy, Default)]
struct Step {
    place: u16,
    step: u16,
}

/// A scan, read MCU by MCU.
pub struct Scan<'a> {
    frame: &'a Frame<'a>,
    tables: &'a Tables,
    reader: Reader<'a>,
    steps: [[Step; 64]; 3],
    /// Of each colour the value that the next difference is told from.
    values: [i32; 3],
    across: u32,
    restarts: u32,
    mcu: u32,
    interval: u32,
    peak: [i32; 8],
}

impl<'a> Scan<'a> {
    pub fn new(frame: &'a Frame, tables: &'a Tables, reader: Reader<'a>, each: usize) -> Result<Scan<'a>, Fault> {
        let mut steps = [[Step::default(); 64]; 3];
        for (steps, colour) in steps.iter_mut().zip(frame.colours.iter().take(frame.num_colours)) {
            let quant = frame.quant.get(colour.quant as usize).ok_or(Fault::Damaged)?;
            for ((step, &told), &place) in steps.iter_mut().zip(quant).zip(&ORDER) {
                // The products of a column, of 16 bits and this, add up to less than 32 bits.
                if told == 0 || told > 0x1FFF {
                    return Err(Fault::Unsupported);
                }
                *step = Step { place: place as u16, step: told };
            }
        }
        let across = if each == 16 { frame.width.div_ceil(16) } else { frame.width.div_ceil(8) };
        let restarts = if frame.restarts == 0 { frame.num_mcus } else { frame.restarts };
        Ok(Scan {
            frame,
            tables,
            reader,
            steps,
            values: [0; 3],
            across,
            restarts: restarts.max(1),
            mcu: 0,
            interval: 0,
            peak: [0; 8],
        })
    }

    /// Decode what a grid looks at into its planes, and see that the rest of the file is there.
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    pub fn planes(&mut self, grid: &Grid, planes: &mut [u8]) -> Result<(), Fault> {
        let (luma, size) = grid.luma();
        let (luma_plane, chroma_planes) = planes.split_at_mut_checked(size).ok_or(Fault::Room)?;
        let chroma = grid.chroma();
        let (blue, red) = chroma_planes.split_at_mut_checked(chroma.1.min(chroma_planes.len())).ok_or(Fault::Room)?;
        let mut planes = [(luma_plane, luma), (blue, chroma.0), (red, chroma.0)];
        for down in grid.first.0..grid.end.0 {
            self.go_to(down as u32 * self.across + grid.first.1 as u32)?;
            for across in grid.first.1..grid.end.1 {
                self.mcu(grid, down, across, &mut planes)?;
            }
        }
        if self.peak.iter().any(|&sum| sum > LARGEST) {
            return Err(Fault::Unsupported);
        }
        let intervals = self.frame.num_mcus.div_ceil(self.restarts.max(1));
        if self.mcu == self.frame.num_mcus.min((self.interval + 1).wrapping_mul(self.restarts)) {
            self.reader.is_used_up()?;
        }
        self.reader.ends(self.interval..intervals.saturating_sub(1))
    }

    /// Pass over everything before an MCU.
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    fn go_to(&mut self, mcu: u32) -> Result<(), Fault> {
        let interval = mcu / self.restarts.max(1);
        if interval > self.interval {
            self.reader.leave_out(self.interval..interval)?;
            (self.interval, self.mcu, self.values) = (interval, interval * self.restarts, [0; 3]);
        }
        while self.mcu < mcu {
            self.begin()?;
            for number in 0..self.frame.num_colours {
                let colour = self.frame.colours[number % 3];
                for _ in 0..colour.across * colour.down {
                    self.difference(number, colour)?;
                    self.pass_over(colour)?;
                }
            }
        }
        Ok(())
    }

    /// Begin an MCU.
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    fn begin(&mut self) -> Result<(), Fault> {
        self.reader.is_sound()?;
        if self.mcu == (self.interval + 1).wrapping_mul(self.restarts) {
            self.reader.pass(restart_marker(self.interval))?;
            self.interval += 1;
            self.values = [0; 3];
        }
        self.mcu += 1;
        Ok(())
    }

    /// Decode an MCU, or as much of it as the part shows.
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    fn mcu(
        &mut self,
        grid: &Grid,
        down: usize,
        across: usize,
        planes: &mut [(&mut [u8], usize); 3],
    ) -> Result<(), Fault> {
        self.begin()?;
        for number in 0..self.frame.num_colours {
            let colour = self.frame.colours[number % 3];
            let (plane, stride) = &mut planes[number % 3];
            let (high, wide) = (8 * colour.down as usize, 8 * colour.across as usize);
            for y in (0..high).step_by(8) {
                for x in (0..wide).step_by(8) {
                    let is_seen = if number == 0 {
                        grid.shows(down * grid.each.0 + y, across * grid.each.1 + x)
                    } else {
                        grid.has_chroma()
                    };
                    self.difference(number, colour)?;
                    if is_seen {
                        let at = ((down - grid.first.0) * high + y) * *stride + (across - grid.first.1) * wide + x;
                        self.block(number, colour, plane.get_mut(at..).ok_or(Fault::Room)?, *stride)?;
                    } else {
                        self.pass_over(colour)?;
                    }
                }
            }
        }
        Ok(())
    }

    #[target_feature(enable = "avx2,bmi1,bmi2")]
    fn difference(&mut self, number: usize, colour: Colour) -> Result<(), Fault> {
        self.reader.fill();
        let word = self.reader.word();
        let symbol = self.tables.dc[colour.dc as usize & 3].symbol(word)?;
        let (length, bits) = (symbol.length as u32, symbol.symbol as u32);
        if bits > 11 {
            return Err(Fault::Damaged);
        }
        // Shifted twice, as there may be none.
        let value = &mut self.values[number % 3];
        *value = value.wrapping_add(extended((word << (length & 31) >> 1 >> (63 - bits)) as u32, bits));
        self.reader.skip(length + bits);
        Ok(())
    }

    /// Decode a block whose first coefficient is known.
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    fn block(&mut self, number: usize, colour: Colour, out: &mut [u8], stride: usize) -> Result<(), Fault> {
        let mut block = [0i32; 64];
        let last = self.coefficients(number, colour, &mut block)?;
        let value = self.values[number % 3];
        if value != value as i16 as i32 {
            return Err(Fault::Unsupported);
        }
        let first = value.wrapping_mul(self.steps[number % 3][0].step as i32);
        let out = out.get_mut(..7 * stride + 8).ok_or(Fault::Room)?;
        if last == 0 {
            idct::flat(first, &mut self.peak, out, stride);
        } else {
            block[0] = first;
            idct::pixels(&block, &mut self.peak, out, stride);
        }
        Ok(())
    }

    /// All coefficients but the first, times their steps; which is the last of them, in the order of the file.
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    fn coefficients(&mut self, number: usize, colour: Colour, block: &mut [i32; 64]) -> Result<usize, Fault> {
        let (table, steps) = (&self.tables.ac[colour.ac as usize & 3], &self.steps[number % 3]);
        let mut at = 0usize;
        loop {
            self.reader.fill();
            // Three looks take at most 54 of the 56 bits.
            for _ in 0..56 / MOST_VALUE {
                let word = self.reader.word();
                let reading = table.value(word);
                let next = at + (reading >> 6 & 0x7F) as usize;
                if next > 63 {
                    if reading & LAST == 0 {
                        break;
                    }
                    self.reader.skip(reading & 63);
                    return Ok(at);
                }
                at = next;
                let step = steps[at & 63];
                block[step.place as usize & 63] = read_value(word, reading).wrapping_mul(step.step as i32);
                self.reader.skip(reading & 63);
                if at == 63 {
                    return Ok(63);
                }
            }
            self.reader.fill();
            let word = self.reader.word();
            let symbol = table.symbol(word)?;
            let (length, run, bits) = (symbol.length as u32, symbol.symbol as usize >> 4, symbol.symbol as u32 & 15);
            self.reader.skip(length + bits);
            if bits == 0 && run < 15 {
                return Ok(at);
            }
            at += run + 1;
            if at > 63 {
                return Err(Fault::Damaged);
            }
            let step = steps[at & 63];
            let value = extended((word << (length & 31) >> 1 >> (63 - bits)) as u32, bits);
            block[step.place as usize & 63] = value.wrapping_mul(step.step as i32);
            if at == 63 {
                return Ok(63);
            }
        }
    }

    /// Pass over all coefficients but the first.
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    fn pass_over(&mut self, colour: Colour) -> Result<(), Fault> {
        let table = &self.tables.ac[colour.ac as usize & 3];
        let mut at = 0u32;
        loop {
            self.reader.fill();
            // Four looks take at most 48 of the 56 bits.
            for _ in 0..4 {
                let walk = table.walk(self.reader.word());
                let (used, led, ends) = (walk & 15, walk >> 4 & 0xFF, walk & ENDS);
                if used == 0 || at + led + (ends > 0) as u32 > 63 {
                    break;
                }
                self.reader.skip(used);
                at += led;
                if ends > 0 || at == 63 {
                    return Ok(());
                }
            }
            // One alone: it is too long for a look, or what a look takes in would belong to the next block.
            self.reader.fill();
            let symbol = table.symbol(self.reader.word())?;
            let (run, bits) = (symbol.symbol as u32 >> 4, symbol.symbol as u32 & 15);
            self.reader.skip(symbol.length as u32 + bits);
            if bits == 0 && run < 15 {
                return Ok(());
            }
            at += run + 1;
            if at >= 63 {
                return if at == 63 { Ok(()) } else { Err(Fault::Damaged) };
            }
        }
    }
}
