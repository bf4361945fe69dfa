//! Serving an NVMe controller: the main thread of an engine.

use super::{Failed, Server, Signals, Workers, ready};
use crate::attach::{EngineEnd, FromHolder, Gone};
use crate::disk::Disk;
use crate::holder::pci::VENDOR;
use crate::nvme::attachment::Attachment;
use crate::nvme::controller::{Controller, Parts};
use crate::nvme::{Stuck, Volume};
use crate::stats::Kind;
use crate::worker::Event;
use ginnel_nvme::identify::Properties;
use ginnel_nvme::log::Health;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::sockopt::socket_peercred;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, PoisonError};
use std::time::Instant;
use tracing::{error, info};

/// The largest number of messages of the holder that are handled before the other descriptors are looked at.
const BATCH: usize = 64;

/// The same, if the registers have changed. No honest VM sends so many at a time that the rest of them matters.
const LONG_BATCH: usize = 4096;

impl From<Stuck> for Failed {
    fn from(Stuck(why): Stuck) -> Self {
        Self::Stuck(why)
    }
}

impl Server {
    /// Serves the controller of a holder until it must stop; then finishes the requests that were begun, and returns.
    /// The end of the holder is an error: the VM has lost its disk.
    pub fn run_attached(&self, attachment: Attachment, signals: Signals<'_>) -> Result<(), Failed> {
        let Attachment { end, state, doorbells, vectors, kicks } = attachment;
        let pid = socket_peercred(&end).map_or(0, |peer| peer.pid.as_raw_nonzero().get().unsigned_abs());
        let broken = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?;
        let broken = Arc::new(broken);
        let admin = kicks[0].clone();
        let [disk] = &self.shared.disks[..] else {
            return Err(Failed::Config("an nvme device has one disk".to_owned()));
        };
        let parts = Parts {
            disk: disk.clone(),
            properties: self.properties(disk),
            state,
            doorbells,
            vectors,
            entries: self.shared.config.queue_size,
            kicks,
            broken: broken.clone(),
        };
        let mut controller = Controller::new(parts).map_err(Failed::Config)?;
        let mut workers = Workers(&self.shared);
        info!(pid, "attached to a holder");
        self.shared.front_end_info().holder = Some(pid);
        loop {
            let [stopped, hung_up, message, kicked, failed, event, wake] = ready([
                signals.stop,
                signals.hangup.as_fd(),
                end.as_fd(),
                admin.as_fd(),
                broken.as_fd(),
                self.events.as_fd(),
                self.shared.wake.as_fd(),
            ])?;
            if stopped {
                break;
            }
            if hung_up {
                signals.hung_up();
            }
            if event {
                match self.events.next() {
                    Some(Event::Failed) => return Err(Failed::Worker),
                    Some(Event::MemoryGone) => controller.queue_broken(&mut workers)?,
                    None => {}
                }
            }
            if failed {
                clear(&broken);
                controller.queue_broken(&mut workers)?;
            }
            if wake {
                if !self.shared.take_resized().is_empty() {
                    controller.resized(&mut workers)?;
                }
                let dumps =
                    std::mem::take(&mut *self.shared.dumps.lock().unwrap_or_else(PoisonError::into_inner));
                for answer in dumps {
                    // The operator may have given up.
                    let _ = answer.send(controller.dump());
                }
            }
            if message && let Err(gone) = handle_messages(&end, &mut controller, &mut workers)? {
                controller.pause(&mut workers)?;
                error!(pid, "the holder is given up: {gone}");
                return Err(Failed::Holder);
            }
            if kicked {
                clear(&admin);
                controller.serve(&mut workers)?;
            }
            self.note_controller(&controller);
        }
        controller.pause(&mut workers)?;
        info!(pid, "the volume ends; what was begun is done, and the holder keeps the device");
        self.shared.ownership.end();
        Ok(())
    }

    /// Notes what the statistics say about the VM.
    fn note_controller(&self, controller: &Controller) {
        let mut info = self.shared.front_end_info();
        info.rings = controller.queues().collect();
        if info.front_end.is_some() != controller.has_vm() {
            // Its process is the holder's to know.
            info.front_end = controller.has_vm().then(|| (0, Instant::now()));
            info.sessions += u64::from(controller.has_vm());
        }
    }

    /// Returns what the controller says about itself. The number of blocks is added when a driver asks.
    fn properties(&self, disk: &Disk) -> Properties {
        let config = &self.shared.config;
        let spec = &config.disks[0];
        Properties {
            vendor: [VENDOR; 2],
            serial: spec.serial.clone(),
            model: "Ginnel volume".to_owned(),
            firmware: env!("CARGO_PKG_VERSION").to_owned(),
            uuid: uuid(&config.name, &spec.serial),
            mdts: config.mdts(),
            doorbell_buffer: !config.are_doorbells_mapped(),
            write_cache: disk.write_cache,
            blocks: 0,
            block_exponent: disk.block_size.trailing_zeros() as u8,
            read_only: disk.read_only,
            deallocate: !disk.read_only && spec.discard,
            write_zeroes: !disk.read_only && spec.discard,
            // What was discarded reads as zeros in a file, and as anything on a block device.
            reads_zeros: false,
            granularity: 4096 / disk.block_size,
            optimal: 0,
        }
    }
}

/// Handles the messages of the holder that have arrived. The inner error says that the holder has gone.
///
/// What the registers ask for is read when the holder says that they have changed, and done when there is no other
/// message: they may be newer than that message, and need memory that the next message names.
fn handle_messages(
    end: &EngineEnd,
    controller: &mut Controller,
    workers: &mut Workers<'_>,
) -> Result<Result<(), Gone>, Failed> {
    let (mut handled, mut wanted) = (0, None);
    // An answer is one to all earlier messages too.
    let mut answer = 0;
    while handled < if wanted.is_some() { LONG_BATCH } else { BATCH } {
        handled += 1;
        let id = match end.receive(false) {
            Ok(Some(FromHolder::Control { id })) => {
                wanted = Some(controller.wanted());
                Some(id)
            }
            Ok(Some(message)) => controller.handle(message, workers)?,
            Ok(None) => break,
            Err(gone) => return Ok(Err(gone)),
        };
        answer = id.unwrap_or(0).max(answer);
    }
    if let Some(wanted) = wanted {
        controller.follow(wanted, workers)?;
    }
    Ok(if answer == 0 { Ok(()) } else { end.done(answer) })
}

/// Returns a UUID of which no two volumes of a guest have the same, as long as they have different names or serial
/// numbers. It is the same whenever and wherever the volume is served, so that a guest knows its disk again.
fn uuid(name: &str, serial: &str) -> [u8; 16] {
    // FNV-1a with 128 bits. A UUID of version 8 leaves it to its maker where the bits come from (RFC 9562, section 5.8).
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = (1 << 88) + 0x13b;
    let text = ["ginnel-volume", name, serial].join("\0");
    let hash = text.bytes().fold(BASIS, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME));
    let mut uuid = hash.to_be_bytes();
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

fn clear(eventfd: &OwnedFd) {
    // Nonblocking: another wake-up may have been taken together with this one.
    let _ = rustix::io::read(eventfd, &mut [0; 8]);
}

impl Volume for Workers<'_> {
    fn health(&self) -> Health {
        let operations = self.0.counters.operation_stats();
        let (read, write) = (&operations[Kind::Read as usize], &operations[Kind::Write as usize]);
        Health {
            read: read.bytes,
            written: write.bytes,
            reads: read.requests,
            writes: write.requests,
            errors: operations.iter().map(|operation| operation.errors).sum(),
            hours: self.0.started.elapsed().as_secs() / 3600,
            became_read_only: false,
        }
    }
}
