//! Files of segments that are made while the daemon serves.
//!
//! A file gets all its memory when it is made, and zeroing gigabytes takes seconds. For a segment that is added at run time, a
//! thread does this. The daemon declares the segment when the file is there, and then answers the client that asked for it, if
//! there is one. If the daemon ends before that, it leaves a file under a temporary name, which the next attempt removes.

use super::server::{Server, Token};
use super::{config, segments};
use crate::poller::{Interest, Poller};
use anyhow::Context;
use ginnel_broker::broker::ClientId;
use ginnel_broker::declared::SegmentSpec;
use ginnel_config::Problem;
use ginnel_layout::Name;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use tracing::error;

/// A segment whose file is to be made.
#[derive(Debug)]
pub(super) struct PendingSegment {
    pub segment: config::Segment,
    pub wanted_by: WantedBy,
}

/// Who wants a segment.
#[derive(Debug)]
pub(super) enum WantedBy {
    /// A client, with this request.
    Client { client: ClientId, request: u32, name: String, spec: Box<SegmentSpec> },
    /// The configuration, which was read again.
    Configuration,
}

/// The request, and whether its file was made (true) or existed already; or why there is none.
type Made = (PendingSegment, Result<bool, Problem>);

/// The files that threads are making.
#[derive(Debug)]
pub(super) struct Making {
    names: BTreeSet<Name>,
    sender: Sender<Made>,
    receiver: Receiver<Made>,
    /// An eventfd that is readable when a file has been made.
    done: Arc<OwnedFd>,
}

impl Making {
    pub fn new(poller: &Poller) -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let done = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        poller.add(&done, Token::Made.into(), Interest::READ)?;
        Ok(Self { names: BTreeSet::new(), sender, receiver, done: Arc::new(done) })
    }

    /// Returns whether the file of a segment of this name is being made.
    pub fn contains(&self, name: &Name) -> bool {
        self.names.contains(name)
    }

    /// Starts a thread that makes the file of a segment.
    pub fn begin(&mut self, pending: PendingSegment, place: String) -> io::Result<()> {
        let (sender, done, name) = (self.sender.clone(), self.done.clone(), pending.segment.name);
        let make = move || {
            let made = segments::make(&pending.segment, &place);
            // The daemon holds the other end for as long as it lives, and reads the eventfd.
            let _ = sender.send((pending, made));
            let _ = rustix::io::write(&done, &1u64.to_ne_bytes());
        };
        std::thread::Builder::new().name("segment".into()).spawn(make)?;
        self.names.insert(name);
        Ok(())
    }

    fn next(&mut self) -> Option<Made> {
        let made = self.receiver.try_recv().ok()?;
        self.names.remove(&made.0.segment.name);
        Some(made)
    }
}

impl Server {
    /// Declares the segments whose files have been made, and answers the clients that asked for them.
    pub(super) fn segments_made(&mut self) {
        let _ = rustix::io::read(&self.making.done, &mut [0u8; 8]);
        while let Some((pending, made)) = self.making.next() {
            let path = pending.segment.path.clone();
            if let Ok(true) = made {
                self.segments.was_made(&path);
            }
            // If another program has made the file meanwhile, it stays.
            let discard = |server: &mut Self| {
                if server.segments.forget_made(&path) {
                    server.segments.discard(&path);
                }
            };
            match pending.wanted_by {
                WantedBy::Client { client, request, name, spec } => {
                    let result = made.map_err(Into::into).and_then(|_| self.segment_declare(&name, *spec));
                    if result.is_err() {
                        discard(self);
                    }
                    self.answer_admin(client, request, result);
                }
                // Why there is no file is found and told once more.
                WantedBy::Configuration => {
                    if let Err(error) = self.declare_made(&pending.segment) {
                        error!(segment = %pending.segment.name, error = format!("{error:#}"), "segment ignored");
                        discard(self);
                    }
                }
            }
        }
    }

    /// Makes the file of a segment of the configuration, if there is none, and then declares the segment.
    pub(super) fn make_segment(&mut self, segment: &config::Segment) -> anyhow::Result<()> {
        let place = self.place_of("segment", &segment.name);
        self.segments.prepare(segment, &place)?;
        if segment.path.exists() {
            return self.declare_made(segment);
        }
        let pending = PendingSegment { segment: segment.clone(), wanted_by: WantedBy::Configuration };
        self.making.begin(pending, place).context("no thread can be started; send SIGHUP again")
    }

    /// Declares a segment of the configuration, and tells its members. If its file cannot be used, it is out of service.
    fn declare_made(&mut self, segment: &config::Segment) -> anyhow::Result<()> {
        let place = self.place_of("segment", &segment.name);
        self.declare_segment(segment, None, &place, true)?;
        self.tell_members(&segment.name);
        Ok(())
    }
}
