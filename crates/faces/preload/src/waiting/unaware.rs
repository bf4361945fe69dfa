//! Threads that sleep in `poll` or `select` for connections that have no rings yet.
//!
//! A thread that sleeps in the kernel knows nothing of the rings that another thread brings meanwhile. A wake byte wakes it, but the kernel
//! asks for the byte once more when the thread runs. So as long as there is such a thread, whoever sleeps for the connection asks its peer
//! for a byte, not for the doorbell, sleeps at edges, and leaves the last byte where it is ([`super::sleep`]). A process with one thread
//! has none.

use crate::process::thread;
use crate::state::socket::{Socket, Stage};
use crate::state::sockets::SOCKETS;
use crate::state::table::Lease;
use crate::waiting::FEW;
use libc::pollfd;
use smallvec::SmallVec;
use std::sync::atomic::{Ordering, fence};

/// Returns whether a thread that sleeps for this socket in the kernel has to be counted.
pub fn concerns(socket: &'static Socket) -> bool {
    matches!(socket.stage(), Stage::Native | Stage::Reported) && !thread::is_only()
}

/// The connections for which a thread is about to sleep in the kernel, until it is awake or cancelled.
pub struct Unaware(SmallVec<[Lease<Socket>; FEW]>);

impl Unaware {
    /// Returns `None` if one of them has got its rings. Otherwise whoever brings rings from now on finds this thread.
    pub fn begin(fds: &[pollfd]) -> Option<Self> {
        let mut sleeper = Self(SmallVec::new());
        for poll in fds {
            // Room wakes a thread by itself.
            if poll.events & (libc::POLLIN | libc::POLLRDNORM) == 0 {
                continue;
            }
            if let Some(call) = SOCKETS.call(poll.fd).filter(|call| concerns(call.what())) {
                let socket = call.what();
                socket.asleep.unaware.fetch_add(1, Ordering::SeqCst);
                // ORDER preload.waiting: see `Direction::add_sleeper`.
                socket.receiving.waiting.fetch_add(1, Ordering::SeqCst);
                sleeper.0.push(call);
            }
        }
        // ORDER preload.unaware: either this thread sees the rings, or a thread that knows of them sees this one. Pairs with:
        // `keeper::has_unaware`.
        fence(Ordering::SeqCst);
        let has_joined = sleeper.0.iter().any(|call| call.what().is_joined());
        (!has_joined).then_some(sleeper)
    }
}

impl Drop for Unaware {
    fn drop(&mut self) {
        // If a signal handler has forked, the child has reset the counters, and they must not go below zero.
        let less = |count: u32| count.checked_sub(1);
        for call in &self.0 {
            let socket = call.what();
            let _ = socket.receiving.waiting.fetch_update(Ordering::SeqCst, Ordering::Relaxed, less);
            socket.asleep.one_less_unaware(|| socket.receiving.common());
        }
    }
}
