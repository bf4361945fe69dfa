//! The change to larger rings.
//!
//! A connection begins with small rings, so that a connection which is mostly idle takes little of its segment. Once a sender has
//! found its ring full twice, both ends ask the daemon for a second channel with larger rings, and carry on in the meantime. The
//! second channel's name follows from the name of the first. Then each direction leaves its ring for the larger one as it has left
//! the kernel ([`ginnel_ring::carrier`]):
//!
//! | sender | receiver |
//! |---|---|
//! | finds its ring full twice: sets WANTED in it, wakes the receiver, and asks for larger rings | sees WANTED when it receives or waits: asks too |
//! | gets the larger ring | gets the larger ring: sets READY there, and looks at BASE there from now on |
//! | sees READY: sets BASE to the number of bytes that the smaller ring has carried, sends into the larger ring, and wakes the receiver | takes the smaller ring's bytes up to BASE, then the larger ring's |
//! | gives the smaller ring up | gives the smaller ring up |
//!
//! Meanwhile the sender may wait for room, and the receiver for another event of the same socket. If the receiver received only
//! after the sender has sent more, neither would ever go on. So a thread that waits looks every millisecond until the larger rings
//! are there.
//!
//! What can go wrong:
//!
//! | | |
//! |---|---|
//! | the segment is full, or the daemon is gone | the end that learns this keeps its rings; the other end gives up after a while, and keeps its rings too |
//! | the peer does not ask | the same |
//! | a side dies or closes | as without larger rings; bytes that it has sent before are received from both rings |
//! | the sender finishes before it has begun the larger ring | the smaller ring is the last |
//! | BASE lies before what was received | ECONNRESET |
//! | BASE lies beyond what the smaller ring gets | the receiver waits, as with TCP |
//! | WANTED is set without need | the connection gets a larger ring |
//! | the sender returns to the kernel (`returning`) | the larger ring takes over from the kernel |
//! | a fork | there are no new rings as long as several processes have the socket (`family`) |

use crate::carrying::{connection, counted};
use crate::daemon::larger;
use crate::daemon::larger::LARGEST;
use crate::process::section::Section;
use crate::state::carrier::Carrier;
use crate::state::family;
use crate::state::rings::Rings;
use crate::state::socket::{Growth, Socket};
use crate::system::errno::{Kept, Result};
use ginnel::{SocketReceiver, SocketSender};
use ginnel_ring::carrier;
use ginnel_ring::carrier::Earlier;
use ginnel_ring::wait::Waitable;
use libc::c_int;
use std::sync::atomic::Ordering;

/// How often a ring has to be full before larger rings are asked for.
const FULLS: u32 = 2;

/// Notes that a ring had no room.
#[cold]
pub fn note_full(socket: &'static Socket, fd: c_int, sender: &SocketSender) {
    let fulls = socket.fulls.fetch_add(1, Ordering::Relaxed) + 1;
    let memory = sender.ring.memory();
    if fulls >= FULLS && socket.growth() == Growth::None && larger::capacity(memory) < LARGEST {
        carrier::want_more(memory);
        socket.grow();
        connection::wake(socket, fd);
    }
}

/// Advances a socket whose calls wait. Returns true if the caller may have to do so again, because the rings are about to become
/// larger.
#[inline]
pub fn attend_waiting(socket: &'static Socket) -> bool {
    let is_growing = || matches!(socket.growth(), Growth::Wanted | Growth::Asked | Growth::Begun);
    is_growing() && larger::may_begin(socket) && {
        let _errno = Kept::new();
        let fd = socket.fd.load(Ordering::Relaxed);
        crate::daemon::session::attend(socket, fd);
        attend(socket, fd);
        is_growing()
    }
}

/// Returns whether a ring is to take over.
fn is_ahead<R>(rings: &Rings<R>, carrier: Carrier) -> bool {
    rings.is_ahead() || carrier != Carrier::Ring && rings.as_ref().is_some()
}

/// Advances a socket whose rings carry both directions. Called at the beginning of each call.
pub fn attend(socket: &'static Socket, fd: c_int) {
    if socket.growth() == Growth::Begun && !family::is_shared(socket) {
        // Rings that were left are dropped behind the locks.
        let _section = Section::begin();
        let mut sending = socket.sending.lock();
        step_sending(socket, fd, &mut sending);
        let (left_sender, sending_is_ahead) =
            (sending.take_left(), is_ahead(&sending, socket.sending.carrier()));
        drop(sending);
        let mut receiving = socket.receiving.lock();
        // If the peer violates the protocol, the call that receives reports it.
        let _ = step_receiving(socket, &mut receiving);
        let (left_receiver, receiving_is_ahead) =
            (receiving.take_left(), is_ahead(&receiving, socket.receiving.carrier()));
        drop(receiving);
        drop((left_sender, left_receiver));
        if !sending_is_ahead && !receiving_is_ahead {
            socket.fulls.store(0, Ordering::Relaxed);
            socket.set_growth(Growth::None);
            crate::daemon::report::changed(socket);
        }
    }
    if !matches!(socket.growth(), Growth::Wanted | Growth::Asked | Growth::Begun) {
        socket.leave_grown();
    }
}

/// Makes the sender continue in the larger ring, if the receiver counts.
#[cold]
pub fn step_sending(socket: &'static Socket, fd: c_int, rings: &mut Rings<SocketSender>) {
    // There is nothing to send behind the end of a stream, which a relative may have marked, or to a peer that takes no more: a wake byte
    // would break the connection.
    if rings.as_ref().is_some_and(|now| now.ring.is_finished() || now.ring.is_closed()) {
        drop(rings.stay());
    }
    if let (Some(now), Some(next)) = (rings.as_ref(), rings.next())
        && carrier::is_counted(next.ring.memory(), Earlier::Ring)
        && !carrier::is_recalled(now.ring.memory())
    {
        let sent = now.ring.cursor().position;
        // If the peer recalls this ring meanwhile, this side sees that later, as with any ring that carries.
        let _ = carrier::begin(next.ring.memory(), sent);
        let capacity = larger::capacity(next.ring.memory());
        rings.step(sent);
        socket.ring_bytes.store(capacity as u64, Ordering::Relaxed);
        // The receiver may sleep, and it has armed the smaller ring only.
        connection::wake(socket, fd);
    }
}

/// Makes the receiver continue in the larger ring, if it has received everything that the smaller one carries. Returns true if it
/// does.
#[cold]
pub fn step_receiving(socket: &'static Socket, rings: &mut Rings<SocketReceiver>) -> Result<bool> {
    let (Some(now), Some(next)) = (rings.as_ref(), rings.next()) else { return Ok(false) };
    // Asked first, because a sender that leaves the ring ends it after that.
    let is_last = now.ring.is_ending();
    // If the ring was given back, the next ring's words are meant for a receiver that continues from the kernel.
    if carrier::given_back(now.ring.memory()).is_some() {
        return Ok(false);
    }
    let received = now.ring.cursor().position;
    let left = counted::left(next, received)?;
    // The sender has begun in the next ring before it ends this one, or never begins there.
    if is_last && left.is_none() {
        drop(rings.stay());
    }
    let is_due = left == Some(0);
    if is_due {
        rings.step(received);
        // A thread that is about to sleep has armed the smaller ring only.
        if socket.receiving.waiting.load(Ordering::Relaxed) > 0
            && let Some(receiver) = rings.as_mut()
        {
            receiver.ring.arm();
        }
    }
    Ok(is_due)
}
