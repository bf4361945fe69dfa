//! The state of a controller, which outlives the process that serves it: see [`ginnel_layout::nvme_state`].

use crate::doorbell::Doorbell;
use crate::error::SetupError;
use ginnel_layout::nvme_state::{
    self as layout, CAP, HEADER, MAGIC, MAGIC_AT, MAPPED, MAX_QUEUES, MAX_SIZE, QUEUES, SLOT, SLOTS, VERSION,
    VERSION_AT, VS, completion, slot, submission,
};
use ginnel_shmem::SharedMemory;

/// Most entries of an admin queue: the fields of AQA have 12 bits.
const MAX_ADMIN: u16 = 4096;

/// The state of a controller. Clones refer to the same state.
#[derive(Clone)]
pub struct State<M> {
    pub(crate) memory: M,
    queues: u16,
    slots: u16,
}

/// What never changes in a controller's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Constants {
    /// Number of I/O queues (N), 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Number of slots of a submission queue (S) and largest number of entries of an I/O queue: a power of two from 2 to [`MAX_SIZE`].
    pub slots: u16,
    /// Whether the doorbells are mapped into the guest.
    pub mapped: bool,
    /// The register CAP.
    pub cap: u64,
    /// The register VS.
    pub vs: u32,
}

/// A completion queue that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionRecord {
    /// A number that the engine chooses, not 0.
    pub created: u64,
    /// Guest address of the queue.
    pub base: u64,
    /// Number of entries: 2 to S, or to 4096 if this is an admin queue.
    pub size: u16,
    /// Interrupt vector.
    pub vector: u16,
    /// Whether interrupts are enabled.
    pub interrupts: bool,
}

/// A submission queue that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubmissionRecord {
    /// A number that the engine chooses, not 0.
    pub created: u64,
    /// Guest address of the queue.
    pub base: u64,
    /// Number of entries: 2 to S, or to 4096 if this is an admin queue.
    pub size: u16,
    /// The completion queue.
    pub completion: u16,
}

impl<M: SharedMemory> State<M> {
    /// Returns the bytes of a state.
    pub const fn len(queues: u16, slots: u16) -> usize {
        layout::len(queues, slots)
    }

    /// Writes a new state into memory that contains zeros.
    pub fn create(memory: M, constants: &Constants) -> Result<Self, SetupError> {
        let Constants { queues, slots, mapped, cap, vs } = *constants;
        let state = Self::checked(memory, queues.into(), slots.into())?;
        for (at, word) in [
            (VERSION_AT, VERSION),
            (QUEUES, queues.into()),
            (SLOTS, slots.into()),
            (MAPPED, mapped.into()),
            (CAP, cap),
            (VS, vs.into()),
            (MAGIC_AT, MAGIC),
        ] {
            // ORDER nvme.state: the words before the magic number are seen. Pairs with: `open`.
            state.memory.store_release_u64(at, word);
        }
        Ok(state)
    }

    /// Opens a state that another process has created.
    pub fn open(memory: M) -> Result<Self, SetupError> {
        // ORDER nvme.state: Pairs with: `create`.
        if memory.len() < HEADER || memory.load_acquire_u64(MAGIC_AT) != MAGIC {
            return Err(SetupError::State("it does not begin with the magic number of a state file"));
        }
        if memory.load_relaxed_u64(VERSION_AT) != VERSION {
            return Err(SetupError::State(
                "its version is not 1: the holder and this process are of different versions",
            ));
        }
        let (queues, slots) = (memory.load_relaxed_u64(QUEUES), memory.load_relaxed_u64(SLOTS));
        Self::checked(memory, queues, slots)
    }

    fn checked(memory: M, queues: u64, slots: u64) -> Result<Self, SetupError> {
        if !(1..=MAX_QUEUES.into()).contains(&queues) {
            return Err(SetupError::State("its number of I/O queues is not from 1 to 64"));
        }
        if !(2..=MAX_SIZE.into()).contains(&slots) || !slots.is_power_of_two() {
            return Err(SetupError::State("its number of slots is not a power of two from 2 to 32768"));
        }
        let (queues, slots) = (queues as u16, slots as u16);
        if memory.len() < Self::len(queues, slots) {
            return Err(SetupError::State("it is shorter than its numbers of queues and slots need"));
        }
        Ok(Self { memory, queues, slots })
    }

    /// Returns what never changes.
    pub fn constants(&self) -> Constants {
        Constants {
            queues: self.queues,
            slots: self.slots,
            mapped: self.memory.load_relaxed_u64(MAPPED) != 0,
            cap: self.memory.load_relaxed_u64(CAP),
            vs: self.memory.load_relaxed_u64(VS) as u32,
        }
    }

    /// Loads a word of the header, such as [`ginnel_layout::nvme_state::CC`], and acquires what was done before it was stored. Panics if
    /// the offset is not in the header.
    pub fn load(&self, word: usize) -> u64 {
        assert!(word < HEADER, "a word of the header");
        // ORDER nvme.word: Pairs with: `store`, by the other process.
        self.memory.load_acquire_u64(word)
    }

    /// Stores a word of the header. Only the process that the format names stores it. Panics if the offset is not in the header.
    pub fn store(&self, word: usize, value: u64) {
        assert!(word < HEADER, "a word of the header");
        // ORDER nvme.word: what was done before is seen. Pairs with: `load`, by the other process.
        self.memory.store_release_u64(word, value);
    }

    /// Returns a completion queue, if it exists.
    pub fn completion(&self, queue: u16) -> Option<CompletionRecord> {
        let at = self.completion_at(queue)?;
        let created = self.memory.load_relaxed_u64(at + completion::CREATED);
        let config = self.memory.load_relaxed_u64(at + completion::CONFIG);
        let base = self.memory.load_relaxed_u64(at + completion::BASE);
        let (vector, interrupts) = ((config >> 16) as u16, config >> 32 & 1 != 0);
        (created != 0).then_some(CompletionRecord { created, base, size: config as u16, vector, interrupts })
    }

    /// Returns a submission queue, if it exists.
    pub fn submission(&self, queue: u16) -> Option<SubmissionRecord> {
        let at = self.submission_at(queue)?;
        let created = self.memory.load_relaxed_u64(at + submission::CREATED);
        let config = self.memory.load_relaxed_u64(at + submission::CONFIG);
        let base = self.memory.load_relaxed_u64(at + submission::BASE);
        let completion = (config >> 16) as u16;
        (created != 0).then_some(SubmissionRecord { created, base, size: config as u16, completion })
    }

    /// Returns the number of all completions that were ever posted to a queue, for people who look at a guest that hangs; 0 if there is no
    /// such queue.
    pub fn posted(&self, queue: u16) -> u64 {
        self.completion_at(queue).map_or(0, |at| self.memory.load_relaxed_u64(at + completion::TAIL))
    }

    /// Returns the number of commands of a submission queue that are in flight, for people who look at a guest that hangs.
    pub fn in_flight(&self, queue: u16) -> u16 {
        if queue > self.queues {
            return 0;
        }
        let taken = |slot: u16| self.slots_at(queue) + SLOT * usize::from(slot) + slot::TAKEN;
        let is_in_flight = |slot: &u16| self.memory.load_relaxed_u64(taken(*slot)) & 1 != 0;
        (0..self.slots).filter(is_in_flight).count() as u16
    }

    /// Creates a completion queue: its doorbell is reset, nothing was posted to it, and then it exists. The caller has checked its
    /// address and vector.
    pub fn create_completion(
        &self,
        queue: u16,
        record: &CompletionRecord,
        doorbell: &Doorbell<M>,
    ) -> Result<(), SetupError> {
        let at = self.completion_at(queue).ok_or(unknown("completion", queue))?;
        self.check_size(queue, record.size)?;
        let CompletionRecord { created, base, size, vector, interrupts } = *record;
        let config = u64::from(size) | u64::from(vector) << 16 | u64::from(interrupts) << 32;
        doorbell.reset();
        self.memory.store_release_u64(at + completion::BASE, base);
        self.memory.store_release_u64(at + completion::CONFIG, config);
        self.memory.store_release_u64(at + completion::TAIL, 0);
        self.memory.store_release_u64(at + completion::CREATED, created);
        Ok(())
    }

    /// Creates a submission queue: its doorbell is reset, nothing was taken from it, and then it exists. The caller has checked its
    /// address, and that its completion queue exists.
    pub fn create_submission(
        &self,
        queue: u16,
        record: &SubmissionRecord,
        doorbell: &Doorbell<M>,
    ) -> Result<(), SetupError> {
        let at = self.submission_at(queue).ok_or(unknown("submission", queue))?;
        self.check_size(queue, record.size)?;
        let SubmissionRecord { created, base, size, completion } = *record;
        let slots = self.slots_at(queue);
        for number in 0..usize::from(self.slots) {
            let taken = slots + SLOT * number + slot::TAKEN;
            // Most slots were never used, and their pages not even allocated.
            if self.memory.load_relaxed_u64(taken) != 0 {
                self.memory.store_release_u64(taken, 0);
            }
        }
        doorbell.reset();
        self.memory.store_release_u64(at + submission::BASE, base);
        self.memory.store_release_u64(at + submission::CONFIG, u64::from(size) | u64::from(completion) << 16);
        self.memory.store_release_u64(at + submission::CREATED, created);
        Ok(())
    }

    /// Deletes a completion queue, if it exists.
    pub fn delete_completion(&self, queue: u16) {
        if let Some(at) = self.completion_at(queue) {
            self.memory.store_release_u64(at + completion::CREATED, 0);
        }
    }

    /// Deletes a submission queue, if it exists. What was in flight is forgotten.
    pub fn delete_submission(&self, queue: u16) {
        if let Some(at) = self.submission_at(queue) {
            self.memory.store_release_u64(at + submission::CREATED, 0);
        }
    }

    /// Deletes all queues, as at a reset of the controller.
    pub fn delete_all(&self) {
        (0..=self.queues).for_each(|queue| self.delete_submission(queue));
        (0..=self.queues).for_each(|queue| self.delete_completion(queue));
    }

    /// Checks the number of entries of a queue.
    pub(crate) fn check_size(&self, queue: u16, size: u16) -> Result<(), SetupError> {
        // The driver chooses the size of the admin queues without regard to `CAP.MQES`. Fewer slots than entries are enough: commands
        // wait until one is free.
        let most = if queue == 0 { self.slots.max(MAX_ADMIN) } else { self.slots };
        if size < 2 || size > most {
            return Err(SetupError::Size { queue, size: size.into(), most });
        }
        Ok(())
    }

    pub(crate) fn completion_at(&self, queue: u16) -> Option<usize> {
        (queue <= self.queues).then(|| layout::completion(queue))
    }

    fn submission_at(&self, queue: u16) -> Option<usize> {
        (queue <= self.queues).then(|| layout::submission(queue, self.queues))
    }

    /// Returns the offset of the slots of a submission queue. The queue's number has been checked.
    pub(crate) fn slots_at(&self, queue: u16) -> usize {
        layout::slots(queue, self.queues, self.slots)
    }

    /// Returns the number of slots of a submission queue.
    pub(crate) fn slots(&self) -> u16 {
        self.slots
    }
}

pub(crate) fn unknown(kind: &'static str, queue: u16) -> SetupError {
    SetupError::Queue { kind, queue, why: "does not exist" }
}
