//! `read`, `write` and their variants.

use crate::calls::{receive, send};
use crate::carrying::{connection, passing};
use crate::exports::inq;
use crate::process::section::Scratch;
use crate::served::giving_back;
use crate::state::reasons;
use crate::state::socket::{End, Socket, Stage};
use crate::state::sockets::SOCKETS;
use crate::state::table::Lease;
use crate::system::confined::is_confined;
use crate::system::errno::{Errno, Kept, check, tell, tell_int};
use crate::system::memory::{can_read, can_write, is_beyond, is_prepared, is_there};
use crate::system::real;
use libc::{
    c_int, c_uint, iovec, mmsghdr, msghdr, off_t, off64_t, size_t, sockaddr, sockaddr_storage, socklen_t,
    ssize_t, timespec,
};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::slice;
use std::time::Instant;

/// Begins a call on a descriptor. Returns `None` unless it is a socket that is or was connected.
#[inline]
pub fn connection(fd: c_int) -> Option<Lease<Socket>> {
    SOCKETS.call(fd).filter(|call| !matches!(call.what().stage(), Stage::New | Stage::Listening))
}

/// Returns the program's bytes as a slice. An empty buffer may be null, and a length above `isize::MAX` is cut.
unsafe fn bytes<'a>(at: *const c_void, len: usize) -> &'a [u8] {
    if len == 0 {
        return &[];
    }
    // A null pointer is reported when the bytes are copied.
    let at = if at.is_null() { NonNull::<u8>::dangling().as_ptr().cast_const().cast() } else { at };
    // SAFETY: the program says that there are `len` bytes.
    unsafe { slice::from_raw_parts(at.cast(), len.min(isize::MAX as usize)) }
}

unsafe fn room<'a>(at: *mut c_void, len: usize) -> &'a mut [u8] {
    if len == 0 {
        return &mut [];
    }
    // A call that discards or counts what it receives needs no room (`input::How::copies`): only the length is used then.
    let at = if at.is_null() { NonNull::<u8>::dangling().as_ptr().cast() } else { at };
    // SAFETY: the program says that there is room for `len` bytes, and that nothing else uses it during the call.
    unsafe { slice::from_raw_parts_mut(at.cast(), len.min(isize::MAX as usize)) }
}

/// Returns the vectors of a call, or `None` if the kernel refuses them: too many, none where there should be some, or one with a
/// length that is negative as a signed number, or with memory that no program has.
unsafe fn vectors<'a>(iov: *const iovec, count: usize) -> Option<&'a [iovec]> {
    if count == 0 {
        return Some(&[]);
    }
    if count > libc::UIO_MAXIOV as usize || !can_read(iov, count * size_of::<iovec>()) {
        return None;
    }
    // SAFETY: the program says that there are `count` vectors.
    let vectors = unsafe { slice::from_raw_parts(iov, count) };
    let is_valid =
        |piece: &iovec| isize::try_from(piece.iov_len).is_ok() && !is_beyond(piece.iov_base, piece.iov_len);
    vectors.iter().all(is_valid).then_some(vectors)
}

/// Does the same for a call whose number of vectors is an `int`.
unsafe fn counted_vectors<'a>(iov: *const iovec, count: c_int) -> Option<&'a [iovec]> {
    // SAFETY: the rules are those of `vectors`.
    usize::try_from(count).ok().and_then(|count| unsafe { vectors(iov, count) })
}

/// Returns whether vectors are for nothing. The kernel then returns from `readv` and `writev` at once, whatever the socket's state is.
fn are_empty(vectors: &[iovec]) -> bool {
    vectors.iter().all(|piece| piece.iov_len == 0)
}

/// Returns the pieces of memory that a call is to send.
unsafe fn pieces(iov: &[iovec]) -> impl Iterator<Item = &[u8]> + Clone {
    // SAFETY: the rules of `bytes` apply to each piece.
    iov.iter().map(|piece| unsafe { bytes(piece.iov_base, piece.iov_len) })
}

/// Returns the pieces of memory into which a call is to receive.
unsafe fn rooms(iov: &[iovec]) -> impl Iterator<Item = &mut [u8]> {
    // SAFETY: the rules of `room` apply to each piece.
    iov.iter().map(|piece| unsafe { room(piece.iov_base, piece.iov_len) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn read(fd: c_int, buffer: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: the program obeys the rules of the function.
    let native = || unsafe { real::read(fd, buffer, len) };
    // The kernel refuses a length that is negative as a signed number, and does nothing for a length of zero.
    if len == 0 || isize::try_from(len).is_err() || is_beyond(buffer, len) {
        return native();
    }
    let Some(call) = connection(fd) else { return native() };
    let socket = call.what();
    // SAFETY: the program says that there is room for `len` bytes, and that nothing else uses it during the call.
    receive::receive(socket, fd, 0, std::iter::once(unsafe { room(buffer, len) }), native)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __read_chk(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    room: size_t,
) -> ssize_t {
    check_room(len, room);
    // SAFETY: there is room for `len` bytes, as just checked, and nothing else uses it during the call.
    unsafe { read(fd, buffer, len) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the program obeys the rules of the function.
    let native = || unsafe { real::readv(fd, iov, count) };
    let Some(call) = connection(fd) else { return native() };
    let socket = call.what();
    // SAFETY: the program says that there are so many vectors.
    let Some(vectors) = (unsafe { counted_vectors(iov, count) }).filter(|vectors| !are_empty(vectors)) else {
        return native();
    };
    // SAFETY: the program says that nothing else uses the memory of the vectors during the call.
    receive::receive(socket, fd, 0, unsafe { rooms(vectors) }, native)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recv(fd: c_int, buffer: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program obeys the rules of the function.
    let native = || unsafe { real::recv(fd, buffer, len, flags) };
    let Some(call) = connection(fd).filter(|_| !is_beyond(buffer, len)) else { return native() };
    let socket = call.what();
    // SAFETY: the program says that there is room for `len` bytes, and that nothing else uses it during the call.
    receive::receive(socket, fd, flags, std::iter::once(unsafe { room(buffer, len) }), native)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __recv_chk(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    check_room(len, room);
    // SAFETY: there is room for `len` bytes, as just checked, and nothing else uses it during the call.
    unsafe { recv(fd, buffer, len, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvfrom(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> ssize_t {
    // SAFETY: the program obeys the rules of the function.
    let native = || unsafe { real::recvfrom(fd, buffer, len, flags, address, address_len) };
    let Some(call) = connection(fd).filter(|_| !is_beyond(buffer, len)) else { return native() };
    let socket = call.what();
    // SAFETY: the program says that there is room for `len` bytes, and that nothing else uses it during the call.
    let got = receive::receive(socket, fd, flags, std::iter::once(unsafe { room(buffer, len) }), native);
    if got < 0 || address.is_null() {
        return got;
    }
    if !can_write(address_len, size_of::<socklen_t>()) {
        return tell(Err(Errno(libc::EFAULT)));
    }
    // SAFETY: the program passes a length together with an address.
    let room = unsafe { &mut *address_len };
    if (*room).cast_signed() < 0 {
        return tell(Err(Errno(libc::EINVAL)));
    }
    // A stream socket reports no sender's address.
    *room = 0;
    got
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __recvfrom_chk(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> ssize_t {
    check_room(len, room);
    // SAFETY: there is room for `len` bytes, as just checked. The address is null, or the program passes room for one and its
    // length.
    unsafe { recvfrom(fd, buffer, len, flags, address, address_len) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program obeys the rules of the function.
    let native = || unsafe { real::recvmsg(fd, message, flags) };
    let Some(call) = connection(fd).filter(|_| is_there(message)) else { return native() };
    let socket = call.what();
    // SAFETY: the program says that there are so many vectors.
    let Some(vectors) = (unsafe { vectors((*message).msg_iov, (*message).msg_iovlen) }) else {
        return native();
    };
    // SAFETY: the program says that nothing else uses the memory of the vectors during the call.
    let rooms = unsafe { rooms(vectors) };
    let mut was_native = false;
    let got = receive::receive(socket, fd, flags, rooms, || {
        was_native = true;
        native()
    });
    if got >= 0 && !was_native && can_write(message, size_of::<msghdr>()) {
        // SAFETY: the program passes a message, which can be written, as just checked, and which nothing else uses during the
        // call.
        inq::complete(socket, fd, unsafe { &mut *message });
    }
    got
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    let has_time = timeout.is_null() || is_there(timeout);
    let Some(call) = connection(fd).filter(|_| has_time && is_there(messages)) else {
        // SAFETY: the program obeys the rules of the function.
        return unsafe { real::recvmmsg(fd, messages, count, flags, timeout) };
    };
    // SAFETY: the pointer is null, or the program passes a valid one.
    let end = match unsafe { crate::exports::polling::time(timeout) } {
        Ok(time) => time.and_then(|time| Instant::now().checked_add(time)),
        Err(errno) => return tell_int(Err(errno)),
    };
    let mut done = 0;
    for i in 0..count.min(libc::UIO_MAXIOV as c_uint) {
        let is_further = i > 0 && flags & libc::MSG_WAITFORONE != 0;
        let flags = flags & !libc::MSG_WAITFORONE | if is_further { libc::MSG_DONTWAIT } else { 0 };
        let message = messages.wrapping_add(i as usize);
        if !can_write(message, size_of::<mmsghdr>()) {
            return if i > 0 { done } else { tell_int(Err(Errno(libc::EFAULT))) };
        }
        // SAFETY: the program passes `count` messages, and this one can be written.
        let message = unsafe { &mut *message };
        let got = match i {
            // SAFETY: the program passes a message with so many vectors, and says that nothing else uses their memory during
            // the call.
            0 => unsafe { recvmsg(fd, &raw mut message.msg_hdr, flags) },
            // SAFETY: the program passes a message with so many vectors, and says that nothing else uses their memory during
            // the call.
            _ => unsafe { receive_further(call.what(), fd, &mut message.msg_hdr, flags) },
        };
        if got < 0 {
            return if i > 0 { done } else { -1 };
        }
        message.msg_len = got as c_uint;
        done += 1;
        // As in the kernel, the time is looked at only after a message.
        if let Some(end) = end
            && can_write(timeout, size_of::<timespec>())
        {
            let left = end.saturating_duration_since(Instant::now());
            // SAFETY: the pointer was read above, and is not null.
            unsafe {
                *timeout = timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
            };
            if left.is_zero() {
                break;
            }
        }
    }
    done
}

/// Receives a further message of a call. It comes from the same socket, even if the descriptor's number now belongs to another
/// file.
unsafe fn receive_further(socket: &'static Socket, fd: c_int, message: &mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program says that there are so many vectors.
    let Some(vectors) = (unsafe { vectors(message.msg_iov, message.msg_iovlen) }) else {
        return tell(Err(refusal(message)));
    };
    // SAFETY: the program says that nothing else uses the memory of the vectors during the call.
    let got = receive::go_on(socket, fd, flags, unsafe { rooms(vectors) });
    if got >= 0 {
        inq::complete(socket, fd, message);
    }
    got
}

/// Returns the kernel's error for a message whose vectors it refuses.
fn refusal(message: &msghdr) -> Errno {
    let is_too_many = message.msg_iovlen > libc::UIO_MAXIOV as usize;
    Errno(if is_too_many { libc::EMSGSIZE } else { libc::EINVAL })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn write(fd: c_int, buffer: *const c_void, len: size_t) -> ssize_t {
    // SAFETY: the program obeys the rules of the function.
    let native = || unsafe { real::write(fd, buffer, len) };
    if isize::try_from(len).is_err() || is_beyond(buffer, len) {
        return native();
    }
    let Some(call) = connection(fd) else { return native() };
    let socket = call.what();
    // SAFETY: the program says that there are `len` bytes.
    send::send(socket, fd, 0, std::iter::once(unsafe { bytes(buffer, len) }), native)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the program obeys the rules of the function.
    let native = || unsafe { real::writev(fd, iov, count) };
    let Some(call) = connection(fd) else { return native() };
    let socket = call.what();
    // SAFETY: the program says that there are so many vectors.
    let Some(vectors) = (unsafe { counted_vectors(iov, count) }).filter(|vectors| !are_empty(vectors)) else {
        return native();
    };
    // SAFETY: the program says that each vector has as many bytes as its length says.
    send::send(socket, fd, 0, unsafe { pieces(vectors) }, native)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn send(fd: c_int, buffer: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program obeys the rules of the function.
    let native = || unsafe { real::send(fd, buffer, len, flags) };
    let Some(call) = connection(fd).filter(|_| !is_beyond(buffer, len)) else { return native() };
    let socket = call.what();
    // SAFETY: the program says that there are `len` bytes.
    send::send(socket, fd, flags, std::iter::once(unsafe { bytes(buffer, len) }), native)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendto(
    fd: c_int,
    buffer: *const c_void,
    len: size_t,
    flags: c_int,
    address: *const sockaddr,
    address_len: socklen_t,
) -> ssize_t {
    // SAFETY: the program obeys the rules of the function.
    let native = || unsafe { real::sendto(fd, buffer, len, flags, address, address_len) };
    let Some(call) = connection(fd).filter(|_| !is_beyond(buffer, len)) else { return native() };
    let socket = call.what();
    if let Some(errno) = refused_address(socket, address, address_len) {
        return tell(Err(errno));
    }
    // SAFETY: the program says that there are `len` bytes.
    send::send(socket, fd, flags, std::iter::once(unsafe { bytes(buffer, len) }), native)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program obeys the rules of the function.
    if !unsafe { passes_connections(message) } {
        // The receiver of the descriptor would take wake bytes for the peer's data.
        Errno(libc::EAGAIN).set();
        return -1;
    }
    // SAFETY: the program obeys the rules of the function.
    let native = || unsafe { real::sendmsg(fd, message, flags) };
    let Some(call) = connection(fd).filter(|_| is_there(message)) else { return native() };
    let socket = call.what();
    // SAFETY: the program passes a message, which can be read, as just checked, and does not change it during the call.
    let head = unsafe { &*message };
    if !can_read(head.msg_control, head.msg_controllen) {
        return native();
    }
    // SAFETY: the program says that there are so many vectors.
    let Some(vectors) = (unsafe { vectors(head.msg_iov, head.msg_iovlen) }) else { return native() };
    if let Some(errno) = refused_beside(socket, fd, head) {
        return tell(Err(errno));
    }
    // SAFETY: the program says that each vector has as many bytes as its length says.
    send::send(socket, fd, flags, unsafe { pieces(vectors) }, native)
}

/// Returns the error with which the kernel refuses the address of a call that sends over a ring. TCP ignores it afterwards.
#[inline]
fn refused_address(socket: &'static Socket, address: *const sockaddr, len: socklen_t) -> Option<Errno> {
    if address.is_null() || !socket.is_joined() {
        return None;
    }
    match len as usize {
        len if len > size_of::<sockaddr_storage>() => Some(Errno(libc::EINVAL)),
        len => (!can_read(address, len)).then_some(Errno(libc::EFAULT)),
    }
}

/// The flags with which the library asks the kernel about what stands beside the bytes of a call.
const ASKING: c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

/// Returns the error with which the kernel refuses the control messages of a call that sends over a ring. TCP judges them, and then sends
/// as if they were not there. `ask` has the kernel send no bytes with them.
#[cold]
fn refused(socket: &'static Socket, fd: c_int, ask: impl FnOnce() -> ssize_t) -> Option<Errno> {
    if !socket.is_joined() || is_confined() {
        return None;
    }
    // A connection that has ended reports that, and the kernel reports it only once.
    connection::look_for_end(socket, fd);
    if socket.end() != End::None {
        return None;
    }
    let _errno = Kept::new();
    let refusals = [libc::EFAULT, libc::EINVAL, libc::ENOBUFS, libc::ENOMEM, libc::EPERM];
    check(ask()).err().filter(|errno| refusals.contains(&errno.0))
}

/// Does the same for the address and the control messages of a message.
#[inline]
fn refused_beside(socket: &'static Socket, fd: c_int, message: &msghdr) -> Option<Errno> {
    if message.msg_controllen == 0 {
        // The kernel cuts an address that is too long, unless its length is negative.
        let longest = size_of::<sockaddr_storage>() as socklen_t;
        let len = if message.msg_namelen > i32::MAX as socklen_t {
            message.msg_namelen
        } else {
            message.msg_namelen.min(longest)
        };
        return refused_address(socket, message.msg_name.cast(), len);
    }
    let without_bytes = msghdr { msg_iov: std::ptr::null_mut(), msg_iovlen: 0, ..*message };
    // SAFETY: there are no bytes to send, and the kernel finds out itself whether the address and the control messages can be read.
    refused(socket, fd, || unsafe { real::sendmsg(fd, &raw const without_bytes, ASKING) })
}

/// Moves the connections whose descriptors a message hands over back to the kernel, or keeps them there. Returns false if one of
/// them has not returned to the kernel in time.
unsafe fn passes_connections(message: *const msghdr) -> bool {
    let mut joined = Scratch::new(Vec::new);
    // SAFETY: the program passes a message, and its control messages are complete.
    unsafe {
        if !is_prepared()
            || !is_there(message)
            || (*message).msg_controllen == 0
            || !can_read((*message).msg_control, (*message).msg_controllen)
        {
            return true;
        }
        let end = (*message).msg_control.addr().saturating_add((*message).msg_controllen);
        let mut control = libc::CMSG_FIRSTHDR(message);
        // The kernel refuses a message with a part that is longer than the whole.
        while !control.is_null() && (*control).cmsg_len <= end - control.addr() {
            if (*control).cmsg_level == libc::SOL_SOCKET && (*control).cmsg_type == libc::SCM_RIGHTS {
                let len = ((*control).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                let fds = libc::CMSG_DATA(control).cast::<c_int>();
                for i in 0..len / size_of::<c_int>() {
                    let fd = fds.add(i).read_unaligned();
                    if let Some(socket) = connection(fd).map(|call| call.what()) {
                        let is_given_back = giving_back::give_back(socket);
                        crate::daemon::session::stays(socket, reasons::PASSED);
                        if !is_given_back {
                            return false;
                        }
                        joined.change(|joined| joined.extend(socket.is_joined().then_some((socket, fd))));
                    }
                }
            }
            control = libc::CMSG_NXTHDR(message, control);
        }
    }
    joined.is_empty() || passing::pass_on(&joined, reasons::PASSED)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    let count = count.min(libc::UIO_MAXIOV as c_uint);
    if !is_prepared() || !is_there(messages) {
        // SAFETY: the kernel refuses the call.
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
    }
    let Some(call) = connection(fd) else {
        // SAFETY: the program passes `count` messages.
        let passes = |i| unsafe { passes_connections(&raw const (*messages.add(i as usize)).msg_hdr) };
        // The call sends the messages in front of the first one that cannot be sent now.
        let sendable = (0..count).take_while(|i| passes(*i)).count() as c_uint;
        if sendable == 0 && count > 0 {
            Errno(libc::EAGAIN).set();
            return -1;
        }
        // SAFETY: the program obeys the rules of the function.
        return unsafe { real::sendmmsg(fd, messages, sendable, flags) };
    };
    let mut done = 0;
    for i in 0..count {
        let message = messages.wrapping_add(i as usize);
        if !can_write(message, size_of::<mmsghdr>()) {
            return if i > 0 { done } else { tell_int(Err(Errno(libc::EFAULT))) };
        }
        // SAFETY: the program passes `count` messages, and this one can be written.
        let message = unsafe { &mut *message };
        let sent = match i {
            // SAFETY: the program passes a message with so many vectors, each of which has as many bytes as its length says.
            0 => unsafe { sendmsg(fd, &raw const message.msg_hdr, flags) },
            // SAFETY: the program passes a message with so many vectors, each of which has as many bytes as its length says.
            _ => unsafe { send_further(call.what(), fd, &message.msg_hdr, flags) },
        };
        if sent < 0 {
            return if i > 0 { done } else { -1 };
        }
        message.msg_len = sent as c_uint;
        done += 1;
    }
    done
}

/// Sends a further message of a call. It goes to the same socket, even if the descriptor's number now belongs to another file.
unsafe fn send_further(socket: &'static Socket, fd: c_int, message: &msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program obeys the rules of the function.
    if !unsafe { passes_connections(message) } {
        return tell(Err(Errno(libc::EAGAIN)));
    }
    // SAFETY: the program says that there are so many vectors.
    let Some(vectors) = (unsafe { vectors(message.msg_iov, message.msg_iovlen) }) else {
        return tell(Err(refusal(message)));
    };
    if let Some(errno) = refused_beside(socket, fd, message) {
        return tell(Err(errno));
    }
    // SAFETY: the program says that each vector has as many bytes as its length says.
    send::go_on(socket, fd, flags, unsafe { pieces(vectors) })
}

/// Converts flags of `preadv2` and `pwritev2` to flags of `recv` and `send` with the same meaning. On a socket, all known flags
/// except RWF_NOWAIT are ignored. Returns EOPNOTSUPP for flags that this library does not know.
fn flags_of_socket(flags: c_int) -> Result<c_int, Errno> {
    let ignored = libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC | libc::RWF_APPEND;
    match flags & !ignored {
        0 => Ok(0),
        libc::RWF_NOWAIT => Ok(libc::MSG_DONTWAIT),
        _ => Err(Errno(libc::EOPNOTSUPP)),
    }
}

/// Begins a call on a connection. Returns `None` if the call has an offset, so that the kernel refuses it.
fn connection_at(fd: c_int, offset: off64_t) -> Option<Lease<Socket>> {
    if offset == -1 { connection(fd) } else { None }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn preadv64v2(
    fd: c_int,
    iov: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the program obeys the rules of the function.
    let native = || unsafe { real::preadv64v2(fd, iov, count, offset, flags) };
    let Some(call) = connection_at(fd, offset) else { return native() };
    let socket = call.what();
    let flags = match flags_of_socket(flags) {
        Ok(flags) => flags,
        Err(errno) => return tell(Err(errno)),
    };
    // SAFETY: the program says that there are so many vectors.
    let Some(vectors) = (unsafe { counted_vectors(iov, count) }).filter(|vectors| !are_empty(vectors)) else {
        return native();
    };
    // SAFETY: the program says that nothing else uses the memory of the vectors during the call.
    receive::receive(socket, fd, flags, unsafe { rooms(vectors) }, native)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn preadv2(
    fd: c_int,
    iov: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: where an offset has 64 bits, the two functions are the same.
    unsafe { preadv64v2(fd, iov, count, offset, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwritev64v2(
    fd: c_int,
    iov: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the program obeys the rules of the function.
    let native = || unsafe { real::pwritev64v2(fd, iov, count, offset, flags) };
    let Some(call) = connection_at(fd, offset) else { return native() };
    let socket = call.what();
    let flags = match flags_of_socket(flags) {
        Ok(flags) => flags,
        Err(errno) => return tell(Err(errno)),
    };
    // SAFETY: the program says that there are so many vectors.
    let Some(vectors) = (unsafe { counted_vectors(iov, count) }).filter(|vectors| !are_empty(vectors)) else {
        return native();
    };
    // SAFETY: the program says that each vector has as many bytes as its length says.
    send::send(socket, fd, flags, unsafe { pieces(vectors) }, native)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwritev2(
    fd: c_int,
    iov: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: where an offset has 64 bits, the two functions are the same.
    unsafe { pwritev64v2(fd, iov, count, offset, flags) }
}

/// Aborts the program if a buffer is too small, as the C library does for a program that was compiled with these checks.
fn check_room(len: size_t, room: size_t) {
    if len > room {
        // SAFETY: `abort` does not return.
        unsafe { libc::abort() };
    }
}
