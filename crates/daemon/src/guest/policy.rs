//! Whether this daemon, when something wakes it, takes the processor from the program that runs.
//!
//! As a rule it should, because a program waits for it. A program that sends one request after the other without waiting for
//! answers does not: each of its requests would take the processor from it, and each switch there and back costs many times
//! what it costs to pass a request on. With `SCHED_BATCH` the daemon runs when that program waits or has used up its time,
//! and finds all that it has sent.
#![allow(unsafe_code)] // System calls that no safe crate offers.

/// The scheduling policy of the thread that has made this.
#[derive(Debug)]
pub struct Policy {
    is_usual: bool,
    is_batch: bool,
}

impl Policy {
    /// As it is. What an administrator has chosen other than the usual policy is left alone.
    pub fn new() -> Self {
        // SAFETY: asks for a number.
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
        // Where the system does not allow this, requests take longer, and nothing else.
        // SAFETY: the kernel only reads `parameters`.
        let _ = unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn current() -> libc::c_int {
        // SAFETY: asks for a number.
        unsafe { libc::sched_getscheduler(0) }
    }

    #[test]
    fn the_policy_is_set_and_taken_back_and_that_of_others_is_left_alone() {
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
