//! Entropy-coded bits of a JPEG scan, read and written (ITU-T T.81, 1992, sections B.1.1.5 and F.1.2.3).

/// What cannot be read or written. The caller decodes the image in another way then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Of a kind that is not cut here: progressive, arithmetic, several scans, 12 bits.
    Unsupported = -1,
    /// The bytes are no sound JPEG.
    Damaged = -2,
    /// The room for the result is too small.
    Room = -3,
}

/// Whether none of a word's bytes is 0xFF: then none of the complement's is zero.
#[inline(always)]
fn is_plain(word: u64) -> bool {
    let inverse = !word;
    inverse.wrapping_sub(0x0101_0101_0101_0101) & !inverse & 0x8080_8080_8080_8080 == 0
}

#[inline(always)]
fn u64_at(data: &[u8], at: usize) -> Option<u64> {
    let bytes = data.get(at..at.wrapping_add(8))?;
    bytes.try_into().ok().map(u64::from_be_bytes)
}

/// Reads the bits of an interval, highest first: what lies between two markers. Whoever reads on behind its end gets
/// any bits, and is told so by `is_sound` afterwards.
///
/// The interval is copied first, without the zeros that are stuffed in behind each 0xFF: looking out for them while bits
/// are read would cost more.
pub struct Reader<'a> {
    data: &'a [u8],
    /// Where the marker stands that ends the interval.
    end: usize,
    clean: &'a mut [u8],
    /// Bytes of the interval in `clean`.
    size: usize,
    at: usize,
    bits: u64,
    count: u32,
}

impl<'a> Reader<'a> {
    /// `clean` is memory to work in; an interval that is longer is damaged.
    pub fn new(data: &'a [u8], at: usize, clean: &'a mut [u8]) -> Self {
        let mut reader = Reader { data, end: at, clean, size: 0, at: 0, bits: 0, count: 0 };
        reader.read(at);
        reader
    }

    /// Take in the interval that begins at a byte.
    fn read(&mut self, from: usize) {
        let (mut from, mut to) = (from, 0usize);
        loop {
            if let (Some(word), Some(place)) = (u64_at(self.data, from), self.clean.get_mut(to..to.wrapping_add(8))) {
                if is_plain(word) {
                    place.copy_from_slice(&word.to_be_bytes());
                    from += 8;
                    to += 8;
                    continue;
                }
            }
            match (self.data.get(from), self.data.get(from.wrapping_add(1)), self.clean.get_mut(to)) {
                (Some(0xFF), Some(0), Some(place)) => {
                    *place = 0xFF;
                    from += 2;
                }
                (Some(0xFF), _, _) | (None, _, _) | (_, _, None) => break,
                (Some(&byte), _, Some(place)) => {
                    *place = byte;
                    from += 1;
                }
            }
            to += 1;
        }
        if let Some(place) = self.clean.get_mut(to..to.wrapping_add(8)) {
            place.fill(0);
        }
        (self.end, self.size) = (from, to);
        (self.at, self.bits, self.count) = (0, 0, 0);
    }

    /// Have at least 56 bits ready.
    #[inline(always)]
    pub fn fill(&mut self) {
        let word = u64_at(self.clean, self.at).unwrap_or(0);
        self.bits |= word >> (self.count & 63);
        self.at += (63 - self.count as usize & 63) >> 3;
        self.count |= 56;
    }

    /// The next bits, from the highest of the word down.
    #[inline(always)]
    pub fn word(&self) -> u64 {
        self.bits
    }

    /// Go on by `n` bits, at most as many as are ready.
    #[inline(always)]
    pub fn skip(&mut self, n: u32) {
        self.bits <<= n & 63;
        self.count = self.count.wrapping_sub(n);
    }

    /// Bits of the interval that have not been read; fewer than none, where more were.
    fn left(&self) -> i64 {
        (self.size as i64 - self.at as i64) * 8 + self.count as i64
    }

    /// At the end of an interval, of which all was read: go to the next, behind the marker, which must be `marker`.
    pub fn pass(&mut self, marker: u8) -> Result<(), Fault> {
        self.is_used_up()?;
        let next = self.behind(marker)?;
        self.read(next);
        Ok(())
    }

    /// Whether no more was read than there is.
    pub fn is_sound(&self) -> Result<(), Fault> {
        if self.left() < 0 {
            Err(Fault::Damaged)
        } else {
            Ok(())
        }
    }

    /// Whether all of the interval was read. Fewer than eight bits may be left over, which fill up the last byte.
    pub fn is_used_up(&self) -> Result<(), Fault> {
        if (0..8).contains(&self.left()) {
            Ok(())
        } else {
            Err(Fault::Damaged)
        }
    }

    /// Leave out the rest of this interval, and all of the next: those that `first` and what follows end.
    ///
    /// Each has to end with its marker: of those between intervals there are eight, in turn.
    pub fn leave_out(&mut self, intervals: core::ops::Range<u32>) -> Result<(), Fault> {
        self.is_sound()?;
        for number in intervals.clone() {
            let next = self.behind(restart_marker(number))?;
            if number.wrapping_add(1) == intervals.end {
                self.read(next);
            } else {
                self.look_for_end(next);
            }
        }
        Ok(())
    }

    /// Whether what was read was there, and what follows: the intervals that `intervals` number, and the image's end.
    pub fn ends(&mut self, intervals: core::ops::Range<u32>) -> Result<(), Fault> {
        self.is_sound()?;
        for number in intervals {
            let next = self.behind(restart_marker(number))?;
            self.look_for_end(next);
        }
        self.behind(0xD9).map(|_| ())
    }

    /// What follows the marker that ends the interval, which must be `marker`.
    fn behind(&self, marker: u8) -> Result<usize, Fault> {
        let mut at = self.end;
        // Any number of 0xFF may stand before a marker.
        while let (Some(0xFF), Some(0xFF)) = (self.data.get(at), self.data.get(at.wrapping_add(1))) {
            at += 1;
        }
        if self.data.get(at) != Some(&0xFF) || self.data.get(at.wrapping_add(1)) != Some(&marker) {
            return Err(Fault::Damaged);
        }
        Ok(at.wrapping_add(2))
    }

    /// Find the marker that ends an interval, without taking it in.
    fn look_for_end(&mut self, mut from: usize) {
        loop {
            if let Some(word) = u64_at(self.data, from) {
                if is_plain(word) {
                    from += 8;
                    continue;
                }
            }
            match (self.data.get(from), self.data.get(from.wrapping_add(1))) {
                (Some(0xFF), Some(0)) => from += 2,
                (Some(0xFF), _) | (None, _) => break,
                (Some(_), _) => from += 1,
            }
        }
        self.end = from;
    }
}

/// The marker that ends an interval, unless it is the last one.
pub fn restart_marker(interval: u32) -> u8 {
    0xD0 + (interval & 7) as u8
}

/// Writes bits, highest first, and bytes.
pub struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
    bits: u64,
    count: u32,
    full: bool,
}

impl<'a> Writer<'a> {
    pub fn new(out: &'a mut [u8]) -> Self {
        Writer { out, at: 0, bits: 0, count: 0, full: false }
    }

    pub fn byte(&mut self, byte: u8) {
        match self.out.get_mut(self.at) {
            Some(place) => {
                *place = byte;
                self.at += 1;
            }
            None => self.full = true,
        }
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.byte(byte);
        }
    }

    /// Append the lowest `n` bits of `value`, whose others are zero; `n` is at most 32.
    #[inline(always)]
    pub fn put(&mut self, value: u64, n: u32) {
        self.bits = self.bits << (n & 63) | value;
        self.count += n;
        if self.count >= 32 {
            self.count -= 32;
            let word = (self.bits >> (self.count & 63)) as u32;
            let inverse = !word;
            if inverse.wrapping_sub(0x0101_0101) & !inverse & 0x8080_8080 == 0 {
                if let Some(place) = self.out.get_mut(self.at..self.at.wrapping_add(4)) {
                    place.copy_from_slice(&word.to_be_bytes());
                    self.at += 4;
                    return;
                }
            }
            self.put_slowly(word);
        }
    }

    #[cold]
    #[inline(never)]
    fn put_slowly(&mut self, word: u32) {
        for byte in word.to_be_bytes() {
            self.stuffed(byte);
        }
    }

    fn stuffed(&mut self, byte: u8) {
        self.byte(byte);
        if byte == 0xFF {
            self.byte(0);
        }
    }

    /// Fill up the last byte with ones, and begin a new one.
    pub fn align(&mut self) {
        let rest = self.count % 8;
        if rest > 0 {
            self.put((1 << (8 - rest)) - 1, 8 - rest);
        }
        while self.count >= 8 {
            self.count -= 8;
            self.stuffed((self.bits >> (self.count & 63)) as u8);
        }
        self.bits = 0;
        self.count = 0;
    }

    /// Bytes written so far.
    pub fn finish(self) -> Result<usize, Fault> {
        if self.full {
            Err(Fault::Room)
        } else {
            Ok(self.at)
        }
    }
}
