//! The segments whose files are being made.

use super::config;
use ginnel_broker::broker::ClientId;
use ginnel_broker::declared::SegmentSpec;
use ginnel_layout::Name;
use std::path::Path;

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

/// The segments whose files are being made.
#[derive(Debug, Default)]
pub(super) struct PendingSegments(Vec<PendingSegment>);

impl PendingSegments {
    /// Returns whether the file of a segment of this name is being made.
    pub fn contains(&self, name: &Name) -> bool {
        self.0.iter().any(|pending| pending.segment.name == *name)
    }

    /// Adds a segment.
    pub fn add(&mut self, pending: PendingSegment) {
        self.0.push(pending);
    }

    /// Removes and returns the segment with this file.
    pub fn take(&mut self, file: &Path) -> Option<PendingSegment> {
        let at = self.0.iter().position(|pending| pending.segment.path == file)?;
        Some(self.0.remove(at))
    }
}
