//! One direction of a stream, for several threads.
//!
//! Nobody keeps its lock while sleeping, so that a thread that polls, shuts down or closes never waits for one that receives.

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

/// Half of a stream.
pub trait Half {
    /// Operations look as long as this, then say [`Error::TimedOut`].
    fn looks(&mut self, time: Duration);
    /// Operations that would have to wait say [`Error::WouldBlock`], and leave the half armed.
    fn arms(&mut self);
    /// What becomes readable then. `None` if nothing can, in a VM without interrupts.
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

/// How an operation is tried.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Once.
    Look,
    /// For a moment, since a peer that is at work answers soon.
    Spin,
    /// Once, and the half is armed if it has to wait.
    Arm,
}

/// Why an operation was not done.
#[derive(Debug)]
pub enum Failed {
    /// It has to wait.
    Later,
    /// This side has given up the direction.
    Shut,
    /// The channel says so.
    Channel(Error),
    /// The system says so.
    System(c_int),
}

/// One direction of a stream.
pub struct Line<H> {
    /// None once this side has given it up.
    half: Mutex<Option<H>>,
    pub waiters: Waiters,
}

impl<H: Half> Line<H> {
    pub fn new(half: H) -> Self {
        Self { half: Mutex::new(Some(half)), waiters: Waiters::default() }
    }

    /// Gives the direction up, and wakes those who wait for it.
    pub fn shut(&self) {
        let half = locked(&self.half).take();
        self.waiters.ring(None);
        drop(half);
    }

    /// Does something with the half that does not wait, if it is there.
    pub fn with(&self, act: impl FnOnce(&mut H)) {
        if let Some(half) = &mut *locked(&self.half) {
            act(half);
        }
        self.waiters.ring(None);
    }

    /// Tries an operation. `wake` is told what becomes readable if the half was armed.
    pub fn attempt<T>(
        &self,
        how: How,
        mut wake: Option<&mut Wake>,
        operation: impl FnOnce(&mut H) -> Result<T, Error>,
    ) -> Result<T, Failed> {
        let mut half = locked(&self.half);
        let there = half.as_mut().ok_or(Failed::Shut)?;
        match how {
            // The half stays armed for those who sleep at it.
            How::Look if self.waiters.are_some() => there.arms(),
            How::Look => there.looks(Duration::ZERO),
            How::Spin => there.looks(WaitMode::DEFAULT_BUDGET),
            How::Arm => there.arms(),
        }
        match operation(there) {
            Ok(done) => {
                drop(half);
                // There may be more, and the readiness of the half is used up.
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

    /// Does an operation. If it has to wait, it does so, or says [`Failed::Later`].
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
