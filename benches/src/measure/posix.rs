//! The C library's robust mutex and its condition variable between processes, in memory that both map.
#![allow(unsafe_code)] // Calls of libc.

use super::locks::{Lock, Signal};
use anyhow::{Result, bail, ensure};
use ginnel::{Mapping, SharedSlice};
use ginnel_layout::segment;

/// Their offset, in the arena of a segment that has no objects.
const AT: usize = (segment::ARENA - segment::RESERVED) as usize + 2 * 4096;

/// A robust, process-shared `pthread_mutex_t` and a process-shared `pthread_cond_t`.
pub struct Posix {
    mutex: *mut libc::pthread_mutex_t,
    condvar: *mut libc::pthread_cond_t,
    _memory: Mapping,
}

fn done(what: &str, code: i32) -> Result<()> {
    ensure!(code == 0, "{what}: {}", std::io::Error::from_raw_os_error(code));
    Ok(())
}

impl Posix {
    /// Uses the ones in `memory`. The first of the two ends must make them (`make`).
    pub fn open(memory: &Mapping, make: bool) -> Result<Self> {
        let slice = SharedSlice::new(memory, AT, 4096);
        let mutex = slice.as_ptr().cast::<libc::pthread_mutex_t>();
        // The condition variable is not in the mutex's cache line.
        let condvar = slice.skip(256).as_ptr().cast::<libc::pthread_cond_t>();
        if make {
            // SAFETY: aligned memory that lives as long as the mapping, which we keep; nobody else uses it yet.
            unsafe {
                let mut attributes = std::mem::zeroed();
                done("mutexattr_init", libc::pthread_mutexattr_init(&raw mut attributes))?;
                let shared = libc::PTHREAD_PROCESS_SHARED;
                done("setpshared", libc::pthread_mutexattr_setpshared(&raw mut attributes, shared))?;
                let robust = libc::PTHREAD_MUTEX_ROBUST;
                done("setrobust", libc::pthread_mutexattr_setrobust(&raw mut attributes, robust))?;
                done("mutex_init", libc::pthread_mutex_init(mutex, &raw const attributes))?;
                let mut attributes = std::mem::zeroed();
                done("condattr_init", libc::pthread_condattr_init(&raw mut attributes))?;
                done("setpshared", libc::pthread_condattr_setpshared(&raw mut attributes, shared))?;
                done("cond_init", libc::pthread_cond_init(condvar, &raw const attributes))?;
            }
        }
        Ok(Self { mutex, condvar, _memory: memory.clone() })
    }
}

impl Lock for Posix {
    #[inline]
    fn lock(&mut self) -> Result<()> {
        // SAFETY: initialised by the first of the two ends before the other came.
        match unsafe { libc::pthread_mutex_lock(self.mutex) } {
            0 => Ok(()),
            code => bail!("pthread_mutex_lock: {}", std::io::Error::from_raw_os_error(code)),
        }
    }
    #[inline]
    fn unlock(&mut self) -> Result<()> {
        // SAFETY: the mutex was initialised by the first of the two ends before the other came, and the memory stays mapped.
        match unsafe { libc::pthread_mutex_unlock(self.mutex) } {
            0 => Ok(()),
            code => bail!("pthread_mutex_unlock: {}", std::io::Error::from_raw_os_error(code)),
        }
    }
}

impl Signal for Posix {
    fn wait(&mut self) -> Result<()> {
        // SAFETY: both were initialised by the first of the two ends before the other came; the mutex is locked by us.
        done("pthread_cond_wait", unsafe { libc::pthread_cond_wait(self.condvar, self.mutex) })
    }
    fn notify(&mut self) -> Result<()> {
        // SAFETY: the condition variable was initialised by the first of the two ends before the other came.
        done("pthread_cond_signal", unsafe { libc::pthread_cond_signal(self.condvar) })
    }
}
