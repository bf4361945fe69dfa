//! TCP_INQ: a control message with each message, which says how many bytes are left.

use crate::carrying::look;
use crate::state::carrier::Carrier;
use crate::state::socket::Socket;
use crate::system::confined::is_confined;
use crate::system::kernel;
use crate::system::memory::can_write;
use libc::{c_int, msghdr};
use std::sync::atomic::Ordering;

/// Completes the head of a message that this library has received instead of the kernel.
pub fn complete(socket: &'static Socket, fd: c_int, head: &mut msghdr) {
    let room = head.msg_controllen;
    (head.msg_namelen, head.msg_controllen, head.msg_flags) = (0, 0, 0);
    if socket.tells_inq.load(Ordering::Relaxed) {
        // SAFETY: the program says that there is so much room for control messages.
        unsafe { add(head, room, left(socket, fd)) };
    }
}

/// Returns how many bytes can be received. As in the kernel, this is 1 if there are none but the end, so that the program goes on
/// receiving. It must not be 0 if there is something, because the program may then wait for an event that is over.
fn left(socket: &'static Socket, fd: c_int) -> c_int {
    let left = match look::available(socket, fd) {
        Some(0) => usize::from(look::has_peer_finished(socket)),
        Some(left) => left,
        None if is_confined() => 1,
        None if socket.receiving.carrier() == Carrier::Kernel => kernel::unread(fd),
        // The ring may have more.
        None => kernel::unread(fd).max(1),
    };
    c_int::try_from(left).unwrap_or(c_int::MAX)
}

/// Adds the control message, as much of it as there is room for.
unsafe fn add(head: &mut msghdr, room: usize, value: c_int) {
    let len = size_of::<c_int>() as u32;
    // SAFETY: the functions only compute lengths.
    let (head_len, full_len, space) =
        unsafe { (libc::CMSG_LEN(0) as usize, libc::CMSG_LEN(len) as usize, libc::CMSG_SPACE(len) as usize) };
    if head.msg_control.is_null() || room < head_len || !can_write(head.msg_control, room.min(full_len)) {
        head.msg_flags |= libc::MSG_CTRUNC;
        return;
    }
    if room < full_len {
        head.msg_flags |= libc::MSG_CTRUNC;
    }
    let written = room.min(full_len);
    let control = head.msg_control.cast::<libc::cmsghdr>();
    let (level, kind) = (libc::IPPROTO_TCP, libc::TCP_INQ);
    // SAFETY: the caller says that there is room for `room` bytes, so there is room for the head and for what is copied behind it.
    unsafe {
        (&raw mut (*control).cmsg_len).write_unaligned(written);
        (&raw mut (*control).cmsg_level).write_unaligned(level);
        (&raw mut (*control).cmsg_type).write_unaligned(kind);
        let bytes = value.to_ne_bytes();
        control.cast::<u8>().add(head_len).copy_from_nonoverlapping(bytes.as_ptr(), written - head_len);
    }
    head.msg_controllen = room.min(space);
}
