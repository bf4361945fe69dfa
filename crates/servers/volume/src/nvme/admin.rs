//! The admin commands (NVMe 1.4, section 5).
//!
//! A command that concerns running queues is not executed here at once: the caller stops those queues, applies the
//! [`Change`], and starts them again.
//!
//! A successor of a killed process executes the commands again that were in flight, so each must be done once even if
//! it is executed twice. The numbers of admin commands show it: a queue that the same command has created exists
//! already, and one that it was to delete has been deleted.

use super::doorbells::{self, Pair};
use super::features::{self, Facts, Set, Word};
use super::memory::Memory;
use super::{Volume, events};
use crate::disk::Disk;
use ginnel_layout::nvme::log::Page;
use ginnel_layout::nvme::{COMMAND, COMPLETION, Command, Opcode, Status};
use ginnel_layout::nvme_state::{DBBUF_EVENTS, DBBUF_SHADOW};
use ginnel_nvme::identify::{self, Properties};
use ginnel_nvme::{CompletionRecord, State, SubmissionRecord, log, prp};
use ginnel_shmem::Mapping;

/// The size of a page of shadow doorbells.
const PAGE: usize = ginnel_layout::nvme::PAGE as usize;

/// The largest number of pieces of an answer: two pages, each of which may lie in two ranges.
const PIECES: usize = 4;

/// What becomes of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// It is done: its status and result.
    Done(Status, u32),
    /// It waits for an event.
    Wait,
    /// It changes something that these queues use: stop them, apply it, start them again.
    Stop(Which, Change),
}

/// Which queues a change concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    /// Those with this completion queue. All commands that were taken are completed.
    Group(u16),
    /// All I/O queues. Commands that were not begun may stay in flight.
    All,
    /// All I/O queues, and the writes that were acknowledged are made durable.
    AllDurable,
}

/// A change that is applied while queues are stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    CreateSubmission(u16, SubmissionRecord),
    DeleteSubmission(u16),
    /// Use shadow doorbells and event indexes at these addresses.
    Shadow(u64, u64),
    /// Turn the write cache on or off.
    WriteCache(bool),
}

/// What the commands work on.
pub(super) struct Admin<'a> {
    pub state: &'a State<Mapping>,
    pub doorbells: &'a Mapping,
    pub disk: &'a Disk,
    pub properties: &'a Properties,
    pub memory: &'a mut Memory,
    pub volume: &'a dyn Volume,
    /// The largest number of entries of an I/O queue.
    pub entries: u16,
    pub vectors: u16,
}

type Done = Result<u32, Status>;

impl Admin<'_> {
    /// Executes a command that has this number, or says what must be stopped for it.
    pub fn execute(&mut self, command: &Command, number: u64) -> Plan {
        // Fused commands and SGLs do not exist for admin commands of a PCI Express controller.
        if command.flags & (Command::FUSE | Command::PSDT) != 0 {
            return Plan::Done(Status::INVALID_FIELD.for_good(), 0);
        }
        let done = match command.opcode {
            Opcode::IDENTIFY => self.identify(command),
            Opcode::GET_LOG_PAGE => self.log(command),
            Opcode::SET_FEATURES => match self.set_features(command) {
                Ok(Set::Done(result)) => Ok(result),
                Ok(Set::WriteCache(on)) if on == self.disk.is_cache_on() => Ok(0),
                // A driver that turns the cache on gives up nothing. One that turns it off sends no more flushes.
                Ok(Set::WriteCache(true)) => return Plan::Stop(Which::All, Change::WriteCache(true)),
                Ok(Set::WriteCache(false)) => {
                    return Plan::Stop(Which::AllDurable, Change::WriteCache(false));
                }
                Err(status) => Err(status),
            },
            Opcode::GET_FEATURES => features::get(self.state, &self.facts(), command.cdw10, command.cdw11),
            Opcode::CREATE_COMPLETION => self.create_completion(command, number),
            Opcode::DELETE_COMPLETION => self.delete_completion(command, number),
            Opcode::CREATE_SUBMISSION => return self.create_submission(command, number).unwrap_or_else(fail),
            Opcode::DELETE_SUBMISSION => return self.delete_submission(command, number).unwrap_or_else(fail),
            // Each command is as good as done when an Abort for it arrives: this one was not aborted.
            Opcode::ABORT => Ok(1),
            Opcode::ASYNC_EVENT => return Plan::Wait,
            Opcode::DOORBELL_BUFFER if !self.state.constants().mapped => {
                let page = |address: u64| {
                    // 0 means that there are none.
                    let fine = address != 0
                        && address.is_multiple_of(PAGE as u64)
                        && self.memory.area(address, PAGE).is_ok();
                    if fine { Ok(address) } else { Err(Status::INVALID_FIELD) }
                };
                let there = (self.state.load(DBBUF_SHADOW), self.state.load(DBBUF_EVENTS));
                match (page(command.prp1), page(command.prp2)) {
                    // Queues use the shadows that there are. After a kill, the same command comes again.
                    _ if there.1 != 0 && there != (command.prp1, command.prp2) => Err(Status::SEQUENCE),
                    _ if there.1 != 0 => Ok(0),
                    (Ok(value), Ok(events)) => return Plan::Stop(Which::All, Change::Shadow(value, events)),
                    _ => Err(Status::INVALID_FIELD),
                }
            }
            _ => Err(Status::INVALID_OPCODE),
        };
        match done {
            Ok(result) => Plan::Done(Status::SUCCESS, result),
            Err(status) => fail(status),
        }
    }

    /// Applies a change. The queues that it concerns are stopped.
    pub fn apply(&mut self, change: Change) -> Result<(), Status> {
        match change {
            Change::CreateSubmission(queue, record) => {
                let doorbell = self.doorbells(queue)?.submission;
                self.state
                    .create_submission(queue, &record, &doorbell)
                    .map_err(|_| Status::INVALID_QUEUE_SIZE)
            }
            Change::DeleteSubmission(queue) => {
                self.state.delete_submission(queue);
                Ok(())
            }
            Change::Shadow(values, events) => {
                for queue in 1..=self.state.constants().queues {
                    // The driver may have written the doorbells before it had shadows.
                    doorbells::begin_shadows(
                        self.state,
                        self.doorbells,
                        self.memory,
                        queue,
                        (values, events),
                    )
                    .map_err(|_| Status::INVALID_FIELD)?;
                }
                // From now on the shadows count, also for a successor. It looks at the second word.
                self.state.store(DBBUF_SHADOW, values);
                self.state.store(DBBUF_EVENTS, events);
                Ok(())
            }
            Change::WriteCache(on) => {
                self.disk.turn_cache(on);
                Ok(())
            }
        }
    }

    fn facts(&self) -> Facts {
        let queues = self.state.constants().queues;
        let exists = |queue| self.state.completion(queue).is_some();
        Facts {
            queues,
            vectors: self.vectors,
            write_cache: self.disk.write_cache,
            is_cache_on: self.disk.is_cache_on(),
            has_queues: (1..=queues).any(exists),
        }
    }

    /// Copies bytes to the memory that the PRPs of a command describe.
    fn answer(&mut self, command: &Command, bytes: &[u8]) -> Done {
        let memory = self.memory.whole().map_err(|_| Status::DATA_TRANSFER)?;
        let mut buffers = Vec::new();
        prp::buffers(&memory, command.prp1, command.prp2, bytes.len() as u32, PIECES, &mut buffers)?;
        match memory.write(&buffers, 0, bytes) {
            n if n == bytes.len() => Ok(0),
            _ => Err(Status::DATA_TRANSFER),
        }
    }

    fn identify(&mut self, command: &Command) -> Done {
        let blocks = self.disk.bytes() / u64::from(self.disk.block_size);
        let page = identify::answer(&Properties { blocks, ..self.properties.clone() }, command)?;
        self.answer(command, &page)
    }

    fn log(&mut self, command: &Command) -> Done {
        let changed = events::is_changed(self.state);
        let page = log::answer(self.properties, &self.volume.health(), changed, command)?;
        let done = self.answer(command, &page);
        if done.is_ok()
            && Page(command.cdw10 as u8) == Page::CHANGED_NAMESPACES
            && !log::retains_event(command)
        {
            events::forget(self.state);
        }
        done
    }

    fn set_features(&mut self, command: &Command) -> Result<Set, Status> {
        features::set(self.state, &self.facts(), command.cdw10, command.cdw11)
    }

    /// Returns the fields that both Create commands have: number, entries, address.
    fn queue(&self, command: &Command) -> Result<(u16, u16, u64), Status> {
        let queue = command.cdw10 as u16;
        if queue == 0 || queue > features::queues(self.state, &self.facts()) {
            return Err(Status::INVALID_QUEUE_ID);
        }
        let entries = (command.cdw10 >> 16) + 1;
        if entries < 2 || entries > self.entries.into() {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        // Queues must be contiguous (CAP.CQR).
        if command.cdw11 & 1 == 0 {
            return Err(Status::INVALID_FIELD);
        }
        if !command.prp1.is_multiple_of(PAGE as u64) {
            return Err(Status::PRP_OFFSET);
        }
        Ok((queue, entries as u16, command.prp1))
    }

    fn check_area(&self, base: u64, len: usize) -> Result<(), Status> {
        self.memory.area(base, len).map(|_| ()).map_err(|why| {
            tracing::debug!("the driver creates a queue where there is no memory: {why}");
            Status::INVALID_FIELD
        })
    }

    fn create_completion(&mut self, command: &Command, number: u64) -> Done {
        let (queue, size, base) = self.queue(command)?;
        match self.state.completion(queue) {
            Some(there) if there.created == number => return Ok(0),
            Some(_) => return Err(Status::INVALID_QUEUE_ID),
            None => {}
        }
        let vector = (command.cdw11 >> 16) as u16;
        let interrupts = command.cdw11 & 2 != 0;
        if interrupts && vector >= self.vectors {
            return Err(Status::INVALID_VECTOR);
        }
        self.check_area(base, usize::from(size) * COMPLETION)?;
        let record = CompletionRecord { created: number, base, size, vector, interrupts };
        let doorbell = self.doorbells(queue)?.completion;
        self.state.create_completion(queue, &record, &doorbell).map_err(|_| Status::INVALID_QUEUE_SIZE)?;
        Ok(0)
    }

    fn delete_completion(&mut self, command: &Command, number: u64) -> Done {
        let queue = command.cdw10 as u16;
        if queue == 0 || self.state.completion(queue).is_none() {
            return if self.has_deleted(number) { Ok(0) } else { Err(Status::INVALID_QUEUE_ID) };
        }
        if submissions(self.state, queue).next().is_some() {
            return Err(Status::INVALID_QUEUE_DELETION);
        }
        Word::Deleted.store(self.state, number);
        self.state.delete_completion(queue);
        Ok(0)
    }

    fn create_submission(&mut self, command: &Command, number: u64) -> Result<Plan, Status> {
        let (queue, size, base) = self.queue(command)?;
        let completion = (command.cdw11 >> 16) as u16;
        match self.state.submission(queue) {
            Some(there) if there.created == number => return Ok(Plan::Done(Status::SUCCESS, 0)),
            Some(_) => return Err(Status::INVALID_QUEUE_ID),
            None => {}
        }
        if completion == 0 || self.state.completion(completion).is_none() {
            return Err(Status::COMPLETION_QUEUE_INVALID);
        }
        self.check_area(base, usize::from(size) * COMMAND)?;
        let record = SubmissionRecord { created: number, base, size, completion };
        Ok(Plan::Stop(Which::Group(completion), Change::CreateSubmission(queue, record)))
    }

    fn delete_submission(&mut self, command: &Command, number: u64) -> Result<Plan, Status> {
        let queue = command.cdw10 as u16;
        let there = if queue == 0 { None } else { self.state.submission(queue) };
        match there {
            Some(record) => {
                Word::Deleted.store(self.state, number);
                Ok(Plan::Stop(Which::Group(record.completion), Change::DeleteSubmission(queue)))
            }
            None if self.has_deleted(number) => Ok(Plan::Done(Status::SUCCESS, 0)),
            None => Err(Status::INVALID_QUEUE_ID),
        }
    }

    /// Returns whether this command has begun to delete a queue before, in a process that was killed.
    fn has_deleted(&self, number: u64) -> bool {
        Word::Deleted.load(self.state) == number
    }

    fn doorbells(&self, queue: u16) -> Result<Pair, Status> {
        doorbells::of(self.state, self.doorbells, self.memory, queue).map_err(|_| Status::INVALID_FIELD)
    }
}

fn fail(status: Status) -> Plan {
    Plan::Done(status.for_good(), 0)
}

/// Returns the submission queues that use a completion queue.
pub(super) fn submissions(
    state: &State<Mapping>,
    completion: u16,
) -> impl Iterator<Item = (u16, SubmissionRecord)> {
    (0..=state.constants().queues)
        .filter_map(move |queue| state.submission(queue).map(|record| (queue, record)))
        .filter(move |(_, record)| record.completion == completion)
}
