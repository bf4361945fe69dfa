//! `splice` and `sendfile`.

use crate::calls::splice::Pipe;
use crate::calls::{send, splice};
use crate::carrying::output;
use crate::exports::io::connection;
use crate::process::buffers;
use crate::process::buffers::{Buffer, SMALL};
use crate::state::socket::Socket;
use crate::system::errno::{Errno, Result, check, tell};
use crate::system::memory::{can_write, is_there};
use crate::system::real;
use libc::{c_int, c_uint, off_t, off64_t, size_t, ssize_t};

/// The flags that the kernel knows.
const FLAGS: c_uint =
    libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_offset: *mut off64_t,
    to: c_int,
    to_offset: *mut off64_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    // SAFETY: the program obeys the rules of the function: each offset is null, or the program passes a valid one.
    let native = |from, to| unsafe { real::splice(from, from_offset, to, to_offset, len, flags) };
    // The kernel does nothing for a length of zero, and refuses flags that it does not know.
    if len == 0 || flags & !FLAGS != 0 {
        return native(from, to);
    }
    // Returns the pipe at the other end, or the kernel's error for a call that moves nothing.
    let pipe = |pipe: Option<Pipe>, pipe_offset: *mut off64_t, socket_offset: *mut off64_t| {
        let Some(pipe) = pipe else { return Err(refusal(native(from, to))) };
        match (pipe_offset.is_null(), socket_offset.is_null()) {
            (false, _) => Err(Errno(libc::ESPIPE)),
            (true, false) => Err(Errno(libc::EINVAL)),
            (true, true) => Ok(pipe.without_waiting(flags & libc::SPLICE_F_NONBLOCK != 0)),
        }
    };
    if let Some(call) = connection(from) {
        let pipe = || {
            splice::may_copy()?;
            pipe(Pipe::writing(to), to_offset, from_offset)
        };
        return tell(splice::into_pipe(call.what(), from, pipe, len, |from| native(from, to)));
    }
    if let Some(call) = connection(to) {
        let pipe = || {
            splice::may_copy()?;
            pipe(Pipe::reading(from), from_offset, to_offset)
        };
        return tell(splice::out_of_pipe(call.what(), to, pipe, len, |to| native(from, to)));
    }
    native(from, to)
}

/// Returns the error of a call that the kernel refuses.
fn refusal(result: ssize_t) -> Errno {
    check(result).err().unwrap_or(Errno(libc::EINVAL))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendfile(
    out: c_int,
    from: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: the program obeys the rules of the function. Where an offset has 64 bits, the two functions are the same.
    unsafe { sendfile64(out, from, offset, count) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendfile64(
    out: c_int,
    from: c_int,
    offset: *mut off64_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: the program obeys the rules of the function.
    let native = |out, from| unsafe { real::sendfile64(out, from, offset, count) };
    if let Some(call) = connection(out) {
        let socket = call.what();
        socket.cache.leave();
        if let Some(sent) = output::through_kernel(socket, out, || native(out, from)) {
            return sent;
        }
        if !offset.is_null() && !is_there(offset) {
            return tell(Err(Errno(libc::EFAULT)));
        }
        // SAFETY: the pointer is null, or the program passes a valid one.
        let mut position = unsafe { offset.as_ref() }.copied();
        let sent = copy_file(socket, out, from, &mut position, count);
        if let Some(position) = position
            && can_write(offset, size_of::<off64_t>())
        {
            // SAFETY: there is a position, so the pointer is not null, and it can be written, as just checked.
            unsafe { *offset = position };
        }
        return tell(sent);
    }
    // The kernel moves bytes of a socket only to a pipe.
    if let Some(call) = connection(from).filter(|_| offset.is_null() && count > 0) {
        let pipe = || {
            splice::may_copy()?;
            Pipe::writing(out).ok_or_else(|| refusal(native(out, from)))
        };
        return tell(splice::into_pipe(call.what(), from, pipe, count, |from| native(out, from)));
    }
    native(out, from)
}

/// Reads bytes of a file and sends them. If there is a `position`, this function advances it and leaves the file's own position
/// unchanged.
fn copy_file(
    socket: &'static Socket,
    out: c_int,
    from: c_int,
    position: &mut Option<off64_t>,
    count: usize,
) -> Result<usize> {
    let (mut buffer, mut small) = (Buffer::take(), [0; SMALL]);
    let buffer = buffers::of(&mut buffer, &mut small);
    let mut sent = 0;
    // The position advances by the number of bytes that were sent, which may be less than the number that was read.
    let mut at = match *position {
        Some(at) => at,
        // SAFETY: the call only asks for the position.
        None => match unsafe { libc::lseek64(from, 0, libc::SEEK_CUR) } {
            // The kernel sends only files that have a position. It refuses those that cannot be read first.
            -1 if Errno::last() == Errno(libc::ESPIPE) => {
                // SAFETY: the call reads no bytes.
                return match check(unsafe { real::read(from, buffer.as_mut_ptr().cast(), 0) }) {
                    Err(Errno(libc::EBADF)) => Err(Errno(libc::EBADF)),
                    _ => Err(Errno(libc::EINVAL)),
                };
            }
            -1 => return Err(Errno::last()),
            at => at,
        },
    };
    while sent < count {
        let len = (count - sent).min(buffer.len());
        // SAFETY: the buffer has room for `len` bytes.
        let got = check(unsafe { libc::pread64(from, buffer.as_mut_ptr().cast(), len, at) });
        let got = match got {
            Ok(0) => break,
            Ok(got) => got,
            Err(_) if sent > 0 => break,
            // A directory.
            Err(Errno(libc::EISDIR)) => return Err(Errno(libc::EINVAL)),
            Err(errno) => return Err(errno),
        };
        let n = send::go_on(socket, out, 0, std::iter::once(&buffer[..got]));
        let n = match check(n) {
            Ok(n) => n,
            Err(_) if sent > 0 => break,
            Err(errno) => return Err(errno),
        };
        sent += n;
        at += n as off64_t;
        match position {
            Some(position) => *position = at,
            // SAFETY: the call only sets the position.
            None => drop(unsafe { libc::lseek64(from, at, libc::SEEK_SET) }),
        }
        if n < got {
            break;
        }
    }
    Ok(sent)
}
