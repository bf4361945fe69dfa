//! virtio-scsi (virtio 1.2, section 5.6): one target, target 0, with a logical unit for each disk.

mod command;
mod pages;
mod sense;

use super::{Begin, Device, Request, part};
use crate::backend::{Failure, Op};
use crate::disk::Disk;
use command::{MAX_LIST, Plan, Unit};
use ginnel_guest_memory::GuestMemory;
use ginnel_layout::virtio_scsi::{
    Address, CDB_LEN, CONTROL_QUEUE, CommandHeader, CommandResponse, Config, ControlKind, EVENT_QUEUE, Event,
    FIRST_COMMAND_QUEUE, Notification, NotificationResponse, Response, SENSE_LEN, TaskFunction,
    TaskManagement, feature,
};
use ginnel_shmem::Mapping;
use ginnel_virtqueue::Chain;
pub use sense::Sense;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use zerocopy::{FromBytes, IntoBytes};

const HEADER: u64 = size_of::<CommandHeader>() as u64;
const RESPONSE: u64 = size_of::<CommandResponse>() as u64;

/// Statuses of a command (SAM-5, section 5.3).
const GOOD: u8 = 0x00;
const CHECK_CONDITION: u8 = 0x02;

/// Commands that are executed even if a unit attention is pending (SPC-4, 5.14): INQUIRY, REPORT LUNS, REQUEST SENSE.
const IN_SPITE: [u8; 3] = [0x12, 0xa0, 0x03];

/// The limits that the driver is told: outstanding commands at a unit, and 512-byte sectors of a command.
const PER_LUN: u32 = 128;
const MAX_SECTORS: u32 = 0xffff;

/// A SCSI target.
#[derive(Debug)]
pub struct Scsi {
    units: Vec<LogicalUnit>,
    /// Number of queues for commands.
    queues: u16,
    /// The largest number of data segments in a command.
    segments: u16,
    /// Whether the driver has asked for events about changes.
    tells_changes: AtomicBool,
}

#[derive(Debug)]
struct LogicalUnit {
    disk: Arc<Disk>,
    /// Whether the backend can give space back.
    space: bool,
    /// Whether its size has changed and the driver has not been told.
    resized: AtomicBool,
}

impl Scsi {
    /// Returns a target with these disks and this many command queues. Each disk comes with whether its backend can
    /// give space back.
    pub fn new(disks: impl IntoIterator<Item = (Arc<Disk>, bool)>, queues: u16, segments: u16) -> Self {
        let unit = |(disk, space)| LogicalUnit { disk, space, resized: AtomicBool::new(false) };
        let units = disks.into_iter().map(unit).collect();
        Self { units, queues, segments, tells_changes: AtomicBool::new(false) }
    }

    /// Begins a command.
    fn command(&self, memory: &GuestMemory<Mapping>, chain: &Chain, request: &mut Request) -> Begin {
        let Some(room) = u64::from(chain.writable_len()).checked_sub(RESPONSE) else {
            // There is no room for a response.
            return Begin::Done(0);
        };
        part(chain.writable(), 0, RESPONSE, &mut request.reply);
        let mut bytes = [0; HEADER as usize];
        if memory.read(chain.readable(), 0, &mut bytes) < bytes.len() {
            return Begin::Done(answer(memory, request, refusal(Response::FAILURE)));
        }
        let CommandHeader { lun, cdb, .. } = zerocopy::transmute!(bytes);
        let out = u64::from(chain.readable_len()) - HEADER;
        let ask = Ask { memory, chain };
        let (lun, plan) = match Address::parse(lun) {
            Address::Lun { target: 0, lun } => match self.units.get(usize::from(lun)) {
                Some(unit) => (lun, self.plan(unit, &cdb, &ask)),
                None => (lun, self.nowhere(&cdb)),
            },
            Address::ReportLuns => (0, self.nowhere(&cdb)),
            Address::Lun { .. } | Address::Nobody => {
                return Begin::Done(answer(memory, request, refusal(Response::BAD_TARGET)));
            }
        };
        let (op, bytes) = match plan {
            Ok(Plan::Op { op, bytes }) => (op, bytes),
            Ok(Plan::Good) => return Begin::Done(answer(memory, request, good(room.max(out)))),
            Ok(Plan::Data(data)) => {
                let n = memory.write(chain.writable(), RESPONSE, &data) as u64;
                let response = match n < data.len() as u64 {
                    true => refusal(Response::OVERRUN),
                    false => good(room - n),
                };
                return Begin::Done(answer(memory, request, response) + n as u32);
            }
            Ok(Plan::Zeros { op, bytes }) => {
                if !ask.zeros(bytes) {
                    return Begin::Done(answer(memory, request, check(Sense::INVALID_FIELD)));
                }
                request.note = out - bytes as u64;
                return Begin::Do { disk: lun, op };
            }
            Err(sense) => return Begin::Done(answer(memory, request, check(sense))),
        };
        let there = if matches!(op, Op::Write { .. }) { out } else { room };
        let Some(left) = there.checked_sub(bytes) else {
            return Begin::Done(answer(memory, request, refusal(Response::OVERRUN)));
        };
        match op {
            Op::Read { .. } => part(chain.writable(), RESPONSE, bytes, &mut request.data),
            Op::Write { .. } => part(chain.readable(), HEADER, bytes, &mut request.data),
            _ => {}
        }
        request.bytes = bytes;
        request.note = left | if matches!(op, Op::Read { .. }) { READS } else { 0 };
        Begin::Do { disk: lun, op }
    }

    fn plan(&self, unit: &LogicalUnit, cdb: &[u8; CDB_LEN], ask: &Ask) -> Result<Plan, Sense> {
        // A load first: the flag changes very rarely, and all workers read it.
        if unit.resized.load(Ordering::Relaxed)
            && !IN_SPITE.contains(&cdb[0])
            && unit.resized.swap(false, Ordering::Relaxed)
        {
            return Err(Sense::CAPACITY_CHANGED);
        }
        let here = Unit { disk: &unit.disk, space: unit.space, luns: self.units.len() as u16 };
        command::plan(cdb, &here, || ask.list())
    }

    /// Returns the answer where there is no unit.
    fn nowhere(&self, cdb: &[u8; CDB_LEN]) -> Result<Plan, Sense> {
        let room = |high: u8, low: u8| usize::from(u16::from_be_bytes([high, low]));
        match cdb[0] {
            0x12 => {
                let mut data = pages::inquiry_of_none();
                data.truncate(room(cdb[3], cdb[4]));
                Ok(Plan::Data(data))
            }
            0xa0 => {
                let mut data = pages::luns(self.units.len() as u16);
                data.truncate(u32::from_be_bytes([cdb[6], cdb[7], cdb[8], cdb[9]]) as usize);
                Ok(Plan::Data(data))
            }
            0x03 => Ok(Plan::Data(Sense::NO_SUCH_UNIT.bytes()[..sense::SENSE.min(cdb[4].into())].to_vec())),
            _ => Err(Sense::NO_SUCH_UNIT),
        }
    }

    /// Executes task management requests, and queries of notifications.
    fn control(&self, memory: &GuestMemory<Mapping>, chain: &Chain, request: &mut Request) -> Begin {
        part(chain.writable(), 0, u64::from(chain.writable_len()), &mut request.reply);
        let mut bytes = [0; size_of::<TaskManagement>()];
        let n = memory.read(chain.readable(), 0, &mut bytes);
        let reply = |bytes: &[u8]| Begin::Done(memory.write(&request.reply, 0, bytes) as u32);
        if let Ok((Notification { kind, .. }, _)) = Notification::read_from_prefix(&bytes[..n])
            && matches!(kind, ControlKind::NOTIFICATION_QUERY | ControlKind::NOTIFICATION_SUBSCRIBE)
        {
            // The target has no notifications.
            let none = NotificationResponse { events: 0, response: Response::OK };
            return reply(none.as_bytes());
        }
        let Ok(task) = TaskManagement::read_from_bytes(&bytes[..n]) else {
            return reply(&[Response::FAILURE.0]);
        };
        if task.kind != ControlKind::TASK_MANAGEMENT {
            return reply(&[Response::FAILURE.0]);
        }
        let lun = match Address::parse(task.lun) {
            Address::Lun { target: 0, lun } => lun,
            _ => return reply(&[Response::BAD_TARGET.0]),
        };
        match task.function {
            TaskFunction::ABORT_TASK
            | TaskFunction::ABORT_TASK_SET
            | TaskFunction::CLEAR_TASK_SET
            | TaskFunction::LOGICAL_UNIT_RESET
                if usize::from(lun) >= self.units.len() =>
            {
                reply(&[Response::INCORRECT_LUN.0])
            }
            TaskFunction::ABORT_TASK
            | TaskFunction::ABORT_TASK_SET
            | TaskFunction::CLEAR_TASK_SET
            | TaskFunction::LOGICAL_UNIT_RESET
            | TaskFunction::I_T_NEXUS_RESET => {
                request.note = CONTROL;
                Begin::Barrier
            }
            _ => reply(&[Response::FUNCTION_REJECTED.0]),
        }
    }
}

/// A bit of [`Request::note`] for a read. The lower 32 bits are the number of the driver's data bytes that are not
/// transferred.
const READS: u64 = 1 << 62;
/// A bit of [`Request::note`] for task management.
const CONTROL: u64 = 1 << 63;

impl Device for Scsi {
    fn queues(&self) -> u16 {
        FIRST_COMMAND_QUEUE + self.queues
    }

    fn features(&self) -> u64 {
        // The units of a target never appear or disappear, but Linux puts buffers into the event queue only if they
        // might: without HOTPLUG it gets no event about a unit that has grown.
        feature::CHANGE | feature::HOTPLUG
    }

    fn set_features(&self, features: u64) {
        self.tells_changes.store(features & feature::CHANGE != 0, Ordering::Relaxed);
        // The cache is on at first, and the driver can turn it off (MODE SELECT).
        self.units.iter().for_each(|unit| unit.disk.turn_cache(true));
    }

    fn disks(&self) -> Vec<Arc<Disk>> {
        self.units.iter().map(|unit| unit.disk.clone()).collect()
    }

    fn config(&self) -> Vec<u8> {
        let config = Config {
            num_queues: self.queues.into(),
            seg_max: self.segments.into(),
            max_sectors: MAX_SECTORS,
            cmd_per_lun: PER_LUN,
            event_info_size: size_of::<Event>() as u32,
            sense_size: SENSE_LEN as u32,
            cdb_size: CDB_LEN as u32,
            max_channel: 0,
            max_target: 0,
            max_lun: self.units.len().saturating_sub(1) as u32,
        };
        config.as_bytes().to_vec()
    }

    fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<(), String> {
        // A driver may write the two lengths, but only with their present values.
        let config = self.config();
        let same = config.get(offset as usize..).is_some_and(|config| config.starts_with(bytes));
        if same { Ok(()) } else { Err("the configuration of a SCSI target cannot be changed".to_owned()) }
    }

    fn begin(
        &self,
        queue: u16,
        memory: &GuestMemory<Mapping>,
        chain: &Chain,
        request: &mut Request,
    ) -> Begin {
        request.clear();
        if queue == CONTROL_QUEUE {
            return self.control(memory, chain, request);
        }
        self.command(memory, chain, request)
    }

    fn finish(&self, memory: &GuestMemory<Mapping>, request: &Request, result: Result<(), Failure>) -> u32 {
        if request.note & CONTROL != 0 {
            return memory.write(&request.reply, 0, &[Response::OK.0]) as u32;
        }
        let reads = request.note & READS != 0;
        let response = match result {
            Ok(()) => good(request.note & u64::from(u32::MAX)),
            Err(Failure::Unsupported) => check(Sense::INVALID_COMMAND),
            Err(Failure::Errno(errno)) if errno == rustix::io::Errno::NOSPC.raw_os_error() => {
                check(Sense::NO_SPACE)
            }
            Err(_) => check(if reads { Sense::READ_ERROR } else { Sense::WRITE_ERROR }),
        };
        answer(memory, request, response) + if reads && result.is_ok() { request.bytes as u32 } else { 0 }
    }

    fn control_queue(&self) -> Option<u16> {
        Some(CONTROL_QUEUE)
    }

    fn event_queue(&self) -> Option<u16> {
        Some(EVENT_QUEUE)
    }

    fn resized(&self, disk: usize) -> Option<Event> {
        let unit = self.units.get(disk)?;
        unit.resized.store(true, Ordering::Relaxed);
        let sense = Sense::CAPACITY_CHANGED;
        let mut lun = Address::bytes(0, disk as u16);
        if disk < 256 {
            // Addressed as in REPORT LUNS: Linux uses these two bytes unchanged as the unit's number.
            lun[2] = 0;
        }
        // A driver that has not asked for such events must not get any (5.6.6.3.1).
        self.tells_changes.load(Ordering::Relaxed).then_some(Event {
            event: Event::PARAM_CHANGE,
            lun,
            reason: u32::from(sense.code) | u32::from(sense.qualifier) << 8,
        })
    }
}

/// The data that a command has to write.
struct Ask<'a> {
    memory: &'a GuestMemory<Mapping>,
    chain: &'a Chain,
}

impl Ask<'_> {
    /// Returns the first bytes of the data, at most [`MAX_LIST`].
    fn list(&self) -> Vec<u8> {
        let mut list = vec![0; MAX_LIST];
        let n = self.memory.read(self.chain.readable(), HEADER, &mut list);
        list.truncate(n);
        list
    }

    /// Returns whether there are this many bytes, and all are zeros.
    fn zeros(&self, bytes: usize) -> bool {
        let mut data = vec![1; bytes];
        self.memory.read(self.chain.readable(), HEADER, &mut data) == bytes
            && data.iter().all(|byte| *byte == 0)
    }
}

/// Writes a response. Returns its length in bytes.
fn answer(memory: &GuestMemory<Mapping>, request: &Request, response: CommandResponse) -> u32 {
    // Only the sense data that exist are written: the rest of the buffer belongs to the driver.
    let len = RESPONSE as usize - SENSE_LEN + response.sense_len as usize;
    memory.write(&request.reply, 0, &response.as_bytes()[..len]);
    RESPONSE as u32
}

fn good(residual: u64) -> CommandResponse {
    CommandResponse {
        sense_len: 0,
        residual: u32::try_from(residual).unwrap_or(u32::MAX),
        status_qualifier: 0,
        status: GOOD,
        response: Response::OK,
        sense: [0; SENSE_LEN],
    }
}

fn check(sense: Sense) -> CommandResponse {
    let mut response = CommandResponse { status: CHECK_CONDITION, ..good(0) };
    response.sense_len = sense::SENSE as u32;
    response.sense[..sense::SENSE].copy_from_slice(&sense.bytes());
    response
}

fn refusal(why: Response) -> CommandResponse {
    CommandResponse { response: why, ..good(0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_guest_memory::{Area, Region};
    use ginnel_shmem::SharedMemory;
    use ginnel_virtqueue::{DeviceQueue, DriverQueue, DriverSetup, Kind, Segment, Setup};

    const GUEST: u64 = 0x10_0000;
    /// Offsets of the header, the data to write, the response and the data to read.
    const PLACES: [usize; 4] = [0x2000, 0x3000, 0x4000, 0x5000];

    /// A target with a writable and a read-only disk, and a driver.
    struct Rig {
        disks: [Arc<Disk>; 2],
        scsi: Scsi,
        memory: Mapping,
        guest: GuestMemory<Mapping>,
        driver: DriverQueue<Mapping>,
        device: DeviceQueue<Mapping>,
        request: Request,
    }

    /// The result of a request.
    #[derive(Debug, PartialEq, Eq)]
    enum Outcome {
        /// Response, status, sense and residual, and the number of bytes of data to read.
        Ended(Response, u8, Option<Sense>, u32, usize),
        Begun(Begin),
    }

    impl Rig {
        fn new() -> Self {
            let memory = Mapping::anonymous(0x10000).unwrap();
            let area = |at, len| Area { memory: memory.clone(), at, len, guest: GUEST + at as u64 };
            let areas = || (area(0, 256), area(256, 64), area(512, 256));
            let (descriptors, driver, device) = areas();
            let (kind, size, event_idx) = (Kind::Split, 16, false);
            let setup = DriverSetup { kind, size, descriptors, driver, device, event_idx, tables: None };
            let driver = DriverQueue::new(setup).unwrap();
            let (descriptors, area, device) = areas();
            let device = DeviceQueue::new(Setup {
                kind,
                size,
                descriptors,
                driver: area,
                device,
                event_idx,
                base: 0,
                inflight: None,
                max_segments: 8,
            });
            let disks = [false, true].map(|read_only| Arc::new(Disk::new(1 << 20, 512, read_only, "x")));
            Self {
                scsi: Scsi::new(disks.clone().map(|disk| (disk, true)), 1, 8),
                disks,
                guest: GuestMemory::new(vec![Region { guest: GUEST, user: 0, memory: memory.clone() }])
                    .unwrap(),
                memory,
                driver,
                device: device.unwrap(),
                request: Request::default(),
            }
        }

        /// Sends the readable bytes (`header`, `out`) with `room` bytes to write to, and begins the request.
        fn begin(&mut self, queue: u16, header: &[u8], out: &[u8], room: [usize; 2]) -> Begin {
            crate::device::seed::scsi(queue, &[header, out], room[0] + room[1]);
            self.memory.write(PLACES[0], header);
            self.memory.write(PLACES[1], out);
            self.memory.write(PLACES[2], &[0xee; 4096]);
            let lens = [header.len(), out.len(), room[0], room[1]];
            let segments: Vec<_> = (0..4)
                .filter(|i| lens[*i] > 0)
                .map(|i| Segment { address: GUEST + PLACES[i] as u64, len: lens[i] as u32, writable: i > 1 })
                .collect();
            let token = self.driver.add(&segments, false).unwrap();
            let _ = self.driver.publish();
            let mut chain = Chain::new();
            let ticket = self.device.pop(&self.guest, &mut chain).unwrap().unwrap();
            let begin = self.scsi.begin(queue, &self.guest, &chain, &mut self.request);
            self.device.push(ticket, 0);
            let _ = self.device.publish();
            assert_eq!(self.driver.poll().unwrap().map(|(id, _)| id), Some(token));
            begin
        }

        fn command(&mut self, lun: [u8; 8], cdb: &[u8], out: &[u8], room: usize) -> Outcome {
            let mut header =
                CommandHeader { lun, tag: 7, task_attribute: 0, priority: 0, crn: 0, cdb: [0; CDB_LEN] };
            header.cdb[..cdb.len()].copy_from_slice(cdb);
            match self.begin(2, header.as_bytes(), out, [RESPONSE as usize, room]) {
                Begin::Done(written) => self.ended(written),
                begin => Outcome::Begun(begin),
            }
        }

        fn ended(&self, written: u32) -> Outcome {
            let mut bytes = [0; RESPONSE as usize];
            self.memory.read(PLACES[2], &mut bytes);
            let response: CommandResponse = zerocopy::transmute!(bytes);
            let sense = (response.sense_len > 0).then(|| {
                assert_eq!((response.sense_len, response.sense[0]), (18, 0x70));
                Sense { key: response.sense[2], code: response.sense[12], qualifier: response.sense[13] }
            });
            assert_eq!(response.sense[18..], [0xee; SENSE_LEN - 18], "more written than there is");
            let read = written as usize - RESPONSE as usize;
            Outcome::Ended(response.response, response.status, sense, response.residual, read)
        }

        fn finish(&self, result: Result<(), Failure>) -> Outcome {
            self.ended(self.scsi.finish(&self.guest, &self.request, result))
        }
    }

    fn lun(n: u16) -> [u8; 8] {
        Address::bytes(0, n)
    }

    fn fine(residual: u32, read: usize) -> Outcome {
        Outcome::Ended(Response::OK, GOOD, None, residual, read)
    }

    fn checked(sense: Sense) -> Outcome {
        Outcome::Ended(Response::OK, CHECK_CONDITION, Some(sense), 0, 0)
    }

    #[test]
    fn a_read_and_a_write_are_transferred() {
        let mut rig = Rig::new();
        let read = [0x28, 0, 0, 0, 0, 8, 0, 0, 2];
        let begun = Outcome::Begun(Begin::Do { disk: 1, op: Op::Read { at: 4096 } });
        assert_eq!(rig.command(lun(1), &read, &[], 1500), begun);
        assert_eq!((rig.request.bytes, rig.request.data.len()), (1024, 1));
        assert_eq!(rig.finish(Ok(())), fine(476, 1024));
        assert_eq!(rig.finish(Err(Failure::Truncated)), checked(Sense::READ_ERROR));
        assert_eq!(
            rig.command(lun(1), &read, &[], 1000),
            Outcome::Ended(Response::OVERRUN, GOOD, None, 0, 0)
        );

        let write = [0x2a, 0, 0, 0, 0, 8, 0, 0, 2];
        let begun = Outcome::Begun(Begin::Do { disk: 0, op: Op::Write { at: 4096, through: false } });
        assert_eq!(rig.command(lun(0), &write, &[1; 1024], 0), begun);
        assert_eq!(rig.finish(Ok(())), fine(0, 0));
        assert_eq!(rig.finish(Err(Failure::Errno(5))), checked(Sense::WRITE_ERROR));
        assert_eq!(rig.finish(Err(Failure::Errno(28))), checked(Sense::NO_SPACE));
        assert_eq!(rig.command(lun(1), &write, &[1; 1024], 0), checked(Sense::WRITE_PROTECTED));
    }

    #[test]
    fn a_missing_target_is_reported() {
        let mut rig = Rig::new();
        assert_eq!(rig.command(lun(2), &[0x00], &[], 0), checked(Sense::NO_SUCH_UNIT));
        assert_eq!(rig.command(lun(2), &[0x12, 0, 0, 0, 36], &[], 36), fine(0, 36));
        assert_eq!(rig.memory.load_relaxed_u32(PLACES[3]) & 0xff, 0x7f);
        let nobody = Outcome::Ended(Response::BAD_TARGET, GOOD, None, 0, 0);
        assert_eq!(rig.command(Address::bytes(1, 0), &[0x12], &[], 36), nobody);
        assert_eq!(rig.command([0; 8], &[0x12], &[], 36), nobody);
        let report = [0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
        assert_eq!(rig.command([0xc1, 1, 0, 0, 0, 0, 0, 0], &report, &[], 256), fine(232, 24));
        assert_eq!(rig.command(lun(9), &report, &[], 256), fine(232, 24));
    }

    #[test]
    fn only_zeros_are_the_same() {
        let mut rig = Rig::new();
        let same = [0x41, 8, 0, 0, 0, 1, 0, 0, 2];
        let op = Op::WriteZeroes { at: 512, len: 1024, unmap: true, through: false };
        let begun = Outcome::Begun(Begin::Do { disk: 0, op });
        assert_eq!(rig.command(lun(0), &same, &[0; 512], 0), begun);
        assert_eq!(rig.finish(Ok(())), fine(0, 0));
        assert_eq!(rig.finish(Err(Failure::Unsupported)), checked(Sense::INVALID_COMMAND));
        let mut other = [0; 512];
        other[511] = 1;
        assert_eq!(rig.command(lun(0), &same, &other, 0), checked(Sense::INVALID_FIELD));
        assert_eq!(rig.command(lun(0), &same, &[0; 511], 0), checked(Sense::INVALID_FIELD), "short");
    }

    #[test]
    fn another_size_is_told_once() {
        let mut rig = Rig::new();
        let ready = [0x00];
        assert_eq!(rig.command(lun(0), &ready, &[], 0), fine(0, 0));
        rig.disks[0].set_bytes(1 << 21);
        assert_eq!(rig.scsi.resized(0), None, "the driver has not asked for it");
        rig.scsi.set_features(feature::CHANGE);
        let event = rig.scsi.resized(0).unwrap();
        assert_eq!(event.as_bytes(), [3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0x2a, 9, 0, 0]);
        assert_eq!(rig.scsi.resized(2), None);
        assert_eq!(rig.command(lun(0), &[0x12, 0, 0, 0, 36], &[], 36), fine(0, 36));
        assert_eq!(rig.command(lun(1), &ready, &[], 0), fine(0, 0), "the other disk");
        assert_eq!(rig.command(lun(0), &ready, &[], 0), checked(Sense::CAPACITY_CHANGED));
        assert_eq!(rig.command(lun(0), &ready, &[], 0), fine(0, 0));
    }

    #[test]
    fn requests_that_are_too_short_harm_nobody() {
        let mut rig = Rig::new();
        assert_eq!(rig.begin(2, &[0; 51], &[], [100, 0]), Begin::Done(0), "no room for a response");
        assert_eq!(rig.begin(2, &[1], &[], [108, 0]), Begin::Done(108));
        assert_eq!(rig.ended(108), Outcome::Ended(Response::FAILURE, GOOD, None, 0, 0));
        assert_eq!(rig.begin(0, &[], &[], [0, 1]), Begin::Done(1));
        assert_eq!(rig.begin(0, &[0; 24], &[], [0, 0]), Begin::Done(0));
    }

    #[test]
    fn tasks_end_when_all_that_began_before_has_ended() {
        let mut rig = Rig::new();
        let mut task = |function, lun| {
            let task = TaskManagement {
                kind: ControlKind::TASK_MANAGEMENT,
                function: TaskFunction(function),
                lun,
                tag: 7,
            };
            let begin = rig.begin(0, task.as_bytes(), &[], [1, 0]);
            let mut answer = [0];
            rig.memory.read(PLACES[2], &mut answer);
            if begin == Begin::Barrier {
                assert_eq!(rig.scsi.finish(&rig.guest, &rig.request, Ok(())), 1);
                assert_eq!(answer, [0xee], "too early");
                rig.memory.read(PLACES[2], &mut answer);
            }
            (begin, Response(answer[0]))
        };
        for function in [0, 1, 3, 4, 5] {
            assert_eq!(task(function, lun(1)), (Begin::Barrier, Response::OK));
        }
        assert_eq!(task(5, lun(2)), (Begin::Done(1), Response::INCORRECT_LUN));
        assert_eq!(task(5, Address::bytes(1, 0)), (Begin::Done(1), Response::BAD_TARGET));
        assert_eq!(task(6, lun(0)), (Begin::Done(1), Response::FUNCTION_REJECTED), "query task");
        let query = Notification { kind: ControlKind::NOTIFICATION_QUERY, lun: lun(0), events: 0x10 };
        assert_eq!(rig.begin(0, query.as_bytes(), &[], [5, 0]), Begin::Done(5));
        let mut answer = [0; 5];
        rig.memory.read(PLACES[2], &mut answer);
        assert_eq!(answer, [0; 5]);
    }
}
