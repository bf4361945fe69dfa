//! Calls that are interrupted by signals.
#![allow(unsafe_code)] // A signal handler, and signals to one thread.

use ginnel_fdpass::{RecvFlags, SendFlags, receive, send, send_all};
use kit::wait::{WATCHDOG, wait_until};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

static CAUGHT: AtomicU32 = AtomicU32::new(0);

extern "C" fn caught(_: libc::c_int) {
    CAUGHT.fetch_add(1, Ordering::Relaxed);
}

/// Runs `call` in a thread, interrupts it while it sleeps in the kernel, and then calls `release` to end its wait.
fn interrupted<T: Send>(call: impl FnOnce() -> T + Send, release: impl FnOnce()) -> T {
    let (tid, done) = (AtomicU32::new(0), AtomicU32::new(0));
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            tid.store(rustix::thread::gettid().as_raw_nonzero().get() as u32, Ordering::Relaxed);
            let result = call();
            done.store(1, Ordering::Relaxed);
            result
        });
        wait_until("the thread to start", || tid.load(Ordering::Relaxed) != 0);
        let tid = tid.load(Ordering::Relaxed);
        let asleep = || {
            let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).unwrap();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
        };
        let before = CAUGHT.load(Ordering::Relaxed);
        wait_until("the thread to sleep in its call", asleep);
        // SAFETY: the thread is still there, because the event that it waits for has not happened.
        assert_eq!(unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, libc::SIGUSR1) }, 0);
        wait_until("the signal to be handled", || CAUGHT.load(Ordering::Relaxed) != before);
        wait_until("the thread to sleep again, or the call to return", || {
            asleep() || done.load(Ordering::Relaxed) != 0
        });
        release();
        thread.join().unwrap()
    })
}

#[test]
fn an_interrupted_call_continues() {
    // SAFETY: the handler only adds to a number. It is installed without SA_RESTART, so that calls are interrupted.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = caught as *const () as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    for kind in [SocketType::STREAM, SocketType::SEQPACKET] {
        let (a, b) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let nothing: [BorrowedFd<'_>; 0] = [];
        // With a timeout, a lost wake-up fails the test instead of hanging it.
        set_socket_timeout(&a, Timeout::Recv, Some(WATCHDOG)).unwrap();
        set_socket_timeout(&a, Timeout::Send, Some(WATCHDOG)).unwrap();
        let got = interrupted(
            || receive(a.as_fd(), &mut [0; 10], 1, RecvFlags::empty()),
            || assert_eq!(send(b.as_fd(), b"x", &[&b], SendFlags::empty()), Ok(1)),
        );
        let got = got.unwrap();
        assert_eq!((got.len, got.fds.len()), (1, 1));

        while send(a.as_fd(), &[7; 1000], &nothing, SendFlags::DONTWAIT).is_ok() {}
        let drain = || {
            let take = |b: &OwnedFd| receive(b.as_fd(), &mut [0; 1000], 1, RecvFlags::DONTWAIT);
            while take(&b).is_ok() {}
        };
        let sent = interrupted(|| send(a.as_fd(), b"x", &[&a], SendFlags::empty()), drain);
        assert_eq!(sent, Ok(1));
    }
    // A stream takes part of a long message, and returns when the signal comes. The rest follows without the descriptor.
    let (a, b) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    set_socket_timeout(&a, Timeout::Send, Some(WATCHDOG)).unwrap();
    set_socket_timeout(&b, Timeout::Recv, Some(WATCHDOG)).unwrap();
    let long: Vec<u8> = (0..4 << 20).map(|i: u32| (i % 251) as u8).collect();
    let (mut bytes, mut fds) = (Vec::new(), 0);
    let take_all = || {
        while bytes.len() < long.len() {
            let mut piece = [0; 10_000];
            let got = receive(b.as_fd(), &mut piece, 1, RecvFlags::empty()).unwrap();
            bytes.extend_from_slice(&piece[..got.len]);
            fds += got.fds.len();
        }
    };
    let sent = interrupted(|| send_all(a.as_fd(), &long, &[&a], SendFlags::empty()), take_all);
    assert_eq!((sent, bytes == long, fds), (Ok(()), true, 1));
}
