//! Files of segments that are made while the daemon serves.
//!
//! A file gets all its memory when it is made, and zeroing gigabytes takes seconds. For a segment that is added at run time, a
//! thread does this. The daemon declares the segment when the file is there, and then answers the client that asked for it. If
//! the daemon ends before that, it leaves a file under a temporary name, which the next attempt removes.

use super::server::{Server, Token};
use super::{config, segments};
use crate::poller::{Interest, Poller};
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

/// A segment that a client has asked for.
#[derive(Debug)]
pub(super) struct PendingSegment {
    pub client: ClientId,
    pub request: u32,
    pub name: String,
    pub spec: SegmentSpec,
    pub segment: config::Segment,
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
            let result =
                made.map_err(Into::into).and_then(|_| self.segment_declare(&pending.name, pending.spec));
            // If another program has made the file meanwhile, it stays.
            if result.is_err() && self.segments.forget_made(&path) {
                self.segments.discard(&path);
            }
            self.answer_admin(pending.client, pending.request, result);
        }
    }
}
