//! A process that has reached its limit of open files. This is a test program of its own because the limit applies to the
//! process.

use ginnel_fdpass::{RecvFlags, SendFlags, receive, send};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::fd::{AsFd, AsRawFd};

#[test]
fn descriptors_beyond_the_limit_are_all_refused_and_closed() {
    for kind in [SocketType::STREAM, SocketType::SEQPACKET] {
        let (a, b) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let (from, to) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        for room in [0, 1, 2] {
            let free = rustix::io::dup(&a).unwrap().as_raw_fd() as u64;
            send(a.as_fd(), b"x", &[&to, &to, &to], SendFlags::empty()).unwrap();
            let old = getrlimit(Resource::Nofile);
            setrlimit(Resource::Nofile, Rlimit { current: Some(free + room), ..old }).unwrap();
            let got = receive(b.as_fd(), &mut [0; 10], 3, RecvFlags::DONTWAIT);
            setrlimit(Resource::Nofile, old).unwrap();
            let got = got.unwrap();
            assert_eq!((got.len, got.fds.len(), got.fds_lost), (1, 0, true), "room for {room}");
        }
        drop(to);
        assert_eq!(rustix::io::read(&from, &mut [0; 1]), Ok(0), "a descriptor stayed open");
    }
}
