//! What the processor at hand can do.

use core::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

/// Whether processor and system know AVX2 and the instructions for bits that came with it (Intel, "Software Developer's
/// Manual", volume 1, section 14.3). A virtual machine may take long to answer.
pub fn has_avx2() -> bool {
    let (most, plain) = (__cpuid(0).eax, __cpuid(1).ecx);
    let (saves, avx) = (plain >> 27 & 1 != 0, plain >> 28 & 1 != 0);
    if most < 7 || !saves || !avx {
        return false;
    }
    let extended = __cpuid_count(7, 0).ebx;
    let (bmi1, avx2, bmi2) = (extended >> 3 & 1, extended >> 5 & 1, extended >> 8 & 1);
    bmi1 & avx2 & bmi2 != 0 && unsafe { kept() } & 6 == 6
}

/// Which registers the system keeps for each thread.
#[target_feature(enable = "xsave")]
unsafe fn kept() -> u64 {
    _xgetbv(0)
}
