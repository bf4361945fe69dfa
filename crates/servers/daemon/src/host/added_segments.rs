//! Segments that are added while the daemon serves. A file gets all its memory when it is made, and zeroing gigabytes takes seconds, so the
//! daemon serves others meanwhile. It declares the segment when the file is there, and then answers the client that asked for it, if
//! there is one.

use super::pending_segments::{PendingSegment, WantedBy};
use super::server::Server;
use super::{config, segments};
use ginnel_config::{Bytes, Problem};
use std::time::Instant;
use tracing::{error, info};

impl Server {
    /// Prepares the making of a segment's file: nothing of an earlier segment is in its place after that. Returns whether there is such a
    /// file already.
    pub(super) fn prepare_making(&mut self, segment: &config::Segment, place: &str) -> Result<bool, Problem> {
        self.segments.check_removed(&segment.path, place)?;
        self.segments.prepare(segment, place)?;
        self.segments.remove_leftover(segment, place)?;
        self.segments.check_removed(&segment.path, place)?;
        Ok(segments::is_there(segment))
    }

    /// Lets a process make the file of a segment.
    pub(super) fn begin_making(&mut self, pending: PendingSegment, place: &str) -> Result<(), Problem> {
        self.segments.begin_making(&pending.segment, place)?;
        self.pending_segments.add(pending);
        Ok(())
    }

    /// Declares the segments whose files have been made, and answers the clients that asked for them.
    pub(super) fn segments_made(&mut self) {
        for (path, made) in self.segments.take_made(|_| true) {
            // A segment that is out of service may have waited for its file.
            self.retry_at = Instant::now();
            let Some(PendingSegment { segment, wanted_by }) = self.pending_segments.take(&path) else {
                continue;
            };
            if made.is_ok() {
                info!(segment = %segment.name, path = %path.display(), size = %Bytes(segment.size), "segment created");
            }
            let declared = match wanted_by {
                WantedBy::Client { client, request, name, spec } => {
                    let place = format!("segment {name}");
                    let made = made.map_err(|problem| Problem { place, ..problem });
                    let result = made.map_err(Into::into).and_then(|()| self.segment_declare(&name, *spec));
                    let declared = result.is_ok();
                    self.answer_admin(client, request, result);
                    declared
                }
                // Why there is no file is found and told once more.
                WantedBy::Configuration => self
                    .declare_made(&segment)
                    .inspect_err(|error| {
                        error!(segment = %segment.name, error = format!("{error:#}"), "segment ignored");
                    })
                    .is_ok(),
            };
            if !declared && self.segments.forget_made(&path) {
                self.segments.discard(&path);
            }
        }
    }

    /// Makes the file of a segment of the configuration, if there is none, and then declares the segment.
    pub(super) fn make_segment(&mut self, segment: &config::Segment) -> anyhow::Result<()> {
        let place = self.place_of("segment", &segment.name);
        if self.prepare_making(segment, &place)? {
            return self.declare_made(segment);
        }
        let pending = PendingSegment { segment: segment.clone(), wanted_by: WantedBy::Configuration };
        Ok(self.begin_making(pending, &place)?)
    }

    /// Declares a segment of the configuration, and tells its members. If its file cannot be used, it is out of service.
    fn declare_made(&mut self, segment: &config::Segment) -> anyhow::Result<()> {
        let place = self.place_of("segment", &segment.name);
        self.declare_segment(segment, None, &place, true)?;
        self.tell_members(&segment.name);
        Ok(())
    }
}
