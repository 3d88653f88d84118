//! Restart markers added to a baseline JPEG without decoding a coefficient.
//!
//! The codes of all coefficients are copied as they are. What changes is the difference that stands first in each block:
//! it is told from the block before, and after a marker from zero (ITU-T T.81, 1992, sections F.1.2.1 and F.1.2.3).

use crate::bits::{restart_marker, Fault, Reader, Writer};
use crate::frame::Frame;
use crate::huffman::{extended, has_all_differences, Table, ALL_DIFFERENCES, ENDS};

/// Memory to work in, and the tables of the image before: most of a set share theirs. All zeros to begin with.
#[repr(C)]
pub struct Workspace {
    dc: [Table; 4],
    ac: [Table; 4],
    all: Table,
}

/// Write the same JPEG with a restart marker after every `interval` MCUs; how many bytes it has.
///
/// `clean` is memory to work in, 16 bytes more than `data` have.
pub fn restart(
    data: &[u8],
    interval: u32,
    out: &mut [u8],
    clean: &mut [u8],
    work: &mut Workspace,
) -> Result<usize, Fault> {
    if interval == 0 || interval > 0xFFFF {
        return Err(Fault::Unsupported);
    }
    let frame = Frame::read(data)?;
    let mut replaced = [false; 4];
    work.all.make(&ALL_DIFFERENCES, false)?;
    for block in frame.blocks() {
        let (dc, ac) = (block.dc as usize & 3, block.ac as usize & 3);
        work.dc[dc].make(&frame.dc[dc], false)?;
        work.ac[ac].make(&frame.ac[ac], true)?;
        replaced[dc] = !has_all_differences(&work.dc[dc]);
    }
    let mut to = Writer::new(out);
    frame.write(&mut to, interval, replaced)?;
    let mut copier = Copier {
        work,
        replaced,
        from: Reader::new(data, frame.scan, clean),
        to,
        read: [0; 4],
        written: [0; 4],
    };
    for number in 0..frame.num_mcus {
        if let Some(marker) = marker_before(number, frame.restarts) {
            copier.from.pass(marker)?;
            copier.read = [0; 4];
        }
        if let Some(marker) = marker_before(number, interval) {
            copier.to.align();
            copier.to.bytes(&[0xFF, marker]);
            copier.written = [0; 4];
        }
        for block in frame.blocks() {
            copier.difference(block.dc, block.colour)?;
            copier.coefficients(block.ac)?;
        }
    }
    copier.from.pass(0xD9)?;
    let mut to = copier.to;
    to.align();
    to.bytes(&[0xFF, 0xD9]);
    to.finish()
}

/// The restart marker that stands before an MCU, if one does.
fn marker_before(number: u32, interval: u32) -> Option<u8> {
    if interval == 0 || number == 0 || number % interval != 0 {
        return None;
    }
    Some(restart_marker(number / interval - 1))
}

/// Copies a scan block by block.
struct Copier<'a> {
    work: &'a Workspace,
    replaced: [bool; 4],
    from: Reader<'a>,
    to: Writer<'a>,
    /// Of each colour the value that the next difference is told from, in the scan that is read and in the one written.
    read: [i32; 4],
    written: [i32; 4],
}

impl Copier<'_> {
    #[inline(always)]
    fn difference(&mut self, table: u8, colour: u8) -> Result<(), Fault> {
        let (place, colour) = (table as usize & 3, colour as usize & 3);
        self.from.fill();
        let word = self.from.word();
        let symbol = self.work.dc[place].symbol(word)?;
        let (length, bits) = (symbol.length as u32, symbol.symbol as u32);
        if bits > 11 {
            return Err(Fault::Damaged);
        }
        // Shifted twice, as there may be none.
        let value = extended((word << (length & 31) >> 1 >> (63 - bits)) as u32, bits);
        self.read[colour] = self.read[colour].wrapping_add(value);
        self.from.skip(length + bits);
        self.write_difference(place, self.read[colour].wrapping_sub(self.written[colour]))?;
        self.written[colour] = self.read[colour];
        Ok(())
    }

    #[inline(always)]
    fn write_difference(&mut self, place: usize, value: i32) -> Result<(), Fault> {
        let bits = 32 - value.unsigned_abs().leading_zeros();
        if bits > 11 {
            return Err(Fault::Damaged);
        }
        let with = if self.replaced[place & 3] { &self.work.all } else { &self.work.dc[place & 3] };
        let extra = (value - (value < 0) as i32) as u32 & ((1 << bits) - 1);
        let code = with.codes[bits as usize] as u64;
        self.to.put(code << bits | extra as u64, with.lengths[bits as usize] as u32 + bits);
        Ok(())
    }

    #[inline(always)]
    fn coefficients(&mut self, table: u8) -> Result<(), Fault> {
        let table = &self.work.ac[table as usize & 3];
        let mut on = 1u32;
        loop {
            self.from.fill();
            // Four looks take at most 48 of the 56 bits.
            for _ in 0..4 {
                let word = self.from.word();
                let walk = table.walk(word);
                let (used, led, ends) = (walk & 15, walk >> 4 & 0xFF, walk & ENDS);
                if used == 0 || on + led + (ends > 0) as u32 > 64 {
                    break;
                }
                self.copy(word, used);
                on += led;
                if ends > 0 || on == 64 {
                    return Ok(());
                }
            }
            // One alone: it is too long for a look, or what a look takes in would belong to the next block.
            self.from.fill();
            let word = self.from.word();
            let symbol = table.symbol(word)?;
            let (run, extra) = (symbol.symbol as u32 >> 4, symbol.symbol as u32 & 15);
            self.copy(word, symbol.length as u32 + extra);
            if extra == 0 && run < 15 {
                return Ok(());
            }
            on += run + 1;
            if on >= 64 {
                return if on == 64 { Ok(()) } else { Err(Fault::Damaged) };
            }
        }
    }

    #[inline(always)]
    fn copy(&mut self, word: u64, bits: u32) {
        self.to.put(word >> 1 >> (63 - bits & 63), bits);
        self.from.skip(bits);
    }
}
