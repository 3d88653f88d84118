//! Huffman tables for walking through a scan: how far, not what (ITU-T T.81, 1992, annex C and section F.2.2.3).

use crate::bits::Fault;

/// Bits that one look into a table covers.
pub const LOOK: u32 = 12;
const PLACES: usize = 1 << LOOK;

/// The same of one that tells how a coefficient's value is read, and the most that code and value may then take.
const LOOK_VALUE: u32 = 10;
pub const MOST_VALUE: u32 = 18;
const VALUES: usize = 1 << LOOK_VALUE;

/// A table as it stands in the file: codes of each length, and the symbols in the order of their codes.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Code {
    pub counts: [u8; 16],
    pub symbols: [u8; 256],
}

impl Code {
    pub const EMPTY: Code = Code { counts: [0; 16], symbols: [0; 256] };

    /// Reads a table from the body of a DHT segment; the table and its bytes.
    pub fn read(body: &[u8]) -> Result<(Code, usize), Fault> {
        let mut code = Code::EMPTY;
        code.counts.copy_from_slice(body.get(..16).ok_or(Fault::Damaged)?);
        let total: usize = code.counts.iter().map(|&n| n as usize).sum();
        let symbols = body.get(16..16 + total).ok_or(Fault::Damaged)?;
        code.symbols.get_mut(..total).ok_or(Fault::Damaged)?.copy_from_slice(symbols);
        Ok((code, 16 + total))
    }
}

/// One symbol: `length` of its code (0: there is none), and the symbol.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Symbol {
    pub length: u8,
    pub symbol: u8,
}

/// A table made ready.
///
/// `walk` says for the next `LOOK` bits how many of them are whole symbols of coefficients, extra bits included
/// (bits 0 to 3), by how many coefficients they lead on (bits 4 to 11), and whether the last of them ends the block
/// (bit 12). 0: not even one fits. Two bytes each: the tables of both kinds of colour fit into a core's nearest cache.
#[repr(C)]
pub struct Table {
    code: Code,
    is_made: u32,
    walk: [u16; PLACES],
    first: [Symbol; PLACES],
    values: [u32; VALUES],
    /// Of each length: the smallest code that is too large for it, at 16 bits, and where its symbols begin, less its
    /// first code.
    limits: [u32; 32],
    starts: [i32; 32],
    /// Code and length of each symbol; length 0: it has none.
    pub codes: [u16; 256],
    pub lengths: [u8; 256],
}

pub const ENDS: u32 = 1 << 12;
const TOO_LONG: u32 = 127 << 6;
pub const LAST: u32 = 1 << 13;

/// The value that `value` tells of.
#[inline(always)]
pub fn read_value(word: u64, reading: u32) -> i32 {
    let bits = reading >> 24 & 63;
    let from = word << (reading >> 16 & 63);
    // All ones where the value is negative. Shifted twice, as there may be no bits.
    let negative = !(from as i64 >> 63);
    let extra = (from >> 1 >> (!bits & 63)) as i64;
    (extra + (negative << bits) - negative) as i32
}

/// A value of so many bits (section F.2.2.1, "EXTEND"); they are zero for none.
#[inline(always)]
pub fn extended(extra: u32, bits: u32) -> i32 {
    let below = 1i32 << bits >> 1;
    if (extra as i32) < below {
        extra as i32 - (1 << bits) + 1
    } else {
        extra as i32
    }
}

impl Table {
    /// Make ready for a code, unless it is that already.
    pub fn make(&mut self, code: &Code, coefficients: bool) -> Result<(), Fault> {
        let made = if coefficients { 2 } else { 1 };
        if self.is_made == made && self.code == *code {
            return Ok(());
        }
        self.is_made = 0;
        self.code = *code;
        self.number()?;
        if !coefficients && self.lengths[16..].iter().any(|&length| length > 0) {
            return Err(Fault::Damaged);
        }
        self.fill_first();
        if coefficients {
            self.fill_walk();
            self.fill_values();
        }
        self.is_made = made;
        Ok(())
    }

    /// Gives each symbol its code (annex C) and refuses codes that do not fit their lengths.
    fn number(&mut self) -> Result<(), Fault> {
        self.lengths = [0; 256];
        let (mut code, mut place) = (0u32, 0usize);
        for (index, &count) in self.code.counts.iter().enumerate() {
            let length = index as u32 + 1;
            self.starts[length as usize & 31] = place as i32 - code as i32;
            for _ in 0..count {
                let symbol = *self.code.symbols.get(place).ok_or(Fault::Damaged)? as usize;
                self.codes[symbol] = code as u16;
                self.lengths[symbol] = length as u8;
                code += 1;
                place += 1;
            }
            // A code of ones alone is none.
            if code >= 1 << length {
                return Err(Fault::Damaged);
            }
            self.limits[length as usize & 31] = code << (16 - length);
            code <<= 1;
        }
        Ok(())
    }

    fn fill_first(&mut self) {
        self.first = [Symbol { length: 0, symbol: 0 }; PLACES];
        let mut symbols = self.code.symbols.iter();
        let mut place = 0usize;
        for (index, &count) in self.code.counts.iter().enumerate().take(LOOK as usize) {
            let wide = PLACES >> (index + 1);
            for &symbol in symbols.by_ref().take(count as usize) {
                if let Some(places) = self.first.get_mut(place..place + wide) {
                    places.fill(Symbol { length: index as u8 + 1, symbol });
                }
                place += wide;
            }
        }
    }

    fn fill_walk(&mut self) {
        for place in 0..PLACES {
            let (mut used, mut on, mut ends) = (0u32, 0u32, 0u32);
            // More than two are rare, and not worth the time: most files have tables of their own.
            for _ in 0..2 {
                let next = self.first[(place << used) & (PLACES - 1)];
                let (length, run, extra) = (next.length as u32, (next.symbol >> 4) as u32, (next.symbol & 15) as u32);
                if length == 0 || used + length + extra > LOOK {
                    break;
                }
                used += length + extra;
                if extra == 0 && run < 15 {
                    ends = ENDS;
                    break;
                }
                on += run + 1;
            }
            self.walk[place] = (used | on << 4 | ends) as u16;
        }
    }

    fn fill_values(&mut self) {
        for place in 0..VALUES {
            let next = self.first[place << (LOOK - LOOK_VALUE) & (PLACES - 1)];
            let (length, run, extra) = (next.length as u32, (next.symbol >> 4) as u32, (next.symbol & 15) as u32);
            let used = length + extra;
            let reading = used | length << 16 | extra << 24;
            self.values[place] = if length == 0 || length > LOOK_VALUE || used > MOST_VALUE {
                TOO_LONG
            } else if extra == 0 && run < 15 {
                reading | TOO_LONG | LAST
            } else {
                reading | (run + 1) << 6
            };
        }
    }

    /// How the next coefficient is read: how many bits it takes (bits 0 to 5), by how many places it follows the last one
    /// (bits 6 to 12), and the bits of its code (16 to 21) and of its value (24 to 29). It cannot follow by 127: then it
    /// takes too many bits, or, with `LAST`, there is none.
    #[inline(always)]
    pub fn value(&self, word: u64) -> u32 {
        self.values[(word >> (64 - LOOK_VALUE)) as usize & (VALUES - 1)]
    }

    /// The `walk` of the next bits.
    #[inline(always)]
    pub fn walk(&self, word: u64) -> u32 {
        self.walk[(word >> (64 - LOOK)) as usize & (PLACES - 1)] as u32
    }

    /// The next symbol.
    #[inline(always)]
    pub fn symbol(&self, word: u64) -> Result<Symbol, Fault> {
        let first = self.first[(word >> (64 - LOOK)) as usize & (PLACES - 1)];
        if first.length > 0 {
            return Ok(first);
        }
        self.long_symbol(word)
    }

    #[cold]
    #[inline(never)]
    fn long_symbol(&self, word: u64) -> Result<Symbol, Fault> {
        let bits = (word >> 48) as u32;
        for length in LOOK + 1..=16 {
            if bits < self.limits[length as usize & 31] {
                let at = ((bits >> (16 - length)) as i32 + self.starts[length as usize & 31]) as usize;
                return Ok(Symbol { length: length as u8, symbol: self.code.symbols[at & 255] });
            }
        }
        Err(Fault::Damaged)
    }
}

/// A code for differences that has each of the twelve categories (annex K.3, table K.3: luminance).
pub const ALL_DIFFERENCES: Code = {
    let mut code = Code::EMPTY;
    code.counts = [0, 1, 5, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0];
    let mut symbol = 0;
    while symbol < 12 {
        code.symbols[symbol] = symbol as u8;
        symbol += 1;
    }
    code
};

/// Whether a code has each category of differences that 8-bit images can have.
pub fn has_all_differences(table: &Table) -> bool {
    table.lengths[..12].iter().all(|&length| length > 0)
}
