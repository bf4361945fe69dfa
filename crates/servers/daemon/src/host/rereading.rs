//! Reading the configuration again while the daemon serves (SIGHUP).
//!
//! A thread reads and checks the file, because names of users may have to be looked up elsewhere, and QEMU be asked for its version. A file
//! with a mistake changes nothing.

use super::accepted::{self, Chosen};
use super::token::Token;
use crate::poller::{Interest, Poller};
use ginnel_config::Problem;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

/// The configuration, or all mistakes of the file.
pub(super) type Read = Result<Chosen, Vec<Problem>>;

/// The configuration that is being read.
#[derive(Debug)]
pub(super) struct Rereading {
    sender: Sender<Read>,
    receiver: Receiver<Read>,
    /// An eventfd that is readable when the file has been read.
    done: Arc<OwnedFd>,
    reads: bool,
    /// The file may have changed since the thread began.
    again: bool,
}

impl Rereading {
    /// Starts without a file. That one has been read is an event of this poller.
    pub fn new(poller: &Poller) -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let done = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        poller.add(&done, Token::Reread.into(), Interest::READ)?;
        Ok(Self { sender, receiver, done: Arc::new(done), reads: false, again: false })
    }

    /// Returns whether the file may be read now. If it is being read already, it is read once more after that.
    pub fn may_begin(&mut self) -> bool {
        self.again = self.reads;
        !self.reads
    }

    /// Starts to read the file.
    pub fn begin(&mut self, file: PathBuf) -> io::Result<()> {
        let (sender, done) = (self.sender.clone(), self.done.clone());
        let read = move || {
            // The daemon holds the other end for as long as it lives, and reads the eventfd.
            let _ = sender.send(accepted::again(&file));
            let _ = rustix::io::write(&done, &1u64.to_ne_bytes());
        };
        std::thread::Builder::new().name("configuration".into()).spawn(read)?;
        self.reads = true;
        Ok(())
    }

    /// Takes the event that the file has been read.
    pub fn hear(&self) {
        let _ = rustix::io::read(&self.done, &mut [0u8; 8]);
    }

    /// Returns what was read, once.
    pub fn take(&mut self) -> Option<Read> {
        let read = self.receiver.try_recv().ok()?;
        self.reads = false;
        Some(read)
    }

    /// Returns whether the file is to be read once more, once.
    pub fn take_again(&mut self) -> bool {
        std::mem::take(&mut self.again)
    }
}
