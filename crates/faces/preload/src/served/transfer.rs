//! Follows what a served connection sends and receives.
//!
//! A call sends and receives under a lock, which it does not hold while it sleeps. A call sends into the kernel without waiting,
//! so the filter notes requests in the order in which they are sent, and before their answers can come. Only one receiving call
//! is in the kernel at a time, so the filter sees the server's bytes in their order.

use crate::cache::filter::Filter;
use crate::cache::serve::Server;
use crate::cache::{State, filter, find, hits};
use crate::carrying::output::UNUSUAL;
use crate::process::signals;
use crate::served::{Asleep, Pieces, Rooms, TOGETHER, begin};
use crate::state::socket::Socket;
use crate::state::sockets::Using;
use crate::system::confined::is_confined;
use crate::system::errno::{Errno, Kept, Result, check, tell};
use crate::system::{kernel, real};
use crate::waiting::call::Call;
use crate::waiting::wait;
use ginnel_cache_protocol::follow::Lost;
use libc::{c_int, c_short};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;

/// The filter of a socket, on which the calling thread works.
struct Entered {
    socket: &'static Socket,
    filter: filter::Entered,
}

impl Deref for Entered {
    type Target = filter::Entered;
    #[inline]
    fn deref(&self) -> &filter::Entered {
        &self.filter
    }
}

impl DerefMut for Entered {
    #[inline]
    fn deref_mut(&mut self) -> &mut filter::Entered {
        &mut self.filter
    }
}

#[inline]
fn enter(socket: &'static Socket) -> Option<Entered> {
    Some(Entered { socket, filter: socket.cache.enter()? })
}

impl Entered {
    /// Answers requests at the beginning of these bytes, until one that the server must answer. Returns the length of the
    /// answered requests.
    #[inline]
    fn answer(&mut self, fd: c_int, bytes: &[u8]) -> usize {
        let socket = self.socket;
        let idle = self.requests.is_between() && self.answers.is_idle();
        if bytes.is_empty() || !idle || socket.cache.asleep.load(Ordering::Relaxed) != 0 {
            return 0;
        }
        // Nothing is to come from the server. If something has come, the connection has ended.
        if socket.cache.is_look_due() && kernel::poll_now(fd, ENDS) != 0 {
            self.leave();
            return 0;
        }
        let (queued, quiet_before) = (self.queue.len(), self.was_quiet);
        let protocol = self.requests.protocol(bytes[0]);
        if protocol != self.protocol {
            return 0;
        }
        let cache = self.cache;
        let (mut done, mut count, mut is_due) = (0, 0, false);
        let mut was_quiet = quiet_before;
        let wants_hits = cache.reader.wants_hits();
        while done < bytes.len() {
            let (out, most) = self.queue.append();
            let mut server = Server { reader: &cache.reader, out, most };
            let hit = |hash| is_due |= wants_hits && cache.hits.note(hash);
            let Some(answered) = server.answer(protocol, &bytes[done..], was_quiet, hit) else { break };
            done += answered.len;
            count += 1;
            was_quiet = answered.is_quiet;
        }
        if done == 0 {
            return 0;
        }
        let added = self.queue.len() - queued;
        if added > 0 && !socket.watchers.is_empty() {
            self.tell_queued();
            if !socket.watchers.offer(socket) {
                self.queue.undo(added);
                self.tell_queued();
                return 0;
            }
        }
        self.was_quiet = was_quiet;
        self.tell_queued();
        socket.cache.answered.fetch_add(count, Ordering::Relaxed);
        if is_due {
            self.tell_hits(fd, cache);
        }
        done
    }

    /// Tells the server which items were found.
    #[cold]
    fn tell_hits(&mut self, fd: c_int, cache: &'static find::Cache) {
        let _errno = Kept::new();
        // If the server has not taken earlier bytes, it is told later. The kernel might take a part of the line only, and after
        // that this connection could send nothing more.
        if kernel::unacknowledged(fd) > hits::LINE {
            return;
        }
        let Some((line, len)) = cache.hits.take(self.protocol) else { return };
        let line = &line[..len];
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let sent = transport(self.socket, fd, || kernel::send(fd, line, flags));
        let sent = usize::try_from(sent.unwrap_or(-1)).unwrap_or(len);
        if sent < len {
            let rest = kernel::send_some(fd, &line[sent..], true);
            self.socket.sending.count_others(rest as u64);
            if sent + rest < len {
                // The server would take the program's next bytes for the rest of the line.
                kernel::send_no_more(fd);
            }
        }
    }

    /// Sends the bytes behind the first `done` ones to the server, without waiting. Returns `None` if the kernel no longer
    /// carries what the connection sends.
    fn pass(&mut self, fd: c_int, flags: c_int, pieces: &Pieces<'_>, done: usize) -> Option<Result<usize>> {
        let socket = self.socket;
        let flags = flags | libc::MSG_DONTWAIT;
        let mut skip = done;
        let mut rest = Pieces::new();
        for piece in pieces {
            let skipped = skip.min(piece.len());
            skip -= skipped;
            if skipped < piece.len() {
                rest.push(&piece[skipped..]);
            }
        }
        let Some(_using) = Using::begin(socket, fd) else { return Some(Err(Errno(libc::EBADF))) };
        let send = || match &rest[..] {
            [one] => kernel::send(fd, one, flags),
            some => send_pieces(fd, some, flags),
        };
        let moved = |sent: &isize| usize::try_from(*sent).unwrap_or(0);
        let sent = check(socket.sending.through_kernel(send, moved)?);
        if let Ok(mut left) = sent {
            self.was_quiet = false;
            for piece in rest {
                let n = left.min(piece.len());
                left -= n;
                if self.note_passed(&piece[..n]).is_err() {
                    self.leave();
                    break;
                }
            }
        }
        Some(sent)
    }

    /// Notes that these bytes have gone to the server.
    fn note_passed(&mut self, bytes: &[u8]) -> std::result::Result<(), Lost> {
        let mut gets = 0;
        let Filter { requests, answers, .. } = &mut ***self;
        let noted = requests.pass(bytes, |passed| {
            gets += u64::from(passed.is_get);
            answers.expect(passed.awaited)
        });
        if gets > 0 {
            self.socket.cache.passed.fetch_add(gets, Ordering::Relaxed);
        }
        noted
    }

    /// Notes the next `n` bytes from the server, which are in these pieces.
    fn note_received<'p>(&mut self, mut n: usize, pieces: impl Iterator<Item = &'p [u8]>) {
        for piece in pieces {
            let some = n.min(piece.len());
            n -= some;
            if self.answers.look(&piece[..some]).is_err() {
                return self.leave();
            }
        }
    }
}

/// Makes a call that sends bytes of this library, and that does not sleep. Returns `None` if the descriptor no longer is this
/// socket, or if the kernel no longer carries what it sends.
fn transport(socket: &'static Socket, fd: c_int, call: impl FnOnce() -> isize) -> Option<isize> {
    let _using = Using::begin(socket, fd)?;
    let send = || {
        let sent = call();
        socket.sending.count_others(u64::try_from(sent).unwrap_or(0));
        sent
    };
    socket.sending.through_kernel(send, |_| 0)
}

/// The events that show the end of a connection on which nothing is to come from the server.
const ENDS: c_short = libc::POLLIN | libc::POLLRDHUP;

#[expect(unsafe_code, reason = "a call of the kernel")]
fn send_pieces(fd: c_int, pieces: &[&[u8]], flags: c_int) -> isize {
    let mut vectors: smallvec::SmallVec<[libc::iovec; 8]> = pieces
        .iter()
        .take(libc::UIO_MAXIOV as usize)
        .map(|piece| libc::iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() })
        .collect();
    // SAFETY: all zeros are a valid `msghdr`, an empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (vectors.as_mut_ptr(), vectors.len());
    // SAFETY: the message has `msg_iovlen` pieces, all of them live, and the kernel only reads them.
    unsafe { real::sendmsg(fd, &raw const message, flags) }
}

/// Sends on a socket that concerns caches. Returns `None` if the caller must send as on any other socket.
pub fn send(socket: &'static Socket, fd: c_int, flags: c_int, pieces: &Pieces<'_>) -> Option<isize> {
    if pieces.is_empty() {
        return None;
    }
    loop {
        match socket.cache.state() {
            State::Fresh if flags & UNUSUAL == 0 => {
                begin::begin(socket, fd, pieces);
                if socket.cache.state() == State::Fresh {
                    return send_while_connecting(socket, fd, flags, pieces);
                }
            }
            State::Fresh => socket.cache.set(State::None),
            State::Asking => wait_for_answer(socket),
            State::Served => return send_served(socket, fd, flags, pieces).map(tell),
            State::None | State::Left => return None,
        }
    }
}

/// Sends on a socket that is still being connected.
#[cold]
fn send_while_connecting(
    socket: &'static Socket,
    fd: c_int,
    flags: c_int,
    pieces: &Pieces<'_>,
) -> Option<isize> {
    if flags & libc::MSG_DONTWAIT != 0 || socket.is_nonblocking(fd) {
        let send = || send_pieces(fd, pieces, flags | libc::MSG_DONTWAIT);
        let sent = socket.sending.through_kernel(send, |sent| usize::try_from(*sent).unwrap_or(0))?;
        if sent < 0 {
            return Some(sent);
        }
        socket.cache.change(State::Fresh, State::None);
        return Some(sent);
    }
    // The call waits in the kernel until the connection is there, and sends the first request.
    socket.cache.change(State::Fresh, State::None);
    None
}

/// Waits until another thread has asked the server.
#[cold]
fn wait_for_answer(socket: &'static Socket) {
    let _errno = Kept::new();
    while socket.cache.state() == State::Asking {
        let _ = signals::sleep(1);
    }
}

fn send_served(
    socket: &'static Socket,
    fd: c_int,
    flags: c_int,
    pieces: &Pieces<'_>,
) -> Option<Result<usize>> {
    let mut filter = enter(socket)?;
    if flags & UNUSUAL != 0 || is_confined() {
        filter.leave();
        return None;
    }
    let total = pieces.iter().map(|piece| piece.len()).sum::<usize>();
    let mut done = match &pieces[..] {
        [one] => filter.answer(fd, one),
        some if total <= TOGETHER => {
            let (mut bytes, mut len) = ([0; TOGETHER], 0);
            for piece in some {
                bytes[len..len + piece.len()].copy_from_slice(piece);
                len += piece.len();
            }
            filter.answer(fd, &bytes[..len])
        }
        _ => 0,
    };
    if done == total {
        return Some(Ok(total));
    }
    let waits = flags & libc::MSG_DONTWAIT == 0 && !socket.is_nonblocking(fd);
    let mut call = Call::sending(socket, fd);
    loop {
        // A call that has sent some bytes returns their number, and the program's next call sends the rest.
        let stopped = |errno| Some(if done > 0 { Ok(done) } else { Err(errno) });
        if socket.cache.state() != State::Served {
            return if done > 0 { Some(Ok(done)) } else { None };
        }
        let errno = match filter.pass(call.fd, flags, pieces, done) {
            Some(Ok(sent)) => {
                done += sent;
                if done >= total || !waits {
                    return Some(Ok(done));
                }
                continue;
            }
            Some(Err(errno)) => errno,
            None => {
                filter.leave();
                return if done > 0 { Some(Ok(done)) } else { None };
            }
        };
        if errno != Errno(libc::EAGAIN) || !waits {
            return stopped(errno);
        }
        drop(filter);
        if let Err(errno) = wait::for_kernel(&mut call) {
            return stopped(errno);
        }
        filter = match enter(socket) {
            Some(filter) => filter,
            None => return if done > 0 { Some(Ok(done)) } else { None },
        };
    }
}

/// Marks that a thread is in the kernel to receive.
struct Receiving {
    socket: &'static Socket,
    _asleep: Asleep,
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if let Some(mut filter) = enter(self.socket) {
            filter.is_receiving = false;
        }
    }
}

/// Flags with which a call does not receive the next bytes of the stream.
const OTHER: c_int = libc::MSG_ERRQUEUE | libc::MSG_OOB;

/// Receives on a socket that concerns caches. Returns `native`, the call of the kernel, as the error if the caller must receive
/// as on any other socket.
pub fn receive<N: FnOnce() -> isize>(
    socket: &'static Socket,
    fd: c_int,
    flags: c_int,
    pieces: &mut Rooms<'_>,
    native: N,
) -> std::result::Result<isize, N> {
    if flags & OTHER != 0 {
        return Err(native);
    }
    let room = pieces.iter().map(|piece| piece.len()).sum::<usize>();
    let peeks = flags & libc::MSG_PEEK != 0;
    loop {
        match socket.cache.state() {
            State::None => return Err(native),
            State::Asking => wait_for_answer(socket),
            State::Fresh => {
                let _asleep = Asleep::anyway(socket);
                // A thread that asks the server may not have seen that this thread sleeps.
                if !socket.cache.is_fresh() {
                    continue;
                }
                let got = through_kernel(socket, native, peeks)?;
                // A server that sends first is not a `ginnel-cache`.
                if got > 0 {
                    socket.cache.change(State::Fresh, State::None);
                }
                return Ok(got);
            }
            State::Served | State::Left => break,
        }
    }
    if room == 0 {
        return Err(native);
    }
    if socket.cache.has_answers() {
        let got = take(socket, flags, pieces);
        let is_enough = got == room || flags & libc::MSG_WAITALL == 0 || peeks;
        if got > 0 && is_enough {
            return Ok(got as isize);
        }
        if got > 0 {
            return Ok(receive_rest(socket, fd, flags, pieces, got) as isize);
        }
    }
    if socket.cache.change(State::Left, State::None) {
        return Err(native);
    }
    if peeks {
        let Some(_asleep) = Asleep::begin(socket) else { return receive(socket, fd, flags, pieces, native) };
        return through_kernel(socket, native, true);
    }
    let receiving = match begin_receiving(socket) {
        Ok(receiving) => receiving,
        // An answer has been queued, or the connection is not served any more.
        Err(()) => return receive(socket, fd, flags, pieces, native),
    };
    let got = match through_kernel(socket, native, false) {
        Ok(got) => got,
        Err(native) => {
            drop(receiving);
            socket.cache.leave();
            return Err(native);
        }
    };
    if got >= 0 {
        let _errno = Kept::new();
        if let Some(mut filter) = enter(socket) {
            match usize::try_from(got) {
                // The connection has ended.
                Ok(0) => filter.leave(),
                // The kernel has dropped the bytes, so the library has not seen them.
                Ok(_) if flags & libc::MSG_TRUNC != 0 => filter.leave(),
                Ok(n) => filter.note_received(n, pieces.iter().map(|piece| &**piece)),
                Err(_) => {}
            }
        }
    }
    drop(receiving);
    Ok(got)
}

/// Receives by this call if the kernel carries what comes. Otherwise returns the call as the error.
fn through_kernel<N: FnOnce() -> isize>(
    socket: &'static Socket,
    native: N,
    peeks: bool,
) -> std::result::Result<isize, N> {
    let mut native = Some(native);
    let call = || native.take().map_or(-1, |native| native());
    let moved = |got: &isize| if peeks { 0 } else { usize::try_from(*got).unwrap_or(0) };
    let got = socket.receiving.through_kernel(call, moved);
    match (got, native) {
        (Some(got), _) => Ok(got),
        (None, Some(native)) => Err(native),
        (None, None) => Ok(-1),
    }
}

/// Marks the calling thread as receiving. Fails if an answer is queued or the connection is not served any more.
fn begin_receiving(socket: &'static Socket) -> std::result::Result<Receiving, ()> {
    let mut filter = enter(socket).ok_or(())?;
    if socket.cache.has_answers() || socket.cache.state() != State::Served {
        return Err(());
    }
    if filter.is_receiving {
        // Two threads that receive at once could look at the bytes in the wrong order.
        filter.leave();
        return Err(());
    }
    filter.is_receiving = true;
    Ok(Receiving { socket, _asleep: Asleep::anyway(socket) })
}

/// Takes queued answers, or looks at them if the flags have `MSG_PEEK`. Returns the number of bytes.
fn take(socket: &'static Socket, flags: c_int, pieces: &mut Rooms<'_>) -> usize {
    let Some(mut filter) = enter(socket) else { return 0 };
    let peeks = flags & libc::MSG_PEEK != 0;
    let mut got = 0;
    if peeks {
        // A call that only looks need not fill more than the first piece.
        if let Some(piece) = pieces.iter_mut().find(|piece| !piece.is_empty()) {
            got = match flags & libc::MSG_TRUNC {
                0 => filter.queue.look(piece),
                _ => piece.len().min(filter.queue.len()),
            };
        }
        return got;
    }
    for piece in pieces.iter_mut() {
        let n = match flags & libc::MSG_TRUNC {
            0 => filter.queue.look(piece),
            _ => piece.len().min(filter.queue.len()),
        };
        filter.queue.drop_first(n);
        got += n;
    }
    filter.tell_queued();
    if filter.queue.len() == 0 {
        socket.cache.change(State::Left, State::None);
    }
    got
}

/// Receives the rest from the server for a call that waits for all of its bytes, and that has got some of them. Returns the
/// number of all bytes of the call.
#[cold]
fn receive_rest(
    socket: &'static Socket,
    fd: c_int,
    flags: c_int,
    pieces: &mut Rooms<'_>,
    got: usize,
) -> usize {
    let (mut all, mut skip) = (got, got);
    for piece in pieces.iter_mut() {
        let skipped = skip.min(piece.len());
        skip -= skipped;
        let rest = &mut piece[skipped..];
        if rest.is_empty() {
            continue;
        }
        let len = rest.len();
        let mut one = Rooms::new();
        one.push(rest);
        let at: *mut u8 = one[0].as_mut_ptr();
        let native = || {
            #[expect(unsafe_code, reason = "the very piece, which nobody looks at during the call")]
            // SAFETY: `at` points to `len` bytes of the program's memory, and no other code uses them during the call.
            let rest = unsafe { std::slice::from_raw_parts_mut(at, len) };
            kernel::receive(fd, rest, flags)
        };
        let more = receive(socket, fd, flags, &mut one, native).unwrap_or_else(|native| native());
        match usize::try_from(more) {
            Ok(n) if n > 0 => all += n,
            _ => break,
        }
        if more as usize != len {
            break;
        }
    }
    all
}

/// Receives for a further part of a call that has received something. Takes only what is queued. Returns `None` if the caller
/// must receive as on any other socket.
pub fn receive_further(socket: &'static Socket, flags: c_int, pieces: &mut Rooms<'_>) -> Option<isize> {
    match socket.cache.state() {
        State::Served | State::Left => match take(socket, flags, pieces) {
            0 => Some(tell(Err(Errno(libc::EAGAIN)))),
            got => Some(got as isize),
        },
        _ => None,
    }
}

/// Returns whether a sending call would not wait, and nothing is to come from the server.
pub fn is_idle(socket: &'static Socket) -> bool {
    socket.cache.state() == State::Served
        && enter(socket).is_some_and(|filter| filter.requests.is_between() && filter.answers.is_idle())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::descriptors;
    use crate::state::socket;
    use ginnel_cache_protocol::Protocol;
    use ginnel_cache_store::reader::Reader;
    use ginnel_cache_store::store::Store;
    use ginnel_layout::cache::Shape;
    use ginnel_shmem::Mapping;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    #[test]
    fn a_server_that_takes_nothing_is_not_told_of_hits() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        let fd = stream.as_raw_fd();
        let socket = descriptors::add_socket(fd);
        socket.set_stage(socket::Stage::Stays);
        let shape = Shape::new(8, 64 << 10, 256, usize::MAX).unwrap();
        let memory = Mapping::anonymous(shape.len()).unwrap();
        let _store = Store::create(memory.clone(), shape, [1, 2], 0).unwrap();
        let cache = find::Cache::of(Reader::new(memory).unwrap());
        *socket.cache.filter.lock() = Some(Box::new(Filter::new(cache, Protocol::Text)));
        for (fd, option) in [(fd, libc::SO_SNDBUF), (peer.as_raw_fd(), libc::SO_RCVBUF)] {
            let size: c_int = 20_000;
            #[expect(unsafe_code, reason = "an option of a socket")]
            // SAFETY: the kernel reads an `int` of four bytes, which lives during the call.
            let set = unsafe { real::setsockopt(fd, libc::SOL_SOCKET, option, (&raw const size).cast(), 4) };
            assert_eq!(set, 0);
        }
        let mut filter = enter(socket).unwrap();
        for turn in 0..100 {
            for key in 1..=256 {
                cache.hits.note((turn * 256 + key) << 20);
            }
            filter.tell_hits(fd, cache);
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let sent = check(kernel::send(fd, b"get a\r\n", libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL));
        assert_ne!(sent, Err(Errno(libc::EPIPE)), "the program's connection goes on");
        drop(filter);
        descriptors::forget(fd);
        drop(peer);
    }
}
