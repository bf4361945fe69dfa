//! Reading the configuration again while the daemon serves (SIGHUP).
//!
//! A thread reads and checks the file, because names of users may have to be looked up elsewhere, and QEMU be asked for its version. A file
//! with a mistake changes nothing.

use super::accepted::{self, Chosen};
use super::server::Server;
use super::token::Token;
use crate::poller::{Interest, Poller};
use ginnel_config::Problem;
use rustix::event::{EventfdFlags, eventfd};
use sd_notify::NotifyState;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use tracing::{error, info};

/// The configuration, or all mistakes of the file.
type Read = Result<Chosen, Vec<Problem>>;

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
    pub fn new(poller: &Poller) -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let done = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        poller.add(&done, Token::Reread.into(), Interest::READ)?;
        Ok(Self { sender, receiver, done: Arc::new(done), reads: false, again: false })
    }

    fn begin(&mut self, file: PathBuf) -> io::Result<()> {
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
}

impl Server {
    /// Begins to read the configuration again.
    pub(super) fn reread(&mut self) {
        if self.rereading.reads {
            self.rereading.again = true;
            return;
        }
        info!(config = %self.config.file.display(), "SIGHUP: the configuration is read again");
        let now = NotifyState::monotonic_usec_now().ok();
        let states: Vec<_> = [NotifyState::Reloading].into_iter().chain(now).collect();
        let _ = sd_notify::notify(false, &states);
        if let Err(error) = self.rereading.begin(self.config.file.clone()) {
            error!(%error, "no thread can be started to read the configuration: nothing was reloaded; reload again");
            self.tell_reloaded("serving");
        }
    }

    /// Obeys the configuration that has been read.
    pub(super) fn reread_done(&mut self) {
        let _ = rustix::io::read(&self.rereading.done, &mut [0u8; 8]);
        while let Ok(read) = self.rereading.receiver.try_recv() {
            self.rereading.reads = false;
            match read {
                Ok(chosen) => {
                    let status = self.reload(chosen.config);
                    self.tell_reloaded(&status);
                }
                Err(problems) => {
                    for problem in &problems {
                        error!("{problem}; nothing was reloaded");
                    }
                    let mistake = problems.first().map(ToString::to_string).unwrap_or_default();
                    self.tell_reloaded(&mistake);
                    self.config.mistake = Some(mistake);
                }
            }
            if std::mem::take(&mut self.rereading.again) {
                self.reread();
            }
        }
    }

    fn tell_reloaded(&self, status: &str) {
        let _ = sd_notify::notify(false, &[NotifyState::Ready, NotifyState::Status(status)]);
    }
}
