//! Messages with real descriptors over both kinds of socket.

use ginnel_fdpass::{MAX_FDS, Received, RecvFlags, SendFlags, receive, receive_from, send, send_all};
use rustix::io::{Errno, FdFlags, fcntl_getfd, read, write};
use rustix::net::sockopt::{set_socket_passcred, set_socket_send_buffer_size};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const KINDS: [SocketType; 2] = [SocketType::STREAM, SocketType::SEQPACKET];
const NOTHING: [BorrowedFd<'static>; 0] = [];

fn pair(kind: SocketType) -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap()
}

fn get(from: &OwnedFd, max_fds: usize) -> Result<Received, Errno> {
    receive(from.as_fd(), &mut [0; 100], max_fds, RecvFlags::DONTWAIT)
}

fn put(to: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
    send(to.as_fd(), bytes, fds, SendFlags::DONTWAIT)
}

fn pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    pipe_with(PipeFlags::NONBLOCK)
}

/// Returns whether nobody has the write end of the pipe any more; otherwise reading would return `AGAIN`.
fn is_closed(read_end: &OwnedFd) -> bool {
    read(read_end, &mut [0; 1]) == Ok(0)
}

#[test]
fn descriptors_arrive_usable_and_close_on_exec() {
    for kind in KINDS {
        let (a, b) = pair(kind);
        let (from, to) = pipe().unwrap();
        assert_eq!(put(&a, b"one", &[to.as_fd()]), Ok(3));
        let mut bytes = [0; 100];
        let got = receive(b.as_fd(), &mut bytes, 1, RecvFlags::empty()).unwrap();
        assert_eq!((&bytes[..got.len], got.fds.len()), (&b"one"[..], 1));
        assert!(!got.truncated && !got.fds_lost && got.sender.is_none());
        assert_eq!(fcntl_getfd(&got.fds[0]), Ok(FdFlags::CLOEXEC));
        write(&got.fds[0], b"x").unwrap();
        assert_eq!(read(&from, &mut [0; 4]), Ok(1));
        drop((to, got));
        assert!(is_closed(&from));
        drop(a);
        assert_eq!(get(&b, 1).unwrap().len, 0, "the end");
    }
}

#[test]
fn more_descriptors_than_asked_for_are_all_refused_and_closed() {
    for kind in KINDS {
        for passcred in [false, true] {
            for (count, max) in (0..6).flat_map(|count| (0..6).map(move |max| (count, max))) {
                let (a, b) = pair(kind);
                set_socket_passcred(&b, passcred).unwrap();
                let (from, to) = pipe().unwrap();
                put(&a, b"x", &vec![to.as_fd(); count]).unwrap();
                drop(to);
                let mut bytes = [0; 10];
                let got = match passcred {
                    true => receive_from(b.as_fd(), &mut bytes, max, RecvFlags::DONTWAIT),
                    false => receive(b.as_fd(), &mut bytes, max, RecvFlags::DONTWAIT),
                };
                let got = got.unwrap();
                assert_eq!((got.len, got.fds_lost), (1, count > max), "{count} sent, {max} asked for");
                assert_eq!(got.fds.len(), if count > max { 0 } else { count });
                assert_eq!(got.sender, passcred.then(std::process::id));
                assert_eq!(is_closed(&from), got.fds.is_empty());
            }
        }
    }
}

#[test]
fn as_many_as_the_kernel_takes_and_no_more() {
    for kind in KINDS {
        let (a, b) = pair(kind);
        let (from, to) = pipe().unwrap();
        assert_eq!(put(&a, b"x", &[to.as_fd(); MAX_FDS + 1]), Err(Errno::INVAL));
        put(&a, b"x", &[to.as_fd(); MAX_FDS]).unwrap();
        let got = get(&b, usize::MAX).unwrap();
        assert_eq!((got.fds.len(), got.fds_lost), (MAX_FDS, false));
        put(&a, b"x", &[to.as_fd(); MAX_FDS]).unwrap();
        drop((to, got));
        let got = get(&b, MAX_FDS - 1).unwrap();
        assert!(got.fds_lost && got.fds.is_empty() && is_closed(&from));
    }
}

#[test]
fn descriptors_cannot_be_sent_without_a_byte() {
    for kind in KINDS {
        let (a, b) = pair(kind);
        assert_eq!(put(&a, b"", &[b.as_fd()]), Err(Errno::INVAL));
        assert_eq!(get(&b, 1).unwrap_err(), Errno::AGAIN, "nothing was sent");
    }
}

#[test]
fn a_packet_longer_than_the_buffer_is_reported_as_truncated() {
    let (a, b) = pair(SocketType::SEQPACKET);
    put(&a, &[7; 101], &[]).unwrap();
    put(&a, &[7; 100], &[]).unwrap();
    assert!(get(&b, 0).unwrap().truncated);
    assert!(!get(&b, 0).unwrap().truncated);
    let (a, b) = pair(SocketType::STREAM);
    put(&a, &[7; 101], &[]).unwrap();
    let (first, second) = (get(&b, 0).unwrap(), get(&b, 0).unwrap());
    assert_eq!((first.len, first.truncated, second.len), (100, false, 1));
}

#[test]
fn a_full_socket_takes_neither_bytes_nor_descriptors() {
    for kind in KINDS {
        let (a, b) = pair(kind);
        while put(&a, &[7; 100], &[]).is_ok() {}
        let (from, to) = pipe().unwrap();
        assert_eq!(put(&a, b"x", &[to.as_fd()]), Err(Errno::AGAIN));
        drop(to);
        assert!(is_closed(&from), "it is nowhere in the socket");
        while get(&b, 1).map_err(|errno| assert_eq!(errno, Errno::AGAIN)).is_ok() {}
    }
}

#[test]
fn the_first_bytes_on_a_stream_carry_the_descriptors() {
    let (a, b) = pair(SocketType::STREAM);
    set_socket_send_buffer_size(&a, 4096).unwrap();
    let long: Vec<u8> = (0..1 << 20).map(|i: u32| (i % 251) as u8).collect();
    let (from, to) = pipe().unwrap();
    let sent = put(&a, &long, &[to.as_fd()]).unwrap();
    assert!(sent > 0 && sent < long.len(), "{sent} bytes fit");
    drop(to);
    let got = get(&b, 1).unwrap();
    assert_eq!(got.fds.len(), 1);
    drop((got, b));
    assert!(is_closed(&from));
}

#[test]
fn a_long_message_arrives_whole_and_its_descriptors_once() {
    let (a, b) = pair(SocketType::STREAM);
    set_socket_send_buffer_size(&a, 4096).unwrap();
    let long: Vec<u8> = (0..1 << 20).map(|i: u32| (i % 251) as u8).collect();
    let (from, to) = pipe().unwrap();
    let (mut bytes, mut fds) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            send_all(a.as_fd(), &long, &[to.as_fd(), a.as_fd()], SendFlags::empty()).unwrap();
            rustix::net::shutdown(&a, rustix::net::Shutdown::Write).unwrap();
        });
        // A failure in this thread closes the socket, so that the sender does not wait for ever.
        let b = b;
        loop {
            let mut piece = [0; 10_000];
            let got = receive(b.as_fd(), &mut piece, 2, RecvFlags::empty()).unwrap();
            assert!(!got.fds_lost);
            fds.extend(got.fds);
            if got.len == 0 {
                break;
            }
            bytes.extend_from_slice(&piece[..got.len]);
        }
    });
    assert!(bytes == long && fds.len() == 2);
    drop((to, fds));
    assert!(is_closed(&from));
}

#[test]
fn data_sent_before_the_peer_closed_can_be_received() {
    for kind in KINDS {
        let (a, b) = pair(kind);
        let (from, to) = pipe().unwrap();
        put(&a, b"never read", &[]).unwrap();
        put(&b, b"last", &[to.as_fd()]).unwrap();
        drop((b, to));
        // The kernel reports ECONNRESET first.
        let got = get(&a, 1).unwrap();
        assert_eq!((got.len, got.fds.len()), (4, 1));
        drop(got);
        assert!(is_closed(&from));
        assert_eq!(get(&a, 1).unwrap().len, 0);
        // No SIGPIPE is raised, which would end this process.
        assert_eq!(put(&a, b"x", &NOTHING), Err(Errno::PIPE));
    }
}

#[test]
fn credentials_without_room_count_as_lost_descriptors() {
    let (a, b) = pair(SocketType::SEQPACKET);
    set_socket_passcred(&b, true).unwrap();
    put(&a, b"x", &[]).unwrap();
    assert!(get(&b, 0).unwrap().fds_lost);
    // Room that no credentials use does not let in a descriptor either.
    set_socket_passcred(&b, false).unwrap();
    let (from, to) = pipe().unwrap();
    put(&a, b"x", &[to.as_fd()]).unwrap();
    drop(to);
    let got = receive_from(b.as_fd(), &mut [0; 10], 0, RecvFlags::DONTWAIT).unwrap();
    assert!(got.fds_lost && got.sender.is_none() && is_closed(&from));
}
