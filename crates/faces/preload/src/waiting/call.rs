//! A call of the program that moves bytes.

use crate::process::{interrupted, thread};
use crate::state::socket::Socket;
use crate::state::sockets::number_in;
use crate::system::errno::{Errno, Result};
use crate::system::kernel;
use libc::c_int;
use std::time::{Duration, Instant};

/// A call that moves bytes over a socket, from its beginning to its end.
///
/// It ends at the latest when the socket's timeout has passed since it began to wait, however often it is woken. Most calls wait at most
/// once, and then most of them only look at the ring, or sleep in a call of the kernel that knows the time. So neither the clock is read
/// nor the kernel asked before this is needed.
pub struct Call {
    pub socket: &'static Socket,
    /// The number by which the call goes on. The program may have closed the one with which the call has begun.
    pub fd: c_int,
    /// The connection with which it has begun, and the error for a call that the program disconnects.
    connection: u64,
    gone: Errno,
    /// The option with the timeout.
    option: c_int,
    has_waited: bool,
    /// How many signal handlers had run in the thread before.
    handled: u32,
    /// It has moved bytes. Then a signal handler ends it, whatever the handler is: the kernel restarts only a call that has moved none.
    pub has_moved: bool,
    begun: Option<Instant>,
    end: Option<Option<Instant>>,
}

impl Call {
    /// Begins a call that receives.
    pub fn receiving(socket: &'static Socket, fd: c_int) -> Self {
        Self::begin(socket, fd, libc::SO_RCVTIMEO, Errno(libc::EPIPE))
    }

    /// Begins a call that sends.
    pub fn sending(socket: &'static Socket, fd: c_int) -> Self {
        Self::begin(socket, fd, libc::SO_SNDTIMEO, Errno(libc::ECONNRESET))
    }

    fn begin(socket: &'static Socket, fd: c_int, option: c_int, gone: Errno) -> Self {
        let connection = socket.connection();
        Self {
            socket,
            fd,
            connection,
            gone,
            option,
            has_waited: false,
            handled: thread::handled(),
            has_moved: false,
            begun: None,
            end: None,
        }
    }

    /// Returns whether the socket still has the connection with which the call has begun.
    pub fn has_connection(&self) -> bool {
        self.socket.connection() == self.connection
    }

    /// Returns the error for a call whose connection the program has ended.
    pub fn gone(&self) -> Errno {
        self.gone
    }

    /// Finds the number by which the call goes on after it has slept. Fails if there is none, or if the program, in this process or in
    /// a relative, has disconnected the socket meanwhile.
    pub fn go_on(&mut self) -> Result<()> {
        self.fd = number_in(self.socket, self.connection, self.fd, self.gone)?;
        Ok(())
    }

    /// Notes that the call waits now. Fails if it has waited before and its time has passed.
    pub fn waits(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.has_waited, true) {
            true => self.left().map(drop),
            false => Ok(()),
        }
    }

    /// Notes that the call sleeps now. Returns whether this is the first time, so that all of the time is left.
    pub fn sleeps(&mut self) -> bool {
        let is_first = self.begun.is_none();
        self.begun.get_or_insert_with(Instant::now);
        is_first
    }

    /// Returns the time that is left, or EAGAIN if it has passed.
    pub fn left(&mut self) -> Result<Option<Duration>> {
        let (socket, fd, option) = (self.socket, self.fd, self.option);
        let begun = &mut self.begun;
        let limit = || {
            let time = socket.timeout(option, || kernel::timeout(fd, option))?;
            begun.get_or_insert_with(Instant::now).checked_add(time)
        };
        let Some(end) = *self.end.get_or_insert_with(limit) else { return Ok(None) };
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(Errno(libc::EAGAIN)) } else { Ok(Some(left)) }
    }

    /// Decides what happens after a sleep: a signal handler ends the call, or does not, as in the kernel.
    pub fn woken<T>(&self, slept: Result<T>, has_limit: bool) -> Result<Option<T>> {
        match slept {
            Err(Errno(libc::EINTR)) if self.has_moved => Err(Errno(libc::EINTR)),
            Err(Errno(libc::EINTR)) => interrupted::interrupted(has_limit, self.handled).map(|()| None),
            slept => slept.map(Some),
        }
    }
}
