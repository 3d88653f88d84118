//! Rows of pixels from planes: chroma interpolated as libjpeg does ("fancy upsampling"), and turned into RGB.

use core::arch::x86_64::*;

/// Pixels that are made at a time.
pub const STRIP: usize = 32;
const HALF: usize = STRIP / 2;

pub type Strip = [u8; STRIP];
pub type Lanes = __m256i;

/// How chroma is sampled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Sampling {
    /// As luma.
    Full,
    /// Half as often across.
    Across,
    /// Half as often across and down.
    Both,
}

/// Of a row of chroma: what the interpolation across starts from, with a neighbour on each side: `sums[0]` is that on
/// the left of the first sample.
///
/// With half the rows, three parts of the nearer row and one of the other.
#[inline(always)]
pub fn sums(near: &[u8], other: &[u8], sampling: Sampling, sums: &mut [u16]) {
    match sampling {
        Sampling::Both => {
            for ((sum, &a), &b) in sums.iter_mut().zip(near).zip(other) {
                *sum = 3 * a as u16 + b as u16;
            }
        }
        _ => {
            for (sum, &a) in sums.iter_mut().zip(near) {
                *sum = a as u16;
            }
        }
    }
}

/// Samples for `STRIP` pixels from sums; `None` where there are too few.
#[target_feature(enable = "avx2")]
pub fn widened(sums: &[u16], at: usize, sampling: Sampling) -> Option<Lanes> {
    // SAFETY: as many as are read.
    if sampling == Sampling::Full {
        let from: &[u16; STRIP] = sums.get(at..at.wrapping_add(STRIP))?.try_into().ok()?;
        let [low, high] = [0, HALF].map(|first| unsafe { _mm256_loadu_si256(from.as_ptr().add(first).cast()) });
        return Some(_mm256_permute4x64_epi64::<0b11011000>(_mm256_packus_epi16(low, high)));
    }
    let from: &[u16; HALF + 2] = sums.get(at..at.wrapping_add(HALF + 2))?.try_into().ok()?;
    let [left, near, right] = [0, 1, 2].map(|first| unsafe { _mm256_loadu_si256(from.as_ptr().add(first).cast()) });
    let thrice = _mm256_add_epi16(near, _mm256_add_epi16(near, near));
    let (even, odd) = (_mm256_add_epi16(thrice, left), _mm256_add_epi16(thrice, right));
    let plus = |sum, more: i16| _mm256_add_epi16(sum, _mm256_set1_epi16(more));
    // Rounded up and down in turn.
    let (even, odd) = if sampling == Sampling::Both {
        (_mm256_srli_epi16::<4>(plus(even, 8)), _mm256_srli_epi16::<4>(plus(odd, 7)))
    } else {
        (_mm256_srli_epi16::<2>(plus(even, 1)), _mm256_srli_epi16::<2>(plus(odd, 2)))
    };
    Some(_mm256_or_si256(even, _mm256_slli_epi16::<8>(odd)))
}

/// Red, green and blue of `HALF` pixels (ITU-T T.871, 2011, section 7; constants with 16 binary places).
#[target_feature(enable = "avx2")]
fn rgb(luma: __m128i, blue: __m128i, red: __m128i) -> [__m128i; 3] {
    let middle = _mm256_set1_epi16(128);
    let y = _mm256_cvtepu8_epi16(luma);
    let [cb, cr] = [blue, red].map(|samples| _mm256_sub_epi16(_mm256_cvtepu8_epi16(samples), middle));
    let [blue, red] = [cb, cr].map(|chroma| _mm256_add_epi16(chroma, chroma));
    let one = _mm256_set1_epi16(1);
    let times = |twice, by: i16| {
        let high = _mm256_mulhi_epi16(twice, _mm256_set1_epi16(by));
        _mm256_srai_epi16::<1>(_mm256_add_epi16(high, one))
    };
    // 1.402 is 1 + 0.402, and 1.772 is 2 - 0.228: what is less than one half is multiplied within 16 bits.
    let r = _mm256_add_epi16(_mm256_add_epi16(y, cr), times(red, 26345));
    let b = _mm256_add_epi16(_mm256_add_epi16(y, blue), times(blue, -14942));
    // -0.344 and -0.714, which is 0.286 - 1.
    let by = _mm256_set1_epi32(18734 << 16 | (-22554i32 & 0xFFFF));
    let [low, high] = [_mm256_unpacklo_epi16(cb, cr), _mm256_unpackhi_epi16(cb, cr)].map(|both| {
        let sum = _mm256_add_epi32(_mm256_madd_epi16(both, by), _mm256_set1_epi32(1 << 15));
        _mm256_srai_epi32::<16>(sum)
    });
    let g = _mm256_add_epi16(_mm256_sub_epi16(y, cr), _mm256_packs_epi32(low, high));
    [r, g, b].map(|each| _mm_packus_epi16(_mm256_castsi256_si128(each), _mm256_extracti128_si256::<1>(each)))
}

/// What `HALF` pixels of three colours become: the places of a colour's samples in one of three parts; -1: another's.
const fn places(part: usize, colour: usize) -> [i8; HALF] {
    let (mut made, mut byte) = ([-1; HALF], 0);
    while byte < HALF {
        let at = part * HALF + byte;
        if at % 3 == colour {
            made[byte] = (at / 3) as i8;
        }
        byte += 1;
    }
    made
}

const PLACES: [[[i8; HALF]; 3]; 3] = {
    let mut made = [[[0; HALF]; 3]; 3];
    let mut at = 0;
    while at < 9 {
        made[at / 3][at % 3] = places(at / 3, at % 3);
        at += 1;
    }
    made
};

/// Three colours pixel by pixel.
#[target_feature(enable = "avx2")]
fn interleaved(colours: [__m128i; 3]) -> [__m128i; 3] {
    PLACES.map(|places| {
        // SAFETY: as many as are read.
        let [a, b, c] = [0, 1, 2]
            .map(|colour| _mm_shuffle_epi8(colours[colour], unsafe { _mm_loadu_si128(places[colour].as_ptr().cast()) }));
        _mm_or_si128(_mm_or_si128(a, b), c)
    })
}

/// `STRIP` pixels, red first.
#[target_feature(enable = "avx2")]
pub fn pixels(luma: &Strip, blue: Lanes, red: Lanes) -> [u8; 3 * STRIP] {
    let mut made = [0; 3 * STRIP];
    // SAFETY: as many as are read, and written.
    let luma: Lanes = unsafe { _mm256_loadu_si256(luma.as_ptr().cast()) };
    let [y, b, r] = [luma, blue, red].map(|lanes| [_mm256_castsi256_si128(lanes), _mm256_extracti128_si256::<1>(lanes)]);
    for half in 0..2 {
        let [red, green, blue] = rgb(y[half], b[half], r[half]);
        let parts = interleaved([red, green, blue]);
        for (number, part) in parts.into_iter().enumerate() {
            unsafe { _mm_storeu_si128(made.as_mut_ptr().add((3 * half + number) * HALF).cast(), part) };
        }
    }
    made
}
