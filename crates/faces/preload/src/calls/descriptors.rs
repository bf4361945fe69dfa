//! What a descriptor refers to: sockets and epoll instances come and go with the program's calls.
//!
//! A connection ends with the last of its descriptors.

use crate::epoll::EPOLLS;
use crate::epoll::instance::Instance;
use crate::process::section::Section;
use crate::state::socket::Socket;
use crate::state::sockets::SOCKETS;
use crate::state::table;
use crate::system::clock::now;
use crate::system::errno::Kept;
use crate::system::{confined, memory};
use crate::waiting::points;
use libc::c_int;
use std::sync::atomic::Ordering;

/// How long a thread that closes a descriptor waits for threads that use its number, in microseconds. None of those sleeps, but a
/// signal handler may have made one of them leave the call in the middle.
const IN_USE: u64 = 1_000_000;

/// Prepares what the first descriptor needs.
fn prepare() {
    let _section = Section::begin();
    memory::prepare();
}

/// Adds a TCP socket that the kernel has just created.
pub fn add_socket(fd: c_int) -> &'static Socket {
    prepare();
    forget(fd);
    let _section = Section::begin();
    let socket = SOCKETS.fresh(Socket::new);
    socket.begin(fd);
    SOCKETS.set(fd, socket);
    socket
}

/// Adds an epoll instance that the kernel has just created.
pub fn add_epoll(fd: c_int) {
    prepare();
    forget(fd);
    let _section = Section::begin();
    let instance = EPOLLS.fresh(Instance::new);
    instance.begin(fd);
    EPOLLS.set(fd, instance);
}

/// Notes that `copy` refers to the same file as `fd`.
pub fn duplicate(fd: c_int, copy: c_int) {
    if fd == copy {
        return;
    }
    forget(copy);
    if let Some(socket) = SOCKETS.get(fd) {
        socket.fds.fetch_add(1, Ordering::Relaxed);
        SOCKETS.set(copy, socket);
    }
    if let Some(instance) = EPOLLS.get(fd) {
        instance.fds.fetch_add(1, Ordering::Relaxed);
        EPOLLS.set(copy, instance);
    }
}

/// Forgets a descriptor, because the kernel has given its number to another file.
pub fn forget(fd: c_int) {
    if let Some(socket) = SOCKETS.take(fd) {
        // The library must not ask the kernel about the connection by this number.
        leave(socket, fd, -1);
    }
    forget_epoll(fd);
}

fn forget_epoll(fd: c_int) {
    if let Some(instance) = EPOLLS.take(fd)
        && instance.fds.fetch_sub(1, Ordering::AcqRel) == 1
    {
        instance.close();
        EPOLLS.release(instance);
    }
}

/// Removes one of a socket's numbers. If it was the last, the connection ends; `open` is the number by which the
/// kernel's socket is still open, or -1.
fn leave(socket: &'static Socket, fd: c_int, open: c_int) {
    let is_last = socket.fds.fetch_sub(1, Ordering::AcqRel) == 1;
    if !is_last && socket.fd.load(Ordering::Relaxed) == fd {
        let is_of = |other: &c_int| SOCKETS.is(*other, socket);
        if let Some(other) = SOCKETS.used(0, u32::MAX).find(is_of) {
            socket.fd.store(other, Ordering::Relaxed);
        }
    }
    if !is_last && open >= 0 && !confined::is_confined() {
        socket.watchers.closes(fd, socket);
    }
    let until = now() + IN_USE;
    // ORDER table.using: see `Using::begin`.
    while socket.using.load(Ordering::SeqCst) != 0 && now() < until {
        if confined::is_confined() { std::hint::spin_loop() } else { std::thread::yield_now() }
    }
    if is_last {
        points::wake_residents(socket);
        crate::carrying::closing::close(socket, open);
        SOCKETS.release(socket);
    }
}

/// Makes a system call that closes a descriptor, or gives its number to another file.
pub fn replace<R>(fd: c_int, call: impl FnOnce() -> R) -> R {
    /// Removes the mark if nothing has replaced it, even if this thread is cancelled in the call.
    struct Mark(c_int);
    impl Drop for Mark {
        fn drop(&mut self) {
            if let Some(entry) = SOCKETS.entry(self.0) {
                let none = std::ptr::null_mut();
                let _ = entry.compare_exchange(table::own_mark(), none, Ordering::Release, Ordering::Relaxed);
            }
        }
    }
    let kept = Kept::new();
    // A signal handler that used the number meanwhile would write past the rings.
    let section = Section::begin();
    let mark = SOCKETS.swap(fd, table::own_mark()).map(|socket| (Mark(fd), socket));
    let _section = mark.is_some().then_some(section);
    if let Some((_, socket)) = &mark {
        leave(socket, fd, fd);
    }
    forget_epoll(fd);
    drop(kept);
    call()
}
