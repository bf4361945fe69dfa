//! NVMe devices that the volume drives itself, through VFIO (`backend = "vfio"`).
//!
//! Each worker has a pair of queues of each device, in memory of its own, and the device reads and writes the guest's memory: there is
//! no system call on the way, and no interrupt. A worker polls while it has commands under way, and sleeps as it usually does when it
//! has none.
//!
//! A device that does not answer ends the process. That is the way out of every failure of a process here: the kernel takes the device's
//! access to memory away and resets it, and a successor begins anew, with the requests that the front end has kept.
#![allow(unsafe_code)] // A pair of queues is dropped by hand, or not at all.

mod addresses;
mod controller;
mod dma;
mod namespace;
mod pair;
mod prps;
mod registers;

use super::commands::Flight;
use super::{Failure, Op};
use controller::Controller;
use dma::Attached;
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_layout::nvme::Opcode;
use ginnel_nvme::Corrupt;
use ginnel_shmem::Mapping;
pub use namespace::{Controllers, NvmeRange};
use pair::Pair;
use prps::Prps;
use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a command may take. Linux gives them 30 seconds too.
const TOO_LONG: u32 = 30;

/// The interval at which it is looked which commands have not ended.
const LOOK: Duration = Duration::from_secs(1);

/// A worker looks at the clock when it has polled so often.
const POLLS: u32 = 1 << 12;

/// The owner of an identifier that no command has.
const NOBODY: (usize, bool, u32) = (usize::MAX, false, 0);

/// A worker's way to one controller.
struct Way {
    controller: Arc<Controller>,
    /// Not dropped while commands are under way: the device still uses its memory.
    pair: ManuallyDrop<Pair>,
    /// The operations on this device, by their numbers. (Their memory has other addresses for another device.)
    flights: Vec<Flight<Prps>>,
    /// For each command under way, by its identifier: the operation, whether it reads, and in which interval it was sent.
    owners: Vec<(usize, bool, u32)>,
    /// Operations whose next command finds no room.
    waiting: VecDeque<usize>,
    /// The guest memory that the device can reach for this worker, with that of the latest queue at the end.
    attached: Vec<Arc<Attached>>,
    polls: u32,
    interval: u32,
    looked: Instant,
}

/// A worker's way to all disks that this process drives.
pub(super) struct Vfio {
    ways: Vec<Way>,
    /// For each disk of the volume, its place and the way to it, if it has one.
    places: Vec<Option<(usize, Arc<NvmeRange>)>>,
    pending: u32,
    /// For each disk, whether zeros are written as data, because the device cannot make them.
    writes_zeros: Vec<bool>,
    /// Why the process must end.
    broken: Option<io::Error>,
}

impl Vfio {
    /// Takes the queues of the worker of that number.
    pub fn new(ranges: Vec<Option<Arc<NvmeRange>>>, worker: usize) -> io::Result<Self> {
        let mut ways: Vec<Way> = Vec::new();
        let writes_zeros = ranges
            .iter()
            .map(|range| range.as_ref().is_some_and(|range| range.limits().zeroes == 0))
            .collect();
        let mut places = Vec::new();
        for range in ranges {
            let Some(range) = range else {
                places.push(None);
                continue;
            };
            let known = ways.iter().position(|way| Arc::ptr_eq(&way.controller, range.controller()));
            let way = match known {
                Some(known) => known,
                None => {
                    ways.push(Way::new(range.controller(), worker)?);
                    ways.len() - 1
                }
            };
            places.push(Some((way, range)));
        }
        Ok(Self { ways, places, pending: 0, writes_zeros, broken: None })
    }

    #[inline]
    pub fn pending(&self) -> u32 {
        self.pending
    }

    /// Begins an operation. Returns its result if it has ended already.
    #[inline]
    pub fn start(
        &mut self,
        id: u32,
        disk: u16,
        op: Op,
        data: &[Buffer],
        memory: &GuestMemory<Mapping>,
    ) -> Option<Result<(), Failure>> {
        let Some(Some((way, range))) = self.places.get(usize::from(disk)) else {
            return Some(Err(Failure::Errno(libc::ENODEV)));
        };
        if let Some(result) = range.answer(op) {
            return Some(result);
        }
        let (way, mut limits, op) = (*way, range.limits(), range.place(op));
        // A device that refused to make zeroes is not asked again.
        if self.writes_zeros[usize::from(disk)] {
            limits.zeroes = 0;
        }
        let index = id as usize;
        self.ways[way].flight(index, memory).begin(disk, op, data, memory, limits);
        self.pending += 1;
        match self.push(index, way) {
            Ok(()) => None,
            Err(failure) => {
                self.end(index, way);
                Some(Err(failure))
            }
        }
    }

    /// Queues the next command of an operation, or lets it wait for room.
    #[inline]
    fn push(&mut self, index: usize, way: usize) -> Result<(), Failure> {
        let way = &mut self.ways[way];
        if !way.pair.has_room() {
            way.waiting.push_back(index);
            return Ok(());
        }
        let flight = &mut way.flights[index];
        if flight.needs_zeros() {
            self.writes_zeros[usize::from(flight.disk)] = true;
        }
        let Some(Some((_, range))) = self.places.get(usize::from(flight.disk)) else {
            return Err(Failure::Errno(libc::ENODEV));
        };
        let command = flight.step(range.nsid())?;
        let reads = command.opcode == Opcode::READ;
        // There is room.
        if let Some(cid) = way.pair.submit_for(flight, command) {
            let at = usize::from(cid);
            if way.owners.len() <= at {
                way.owners.resize(at + 1, NOBODY);
            }
            way.owners[at] = (index, reads, way.interval);
        }
        Ok(())
    }

    fn end(&mut self, index: usize, way: usize) {
        self.pending -= 1;
        self.ways[way].flights[index].end();
    }

    /// Shows the devices what was started. An error says that a device does not answer, and that the process must end.
    #[inline]
    pub fn submit(&mut self) -> io::Result<()> {
        for way in &mut self.ways {
            way.pair.ring();
        }
        match self.broken.take() {
            None => Ok(()),
            Some(error) => Err(error),
        }
    }

    #[inline]
    pub fn reap(&mut self, mut done: impl FnMut(u32, Result<(), Failure>)) {
        for at in 0..self.ways.len() {
            if self.ways[at].is_idle() {
                continue;
            }
            let mut found = false;
            loop {
                let way = &mut self.ways[at];
                let completion = match way.pair.reap() {
                    Ok(Some(completion)) => completion,
                    Ok(None) => break,
                    Err(corrupt) => {
                        self.broken = Some(way.lied(&corrupt));
                        return;
                    }
                };
                found = true;
                let cid = completion.cid;
                let Some(owner) = way.owners.get_mut(usize::from(cid)) else { continue };
                let (index, reads, _) = std::mem::replace(owner, NOBODY);
                let Some(flight) = way.flights.get_mut(index) else { continue };
                let status = completion.status();
                way.pair.take_back(cid, flight, reads && status.is_success());
                let result = match flight.advance(i32::from(status.0 & 0x7fff)) {
                    Some(result) => result,
                    None => match self.push(index, at) {
                        Ok(()) => continue,
                        Err(failure) => Err(failure),
                    },
                };
                self.end(index, at);
                done(index as u32, result);
            }
            if found {
                self.resume(at, &mut done);
                self.ways[at].pair.ring();
            } else if let Err(error) = self.ways[at].look() {
                self.broken = Some(error);
            }
        }
    }

    /// Queues the commands of operations that have waited for room.
    #[inline]
    fn resume(&mut self, at: usize, done: &mut impl FnMut(u32, Result<(), Failure>)) {
        while !self.ways[at].waiting.is_empty() && self.ways[at].pair.has_room() {
            let Some(index) = self.ways[at].waiting.pop_front() else { return };
            if let Err(failure) = self.push(index, at) {
                self.end(index, at);
                done(index as u32, Err(failure));
            }
        }
    }

    /// Returns whether zeros have to be written to a disk as data.
    pub fn writes_zeros(&self, disk: u16) -> bool {
        self.writes_zeros.get(usize::from(disk)) == Some(&true)
    }

    /// Lets the devices reach this memory too, and no longer any that nobody else uses; `None` if requests are not to be expected soon.
    /// Blocks while the kernel finds or allocates all pages of the memory.
    pub fn attach(&mut self, memory: Option<&Arc<GuestMemory<Mapping>>>) {
        let is_idle = self.pending == 0;
        for way in &mut self.ways {
            // First, so that memory that stays is not mapped anew.
            let attached = memory.map(|memory| way.controller.dma().attach(memory));
            if is_idle {
                // They are looked up again.
                way.flights.iter_mut().for_each(|flight| flight.transfer.attached = None);
            }
            match attached {
                None if is_idle => way.attached.clear(),
                None => {}
                Some(attached) => {
                    way.attached.retain(|other| other.is_used() && !Arc::ptr_eq(other, &attached));
                    way.attached.push(attached);
                }
            }
        }
    }

    /// Returns whether the devices can reach memory of a guest.
    pub fn is_attached(&self) -> bool {
        self.ways.iter().any(|way| !way.attached.is_empty())
    }
}

impl Way {
    fn new(controller: &Arc<Controller>, worker: usize) -> io::Result<Self> {
        let pair =
            controller.take_pair(worker).ok_or_else(|| io::Error::other("another worker has its queues"))?;
        Ok(Self {
            controller: controller.clone(),
            pair: ManuallyDrop::new(pair),
            flights: Vec::new(),
            owners: Vec::new(),
            waiting: VecDeque::new(),
            attached: Vec::new(),
            polls: 0,
            interval: 0,
            looked: Instant::now(),
        })
    }

    /// Returns an operation, for data in this memory.
    #[inline]
    fn flight(&mut self, index: usize, memory: &GuestMemory<Mapping>) -> &mut Flight<Prps> {
        if self.flights.len() <= index {
            self.flights.resize_with(index + 1, || Flight::idle(Prps::new()));
        }
        let flight = &mut self.flights[index];
        if !flight.transfer.attached.as_ref().is_some_and(|attached| attached.is(memory)) {
            let latest = self.attached.iter().rev();
            flight.transfer.attached = latest.into_iter().find(|attached| attached.is(memory)).cloned();
        }
        flight
    }

    /// Returns whether nothing is under way, and nothing waits.
    #[inline]
    fn is_idle(&self) -> bool {
        self.pair.outstanding() == 0 && self.waiting.is_empty()
    }

    /// Looks from time to time whether the device still answers.
    #[inline]
    fn look(&mut self) -> io::Result<()> {
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(POLLS) { self.look_now() } else { Ok(()) }
    }

    #[cold]
    fn look_now(&mut self) -> io::Result<()> {
        let now = Instant::now();
        if now - self.looked < LOOK {
            return Ok(());
        }
        self.looked = now;
        self.interval = self.interval.wrapping_add(1);
        if let Some(why) = self.controller.failure() {
            return Err(self.ends(why));
        }
        if self.pair.outstanding() == 0 {
            return Err(self.ends("has completed all commands, and does not say that it has taken them"));
        }
        let is_late = |&&(_, _, sent): &&(usize, bool, u32)| self.interval.wrapping_sub(sent) > TOO_LONG;
        match self.owners.iter().filter(|owner| owner.0 != NOBODY.0).find(is_late) {
            None => Ok(()),
            Some(_) => Err(self.ends("has not answered a command for 30 seconds")),
        }
    }

    #[cold]
    fn ends(&self, why: &str) -> io::Error {
        io::Error::other(format!(
            "the NVMe device {} {why}; this process ends, and the next one resets the device",
            self.controller.address()
        ))
    }

    #[cold]
    fn lied(&self, corrupt: &Corrupt) -> io::Error {
        self.ends(&format!("says what cannot be: {corrupt}"))
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        if self.pair.outstanding() > 0 {
            // The process ends. Until then nobody may get the memory, or its addresses.
            return std::mem::forget((std::mem::take(&mut self.attached), std::mem::take(&mut self.flights)));
        }
        // SAFETY: the pair is not used after this, since the value is dropped.
        unsafe { ManuallyDrop::drop(&mut self.pair) };
    }
}
