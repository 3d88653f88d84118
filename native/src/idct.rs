//! The inverse cosine transform of 8 by 8 coefficients, in whole numbers: to the last bit that of libjpeg's "islow".
//!
//! Twelve multiplications for one dimension (after Loeffler, Ligtenberg and Moschytz, "Practical fast 1-D DCT algorithms
//! with 11 multiplications", 1989). Constants have 13 binary places; between the two dimensions 2 are kept.

use core::arch::x86_64::*;

/// Coefficients of a block, row by row, times their steps.
pub type Block = [i32; 64];

/// Where the sizes of a column's coefficients add up to more, libjpeg-turbo may overflow, and what it makes depends on
/// the processor. Encoders of pixels never get there: the squares of a block's coefficients add up to 1024 squared.
pub const LARGEST: i32 = 2900;

const PLACES: i32 = 13;
const KEPT: i32 = 2;

/// Eight columns, worked at together.
type Lanes = __m256i;

#[target_feature(enable = "avx2")]
fn add(a: Lanes, b: Lanes) -> Lanes {
    _mm256_add_epi32(a, b)
}

#[target_feature(enable = "avx2")]
fn sub(a: Lanes, b: Lanes) -> Lanes {
    _mm256_sub_epi32(a, b)
}

#[target_feature(enable = "avx2")]
fn mul(a: Lanes, by: i32) -> Lanes {
    _mm256_mullo_epi32(a, _mm256_set1_epi32(by))
}

/// One dimension, for eight columns at once; without its last `DROPPED` binary places, rounded to the nearest after
/// `PLUS` was added.
#[target_feature(enable = "avx2")]
fn transform<const DROPPED: i32, const PLUS: i32>(v: &[Lanes; 8]) -> [Lanes; 8] {
    let turned = mul(add(v[2], v[6]), 4433);
    let (low, high) = (sub(turned, mul(v[6], 15137)), add(turned, mul(v[2], 6270)));
    let half = _mm256_set1_epi32((1 << (DROPPED - 1)) + (PLUS << DROPPED));
    let sum = add(_mm256_slli_epi32::<PLACES>(add(v[0], v[4])), half);
    let difference = add(_mm256_slli_epi32::<PLACES>(sub(v[0], v[4])), half);
    let even = [add(sum, high), add(difference, low), sub(difference, low), sub(sum, high)];

    let (a, b) = (add(v[7], v[3]), add(v[5], v[1]));
    let both = mul(add(a, b), 9633);
    let (a, b) = (sub(both, mul(a, 16069)), sub(both, mul(b, 3196)));
    let (outer, inner) = (mul(add(v[7], v[1]), 7373), mul(add(v[5], v[3]), 20995));
    let odd = [
        add(sub(mul(v[1], 12299), outer), b),
        add(sub(mul(v[3], 25172), inner), a),
        add(sub(mul(v[5], 16819), inner), b),
        add(sub(mul(v[7], 2446), outer), a),
    ];
    [
        _mm256_srai_epi32::<DROPPED>(add(even[0], odd[0])),
        _mm256_srai_epi32::<DROPPED>(add(even[1], odd[1])),
        _mm256_srai_epi32::<DROPPED>(add(even[2], odd[2])),
        _mm256_srai_epi32::<DROPPED>(add(even[3], odd[3])),
        _mm256_srai_epi32::<DROPPED>(sub(even[3], odd[3])),
        _mm256_srai_epi32::<DROPPED>(sub(even[2], odd[2])),
        _mm256_srai_epi32::<DROPPED>(sub(even[1], odd[1])),
        _mm256_srai_epi32::<DROPPED>(sub(even[0], odd[0])),
    ]
}

/// Rows to columns.
#[target_feature(enable = "avx2")]
fn turned(v: &[Lanes; 8]) -> [Lanes; 8] {
    let pairs = |a, b| (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let quads = |a, b| (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    let halves = |a, b| (_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b));
    let ((a0, a1), (b0, b1)) = (pairs(v[0], v[1]), pairs(v[2], v[3]));
    let ((c0, c1), (d0, d1)) = (pairs(v[4], v[5]), pairs(v[6], v[7]));
    let ((r0, r1), (r2, r3)) = (quads(a0, b0), quads(a1, b1));
    let ((s0, s1), (s2, s3)) = (quads(c0, d0), quads(c1, d1));
    let ((m0, m4), (m1, m5), (m2, m6), (m3, m7)) = (halves(r0, s0), halves(r1, s1), halves(r2, s2), halves(r3, s3));
    [m0, m1, m2, m3, m4, m5, m6, m7]
}

/// The eight rows of pixels of columns, each of whose lanes is a row: values from 0 to 255, others are brought there.
#[target_feature(enable = "avx2")]
fn rows(c: &[Lanes; 8]) -> [Lanes; 2] {
    let by_row = _mm256_setr_epi8(
        0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
    );
    let four = |a, b, c, d| {
        let bytes = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        _mm256_shuffle_epi8(bytes, by_row)
    };
    let (left, right) = (four(c[0], c[1], c[2], c[3]), four(c[4], c[5], c[6], c[7]));
    [_mm256_unpacklo_epi32(left, right), _mm256_unpackhi_epi32(left, right)]
}

/// Write the pixels of a block, in rows of `stride` bytes. `peak` grows to the largest sums of columns (see `LARGEST`).
#[target_feature(enable = "avx2")]
pub fn pixels(block: &Block, peak: &mut [i32; 8], out: &mut [u8], stride: usize) {
    let at: *const Lanes = block.as_ptr().cast();
    // SAFETY: a block has eight rows of eight numbers.
    let v: [Lanes; 8] = core::array::from_fn(|row| unsafe { _mm256_loadu_si256(at.add(row)) });
    let sum = v.iter().fold(_mm256_setzero_si256(), |sum, &row| add(sum, _mm256_abs_epi32(row)));
    // SAFETY: there are eight sums.
    unsafe {
        let place: *mut Lanes = peak.as_mut_ptr().cast();
        _mm256_storeu_si256(place, _mm256_max_epi32(_mm256_loadu_si256(place), sum));
    }
    let columns = turned(&transform::<{ PLACES - KEPT }, 0>(&v));
    let [a, b] = rows(&transform::<{ PLACES + KEPT + 3 }, 128>(&columns));
    let quarters = [
        _mm256_castsi256_si128(a),
        _mm256_castsi256_si128(b),
        _mm256_extracti128_si256::<1>(a),
        _mm256_extracti128_si256::<1>(b),
    ];
    let mut places = out.chunks_mut(stride.max(8));
    for two in quarters {
        for row in [_mm_cvtsi128_si64(two), _mm_extract_epi64::<1>(two)] {
            if let Some(place) = places.next().and_then(|row| row.first_chunk_mut::<8>()) {
                *place = row.to_le_bytes();
            }
        }
    }
}

/// The same of a block that has but its first coefficient.
#[target_feature(enable = "avx2")]
pub fn flat(first: i32, peak: &mut [i32; 8], out: &mut [u8], stride: usize) {
    peak[0] = peak[0].max(first.wrapping_abs());
    let pixel = ((first.wrapping_add(4) >> 3).wrapping_add(128)).clamp(0, 255) as u8;
    for row in out.chunks_mut(stride.max(8)).take(8) {
        if let Some(place) = row.first_chunk_mut::<8>() {
            *place = [pixel; 8];
        }
    }
}
