//! The segments before a JPEG's scan (ITU-T T.81, 1992, annex B).

use crate::bits::{Fault, Writer};
use crate::huffman::{Code, ALL_DIFFERENCES};

const MOST_BLOCKS: usize = 10; // of one MCU (section B.2.3)

/// One block of an MCU: which colour, and which of the four tables of each kind.
#[derive(Clone, Copy, Default)]
pub struct Block {
    pub colour: u8,
    pub dc: u8,
    pub ac: u8,
}

/// One colour: blocks of an MCU across and down, and which of the four tables of each kind.
#[derive(Clone, Copy, Default)]
pub struct Colour {
    pub across: u8,
    pub down: u8,
    pub quant: u8,
    pub dc: u8,
    pub ac: u8,
}

/// What three colours are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Told {
    Nothing,
    /// By a JFIF segment: YCbCr.
    Jfif,
    /// By a segment of Adobe's: 0 for RGB, 1 for YCbCr.
    Adobe(u8),
}

/// What is known of a JPEG when its scan begins.
pub struct Frame<'a> {
    data: &'a [u8],
    /// Where the scan's coded data begin.
    pub scan: usize,
    pub num_mcus: u32,
    /// MCUs between restart markers; 0: there are none.
    pub restarts: u32,
    num_blocks: usize,
    blocks: [Block; MOST_BLOCKS],
    pub dc: [Code; 4],
    pub ac: [Code; 4],
    pub height: u32,
    pub width: u32,
    /// 1 or 3.
    pub num_colours: usize,
    pub colours: [Colour; 3],
    names: [u8; 3],
    told: Told,
    /// Steps of the coefficients, in the order of the file; zeros: not told of.
    pub quant: [[u16; 64]; 4],
}

fn u16_at(data: &[u8], at: usize) -> Result<u32, Fault> {
    match (data.get(at), data.get(at.wrapping_add(1))) {
        (Some(&high), Some(&low)) => Ok((high as u32) << 8 | low as u32),
        _ => Err(Fault::Damaged),
    }
}

/// Calls `each` with the marker and the body of every segment before the scan; where that begins, and its header.
fn segments<'a>(data: &'a [u8], mut each: impl FnMut(u8, &'a [u8]) -> Result<(), Fault>) -> Result<(usize, &'a [u8]), Fault> {
    if data.get(..2) != Some(&[0xFF, 0xD8]) {
        return Err(Fault::Damaged);
    }
    let mut at = 2usize;
    loop {
        if data.get(at) != Some(&0xFF) {
            return Err(Fault::Damaged);
        }
        let marker = *data.get(at.wrapping_add(1)).ok_or(Fault::Damaged)?;
        if marker == 0xFF {
            at += 1;
            continue;
        }
        let size = u16_at(data, at.wrapping_add(2))? as usize;
        let end = at.wrapping_add(2).wrapping_add(size);
        let body = data.get(at.wrapping_add(4)..end).ok_or(Fault::Damaged)?;
        if marker == 0xDA {
            return Ok((end, body));
        }
        each(marker, body)?;
        at = end;
    }
}

impl<'a> Frame<'a> {
    pub fn read(data: &'a [u8]) -> Result<Frame<'a>, Fault> {
        let mut frame = Frame {
            data,
            scan: 0,
            num_mcus: 0,
            restarts: 0,
            num_blocks: 0,
            blocks: [Block::default(); MOST_BLOCKS],
            dc: [Code::EMPTY; 4],
            ac: [Code::EMPTY; 4],
            height: 0,
            width: 0,
            num_colours: 0,
            colours: [Colour::default(); 3],
            names: [0; 3],
            told: Told::Nothing,
            quant: [[0; 64]; 4],
        };
        let mut sof: &[u8] = &[];
        let (scan, header) = segments(data, |marker, body| {
            match marker {
                0xC0 | 0xC1 if sof.is_empty() && !body.is_empty() => sof = body,
                0xC4 => frame.read_tables(body)?,
                0xDD if body.len() == 2 => frame.restarts = u16_at(body, 0)?,
                0xDB => frame.read_steps(body)?,
                0xE0 if body.len() >= 14 && body.starts_with(b"JFIF\0") => frame.told = Told::Jfif,
                0xEE if body.len() >= 12 && body.starts_with(b"Adobe") && frame.told != Told::Jfif => {
                    frame.told = Told::Adobe(body[11]);
                }
                // What is before a scan and has no bearing on it.
                0xE0..=0xEF | 0xFE => {}
                _ => return Err(Fault::Unsupported),
            }
            Ok(())
        })?;
        frame.scan = scan;
        frame.read_colours(sof, header)?;
        Ok(frame)
    }

    fn read_tables(&mut self, mut body: &[u8]) -> Result<(), Fault> {
        while let Some((&place, rest)) = body.split_first() {
            let (code, size) = Code::read(rest)?;
            let tables = match place >> 4 {
                0 => &mut self.dc,
                1 => &mut self.ac,
                _ => return Err(Fault::Damaged),
            };
            *tables.get_mut((place & 15) as usize).ok_or(Fault::Damaged)? = code;
            body = rest.get(size..).ok_or(Fault::Damaged)?;
        }
        Ok(())
    }

    fn read_steps(&mut self, mut body: &[u8]) -> Result<(), Fault> {
        while let Some((&place, rest)) = body.split_first() {
            let size = if place >> 4 == 0 { 64 } else { 128 };
            let (told, rest) = (rest.get(..size).ok_or(Fault::Damaged)?, rest.get(size..).ok_or(Fault::Damaged)?);
            let steps = self.quant.get_mut((place & 15) as usize).ok_or(Fault::Damaged)?;
            for (step, bytes) in steps.iter_mut().zip(told.chunks(size / 64)) {
                *step = bytes.iter().fold(0, |high, &low| high << 8 | low as u16);
            }
            body = rest;
        }
        Ok(())
    }

    /// Whether three colours are YCbCr, as libjpeg takes it.
    pub fn is_ycbcr(&self) -> bool {
        match self.told {
            Told::Jfif => true,
            Told::Adobe(transform) => transform == 1,
            Told::Nothing => self.names != *b"RGB",
        }
    }

    fn read_colours(&mut self, sof: &[u8], sos: &[u8]) -> Result<(), Fault> {
        let (bits, count) = match (sof.first(), sof.get(5)) {
            (Some(&bits), Some(&count)) => (bits, count as usize),
            _ => return Err(Fault::Unsupported),
        };
        let (height, width) = (u16_at(sof, 1)?, u16_at(sof, 3)?);
        let is_whole = sos.first() == Some(&(count as u8)) && sos.get(1 + 2 * count..) == Some(&[0, 63, 0]);
        if sof.len() != 6 + 3 * count {
            return Err(Fault::Damaged);
        }
        if bits != 8 || !(count == 1 || count == 3) || !is_whole || height == 0 || width == 0 {
            return Err(Fault::Unsupported);
        }
        (self.height, self.width, self.num_colours) = (height, width, count);
        let (mut across, mut down) = (1u32, 1u32);
        for colour in 0..count {
            let told = sof.get(6 + 3 * colour..9 + 3 * colour).ok_or(Fault::Damaged)?;
            let chosen = sos.get(1 + 2 * colour..3 + 2 * colour).ok_or(Fault::Damaged)?;
            let (x, y) = (told[1] >> 4, told[1] & 15);
            let block = Block { colour: colour as u8, dc: chosen[1] >> 4, ac: chosen[1] & 15 };
            if told[0] != chosen[0] || !(1..=4).contains(&x) || !(1..=4).contains(&y) || block.dc > 3 || block.ac > 3 {
                return Err(Fault::Unsupported);
            }
            // A single colour is coded block by block, whatever its sampling says.
            let (x, y) = if count == 1 { (1, 1) } else { (x, y) };
            let kept = Colour { across: x, down: y, quant: told[2], dc: block.dc, ac: block.ac };
            *self.colours.get_mut(colour).ok_or(Fault::Damaged)? = kept;
            *self.names.get_mut(colour).ok_or(Fault::Damaged)? = told[0];
            across = across.max(x as u32);
            down = down.max(y as u32);
            for _ in 0..x * y {
                *self.blocks.get_mut(self.num_blocks).ok_or(Fault::Damaged)? = block;
                self.num_blocks += 1;
            }
        }
        self.num_mcus = width.div_ceil(8 * across.clamp(1, 4)) * height.div_ceil(8 * down.clamp(1, 4));
        Ok(())
    }

    /// The blocks of an MCU.
    pub fn blocks(&self) -> impl Iterator<Item = Block> + '_ {
        self.blocks.iter().take(self.num_blocks).copied()
    }

    /// Write all segments again, with another restart interval.
    ///
    /// `replaced` tells which tables for differences are exchanged for one that has every category.
    pub fn write(&self, out: &mut Writer, restarts: u32, replaced: [bool; 4]) -> Result<(), Fault> {
        out.bytes(&[0xFF, 0xD8]);
        let (_, header) = segments(self.data, |marker, body| {
            match marker {
                0xDD => {}
                _ => {
                    segment(out, marker, body.len());
                    out.bytes(body);
                }
            }
            Ok(())
        })?;
        for (place, _) in replaced.iter().enumerate().filter(|(_, &is)| is) {
            segment(out, 0xC4, 1 + 16 + 12);
            out.byte(place as u8);
            out.bytes(&ALL_DIFFERENCES.counts);
            out.bytes(&ALL_DIFFERENCES.symbols[..12]);
        }
        segment(out, 0xDD, 2);
        out.bytes(&(restarts as u16).to_be_bytes());
        segment(out, 0xDA, header.len());
        out.bytes(header);
        Ok(())
    }
}

fn segment(out: &mut Writer, marker: u8, body: usize) {
    out.bytes(&[0xFF, marker]);
    out.bytes(&(body as u16 + 2).to_be_bytes());
}
