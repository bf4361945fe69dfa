//! The controller as QEMU sees it: it turns the requests of vfio-user into registers, ranges of memory, interrupt vectors, and messages for
//! the engine.

use crate::attach::Range;
use crate::holder::link::{Item, Link};
use crate::holder::pci::{self, ConfigSpace, MSIX_BAR, PENDING_BAR, TABLE_BAR};
use crate::holder::ranges::{MAX_RANGES, Ranges};
use crate::holder::registers::{Registers, Shape};
use crate::hush::Hush;
use ginnel_layout::vfio_user::{Access, Area, DeviceInfo, IrqInfo, pci as index};
use ginnel_nvme::SetupError;
use ginnel_shmem::Mapping;
use ginnel_vfio_user::{Action, Errno, Irqs, Region, Request};
use rustix::fs::fstat;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;
use tracing::warn;
use zerocopy::IntoBytes;

/// The answer to a request.
#[derive(Debug)]
pub enum Answer {
    /// It is done.
    Now(Vec<u8>),
    /// It is done, and the client gets a file too.
    File(Vec<u8>, Arc<OwnedFd>),
    /// It is done when the link has settled this number. The text says what is waited for.
    When(u64, Vec<u8>, &'static str),
    /// It is refused.
    Refused(Errno),
}

/// The controller.
pub struct Device {
    shape: Shape,
    registers: Registers<Mapping>,
    config: ConfigSpace,
    ranges: Ranges,
    vectors: Vec<Option<Arc<OwnedFd>>>,
    odd_accesses: Hush,
    unseen: Hush,
    refused: Hush,
    absent: Hush,
}

impl Device {
    /// Returns a controller whose state and doorbells lie in these mappings.
    pub fn new(shape: Shape, state: Mapping, doorbells: Mapping) -> Result<Self, SetupError> {
        let vectors = shape.queues + 1;
        Ok(Self {
            shape,
            registers: Registers::new(shape, state, doorbells)?,
            config: ConfigSpace::new(shape.bar() as u64, vectors),
            ranges: Ranges::default(),
            vectors: vec![None; vectors.into()],
            odd_accesses: Hush::default(),
            unseen: Hush::default(),
            refused: Hush::default(),
            absent: Hush::default(),
        })
    }

    /// Handles a request of the client.
    pub fn handle(&mut self, request: Request<'_>, link: &mut Link) -> Answer {
        match request {
            // It comes once, as the first message.
            Request::Version { .. } => Answer::Refused(Errno::INVAL),
            Request::Map { address, size, offset, writable, file } => {
                self.map(Range { iova: address, len: size, offset, writable }, file, link)
            }
            Request::Unmap { message, first, last } => match self.unmap(first, last, link) {
                Ok(number) => {
                    Answer::When(number, Request::unmapped(message).to_vec(), "the end of requests in memory")
                }
                Err(errno) => Answer::Refused(errno),
            },
            Request::DeviceInfo => {
                let info = DeviceInfo {
                    argsz: size_of::<DeviceInfo>() as u32,
                    flags: DeviceInfo::RESET | DeviceInfo::PCI,
                    num_regions: index::REGIONS,
                    num_irqs: index::IRQS,
                };
                Answer::Now(info.as_bytes().to_vec())
            }
            Request::RegionInfo { index, argsz } => match self.region(index) {
                Some(region) => match region.reply(index, argsz) {
                    (body, true) => Answer::File(body, link.doorbells().clone()),
                    (body, false) => Answer::Now(body),
                },
                None => Answer::Refused(Errno::INVAL),
            },
            // QEMU prints a warning if these exist and are none.
            Request::IrqInfo { index: index::ERR } => Answer::Refused(Errno::INVAL),
            Request::IrqInfo { index } if index < index::IRQS => {
                let count = if index == index::MSIX { self.vectors.len() as u32 } else { 0 };
                let argsz = size_of::<IrqInfo>() as u32;
                let info = IrqInfo { argsz, flags: IrqInfo::EVENTFD, index, count };
                Answer::Now(info.as_bytes().to_vec())
            }
            Request::IrqInfo { .. } => Answer::Refused(Errno::INVAL),
            Request::SetIrqs { index, start, count, action, irqs } => {
                match self.set_irqs(index, start, count, action, irqs, link) {
                    Ok(()) => Answer::Now(Vec::new()),
                    Err(errno) => Answer::Refused(errno),
                }
            }
            Request::Read { access } => self.read(access),
            Request::Write { access, data } => self.write(access, data, link),
            Request::Reset => Answer::When(self.reset(link), Vec::new(), "the reset"),
        }
    }

    fn region(&self, number: u32) -> Option<Region> {
        let region = |size| Region { size, writable: true, areas: Vec::new() };
        match number {
            index::BAR0 => {
                let area = |(offset, size)| Area { offset: offset as u64, size: size as u64 };
                let areas = self.shape.mapped_area().into_iter().map(area).collect();
                Some(Region { areas, ..region(self.shape.bar() as u64) })
            }
            TABLE_BAR | PENDING_BAR => Some(region(MSIX_BAR)),
            index::CONFIG => Some(region(pci::LEN as u64)),
            other => (other < index::REGIONS).then(Region::default),
        }
    }

    /// Returns whether an access lies inside its region.
    fn is_inside(&self, access: Access) -> bool {
        let end = access.offset.checked_add(access.count.into());
        self.region(access.region).zip(end).is_some_and(|(region, end)| end <= region.size)
    }

    fn read(&self, access: Access) -> Answer {
        if !self.is_inside(access) {
            return Answer::Refused(Errno::INVAL);
        }
        let header = size_of::<Access>();
        let mut body = vec![0; header + access.count as usize];
        body[..header].copy_from_slice(access.as_bytes());
        match access.region {
            index::BAR0 => self.registers.read(access.offset, &mut body[header..]),
            index::CONFIG => self.config.read(access.offset, &mut body[header..]),
            // QEMU has the MSI-X table itself, and no interrupt is ever pending.
            _ => {}
        }
        Answer::Now(body)
    }

    fn write(&mut self, access: Access, data: &[u8], link: &mut Link) -> Answer {
        if !self.is_inside(access) {
            return Answer::Refused(Errno::INVAL);
        }
        match access.region {
            index::BAR0 => {
                let written = self.registers.write(access.offset, data);
                if let Some(why) = written.odd
                    && let Some(suppressed) = self.odd_accesses.allows(Instant::now())
                {
                    let (at, len) = (access.offset, data.len());
                    warn!(
                        suppressed,
                        "the guest's driver writes {len} bytes to register {at:#x}: ignored, {why}"
                    );
                }
                if let Some(queue) = written.kick {
                    link.kick(queue);
                }
                if written.control {
                    self.complain_of_absence(link);
                    link.tell(Item::Control);
                }
            }
            index::CONFIG => {
                self.config.write(access.offset, data);
                if self.registers.set_bus_master(self.config.is_bus_master()) {
                    // A guest that switches it off relies on that nothing is written into its memory any more.
                    if !self.config.is_bus_master() {
                        let body = access.as_bytes().to_vec();
                        return Answer::When(link.ask(Item::Control), body, "the end of requests in memory");
                    }
                    link.tell(Item::Control);
                }
            }
            _ => {}
        }
        Answer::Now(access.as_bytes().to_vec())
    }

    /// Says so if the guest waits for an engine that is not there.
    fn complain_of_absence(&mut self, link: &Link) {
        if self.registers.is_enabled()
            && !link.is_attached()
            && let Some(suppressed) = self.absent.allows(Instant::now())
        {
            warn!(
                suppressed,
                "the guest waits for its disk, and no engine is there: start ginnel-volume without --holder"
            );
        }
    }

    fn map(&mut self, range: Range, file: Option<OwnedFd>, link: &mut Link) -> Answer {
        let is_file = file.is_some();
        let Range { iova, len, .. } = range;
        match self.ranges.add(range, file) {
            Ok(mapped) => {
                match &mapped.file {
                    Some(file) => link.tell(Item::Map(range, file.clone())),
                    // ROMs and other devices come like this too, so this is no fault in itself.
                    None if is_file && let Some(suppressed) = self.unseen.allows(Instant::now()) => warn!(
                        suppressed,
                        "the VM's memory at {iova:#x}, {len} bytes, is no file, and cannot be used: use memory-backend-memfd,share=on"
                    ),
                    None => {}
                }
                Answer::Now(Vec::new())
            }
            Err(errno) => {
                if let Some(suppressed) = self.refused.allows(Instant::now()) {
                    let why = match errno {
                        Errno::EXIST => "it overlaps memory that is mapped already".to_owned(),
                        Errno::NOSPC => {
                            format!(
                                "{MAX_RANGES} ranges are mapped already; with an IOMMU, boot the guest with iommu=pt"
                            )
                        }
                        Errno::MFILE => {
                            "it is of too many different files; use fewer memory backends".to_owned()
                        }
                        errno => format!("its file cannot be examined: {errno}"),
                    };
                    warn!(suppressed, "the VM's memory at {iova:#x}, {len} bytes, is refused: {why}");
                }
                Answer::Refused(errno)
            }
        }
    }

    /// Takes ranges away. Returns the number that the link settles when nobody uses them any more.
    fn unmap(&mut self, first: u64, last: u64, link: &mut Link) -> Result<u64, Errno> {
        let removed = self.ranges.remove(first, last).inspect_err(|_| {
            if let Some(suppressed) = self.refused.allows(Instant::now()) {
                warn!(
                    suppressed,
                    "a part of a range of the VM's memory, {first:#x} to {last:#x}, is unmapped: refused"
                );
            }
        })?;
        let mut seen: Vec<Range> =
            removed.iter().filter(|mapped| mapped.file.is_some()).map(|mapped| mapped.range).collect();
        let Some(end) = seen.pop() else {
            // No engine knew of it.
            return Ok(0);
        };
        seen.into_iter().for_each(|range| link.tell(Item::Unmap(range)));
        Ok(link.ask(Item::Unmap(end)))
    }

    fn set_irqs(
        &mut self,
        kind: u32,
        start: u32,
        count: u32,
        action: Action,
        irqs: Irqs<'_>,
        link: &mut Link,
    ) -> Result<(), Errno> {
        let disables = matches!((action, &irqs), (Action::Trigger, Irqs::All)) && count == 0;
        match (kind, action, irqs) {
            (index::MSIX, _, _) if disables => {
                self.set_vectors(0, vec![None; self.vectors.len()], link);
                Ok(())
            }
            // There are no interrupts of this kind.
            (0..index::IRQS, _, _) if disables => Ok(()),
            (index::MSIX, Action::Trigger, Irqs::Eventfds(eventfds)) => {
                let (start, count) = (start as usize, count as usize);
                if start + count > self.vectors.len() {
                    return Err(Errno::INVAL);
                }
                // An eventfd has no type of file. To close a socket, for one, could take for ever.
                let is_eventfd = |fd: &OwnedFd| fstat(fd).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == 0);
                if !eventfds.iter().all(is_eventfd) {
                    return Err(Errno::INVAL);
                }
                let vectors = match eventfds.is_empty() {
                    true => vec![None; count],
                    false => eventfds.into_iter().map(|eventfd| Some(Arc::new(eventfd))).collect(),
                };
                self.set_vectors(start, vectors, link);
                Ok(())
            }
            _ => Err(Errno::INVAL),
        }
    }

    fn set_vectors(&mut self, start: usize, vectors: Vec<Option<Arc<OwnedFd>>>, link: &mut Link) {
        for (number, eventfd) in (start..).zip(vectors) {
            if eventfd.is_some() || self.vectors[number].is_some() {
                self.vectors[number].clone_from(&eventfd);
                link.tell(Item::Vector(number as u32, eventfd));
            }
        }
    }

    /// Resets the controller. Returns the number that the link settles when the engine has done so.
    fn reset(&mut self, link: &mut Link) -> u64 {
        self.registers.reset();
        self.config.reset();
        self.registers.set_bus_master(false);
        link.ask(Item::Control)
    }

    /// Forgets everything of a client that has gone. Returns the number that the link settles when nobody uses its memory any more.
    pub fn client_gone(&mut self, link: &mut Link) -> u64 {
        self.set_vectors(0, vec![None; self.vectors.len()], link);
        // Nothing is a part of a range here.
        let removed = self.ranges.remove(0, u64::MAX).unwrap_or_default();
        for mapped in removed.iter().filter(|mapped| mapped.file.is_some()) {
            link.tell(Item::Unmap(mapped.range));
        }
        self.reset(link)
    }

    /// Tells an engine that has just attached everything that it must know.
    pub fn introduce(&self, link: &mut Link) {
        for mapped in self.ranges.iter() {
            if let Some(file) = &mapped.file {
                link.tell(Item::Map(mapped.range, file.clone()));
            }
        }
        for (number, eventfd) in (0..).zip(&self.vectors) {
            if eventfd.is_some() {
                link.tell(Item::Vector(number, eventfd.clone()));
            }
        }
        // Its answer settles what its predecessor has left unanswered.
        link.ask(Item::Control);
    }
}

#[cfg(test)]
mod tests;
