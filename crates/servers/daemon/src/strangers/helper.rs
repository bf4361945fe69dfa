//! The process that takes descriptors of one user out of the queues of its connections, examines them, and closes them. Each of
//! these calls may block for ever. Then the daemon kills this process, and does not wait for it.

use super::{ANSWER, Answer, Found, REQUEST, Request, Task, facts, loan};
use crate::interrupt::interrupted;
use crate::spawned::end_with_parent;
use ginnel_fdpass::{MAX_FDS, RecvFlags, SendFlags, receive, receive_from, send};
use ginnel_layout::wire::{self, MAX_PACKET, SocketReport};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use zerocopy::{FromBytes, FromZeros};

/// Arguments of `ginneld helper`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The user whose descriptors it examines, shown in the list of processes. Standard input is the socket to the daemon.
    #[arg(long)]
    pub user: u32,
}

/// Serves until the daemon closes the socket.
pub fn run(_: Args) -> anyhow::Result<()> {
    end_with_parent()?;
    crate::keeper::raise_open_files();
    let daemon = io::stdin();
    let mut packet = vec![0; MAX_PACKET];
    let mut request = [0; REQUEST];
    loop {
        let got = receive(daemon.as_fd(), &mut request, 1, RecvFlags::empty())?;
        if got.len == 0 {
            return Ok(());
        }
        let (Ok(Request { serial, task }), Some(connection)) =
            (Request::read_from_bytes(&request[..got.len]), got.fds.into_iter().next())
        else {
            anyhow::bail!("the daemon has sent something else than a request");
        };
        let (report, mut fds) = take(&connection, &mut packet);
        // From now on only the daemon decides when the connection ends.
        drop(connection);
        let is_one = fds.len() == 1;
        let rest = loan::open(&mut fds);
        let found = match &fds[..] {
            _ if task != Task::EXAMINE => Found::Nothing,
            [socket] if is_one => facts::read(report, socket).map_or_else(Found::Stays, Found::Facts),
            _ => Found::NotOne,
        };
        let answer: [u8; ANSWER] = zerocopy::transmute!(Answer::new(serial, report, found));
        if send::<OwnedFd>(daemon.as_fd(), &answer, &[], SendFlags::empty()).is_err() {
            return Ok(()); // The daemon has gone.
        }
        interrupted(|| drop(fds));
        interrupted(|| drop(rest));
    }
}

/// Takes the packet that the daemon has seen out of a connection's queue. Returns the report in it, and its descriptors.
fn take(connection: &OwnedFd, buffer: &mut [u8]) -> (SocketReport, Vec<OwnedFd>) {
    let flags = RecvFlags::DONTWAIT;
    let got = interrupted(|| receive_from(connection.as_fd(), buffer, MAX_FDS, flags));
    let Ok(got) = got else { return (SocketReport::new_zeroed(), Vec::new()) };
    let body = wire::split(&buffer[..got.len.min(buffer.len())]);
    let report = body.and_then(|(_, body)| wire::body(body));
    (report.unwrap_or_else(SocketReport::new_zeroed), got.fds)
}
