//! Listening sockets that rest for a while, because nothing can be accepted now. Otherwise the connection that waits there would wake
//! the event loop at once, again and again.

use super::token::Token;
use std::time::{Duration, Instant};

/// How long a socket rests.
const PAUSE: Duration = Duration::from_secs(1);

/// The sockets that rest, and until when, the earliest first.
#[derive(Debug, Default)]
pub struct Pauses(Vec<(Token, Instant)>);

impl Pauses {
    /// Notes that a socket rests from now on.
    pub fn begin(&mut self, token: Token) {
        self.0.push((token, Instant::now() + PAUSE));
    }

    /// Removes and returns the next socket that has rested.
    pub fn take_over(&mut self) -> Option<Token> {
        let (token, _) = *self.0.first().filter(|(_, until)| *until <= Instant::now())?;
        self.0.remove(0);
        Some(token)
    }

    /// Returns the time until [`Pauses::take_over`] has something to return.
    pub fn until_next(&self) -> Option<Duration> {
        self.0.first().map(|(_, until)| until.saturating_duration_since(Instant::now()))
    }
}
