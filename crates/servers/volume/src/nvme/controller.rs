//! The controller: what its registers ask for, and the admin queue.
//!
//! ```text
//!                    CC.EN                        bus mastering, no shutdown
//!   disabled  ---------------->  ready, queues  <---------------------------->  ready, queues
//!      ^                          stopped                                        running
//!      |   a reset: CC.EN from 1 to 0, DEVICE_RESET, the loss of QEMU               |
//!      +---------------------------------------------------------------------------+
//! ```
//!
//! The holder stores in the state what the guest wants (CC, the number of resets, bus mastering), and sends a message. This
//! side does what is missing, step by step, and stores each step when it is done. So the successor of a process that was
//! killed finds out in the same way what is left to do.
//!
//! If the guest's memory changes while queues run, they are stopped and started again. All that they need lies in the
//! state, also the commands in flight. QEMU changes a range by removing it and adding another one, so queues whose memory
//! is not there wait for the next range. If the memory never comes back, the driver waits for ever, as with any disk.
//!
//! If the driver breaks its queues, or the file of their memory is truncated, the controller sets CSTS.CFS and does
//! nothing more until it is reset (NVMe 1.4, section 9.5).

use super::admin::{Admin, Change, Plan, Which, submissions};
use super::bell::Bell;
use super::memory::Memory;
use super::{Stuck, Volume, doorbells, dump, events, features};
use crate::attach::FromHolder;
use crate::disk::Disk;
use crate::hush::Hush;
use crate::worker::{Nvme, Requests, Start, ring};
use ginnel_layout::nvme::event::NAMESPACE_CHANGED;
use ginnel_layout::nvme::{Aqa, COMMAND, COMPLETION, Command, Status, cc, csts};
use ginnel_layout::nvme_state::{
    ACQ, AQA, ASQ, BUS_MASTER, CC, CSTS, DBBUF_EVENTS, DBBUF_SHADOW, DONE_GENERATION, NOTE, RESET_GENERATION,
};
use ginnel_nvme::identify::Properties;
use ginnel_nvme::{CompletionRecord, QueueGroup, QueueSetup, State, SubmissionRecord, Ticket};
use ginnel_shmem::Mapping;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;
use tracing::{debug, error, warn};
use zerocopy::FromZeros;

/// The number that the admin queues have as their creator: no command created them.
const NOBODY: u64 = u64::MAX;

/// The largest number of admin commands that are executed before the main thread looks at its other descriptors.
const BATCH: usize = 32;

/// What a controller is made of.
pub struct Parts {
    /// Its disk.
    pub disk: Arc<Disk>,
    /// What it says about itself.
    pub properties: Properties,
    /// The file with the state, whole.
    pub state: Mapping,
    /// The file with the doorbells, whole.
    pub doorbells: Mapping,
    /// Number of interrupt vectors.
    pub vectors: u16,
    /// The largest number of entries of an I/O queue.
    pub entries: u16,
    /// The eventfds that the holder writes when it has seen a doorbell, by the number of the queue.
    pub kicks: Vec<Arc<OwnedFd>>,
    /// The eventfd that a worker writes when a queue is broken.
    pub broken: Arc<OwnedFd>,
}

/// A controller, on the main thread.
pub struct Controller {
    disk: Arc<Disk>,
    properties: Properties,
    state: State<Mapping>,
    doorbells: Mapping,
    kicks: Vec<Arc<OwnedFd>>,
    broken: Arc<OwnedFd>,
    entries: u16,
    memory: Memory,
    vectors: Vec<Option<Arc<OwnedFd>>>,
    bell: Bell,
    /// Whether the queues are to run, as far as the registers say.
    runs: bool,
    /// The admin queues, while the queues run.
    admin: Option<QueueGroup<Mapping>>,
    requests: events::Requests,
    /// The completion queues that workers serve.
    running: Vec<u16>,
    failures: Hush,
}

/// The words that the holder writes, as they were at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    generation: u64,
    cc: u32,
    aqa: Aqa,
    asq: u64,
    acq: u64,
    bus_master: bool,
}

/// Why queues cannot be started.
#[derive(Debug)]
enum Unable {
    /// Their memory is not there.
    Memory(String),
    /// They are broken, or their disk is not available.
    Broken(String),
}

impl Unable {
    fn why(self) -> String {
        match self {
            Self::Memory(why) | Self::Broken(why) => why,
        }
    }
}

type Done = Result<(), Stuck>;

impl Controller {
    /// Takes over the state. An error says what is wrong with it.
    pub fn new(parts: Parts) -> Result<Self, String> {
        let Parts { disk, properties, state, doorbells, vectors, entries, kicks, broken } = parts;
        disk.keep_note(state.part(NOTE, Disk::NOTE));
        let state = State::open(state).map_err(|e| e.to_string())?;
        if kicks.len() != usize::from(state.constants().queues) + 1 {
            return Err(format!("the state is for {} queues", state.constants().queues));
        }
        Ok(Self {
            disk,
            properties,
            state,
            doorbells,
            kicks,
            broken,
            entries,
            memory: Memory::default(),
            vectors: vec![None; vectors.into()],
            bell: Bell::new().map_err(|e| format!("no thread: {e}"))?,
            runs: false,
            admin: None,
            requests: events::Requests::default(),
            running: Vec::new(),
            failures: Hush::default(),
        })
    }

    /// Executes a message of the holder. Returns the number with which it is to be answered, if it is to be. Blocks while
    /// queues are stopped, for at most a minute each.
    pub fn handle(&mut self, message: FromHolder, volume: &mut dyn Volume) -> Result<Option<u64>, Stuck> {
        match message {
            FromHolder::Map { range, file } => {
                self.change(volume, |memory| {
                    if let Err(why) = memory.map(range, file) {
                        error!("the guest's memory at {:#x} cannot be used: {why}", range.iova);
                    }
                })?;
                Ok(None)
            }
            FromHolder::Unmap { id, iova, len } => {
                self.change(volume, |memory| memory.unmap(iova, len))?;
                Ok(Some(id).filter(|id| *id != 0))
            }
            FromHolder::Vector { number, eventfd } => {
                self.set_vector(number, eventfd.map(Arc::new), volume)?;
                Ok(None)
            }
            // The caller follows the registers when it has handled all messages, and the attachment has seen to the others.
            FromHolder::Control { .. } | FromHolder::Welcome { .. } | FromHolder::Refused { .. } => Ok(None),
        }
    }

    /// Changes the guest's memory. Queues that run stop before the change and start again afterwards.
    fn change(&mut self, volume: &mut dyn Volume, change: impl FnOnce(&mut Memory)) -> Done {
        self.pause(volume)?;
        change(&mut self.memory);
        if !self.runs {
            return Ok(());
        }
        self.run(volume)
    }

    fn set_vector(&mut self, number: u32, eventfd: Option<Arc<OwnedFd>>, volume: &mut dyn Volume) -> Done {
        let Some(vector) = self.vectors.get_mut(number as usize) else {
            warn!("there is no interrupt vector {number}; there are {}", self.vectors.len());
            return Ok(());
        };
        // If the descriptor blocked, a VMM could stop its own volume.
        if let Some(eventfd) = &eventfd
            && let Err(error) = rustix::io::ioctl_fionbio(eventfd, true)
        {
            warn!("interrupt vector {number} is not an eventfd: {error}");
            return Ok(());
        }
        vector.clone_from(&eventfd);
        for &queue in &self.running {
            let uses = |record: CompletionRecord| record.interrupts && u32::from(record.vector) == number;
            if self.state.completion(queue).is_some_and(uses) {
                volume.set_call(queue, eventfd.clone());
            }
        }
        // An interrupt of the admin queue on the old descriptor may have been lost.
        match &eventfd {
            Some(eventfd) if number == 0 => self.bell.ring(eventfd),
            _ => Ok(()),
        }
    }

    /// Returns what the registers ask for now.
    pub fn wanted(&self) -> Wanted {
        // The holder stores a reset's CC before its generation; and what a driver needs for CC, it writes before CC.
        let generation = self.state.load(RESET_GENERATION);
        let cc = self.state.load(CC) as u32;
        Wanted {
            generation,
            cc,
            aqa: Aqa(self.state.load(AQA) as u32),
            asq: self.state.load(ASQ),
            acq: self.state.load(ACQ),
            bus_master: self.state.load(BUS_MASTER) != 0,
        }
    }

    /// Does what the registers have asked for.
    pub fn follow(&mut self, wanted: Wanted, volume: &mut dyn Volume) -> Done {
        let Wanted { generation, cc, bus_master, .. } = wanted;
        if self.state.load(DONE_GENERATION) != generation {
            self.reset(generation, volume)?;
        }
        if cc & cc::EN != 0 && self.csts() & (csts::RDY | csts::CFS) == 0 {
            match self.enable(wanted) {
                Ok(()) => self.set_csts(csts::RDY),
                Err(why) => self.fail(&why, volume)?,
            }
        }
        let ready = self.csts() & (csts::RDY | csts::CFS) == csts::RDY;
        if ready && cc & cc::SHN != 0 && self.csts() & csts::SHST != csts::SHST_COMPLETE {
            self.shut_down(volume)?;
        }
        self.runs = ready && self.csts() & csts::SHST == 0 && bus_master;
        match (self.runs, self.admin.is_some()) {
            (true, false) => self.run(volume),
            (false, true) => self.pause(volume),
            _ => Ok(()),
        }
    }

    fn csts(&self) -> u32 {
        self.state.load(CSTS) as u32
    }

    fn set_csts(&self, csts: u32) {
        self.state.store(CSTS, csts.into());
    }

    /// Stops everything, and brings the state back to what it is after power-on. What was in flight is forgotten: no
    /// request uses the guest's memory any more.
    fn reset(&mut self, generation: u64, volume: &mut dyn Volume) -> Done {
        self.pause(volume)?;
        self.state.delete_all();
        self.state.store(DBBUF_EVENTS, 0);
        self.state.store(DBBUF_SHADOW, 0);
        features::reset(&self.state);
        // The next driver may be another one, and it finds the cache on.
        self.disk.turn_cache(true);
        self.set_csts(0);
        self.state.store(DONE_GENERATION, generation);
        debug!("the controller is reset");
        Ok(())
    }

    /// Creates the admin queues.
    fn enable(&self, wanted: Wanted) -> Result<(), String> {
        let Wanted { cc, aqa, asq, acq, .. } = wanted;
        if cc & cc::CSS != 0 {
            return Err(format!("CC.CSS selects command set {}; there is only 0", (cc & cc::CSS) >> 4));
        }
        if cc::page_size(cc) != 4096 {
            return Err(format!("CC.MPS selects pages of {} bytes; there are only 4096", cc::page_size(cc)));
        }
        let (submission, completion) = (aqa.submission() as u16, aqa.completion() as u16);
        self.memory.area(asq, usize::from(submission) * COMMAND).map_err(|e| format!("ASQ: {e}"))?;
        self.memory.area(acq, usize::from(completion) * COMPLETION).map_err(|e| format!("ACQ: {e}"))?;
        let pair = doorbells::of(&self.state, &self.doorbells, &self.memory, 0)?;
        let completions =
            CompletionRecord { created: NOBODY, base: acq, size: completion, vector: 0, interrupts: true };
        let submissions = SubmissionRecord { created: NOBODY, base: asq, size: submission, completion: 0 };
        self.state.create_completion(0, &completions, &pair.completion).map_err(|e| format!("AQA: {e}"))?;
        self.state.create_submission(0, &submissions, &pair.submission).map_err(|e| format!("AQA: {e}"))?;
        features::reset(&self.state);
        debug!(submission, completion, "the controller is enabled");
        Ok(())
    }

    /// Makes all writes durable, at the guest's request (NVMe 1.4, section 7.6.2).
    fn shut_down(&mut self, volume: &mut dyn Volume) -> Done {
        self.set_csts(csts::RDY | csts::SHST_BUSY);
        self.stop_groups(false, volume)?;
        self.pause(volume)?;
        if let Err(why) = volume.sync() {
            return self.fail(&format!("it cannot shut down, as writes are not durable: {why}"), volume);
        }
        self.set_csts(csts::RDY | csts::SHST_COMPLETE);
        debug!("the controller is shut down");
        Ok(())
    }

    /// Stops everything until a reset, because the driver or the file of its memory is broken.
    #[cold]
    fn fail(&mut self, why: &str, volume: &mut dyn Volume) -> Done {
        // The guest can reset the controller and break it again as fast as it likes.
        if let Some(suppressed) = self.failures.allows(Instant::now()) {
            error!(suppressed, "the controller has failed, and its driver must reset it: {why}");
        }
        self.set_csts(self.csts() | csts::CFS);
        self.runs = false;
        self.pause(volume)
    }

    /// Reports that a worker has found a queue broken, or that memory is gone.
    pub fn queue_broken(&mut self, volume: &mut dyn Volume) -> Done {
        if self.csts() & csts::CFS != 0 || self.admin.is_none() {
            return Ok(());
        }
        self.fail("a queue is broken", volume)
    }

    /// Starts the admin queue and all I/O queues, or waits for their memory. If one cannot be started, the controller has failed.
    fn run(&mut self, volume: &mut dyn Volume) -> Done {
        match self.start_all(volume) {
            Ok(()) => self.serve(volume),
            // It was there when the queues were created, so it is on its way.
            Err(Unable::Memory(why)) => {
                debug!("the queues wait for memory: {why}");
                self.pause(volume)
            }
            Err(Unable::Broken(why)) => self.fail(&why, volume),
        }
    }

    fn start_all(&mut self, volume: &mut dyn Volume) -> Result<(), Unable> {
        self.admin = Some(self.group(0)?);
        self.start_groups(volume)
    }

    fn start_groups(&mut self, volume: &mut dyn Volume) -> Result<(), Unable> {
        for queue in 1..=self.state.constants().queues {
            if !self.running.contains(&queue) {
                self.start_group(queue, volume)?;
            }
        }
        Ok(())
    }

    /// Starts a completion queue with its submission queues, if there are any.
    fn start_group(&mut self, queue: u16, volume: &mut dyn Volume) -> Result<(), Unable> {
        let Some(record) = self.state.completion(queue) else { return Ok(()) };
        let mut kicks = vec![queue];
        kicks.extend(submissions(&self.state, queue).map(|(queue, _)| queue));
        if kicks.len() == 1 {
            return Ok(());
        }
        kicks.sort_unstable();
        kicks.dedup();
        let mapped = self.state.constants().mapped;
        // Queues of one thread may have the same kick, and it can wait for a descriptor only once.
        let kick = |queue: u16| self.kicks[usize::from(queue)].try_clone().map(Arc::new);
        let kicks = kicks.into_iter().filter(|_| !mapped).map(kick).collect::<io::Result<Vec<_>>>();
        let call = self.vectors.get(usize::from(record.vector)).filter(|_| record.interrupts);
        let start = Start {
            index: queue,
            memory: self.memory.whole().map_err(Unable::Broken)?,
            kicks: kicks.map_err(|e| Unable::Broken(format!("its eventfds: {e}")))?,
            call: call.cloned().flatten(),
            error: Some(self.broken.clone()),
            requests: Requests::Nvme(Nvme {
                group: self.group(queue)?,
                shadow: self.state.load(DBBUF_EVENTS) != 0,
            }),
        };
        volume.start(start).map_err(Unable::Broken)?;
        self.running.push(queue);
        Ok(())
    }

    /// Makes a completion queue and its submission queues ready to be served, where they stood.
    fn group(&self, queue: u16) -> Result<QueueGroup<Mapping>, Unable> {
        let pair =
            |queue| doorbells::of(&self.state, &self.doorbells, &self.memory, queue).map_err(Unable::Memory);
        let ring = |base, size: u16, entry: usize| {
            self.memory.area(base, usize::from(size) * entry).map_err(Unable::Memory)
        };
        let record = self.state.completion(queue);
        let record = record.ok_or_else(|| Unable::Broken(format!("there is no completion queue {queue}")))?;
        let completion = QueueSetup {
            id: queue,
            ring: ring(record.base, record.size, COMPLETION)?,
            doorbell: pair(queue)?.completion,
        };
        let submission = |(id, record): (u16, SubmissionRecord)| {
            let ring = ring(record.base, record.size, COMMAND)?;
            Ok(QueueSetup { id, ring, doorbell: pair(id)?.submission })
        };
        let submissions = submissions(&self.state, queue).map(submission).collect::<Result<_, Unable>>()?;
        QueueGroup::new(&self.state, completion, submissions).map_err(|e| Unable::Broken(e.to_string()))
    }

    /// Stops the admin queue and all I/O queues. What was not begun stays in flight in the state.
    pub fn pause(&mut self, volume: &mut dyn Volume) -> Done {
        self.stop_groups(true, volume)?;
        self.admin = None;
        // These requests are in flight, too, and are taken again.
        self.requests = events::Requests::default();
        Ok(())
    }

    fn stop_groups(&mut self, suspend: bool, volume: &mut dyn Volume) -> Done {
        while let Some(&queue) = self.running.last() {
            volume.stop(queue, suspend).map_err(Stuck)?;
            self.running.pop();
        }
        Ok(())
    }

    /// Executes admin commands. Called when the holder has seen the admin queue's doorbell. While memory is missing, nothing is done.
    pub fn serve(&mut self, volume: &mut dyn Volume) -> Done {
        for _ in 0..BATCH {
            let Some(admin) = &mut self.admin else { return Ok(()) };
            let (ticket, command) = match admin.take() {
                Ok(Some(taken)) => taken,
                Ok(None) => return self.tell(volume),
                Err(broken) => return self.fail(&broken.to_string(), volume),
            };
            if command == Command::new_zeroed() {
                let why = "a command of zeros: the VM's memory is not shared; QEMU needs memory-backend-memfd,share=on";
                return self.fail(why, volume);
            }
            self.execute(ticket, &command, volume)?;
        }
        // There may be more.
        ring(&self.kicks[0]);
        self.tell(volume)
    }

    fn execute(&mut self, ticket: Ticket, command: &Command, volume: &mut dyn Volume) -> Done {
        let number = ticket.number();
        let plan = self.admin_commands(volume).execute(command, number);
        let (status, result) = match plan {
            Plan::Done(status, result) => (status, result),
            Plan::Wait => {
                let Some(admin) = &mut self.admin else { return Ok(()) };
                if self.requests.is_full(&self.state) {
                    (Status::ASYNC_EVENT_LIMIT.for_good(), 0)
                } else {
                    admin.park(&ticket);
                    self.requests.add(ticket);
                    return Ok(());
                }
            }
            Plan::Stop(which, change) => match self.apply(which, change, volume)? {
                Ok(()) => (Status::SUCCESS, 0),
                Err(status) => (status.for_good(), 0),
            },
        };
        // Applying a change may have failed the controller.
        if let Some(admin) = &mut self.admin {
            admin.complete(ticket, status, result);
        }
        Ok(())
    }

    /// Stops queues, applies a change, and starts them again.
    fn apply(
        &mut self,
        which: Which,
        change: Change,
        volume: &mut dyn Volume,
    ) -> Result<Result<(), Status>, Stuck> {
        match which {
            Which::Group(queue) => {
                if let Some(at) = self.running.iter().position(|running| *running == queue) {
                    volume.stop(queue, false).map_err(Stuck)?;
                    self.running.swap_remove(at);
                }
            }
            Which::All | Which::AllDurable => self.stop_groups(true, volume)?,
        }
        // Before the change is noted: a successor that finds it noted makes nothing durable. The queues are stopped, so nothing is
        // written in between.
        let durable = match which {
            Which::AllDurable => volume.sync().map_err(|why| {
                error!("the driver turns the write cache off, and writes are not durable: {why}");
                Status::INTERNAL
            }),
            Which::All | Which::Group(_) => Ok(()),
        };
        let done = durable.and_then(|()| self.admin_commands(volume).apply(change));
        if let Err(unable) = self.start_groups(volume) {
            self.fail(&unable.why(), volume)?;
        }
        Ok(done)
    }

    fn admin_commands<'a>(&'a mut self, volume: &'a dyn Volume) -> Admin<'a> {
        Admin {
            state: &self.state,
            doorbells: &self.doorbells,
            disk: &self.disk,
            properties: &self.properties,
            memory: &mut self.memory,
            volume,
            entries: self.entries,
            vectors: self.vectors.len() as u16,
        }
    }

    /// Notes that the size of the disk has changed, and tells the driver if it wants to know.
    pub fn resized(&mut self, volume: &mut dyn Volume) -> Done {
        events::change(&self.state);
        self.tell(volume)
    }

    /// Completes a request for events if there is one to tell, and raises the interrupt of the admin queue if something was
    /// completed.
    fn tell(&mut self, volume: &mut dyn Volume) -> Done {
        let Some(admin) = &mut self.admin else { return Ok(()) };
        if events::is_due(&self.state)
            && let Some(ticket) = self.requests.take()
        {
            match admin.unpark(&ticket) {
                Ok(true) => {
                    admin.complete(ticket, Status::SUCCESS, NAMESPACE_CHANGED);
                    events::told(&self.state);
                }
                // The driver rings when it has taken completions, and this is called again.
                Ok(false) => self.requests.add(ticket),
                Err(broken) => return self.fail(&broken.to_string(), volume),
            }
        }
        if admin.publish()
            && let Some(Some(vector)) = self.vectors.first()
        {
            self.bell.ring(vector)?;
        }
        Ok(())
    }

    /// Returns the state of the controller, for people who look at a guest that hangs.
    pub fn dump(&self) -> ginnel_volume_control::Controller {
        dump::controller(&self.state, &self.doorbells, &self.memory, self.requests.len())
    }

    /// Returns whether a VM is there: it has shared its memory.
    pub fn has_vm(&self) -> bool {
        !self.memory.is_empty()
    }

    /// Returns, for each completion queue, whether it is served, and its size.
    pub fn queues(&self) -> impl Iterator<Item = (bool, u16)> {
        (0..=self.state.constants().queues).map(|queue| {
            let size = self.state.completion(queue).map_or(0, |record| record.size);
            let runs = if queue == 0 { self.admin.is_some() } else { self.running.contains(&queue) };
            (runs, size)
        })
    }
}
