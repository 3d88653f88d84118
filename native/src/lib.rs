//! Restart markers for JPEG files, without decoding them, parts of JPEG files, decoded, and these resized; called from
//! Python by `ctypes`.
//!
//! Nothing here allocates, and nothing can panic: the build fails where the compiler cannot show that (see `panics`).

#![cfg_attr(not(test), no_std)]

mod bits;
mod frame;
mod huffman;
mod restart;

#[cfg(target_arch = "x86_64")]
mod chroma;
#[cfg(target_arch = "x86_64")]
mod colour;
#[cfg(target_arch = "x86_64")]
mod cut;
#[cfg(target_arch = "x86_64")]
mod idct;
#[cfg(target_arch = "x86_64")]
mod part;
#[cfg(target_arch = "x86_64")]
mod processor;
#[cfg(target_arch = "x86_64")]
mod resize;
#[cfg(target_arch = "x86_64")]
mod scan;
#[cfg(target_arch = "x86_64")]
mod weights;

pub use bits::Fault;
pub use restart::{restart, Workspace};

/// The version of the functions below; Python refuses another.
#[no_mangle]
pub extern "C" fn steadytrain_version() -> u32 {
    6
}

/// Bytes of a workspace, which is all zeros at first and aligned to eight bytes; one for each thread.
#[no_mangle]
pub extern "C" fn steadytrain_workspace() -> usize {
    core::mem::size_of::<Workspace>()
}

/// Write the same JPEG with a restart marker after every `interval` MCUs; bytes written to `out`, or a fault's number.
///
/// # Safety
///
/// `data` has `size` bytes, `out` has `room`, `clean` has `size + 16`, all of them apart; `work` is a workspace that no
/// other thread is using.
#[no_mangle]
pub unsafe extern "C" fn steadytrain_restart(
    data: *const u8,
    size: usize,
    interval: u32,
    out: *mut u8,
    room: usize,
    clean: *mut u8,
    work: *mut Workspace,
) -> isize {
    let (data, out) = (core::slice::from_raw_parts(data, size), core::slice::from_raw_parts_mut(out, room));
    let clean = core::slice::from_raw_parts_mut(clean, size + 16);
    match restart(data, interval, out, clean, &mut *work) {
        Ok(size) => size as isize,
        Err(fault) => fault as isize,
    }
}

/// Whether parts can be decoded and resized here (1) or not (0).
#[no_mangle]
pub extern "C" fn steadytrain_decodes() -> u32 {
    #[cfg(target_arch = "x86_64")]
    return processor::has_avx2() as u32;
    #[cfg(not(target_arch = "x86_64"))]
    return 0;
}

/// A panic anywhere leaves this name in the library, which then cannot be linked.
#[cfg(not(test))]
mod panics {
    extern "C" {
        fn steadytrain_can_panic() -> !;
    }

    #[panic_handler]
    fn panic(_: &core::panic::PanicInfo) -> ! {
        unsafe { steadytrain_can_panic() }
    }
}
