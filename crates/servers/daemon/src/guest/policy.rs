//! The scheduling policy: whether this daemon preempts the running program when it is woken.
//!
//! As a rule it should, because a program waits for it. But a program that sends one request after the other without waiting for
//! answers does not wait: each of its requests would take the processor away from it, and each switch there and back costs many
//! times as much as relaying a request. With `SCHED_BATCH` the daemon runs when that program waits or has used up its time slice,
//! and then finds everything that the program has sent.
#![allow(unsafe_code)] // For system calls that no safe crate offers.

/// The scheduling policy of the thread that made this value.
#[derive(Debug)]
pub struct Policy {
    is_usual: bool,
    is_batch: bool,
}

impl Policy {
    /// Reads the present policy. If an administrator has chosen another one than the usual policy, it is never changed.
    pub fn new() -> Self {
        // SAFETY: this only returns a number.
        Self { is_usual: unsafe { libc::sched_getscheduler(0) } == libc::SCHED_OTHER, is_batch: false }
    }

    /// Sets `SCHED_BATCH`, or the usual policy again.
    pub fn set_batch(&mut self, batch: bool) {
        if !self.is_usual || batch == self.is_batch {
            return;
        }
        self.is_batch = batch;
        let policy = if batch { libc::SCHED_BATCH } else { libc::SCHED_OTHER };
        let parameters = libc::sched_param { sched_priority: 0 };
        // If the system does not allow this, requests take longer, and nothing else changes.
        // SAFETY: the kernel only reads `parameters`.
        let _ = unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn current() -> libc::c_int {
        // SAFETY: this only returns a number.
        unsafe { libc::sched_getscheduler(0) }
    }

    #[test]
    fn the_usual_policy_is_changed_and_restored_and_any_other_is_kept() {
        let mut policy = Policy { is_usual: true, is_batch: false };
        for batch in [true, false, true] {
            policy.set_batch(batch);
            assert_eq!(current(), if batch { libc::SCHED_BATCH } else { libc::SCHED_OTHER });
        }
        let mut other = Policy::new();
        other.set_batch(true);
        other.set_batch(false);
        assert_eq!(current(), libc::SCHED_BATCH);
        policy.set_batch(false);
        assert!(Policy::new().is_usual);
    }
}
