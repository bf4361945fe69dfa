//! Listening sockets that rest for a while, because nothing can be accepted now. Otherwise the connection that waits there would wake
//! the event loop at once, again and again.

use super::server::Server;
use super::token::Token;
use crate::poller::Interest;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};
use tracing::warn;

/// How long a socket rests.
const PAUSE: Duration = Duration::from_secs(1);

/// The sockets that rest, and until when, the earliest first.
#[derive(Debug, Default)]
pub struct Pauses(Vec<(Token, Instant)>);

impl Server {
    /// Lets a listening socket rest, where accepting has failed.
    pub(super) fn pause(&mut self, token: Token, whose: &str, why: Errno) {
        warn!(errno = %why, "{whose} cannot be accepted, and waits; raise LimitNOFILE= if this goes on");
        if self.set_listening(token, false) {
            self.pauses.0.push((token, Instant::now() + PAUSE));
        }
    }

    /// Accepts again at the sockets that have rested.
    pub(super) fn end_pauses(&mut self) {
        while let Some((token, _)) = self.pauses.0.first().filter(|(_, until)| *until <= Instant::now()) {
            let token = *token;
            self.set_listening(token, true);
            self.pauses.0.remove(0);
        }
    }

    /// Returns the time until [`Server::end_pauses`] has something to do.
    pub(super) fn until_pause_ends(&self) -> Option<Duration> {
        self.pauses.0.first().map(|(_, until)| until.saturating_duration_since(Instant::now()))
    }

    fn set_listening(&self, token: Token, listens: bool) -> bool {
        let listener: Option<BorrowedFd<'_>> = match token {
            Token::Listener => self.clients.listener(),
            Token::VmListener(member) => self.vms.get(&member).and_then(|vm| vm.listener()).map(AsFd::as_fd),
            _ => None,
        };
        let interest = Interest { read: listens, write: false };
        listener.is_some_and(|listener| self.poller.modify(listener, token.into(), interest).is_ok())
    }
}
