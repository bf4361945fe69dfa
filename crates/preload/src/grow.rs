//! Larger rings.
//!
//! A connection begins with small rings, so that one which is mostly idle takes little of its segment. Once a sender has found its ring full
//! twice, both ends ask the daemon for a second channel with larger ones, at a name that follows from the first one's, and go on in the
//! meantime. Then each direction leaves its ring for the larger one as it has left the kernel ([`ginnel_ring::carrier`]):
//!
//! | sender | receiver |
//! |---|---|
//! | finds its ring full twice: says WANTED in it, wakes the receiver, and asks for larger ones | sees WANTED when it receives or waits: asks too |
//! | has the larger ring | has the larger ring: says READY there, and looks at BASE there from now on |
//! | sees READY: BASE := bytes that the smaller ring has carried; sends into the larger one, and wakes the receiver | takes the smaller ring's bytes up to BASE, then the larger one's |
//! | gives the smaller ring up | gives it up |
//!
//! The sender may wait for room meanwhile, and the receiver for something else of the same socket. Neither would ever go on if the
//! receiver only receives once the sender has sent more. So who waits looks every millisecond until the larger rings are there.
//!
//! What can go wrong:
//!
//! | | |
//! |---|---|
//! | the segment is full, or the daemon is gone | the end that is told so stays with its rings; the other gives up after a while, and does too |
//! | the peer does not ask | the same |
//! | a side dies or closes | as ever; bytes that it has sent before are received from both rings |
//! | the sender finishes before it has begun the larger ring | the smaller one is the last |
//! | BASE lies before what was received | ECONNRESET |
//! | BASE lies beyond what the smaller ring gets | the receiver waits, as with TCP |
//! | WANTED without need | a larger ring |
//! | the sender goes back to the kernel (`returning`) | the larger ring takes over from the kernel |
//! | a fork | no new rings as long as several processes have the socket (`family`) |

use std::sync::atomic::Ordering;

use ginnel::{SocketChannel, SocketReceiver, SocketSender};
use ginnel_layout::ring::HEADER;
use ginnel_ring::carrier::{self, Earlier};
use ginnel_ring::wait::Waitable;
use ginnel_shmem::SharedMemory;
use libc::c_int;

use crate::direction::Carrier;
use crate::errno::{Kept, Result};
use crate::family;
use crate::kernel;
use crate::receive;
use crate::rings::Rings;
use crate::socket::{Growth, Socket};

/// Data bytes of the rings that a connection begins with.
pub const SMALLEST: usize = 4 << 10;
/// Those of the largest.
pub const LARGEST: usize = 256 << 10;
/// So many times as large is the next one.
const FACTOR: usize = 16;
/// So often a ring has to be full.
const FULLS: u32 = 2;

fn capacity(ring: &impl SharedMemory) -> usize {
    ring.len() - HEADER
}

/// Data bytes of the rings that come next; `None` if there are none.
pub fn next_capacity(socket: &'static Socket) -> Option<usize> {
    if family::is_shared(socket) {
        return None;
    }
    // What has gone back to the kernel was too small in any case.
    if socket.has_returned() {
        return Some(
            (socket.ring_bytes.load(Ordering::Relaxed) as usize * FACTOR).clamp(SMALLEST * FACTOR, LARGEST),
        );
    }
    let rings = socket.sending.lock();
    let now = capacity(rings.as_ref()?.ring.memory());
    (now < LARGEST).then(|| (now * FACTOR).min(LARGEST))
}

/// A ring had no room.
#[cold]
pub fn note_full(socket: &'static Socket, fd: c_int, sender: &SocketSender) {
    let fulls = socket.fulls.fetch_add(1, Ordering::Relaxed) + 1;
    let memory = sender.ring.memory();
    if fulls >= FULLS && socket.growth() == Growth::None && capacity(memory) < LARGEST {
        carrier::want_more(memory);
        socket.grow();
        kernel::wake(socket, fd);
    }
}

/// Brings a socket further whose calls wait. True if that may have to be done again: its rings are about to become larger.
#[inline]
pub fn attend_waiting(socket: &'static Socket) -> bool {
    let is_growing = || matches!(socket.growth(), Growth::Wanted | Growth::Asked | Growth::Begun);
    is_growing() && may_begin(socket) && {
        let _errno = Kept::new();
        let fd = socket.fd.load(Ordering::Relaxed);
        crate::meet::attend(socket, fd);
        attend(socket, fd);
        is_growing()
    }
}

/// Whether larger rings may be asked for: both directions have left the kernel, or have gone back to it.
pub fn may_begin(socket: &'static Socket) -> bool {
    let has_left = |carrier, returned| carrier == Carrier::Ring || carrier == Carrier::Kernel && returned;
    has_left(socket.sending.carrier(), socket.sending.has_returned())
        && has_left(socket.receiving.carrier(), socket.receiving.has_returned())
}

/// The larger rings are there. `is_current` says whether the socket has not been closed; whoever closes it says so before taking the
/// locks of its rings. False if it was.
pub fn take(socket: &'static Socket, channel: SocketChannel, is_current: impl Fn() -> bool) -> bool {
    let (sender, mut receiver) = channel.split();
    let is_shared = family::is_shared(socket);
    let mut sending = socket.sending.lock();
    if !is_current() {
        return false;
    }
    if is_shared || socket.is_passed() {
        socket.set_growth(Growth::Over);
        return false;
    }
    // What is not taken is closed here. In a direction that the kernel carries, `change` goes on with it.
    let _ = match socket.sending.has_returned() {
        true => {
            socket.ring_bytes.store(capacity(sender.ring.memory()) as u64, Ordering::Relaxed);
            sending.begin_again(sender)
        }
        false => sending.offer(sender),
    };
    drop(sending);
    let mut receiving = socket.receiving.lock();
    if !is_current() {
        return false;
    }
    if socket.receiving.has_returned() {
        // As when a connection changes over at first: another thread may sleep.
        receiver.ring.arm();
        let _ = receiving.begin_again(receiver);
    } else if receiving.offer(receiver).is_ok()
        && let Some(next) = receiving.next()
    {
        carrier::count(next.ring.memory(), Earlier::Ring);
    }
    socket.set_growth(Growth::Begun);
    true
}

/// Whether there is a ring that is to take over.
fn is_ahead<R>(rings: &Rings<R>, carrier: Carrier) -> bool {
    rings.is_ahead() || carrier != Carrier::Ring && rings.as_ref().is_some()
}

/// Brings a socket whose rings carry both directions further. Called at the beginning of each call.
pub fn attend(socket: &'static Socket, fd: c_int) {
    if socket.growth() == Growth::Begun && !family::is_shared(socket) {
        let mut sending = socket.sending.lock();
        step_sending(socket, fd, &mut sending);
        let (left_sender, sending_is_ahead) =
            (sending.take_left(), is_ahead(&sending, socket.sending.carrier()));
        drop(sending);
        let mut receiving = socket.receiving.lock();
        // If the peer lies, the call that receives says so.
        let _ = step_receiving(socket, &mut receiving);
        let (left_receiver, receiving_is_ahead) =
            (receiving.take_left(), is_ahead(&receiving, socket.receiving.carrier()));
        drop(receiving);
        drop((left_sender, left_receiver));
        if !sending_is_ahead && !receiving_is_ahead {
            socket.fulls.store(0, Ordering::Relaxed);
            socket.set_growth(Growth::None);
            crate::report::changed(socket);
        }
    }
    if !matches!(socket.growth(), Growth::Wanted | Growth::Asked | Growth::Begun) {
        socket.leave_grown();
    }
}

/// The sender goes on in the larger ring, if the receiver counts.
#[cold]
pub fn step_sending(socket: &'static Socket, fd: c_int, rings: &mut Rings<SocketSender>) {
    if let (Some(now), Some(next)) = (rings.as_ref(), rings.next())
        && carrier::is_counted(next.ring.memory(), Earlier::Ring)
        && !carrier::is_recalled(now.ring.memory())
    {
        let sent = now.ring.cursor().position;
        // Whoever recalls this one is seen later, as one that recalls any ring that carries.
        let _ = carrier::begin(next.ring.memory(), sent);
        let capacity = capacity(next.ring.memory());
        rings.step(sent);
        socket.ring_bytes.store(capacity as u64, Ordering::Relaxed);
        // The receiver may sleep, and has armed the other ring.
        kernel::wake(socket, fd);
    }
}

/// The receiver goes on in the larger ring, if it has all that the smaller one carries. True if it does.
#[cold]
pub fn step_receiving(socket: &'static Socket, rings: &mut Rings<SocketReceiver>) -> Result<bool> {
    let (Some(now), Some(next)) = (rings.as_ref(), rings.next()) else { return Ok(false) };
    // What the next ring says then is meant for one that goes on from the kernel.
    if carrier::given_back(now.ring.memory()).is_some() {
        return Ok(false);
    }
    let received = now.ring.cursor().position;
    let is_due = receive::left(next, received)? == Some(0);
    if is_due {
        rings.step(received);
        // Who is about to sleep has armed the other ring.
        if socket.receiving.waiting.load(Ordering::Relaxed) > 0
            && let Some(receiver) = rings.as_mut()
        {
            receiver.ring.arm();
        }
    }
    Ok(is_due)
}
