//! Copies between pipes and connections that have changed over, for `splice` and `sendfile`.
//!
//! Nothing may be lost that was taken out of one side if the other side does not take it. So only as many bytes are taken out of a
//! pipe as the ring has room for, and only as many out of a ring as the pipe has taken. Both happen under the lock of the
//! direction, so that bytes keep their order if several threads do this at once. Neither waits under the lock.
//!
//! While the kernel carries a direction, the program's own call moves the bytes, and the library counts them.
#![allow(unsafe_code)] // System calls on descriptors of the program.

use crate::calls::send;
use crate::carrying::output::Stop;
use crate::carrying::{attend, input, output};
use crate::process::buffers::{Buffer, SMALL};
use crate::process::interrupted::interrupted;
use crate::process::{buffers, signals, thread};
use crate::served::giving_back;
use crate::state::known::Fact;
use crate::state::socket::Socket;
use crate::system::confined::is_confined;
use crate::system::errno::{Errno, Kept, Result, check};
use crate::system::real;
use crate::waiting::call::Call;
use crate::waiting::wait;
use libc::{c_int, iovec};
use std::sync::atomic::{AtomicBool, Ordering};

/// An end of a pipe.
#[derive(Clone, Copy)]
pub struct Pipe {
    fd: c_int,
    waits: bool,
}

/// False once the kernel has refused RWF_NOWAIT for a pipe. Linux has it for pipes since version 6.5.
static HAS_NOWAIT: AtomicBool = AtomicBool::new(true);

impl Pipe {
    /// Returns the end of a pipe to which a descriptor refers. Returns `None` if it is no pipe, or not that end.
    fn of(fd: c_int, end: c_int) -> Option<Self> {
        let _errno = Kept::new();
        let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
        // SAFETY: `status` has room for the answer.
        let is_known = unsafe { libc::fstat(fd, status.as_mut_ptr()) } == 0;
        // SAFETY: zeros are valid if the kernel has not answered.
        let is_pipe = is_known && unsafe { status.assume_init() }.st_mode & libc::S_IFMT == libc::S_IFIFO;
        if !is_pipe {
            return None;
        }
        // SAFETY: F_GETFL has no argument.
        let flags = unsafe { real::fcntl(fd, libc::F_GETFL, std::ptr::null_mut()) };
        let is_end = flags >= 0
            && flags & libc::O_PATH == 0
            && [end, libc::O_RDWR].contains(&(flags & libc::O_ACCMODE));
        is_end.then_some(Self { fd, waits: flags & libc::O_NONBLOCK == 0 })
    }

    /// Returns the end from which a program reads.
    pub fn reading(fd: c_int) -> Option<Self> {
        Self::of(fd, libc::O_RDONLY)
    }

    /// Returns the end to which a program writes.
    pub fn writing(fd: c_int) -> Option<Self> {
        Self::of(fd, libc::O_WRONLY)
    }

    /// Sets that a call does not wait for the pipe.
    pub fn without_waiting(self, never: bool) -> Self {
        Self { waits: self.waits && !never, ..self }
    }

    /// Waits for the pipe, if the call waits. Returns what the kernel reports, or EAGAIN.
    fn wait(self, events: i16) -> Result<i16> {
        let mut poll = libc::pollfd { fd: self.fd, events, revents: 0 };
        let handled = thread::handled();
        loop {
            // SAFETY: `poll` is one pollfd, and the count is 1.
            let ready = unsafe { real::poll(&raw mut poll, 1, if self.waits { -1 } else { 0 }) };
            match check(ready as isize) {
                Ok(0) => return Err(Errno(libc::EAGAIN)),
                Ok(_) if poll.revents & libc::POLLNVAL != 0 => return Err(Errno(libc::EBADF)),
                Ok(_) => return Ok(poll.revents),
                Err(Errno(libc::EINTR)) => interrupted(false, handled)?,
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Waits until the pipe has bytes. Returns false if it has none, and no writer.
    fn wait_for_bytes(self) -> Result<bool> {
        Ok(self.wait(libc::POLLIN)? & libc::POLLIN != 0)
    }

    /// Waits until the pipe has room. Fails with EPIPE if it has no reader.
    fn wait_for_room(self) -> Result<()> {
        if self.wait(libc::POLLOUT)? & libc::POLLERR != 0 {
            signals::raise_sigpipe();
            return Err(Errno(libc::EPIPE));
        }
        Ok(())
    }

    /// Reads what is there, without waiting. Returns 0 if nothing is there and the pipe has no writer.
    fn read(self, into: &mut [u8]) -> Result<usize> {
        if HAS_NOWAIT.load(Ordering::Relaxed) {
            let piece = iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
            // SAFETY: the vector is of `into`, which has room for that many bytes.
            let got = unsafe { real::preadv64v2(self.fd, &raw const piece, 1, -1, libc::RWF_NOWAIT) };
            match check(got) {
                Err(Errno(libc::EOPNOTSUPP)) => HAS_NOWAIT.store(false, Ordering::Relaxed),
                result => return result,
            }
        }
        // Between the two calls, another reader may take the bytes. Then this one waits for others.
        if !self.without_waiting(true).wait_for_bytes()? {
            return Ok(0);
        }
        // SAFETY: `into` has room for that many bytes.
        check(unsafe { real::read(self.fd, into.as_mut_ptr().cast(), into.len()) })
    }

    /// Writes as much as there is room for, without waiting.
    fn write(self, from: &[u8]) -> Result<usize> {
        if HAS_NOWAIT.load(Ordering::Relaxed) {
            let piece = iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
            // SAFETY: the vector is of `from`, which the call only reads.
            let put = unsafe { real::pwritev64v2(self.fd, &raw const piece, 1, -1, libc::RWF_NOWAIT) };
            match check(put) {
                Err(Errno(libc::EOPNOTSUPP)) => HAS_NOWAIT.store(false, Ordering::Relaxed),
                result => return result,
            }
        }
        // A pipe that is writable has room for so many bytes. Between the two calls, another writer may take it; then this one
        // waits for other room.
        self.without_waiting(true).wait_for_room()?;
        let from = &from[..from.len().min(libc::PIPE_BUF)];
        // SAFETY: `from` has that many bytes.
        check(unsafe { real::write(self.fd, from.as_ptr().cast(), from.len()) })
    }
}

/// Moves up to `len` bytes from a connection into a pipe. `native` is the kernel's call for it, by a descriptor of the connection,
/// and `pipe` finds the pipe.
pub fn into_pipe(
    socket: &'static Socket,
    fd: c_int,
    pipe: impl FnOnce() -> Result<Pipe>,
    len: usize,
    native: impl Fn(c_int) -> isize,
) -> Result<usize> {
    let through_kernel = |fd| {
        let moved = |got: &isize| usize::try_from(*got).unwrap_or(0);
        socket.receiving.through_kernel(|| native(fd), moved)
    };
    let is_given_back = giving_back::give_back(socket);
    socket.cache.leave();
    if !is_given_back {
        // This is the error for a descriptor that does not support `splice`. Programs then use `read` and `write`.
        return Err(Errno(libc::EINVAL));
    }
    attend::attend_or_wait(socket, fd);
    if let Some(got) = through_kernel(fd) {
        return check(got);
    }
    let pipe = pipe()?;
    crate::state::family::attend(socket);
    let waits = !socket.is_nonblocking(fd);
    let (mut moved, mut call) = (0, Call::receiving(socket, fd));
    let (mut buffer, mut small) = (Buffer::take(), [0; SMALL]);
    let buffer = buffers::of(&mut buffer, &mut small);
    while moved < len {
        // As in the kernel, the pipe comes first.
        if moved == 0 {
            pipe.wait_for_room()?;
        }
        let most = (len - moved).min(buffer.len());
        let mut is_full = false;
        let give = |bytes: &[u8]| {
            let put = pipe.write(bytes);
            is_full = put == Err(Errno(libc::EAGAIN));
            put
        };
        match input::some_to(socket, call.fd, &mut buffer[..most], waits, give) {
            // The kernel carries again.
            None if moved > 0 => break,
            None => {
                call.go_on()?;
                if let Some(got) = through_kernel(call.fd) {
                    return check(got);
                }
            }
            Some(Ok(0)) => break,
            Some(Ok(n)) => moved += n,
            Some(Err(_)) if moved > 0 => break,
            // The next round waits for room.
            Some(Err(Errno(libc::EAGAIN))) if is_full && pipe.waits => {}
            Some(Err(Errno(libc::EAGAIN))) if !is_full && socket.has(Fact::ShutDownReceiving) => break,
            Some(Err(Errno(libc::EAGAIN))) if !is_full && waits => wait::for_data(&mut call)?,
            Some(Err(errno)) => return Err(errno),
        }
    }
    Ok(moved)
}

/// Moves up to `len` bytes from a pipe into a connection. `native` is the kernel's call for it, by a descriptor of the connection,
/// and `pipe` finds the pipe.
pub fn out_of_pipe(
    socket: &'static Socket,
    fd: c_int,
    pipe: impl FnOnce() -> Result<Pipe>,
    len: usize,
    native: impl Fn(c_int) -> isize,
) -> Result<usize> {
    socket.cache.leave();
    if let Some(sent) = output::through_kernel(socket, fd, || native(fd)) {
        return check(sent);
    }
    let pipe = pipe()?;
    crate::state::family::attend(socket);
    let waits = !socket.is_nonblocking(fd);
    let (mut moved, mut call) = (0, Call::sending(socket, fd));
    let (mut buffer, mut small) = (Buffer::take(), [0; SMALL]);
    let buffer = buffers::of(&mut buffer, &mut small);
    while moved < len {
        // As in the kernel, the pipe comes first.
        if moved == 0 && !pipe.wait_for_bytes()? {
            break;
        }
        let most = (len - moved).min(buffer.len());
        let buffer = &mut buffer[..most];
        match output::some_from(socket, call.fd, buffer, |room| pipe.read(room)) {
            // The kernel carries again.
            None if moved > 0 => break,
            None => {
                call.go_on()?;
                if let Some(sent) = output::through_kernel(socket, call.fd, || native(call.fd)) {
                    return check(sent);
                }
            }
            // The pipe has no bytes and no writer.
            Some(Ok(0)) => break,
            Some(Ok(n)) => moved += n,
            Some(Err(_)) if moved > 0 => break,
            // Another reader has taken the bytes. The next round waits for others.
            Some(Err(Stop::Source(Errno(libc::EAGAIN)))) if pipe.waits => {}
            Some(Err(Stop::Source(errno))) => return Err(errno),
            Some(Err(Stop::Full)) => {
                send::wait_for_room(&mut call, waits, 0, false)
                    .map_err(|errno| socket.tell().unwrap_or(errno))?;
            }
            Some(Err(Stop::Ended(error))) => return Err(output::broken(socket, call.fd, error, 0)),
        }
    }
    Ok(moved)
}

/// Returns the error of a call that would move bytes of a connection which has changed over, if the program has confined itself
/// so that the library may not look at pipes.
pub fn may_copy() -> Result<()> {
    if is_confined() { Err(Errno(libc::EINVAL)) } else { Ok(()) }
}
