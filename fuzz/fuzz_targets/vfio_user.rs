//! What a client says to a vfio-user server, in any pieces, with descriptors, over a real socket. The server never panics and never hangs,
//! keeps a bounded number of bytes, and finds the messages again that are well-formed in themselves.
#![no_main]

use ginnel_fdpass::{self as fdpass, SendFlags};
use ginnel_fuzz::vfio_user::{CUT, DEAF, NO_REPLY, RAW, Step, WRONG_SIZE};
use ginnel_layout::vfio_user::{Command, Header};
use ginnel_vfio_user::{Errno, MAX_DATA, Request, Server};
use libfuzzer_sys::fuzz_target;
use rustix::event::{EventfdFlags, eventfd};
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use zerocopy::{FromBytes, IntoBytes};

fuzz_target!(|input: &[u8]| {
    let (client, server) = UnixStream::pair().unwrap();
    client.set_nonblocking(true).unwrap();
    let mut server = Server::new(server).unwrap();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let mut rest = input;
    while let Ok((step, after)) = Step::read_from_prefix(rest) {
        let (body, after) = after.split_at(usize::from(u16::from_le_bytes(step.len)).min(after.len()));
        rest = after;
        let fds: Vec<BorrowedFd<'_>> = vec![event.as_fd(); usize::from(step.flags & 15) * 2];
        let wrong = if step.flags & WRONG_SIZE != 0 { 7 } else { 0 };
        let flags = if step.flags & NO_REPLY != 0 { Header::NO_REPLY } else { 0 };
        let size = (size_of::<Header>() + body.len()) as u32 - wrong;
        let header = Header { id: 7, command: Command(step.command.into()), size, flags, error: 0 };
        let bytes = if step.command == RAW { body.to_vec() } else { [header.as_bytes(), body].concat() };
        let (first, second) =
            bytes.split_at(if step.flags & CUT != 0 { bytes.len() / 2 } else { bytes.len() });
        for (piece, fds) in [(first, &fds[..]), (second, &[])] {
            if !piece.is_empty() && fdpass::send_all(client.as_fd(), piece, fds, SendFlags::DONTWAIT).is_err()
            {
                return;
            }
            if !serve(&mut server) {
                return;
            }
        }
        if step.flags & DEAF == 0 {
            while (&client).read(&mut [0; 4096]).is_ok_and(|n| n > 0) {}
        }
    }
});

/// Handles what has arrived. Returns whether the connection goes on.
fn serve(server: &mut Server) -> bool {
    loop {
        let mut message = match server.receive() {
            Ok(Some(message)) => message,
            Ok(None) => return server.flush().is_ok(),
            Err(_) => return false,
        };
        let to = message.reply_to();
        match message.request() {
            Ok(Request::Read { access }) => {
                assert!((1..=MAX_DATA).contains(&(access.count as usize)));
                server.reply(to, &vec![0; access.count as usize], None);
            }
            Ok(Request::Write { access, data }) => assert_eq!(data.len(), access.count as usize),
            Ok(Request::Map { address, size, offset, .. }) => {
                assert!(
                    size > 0
                        && address.checked_add(size - 1).is_some()
                        && offset.checked_add(size - 1).is_some()
                );
                server.reply(to, &[], None);
            }
            Ok(Request::Unmap { message, first, last }) => {
                assert!(first <= last);
                server.reply(to, &Request::unmapped(message), None);
            }
            Ok(_) => server.reply(to, &[], None),
            Err(Errno::MSGSIZE | Errno::MFILE | Errno::INVAL | Errno::OPNOTSUPP | Errno::PROTONOSUPPORT) => {
                server.fail(to, Errno::INVAL);
            }
            Err(other) => panic!("{other}"),
        }
        if server.flush().is_err() {
            return false;
        }
    }
}
