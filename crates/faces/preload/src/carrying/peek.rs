//! Bytes that stay where they are: MSG_PEEK and FIONREAD.
//!
//! Several carriers may have bytes at the same time, because a sender changes from one to the next without waiting for the receiver:
//! the kernel and the ring that takes over from it, a ring and a larger one, or a ring and the kernel. A program may wait until it sees
//! more bytes than one of them has, so it is shown those of all. The kernel's socket may have wake bytes before the program's, which are
//! skipped there.

use crate::carrying::{counted, returning};
use crate::state::carrier::Carrier;
use crate::state::rings::Rings;
use crate::state::socket::Socket;
use crate::state::sockets::Using;
use crate::state::{stash, taken};
use crate::system::confined::is_confined;
use crate::system::kernel;
use crate::system::memory::can_write;
use ginnel::SocketReceiver;
use ginnel_layout::ring::HEADER;
use ginnel_ring::carrier;
use ginnel_ring::stream::Consumer;
use ginnel_shmem::{Mapping, SharedMemory};
use libc::c_int;
use smallvec::SmallVec;
use std::sync::atomic::Ordering;

/// Where bytes are shown.
struct Sink<'a, 'b> {
    /// The memory into which they are copied. Without it, they are only counted.
    into: Option<&'a mut [&'b mut [u8]]>,
    /// How many bytes have room there.
    most: usize,
    /// How many there have been.
    len: usize,
}

impl Sink<'_, '_> {
    /// Returns the memory for the next bytes, of which there are `len`, as far as there is room.
    fn room(&mut self, len: usize) -> Option<SmallVec<[&mut [u8]; 8]>> {
        let (mut before, mut left) = (self.len, len);
        let mut parts = SmallVec::new();
        for piece in self.into.as_deref_mut()? {
            let from = before.min(piece.len());
            let part = &mut piece[from..];
            let len = left.min(part.len());
            (before, left) = (before - from, left - len);
            if len > 0 {
                parts.push(&mut part[..len]);
            }
        }
        Some(parts)
    }

    /// Does the same for bytes that this library copies. If the memory is not there, nothing more is shown.
    fn checked_room(&mut self, len: usize) -> Option<SmallVec<[&mut [u8]; 8]>> {
        let is_there = |part: &mut &mut [u8]| can_write(part.as_mut_ptr(), part.len());
        if !self.room(len)?.iter_mut().all(is_there) {
            self.most = self.len;
            return None;
        }
        self.room(len)
    }

    fn is_full(&self) -> bool {
        self.len == self.most
    }

    /// Counts bytes of which there are `len`, as far as there is room.
    fn count(&mut self, len: usize) {
        self.len += len.min(self.most - self.len);
    }

    /// Shows what a ring has. Returns how many bytes that is.
    fn ring(&mut self, ring: &mut Consumer<Mapping>) -> usize {
        let Ok(available) = ring.poll_all() else { return 0 };
        let mut from = 0;
        for part in self.checked_room(available).into_iter().flatten() {
            copy(ring, from, part);
            from += part.len();
        }
        self.count(available);
        available
    }

    /// Shows what was received among wake bytes, behind `skipped` bytes. Returns how many of these are in the kernel.
    fn stash(&mut self, socket: &Socket, skipped: u64) -> u64 {
        let mut stash = [0; stash::MOST];
        let len = socket.receiving.stash().show(0, &mut stash);
        let first = usize::try_from(skipped).map_or(len, |skipped| skipped.min(len));
        let bytes = &stash[first..len];
        let mut rest = bytes;
        for part in self.checked_room(bytes.len()).into_iter().flatten() {
            let shown;
            (shown, rest) = rest.split_at(part.len());
            part.copy_from_slice(shown);
        }
        self.count(bytes.len());
        skipped - first as u64
    }

    /// Shows what the kernel has behind `skipped` bytes, at most so many bytes.
    fn kernel(&mut self, socket: &'static Socket, fd: c_int, skipped: u64, most: u64) {
        let Some(_using) = Using::begin(socket, fd) else { return };
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let shown = match (self.room(most), usize::try_from(skipped)) {
            (None, Ok(skipped)) => kernel::unread(fd).saturating_sub(skipped).min(most),
            (Some(mut room), Ok(skipped)) => kernel::peek_behind(fd, skipped, &mut room, false).unwrap_or(0),
            _ => 0,
        };
        self.count(shown);
    }
}

/// Copies bytes from the ring, behind the first `from`, and leaves them there. The ring has at least so many.
pub fn copy(ring: &Consumer<Mapping>, from: usize, into: &mut [u8]) {
    let memory = ring.memory();
    let capacity = memory.len() - HEADER;
    let start = (ring.cursor().position as usize + from) & (capacity - 1);
    let first = into.len().min(capacity - start);
    memory.read(HEADER + start, &mut into[..first]);
    memory.read(HEADER, &mut into[first..]);
}

/// Returns how many bytes have room in pieces of memory.
pub fn room(pieces: &[&mut [u8]]) -> usize {
    pieces.iter().fold(0, |room, piece| room.saturating_add(piece.len()))
}

/// Shows bytes that can be received without waiting, and leaves them where they are. Returns how many there are: of those that fit, or,
/// if there is no memory into which they are copied, of all. The caller holds the lock of the rings. A carrier other than the kernel
/// alone carries the direction.
pub fn show(
    socket: &'static Socket,
    fd: c_int,
    rings: &mut Rings<SocketReceiver>,
    into: Option<&mut [&mut [u8]]>,
) -> usize {
    let most = into.as_ref().map_or(usize::MAX, |into| room(into));
    let mut sink = Sink { into, most, len: 0 };
    let received = socket.receiving.kernels();
    match socket.receiving.carrier() {
        Carrier::Kernel | Carrier::Changing => {}
        Carrier::Counted => {
            let Some(receiver) = rings.as_mut() else { return 0 };
            let left = || counted::left(receiver, received).unwrap_or(Some(0));
            sink.kernel(socket, fd, 0, left().unwrap_or(u64::MAX));
            // As in a call that receives, the sender may have named the byte meanwhile, and bytes behind it are wake bytes.
            if let Some(left) = left().and_then(|left| usize::try_from(left).ok()) {
                sink.len = sink.len.min(left);
                if sink.len == left {
                    sink.ring(&mut receiver.ring);
                }
            }
        }
        Carrier::Ring => {
            let Some(receiver) = rings.as_mut() else { return 0 };
            let end = ring(socket, fd, &mut sink, receiver);
            // If the ring was given back, the next one takes over from the kernel.
            if carrier::given_back(receiver.ring.memory()).is_none()
                && let Some(next) = rings.next_mut()
                && counted::left(next, end) == Ok(Some(0))
            {
                ring(socket, fd, &mut sink, next);
            }
        }
        Carrier::Returning => behind_wakes(socket, fd, &mut sink, socket.resume.load(Ordering::Relaxed), 0),
    }
    sink.len
}

/// Shows what a ring has and, if the sender has left it for the kernel, what comes after it. Returns where the ring ends.
fn ring(socket: &'static Socket, fd: c_int, sink: &mut Sink<'_, '_>, receiver: &mut SocketReceiver) -> u64 {
    let available = sink.ring(&mut receiver.ring) as u64;
    let end = receiver.ring.cursor().position + available;
    if let Some(place) = carrier::given_back(receiver.ring.memory())
        && place.ring == end
        && !sink.is_full()
    {
        // The last bytes of the ring come once more. They are the same, and so are shown again at their place.
        let shown = sink.len;
        let again = place.repeated.min(available);
        sink.len = shown.saturating_sub(again as usize);
        behind_wakes(socket, fd, sink, place.kernel, place.repeated - again);
        sink.len = sink.len.max(shown);
    }
    end
}

/// Shows what the kernel carries behind the wake bytes, which end at this place, and behind further bytes.
fn behind_wakes(socket: &'static Socket, fd: c_int, sink: &mut Sink<'_, '_>, wakes_end: u64, skipped: u64) {
    let skipped = sink.stash(socket, skipped);
    // Another thread may have taken a wake byte and not counted it yet.
    if !is_confined() && !returning::is_taken(socket) && taken::is_counted_until(socket, fd, wakes_end) {
        let wakes = wakes_end.saturating_sub(socket.receiving.kernels());
        sink.kernel(socket, fd, wakes.saturating_add(skipped), u64::MAX);
    }
}
