//! SIGHUP, which asks a daemon to read its configuration again. The kernel also sends it to a program whose terminal has gone; that is a
//! request to end.

use std::io::{self, IsTerminal, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// The SIGHUPs of this process.
#[derive(Debug)]
pub struct Hangup {
    /// A byte comes for each signal.
    signals: UnixStream,
    had_terminal: bool,
}

impl Hangup {
    /// Registers the signal. From now on it does not end the process by itself.
    pub fn register() -> io::Result<Self> {
        let (signals, write) = UnixStream::pair()?;
        signals.set_nonblocking(true)?;
        signal_hook::low_level::pipe::register(signal_hook::consts::SIGHUP, write)?;
        Ok(Self { signals, had_terminal: io::stderr().is_terminal() })
    }

    /// Takes the signals that have come. Returns false if the process must end, because its terminal has gone.
    pub fn take(&self) -> bool {
        let mut bytes = [0; 64];
        while (&self.signals).read(&mut bytes).is_ok_and(|n| n == bytes.len()) {}
        // The kernel refuses every question about a terminal that has gone.
        !self.had_terminal || io::stderr().is_terminal()
    }
}

impl AsFd for Hangup {
    /// Returns a descriptor that is readable when a signal has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }
}
