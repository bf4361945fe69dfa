//! What a call that receives would find, without receiving it.

use crate::carrying::{connection, counted, grow, lowat, peek, returning, room};
use crate::state::carrier::Carrier;
use crate::state::known::Fact;
use crate::state::rings::Rings;
use crate::state::socket::{End, Socket};
use crate::system::errno::Errno;
use crate::system::kernel;
use ginnel::{SocketReceiver, SocketSender};
use ginnel_ring::stream::Consumer;
use ginnel_ring::{RecvError, carrier};
use ginnel_shmem::Mapping;
use libc::c_int;
use std::sync::atomic::Ordering;

/// What a call that receives would find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing now.
    Nothing,
    /// Bytes, or an error.
    Something,
    /// The end of the stream: no more bytes.
    End,
}

/// Returns what a receiving call would find, unless the kernel alone carries this direction. `kernel` returns whether
/// the kernel's socket is readable; it is called only where that matters.
fn look(socket: &'static Socket, kernel: impl FnOnce() -> bool) -> Found {
    look_at(socket, &mut socket.receiving.lock(), kernel, 1)
}

/// Looks with the lock held. `least` is how many bytes are something.
fn look_at(
    socket: &'static Socket,
    rings: &mut Rings<SocketReceiver>,
    kernel: impl FnOnce() -> bool,
    least: usize,
) -> Found {
    let readable = |kernel: bool| if kernel { Found::Something } else { Found::Nothing };
    let fd = socket.fd.load(Ordering::Relaxed);
    // The receiving call reports the error.
    if socket.receiving.is_lost() {
        return Found::Something;
    }
    match socket.receiving.carrier() {
        Carrier::Kernel | Carrier::Changing => return readable(kernel()),
        Carrier::Counted => {
            let Some(receiver) = rings.as_ref() else { return Found::Something };
            match counted::left(receiver, socket.receiving.kernels()) {
                Ok(Some(0)) => {}
                Err(_) => return Found::Something,
                Ok(_) => return readable(kernel() && (least <= 1 || has_enough(socket, rings))),
            }
        }
        Carrier::Ring | Carrier::Returning => {}
    }
    if socket.receiving.carrier() != Carrier::Returning {
        let found = match poll(socket, rings) {
            Ok(_) if least > 1 && !has_enough(socket, rings) => return Found::Nothing,
            Ok(_) => return Found::Something,
            Err(RecvError::Empty) if socket.end() == End::None => Found::Nothing,
            Err(RecvError::PeerDead) if connection::may_end_still(socket, fd, rings) => Found::Nothing,
            Err(RecvError::Empty | RecvError::Finished | RecvError::PeerDead) => Found::End,
            Err(_) => return Found::Something,
        };
        match returning::begin_if_due(socket, fd, rings) {
            Ok(false) => return found,
            // The receiving call reports the error.
            Err(_) => return Found::Something,
            Ok(true) => {}
        }
    }
    if returning::settle(socket, fd, rings) {
        return readable(kernel());
    }
    readable(!socket.receiving.stash().is_empty() || socket.end() != End::None || socket.receiving.is_lost())
}

/// Does the same for a program that is to be told of input. Also returns whether the peer sends nothing more, although there may be bytes
/// before that end. Where the kernel carries, the caller asks the kernel for that.
pub fn look_ahead(socket: &'static Socket, kernel: impl FnOnce() -> bool) -> (Found, bool) {
    let mut rings = socket.receiving.lock();
    let found = look_at(socket, &mut rings, kernel, socket.lowat.bytes());
    (found, has_ended(socket, &rings))
}

/// Returns whether as much is there as the program wants to be told of.
#[cold]
fn has_enough(socket: &'static Socket, rings: &mut Rings<SocketReceiver>) -> bool {
    // The kernel has some of it, up to the byte that the sender has named.
    let (kernels, named) = match (socket.receiving.carrier(), rings.as_ref()) {
        (Carrier::Counted, Some(receiver)) => match counted::left(receiver, socket.receiving.kernels()) {
            Ok(left) => {
                (counted::within(kernel::unread(socket.fd.load(Ordering::Relaxed)), left), left.is_some())
            }
            Err(_) => return true,
        },
        _ => (0, true),
    };
    let there = if named { poll_all(socket, rings).unwrap_or(0) } else { 0 };
    lowat::is_reached(socket, rings, kernels, there)
}

/// Returns whether a ring carries and the peer sends nothing more than what is there.
pub fn is_ending(socket: &'static Socket, rings: &Rings<SocketReceiver>) -> bool {
    match socket.receiving.carrier() {
        Carrier::Ring => {
            socket.end() != End::None || last(rings).is_some_and(is_at_end) || ends_over_tcp(socket, rings)
        }
        Carrier::Returning => socket.end() != End::None || ends_over_tcp(socket, rings),
        Carrier::Kernel | Carrier::Changing | Carrier::Counted => false,
    }
}

/// Returns whether the peer has left the ring and then ended what it sends, which the kernel says.
fn ends_over_tcp(socket: &'static Socket, rings: &Rings<SocketReceiver>) -> bool {
    let fd = socket.fd.load(Ordering::Relaxed);
    rings.all().any(is_left) && kernel::poll_now(fd, libc::POLLRDHUP) & libc::POLLRDHUP != 0
}

/// Returns whether the sender has left this ring for the kernel.
fn is_left(receiver: &SocketReceiver) -> bool {
    carrier::given_back(receiver.ring.memory()).is_some()
}

/// Returns whether the peer has ended what it sends, although the kernel may still have some of that. Nobody is told when the kernel has no
/// more of it, because another thread may receive that.
fn has_ended(socket: &'static Socket, rings: &Rings<SocketReceiver>) -> bool {
    let is_named =
        |ring: &SocketReceiver| matches!(counted::left(ring, socket.receiving.kernels()), Ok(Some(_)));
    match (socket.receiving.carrier(), rings.as_ref()) {
        (Carrier::Counted, Some(ring)) => is_named(ring) && is_at_end(ring),
        _ => is_ending(socket, rings),
    }
}

/// Returns whether the peer has ended the stream in this ring. (A ring that the sender has left is marked as finished too, but is not the
/// end.)
fn is_at_end(receiver: &SocketReceiver) -> bool {
    receiver.ring.is_ending() && !is_left(receiver)
}

/// Returns the ring into which the peer sends now. It has named the byte at which the next ring begins before it left the one before, so
/// the end is there, although the program may not have received all of that ring.
fn last(rings: &Rings<SocketReceiver>) -> Option<&SocketReceiver> {
    let goes_on = |next: &&SocketReceiver| counted::left(next, 0) != Ok(None);
    rings.next().filter(goes_on).or(rings.as_ref())
}

/// Returns whether the peer has broken the connection: it has closed its end with bytes of ours unread, or has asked for it.
pub fn is_reset(socket: &'static Socket) -> bool {
    // Wake bytes that nobody has read make the kernel reset the connection too, where TCP would have ended it in order. So the kernel's
    // word counts only where it carries what this side sends, and there are no wake bytes behind that.
    let receiving = socket.receiving.carrier();
    match (receiving, socket.sending.carrier()) {
        (_, Carrier::Ring) => {}
        (Carrier::Ring | Carrier::Returning, Carrier::Kernel) => return socket.end() == End::Reset,
        _ => return false,
    }
    // A peer that has marked its end in the ring has not died.
    let has_finished = last(&socket.receiving.lock()).is_some_and(is_at_end);
    let ring = socket.sending.lock();
    // A process that has ended without a close has left bytes unread too. Where the kernel carries what the peer sends, its end does not
    // say that the peer's process has ended, but the daemon does.
    let is_gone = |sender: &SocketSender| match receiving {
        Carrier::Ring => matches!(socket.end(), End::Fin | End::Reset) && !has_finished,
        Carrier::Kernel | Carrier::Counted => sender.ring.is_dead(),
        Carrier::Changing | Carrier::Returning => false,
    };
    let has_left =
        |sender: &SocketSender| is_gone(sender) && !sender.ring.is_closed() && room::untaken(sender) > 0;
    ring.as_ref().is_some_and(|sender| sender.ring.is_aborted() || has_left(sender))
}

/// Returns the error that SO_ERROR gives the program, and records that the program is told now.
pub fn take_error(socket: &'static Socket) -> Errno {
    let is_told = || !socket.note(Fact::ToldReset);
    match socket.tell() {
        Some(errno) => errno,
        // The peer has broken the connection after it had ended it.
        None if socket.has(Fact::SentInVain) && !is_told() => Errno(libc::EPIPE),
        None if is_reset(socket) && !is_told() => Errno(libc::ECONNRESET),
        None => Errno(0),
    }
}

/// Polls the ring that carries now, and returns how many bytes it offers.
fn poll(socket: &'static Socket, rings: &mut Rings<SocketReceiver>) -> std::result::Result<usize, RecvError> {
    poll_by(socket, rings, Consumer::poll)
}

/// Returns how many bytes the ring that carries now has in total.
fn poll_all(
    socket: &'static Socket,
    rings: &mut Rings<SocketReceiver>,
) -> std::result::Result<usize, RecvError> {
    poll_by(socket, rings, Consumer::poll_all)
}

fn poll_by(
    socket: &'static Socket,
    rings: &mut Rings<SocketReceiver>,
    poll: impl Fn(&mut Consumer<Mapping>) -> std::result::Result<usize, RecvError>,
) -> std::result::Result<usize, RecvError> {
    loop {
        if rings.is_ahead() && grow::step_receiving(socket, rings).is_err() {
            // The receiving call reports the error.
            return Err(RecvError::Aborted);
        }
        let Some(receiver) = rings.as_mut() else { return Err(RecvError::Aborted) };
        if carrier::wants_more(receiver.ring.memory()) {
            socket.grow();
        }
        let found = poll(&mut receiver.ring);
        // A ring that the sender has left counts as finished too.
        let is_over = matches!(found, Err(RecvError::Finished | RecvError::PeerDead));
        if !(is_over && rings.is_ahead() && grow::step_receiving(socket, rings) == Ok(true)) {
            return found;
        }
    }
}

/// Returns whether the ring has something, has ended, or no longer carries.
pub fn is_ready(socket: &'static Socket) -> bool {
    match socket.receiving.carrier() {
        Carrier::Ring | Carrier::Returning => {
            let fd = socket.fd.load(Ordering::Relaxed);
            look(socket, || kernel::poll_now(fd, libc::POLLIN) != 0) != Found::Nothing
        }
        // A call that slept when the sender returned to the kernel goes on with the kernel.
        Carrier::Kernel if socket.receiving.has_returned() => {
            kernel::poll_now(socket.fd.load(Ordering::Relaxed), libc::POLLIN) != 0
        }
        _ => poll(socket, &mut socket.receiving.lock()) != Err(RecvError::Empty),
    }
}

/// How far a direction has come, as far as its rings say.
#[derive(Clone, Copy, PartialEq)]
pub struct Progress {
    /// The position up to which bytes have come.
    pub position: u64,
    /// Whether the peer sends nothing more.
    pub is_ending: bool,
    /// Whether the sender has left the ring for the kernel.
    pub is_left: bool,
}

/// Returns how far the receiving direction has come.
pub fn progress(socket: &'static Socket) -> Progress {
    let mut rings = socket.receiving.lock();
    let available = poll_all(socket, &mut rings);
    let behind = behind(&mut rings);
    let fd = socket.fd.load(Ordering::Relaxed);
    let (is_ending, before) = (has_ended(socket, &rings), rings.before());
    let Some(receiver) = rings.as_ref() else {
        return Progress { position: before, is_ending, is_left: false };
    };
    let position = before + receiver.ring.cursor().position;
    // The end is news too.
    let position = match available {
        Ok(n) => position + n as u64 + behind,
        Err(RecvError::Empty) => position,
        // Whoever asks lets the time pass in which a late end may come.
        Err(RecvError::PeerDead) if connection::may_end_still(socket, fd, &rings) => position,
        Err(_) => u64::MAX,
    };
    Progress { position, is_ending, is_left: is_left(receiver) || rings.next().is_some_and(is_left) }
}

/// Returns how many bytes a larger ring has, behind those of the ring that carries now.
fn behind(rings: &mut Rings<SocketReceiver>) -> u64 {
    let is_begun = |next: &&mut SocketReceiver| matches!(counted::left(next, 0), Ok(Some(_)));
    rings.next_mut().filter(is_begun).and_then(|next| next.ring.poll_all().ok()).unwrap_or(0) as u64
}

/// Returns whether the peer sends nothing more, as far as the rings say.
pub fn has_peer_finished(socket: &'static Socket) -> bool {
    has_ended(socket, &socket.receiving.lock())
}

/// Bytes that can be received without waiting; `None` if that is the kernel's to say.
pub fn available(socket: &'static Socket, fd: c_int) -> Option<usize> {
    let mut rings = socket.receiving.lock();
    match socket.receiving.carrier() {
        Carrier::Kernel | Carrier::Changing => return None,
        Carrier::Counted => {}
        // This also notices that the sender asks for a larger ring, or has left.
        Carrier::Ring | Carrier::Returning => {
            look_at(socket, &mut rings, || true, 1);
        }
    }
    match socket.receiving.carrier() {
        Carrier::Kernel => None,
        _ => Some(peek::show(socket, fd, &mut rings, None)),
    }
}
