//! One direction of a stream, shared by several threads.
//!
//! No thread holds the lock while it sleeps, so a thread that polls, shuts down or closes never waits for one that receives.

use super::waiting::{Waiters, Wake};
use ginnel::{Error, StreamReceiver, StreamSender, WaitMode};
use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One half of a stream: the sender or the receiver.
pub trait Half {
    /// Sets the half so that its operations poll for this time, and then fail with [`Error::TimedOut`].
    fn looks(&mut self, time: Duration);
    /// Sets the half so that operations that would have to wait fail with [`Error::WouldBlock`], and leave the half armed.
    fn arms(&mut self);
    /// Returns the descriptor that becomes readable when an armed half is ready, or `None` in a VM without interrupts, where there is
    /// none.
    fn descriptor(&mut self) -> Result<Option<RawFd>, Error>;
}

macro_rules! half {
    ($($half:ty),*) => {$(
        impl Half for $half {
            fn looks(&mut self, time: Duration) {
                self.set_nonblocking(false);
                self.set_mode(WaitMode::Poll);
                self.set_timeout(Some(time));
            }
            fn arms(&mut self) {
                self.set_nonblocking(true);
            }
            fn descriptor(&mut self) -> Result<Option<RawFd>, Error> {
                match self.poll_fd() {
                    Ok(fd) => Ok(Some(fd.as_raw_fd())),
                    Err(Error::System { source, .. }) if source.kind() == io::ErrorKind::Unsupported => Ok(None),
                    Err(error) => Err(error),
                }
            }
        }
    )*};
}
half!(StreamSender, StreamReceiver);

/// How to try an operation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Try once.
    Look,
    /// Try for a moment, because an active peer answers soon.
    Spin,
    /// Try once, and arm the half if the operation has to wait.
    Arm,
}

/// The reason why an operation was not executed.
#[derive(Debug)]
pub enum Failed {
    /// The operation has to wait.
    Later,
    /// This side has shut down the direction.
    Shut,
    /// The channel reports an error.
    Channel(Error),
    /// A system call failed with this errno value.
    System(c_int),
}

/// One direction of a stream.
pub struct Direction<H> {
    /// `None` once this side has shut down the direction.
    half: Mutex<Option<H>>,
    pub waiters: Waiters,
}

impl<H: Half> Direction<H> {
    pub fn new(half: H) -> Self {
        Self { half: Mutex::new(Some(half)), waiters: Waiters::default() }
    }

    /// Shuts down the direction, and wakes the threads that wait for it.
    pub fn shut(&self) {
        let half = locked(&self.half).take();
        self.waiters.ring(None);
        drop(half);
    }

    /// Calls `act` with the half, unless the direction is shut down. `act` must not wait.
    pub fn with(&self, act: impl FnOnce(&mut H)) {
        if let Some(half) = &mut *locked(&self.half) {
            act(half);
        }
        self.waiters.ring(None);
    }

    /// Tries an operation. If the half was armed, adds the descriptor that becomes readable to `wake`.
    pub fn attempt<T>(
        &self,
        how: How,
        mut wake: Option<&mut Wake>,
        operation: impl FnOnce(&mut H) -> Result<T, Error>,
    ) -> Result<T, Failed> {
        let mut half = locked(&self.half);
        let there = half.as_mut().ok_or(Failed::Shut)?;
        match how {
            // The half stays armed for the threads that sleep.
            How::Look if self.waiters.are_some() => there.arms(),
            How::Look => there.looks(Duration::ZERO),
            How::Spin => there.looks(WaitMode::DEFAULT_BUDGET),
            How::Arm => there.arms(),
        }
        match operation(there) {
            Ok(done) => {
                drop(half);
                // There may be more, and this operation has consumed the readiness for which other threads sleep.
                self.waiters.ring(wake.as_deref());
                Ok(done)
            }
            Err(Error::WouldBlock | Error::TimedOut) => {
                if let Some(wake) = &mut wake {
                    wake.add(there.descriptor().map_err(Failed::Channel)?);
                }
                Err(Failed::Later)
            }
            Err(error) => {
                drop(half);
                self.waiters.ring(wake.as_deref());
                Err(Failed::Channel(error))
            }
        }
    }

    /// Executes an operation. If it would have to wait, waits (`waits`) or fails with [`Failed::Later`].
    pub fn run<T>(
        &self,
        waits: bool,
        mut operation: impl FnMut(&mut H) -> Result<T, Error>,
    ) -> Result<T, Failed> {
        let how = if waits { How::Spin } else { How::Look };
        loop {
            match self.attempt(how, None, &mut operation) {
                Err(Failed::Later) if waits => {}
                done => return done,
            }
            let mut wake = Wake::new().map_err(Failed::System)?;
            let _entered = self.waiters.enter(&wake);
            match self.attempt(How::Arm, Some(&mut wake), &mut operation) {
                Err(Failed::Later) => {}
                done => return done,
            }
            wake.sleep(None).map_err(Failed::System)?;
        }
    }
}
