//! Queues in a small guest of their own: where they lie, and both sides.

use ginnel_guest_memory::{Area, GuestMemory, Region};
use ginnel_layout::nvme::{Command, Completion, DOORBELLS, completion_doorbell, submission_doorbell};
use ginnel_nvme::{
    CompletionRecord, Constants, Corrupt, Doorbell, DriverCompletions, DriverDoorbell, DriverSubmissions,
    QueueGroup, QueueSetup, SetupError, State, SubmissionRecord,
};
use ginnel_shmem::{Mapping, SharedMemory};

/// Start of the guest's memory, in guest addresses.
pub const GUEST: u64 = 0x10_0000;
/// Number of the completion queue. The submission queues have the numbers from 1 on.
pub const COMPLETION: u16 = 1;
/// Most submission queues of a group.
pub const MOST: u16 = 4;
/// Bytes of the guest's data.
pub const DATA: usize = 64 << 10;
/// Bytes between two doorbells in the doorbells file, and between two shadow doorbells.
const STRIDE: usize = 64;
const PAGE: usize = 4096;

/// How the device learns what is in a doorbell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The doorbells are mapped.
    Mapped,
    /// Each write is trapped.
    Trapped,
    /// Shadow doorbells.
    Shadow,
}

/// The queues of a group, and where they lie in their guest's memory.
#[derive(Clone, Copy, Debug)]
pub struct Rig {
    /// How doorbells are passed.
    pub mode: Mode,
    /// Number of submission queues, 1 to [`MOST`].
    pub submissions: u16,
    /// Number of entries of a submission queue.
    pub size: u16,
    /// Number of entries of the completion queue.
    pub completions: u16,
    /// Number of slots of a submission queue.
    pub slots: u16,
}

impl Rig {
    /// Returns the queues that a byte selects.
    pub fn choose(choice: u8) -> Self {
        let [size, completions] = [[2, 2], [3, 16], [5, 4], [16, 7]][usize::from(choice >> 2 & 3)];
        Self {
            mode: [Mode::Mapped, Mode::Trapped, Mode::Shadow, Mode::Shadow][usize::from(choice & 3)],
            submissions: [1, 2, 3, 1][usize::from(choice >> 4 & 3)],
            size,
            completions,
            slots: size.max(completions).next_power_of_two(),
        }
    }

    /// Returns one submission queue and its completion queue, of the same size.
    pub fn pair(mode: Mode, size: u16) -> Self {
        Self { mode, submissions: 1, size, completions: size, slots: size.next_power_of_two() }
    }

    /// Returns the offset of submission queue `index` (from 0 on) in the guest's memory.
    pub fn submission_at(&self, index: u16) -> usize {
        let each = (64 * usize::from(self.size)).next_multiple_of(PAGE);
        (16 * usize::from(self.completions)).next_multiple_of(PAGE) + each * usize::from(index)
    }

    /// Returns the offset of the shadow doorbells; the event indexes are in the next page.
    pub fn shadow_at(&self) -> usize {
        self.submission_at(self.submissions)
    }

    /// Returns the offset of the data.
    pub fn data_at(&self) -> usize {
        self.shadow_at() + 2 * PAGE
    }

    /// Returns the guest address of byte `at` of the data.
    pub fn data(&self, at: usize) -> u64 {
        GUEST + (self.data_at() + at) as u64
    }

    /// Makes the guest's memory.
    pub fn memory(&self) -> Mapping {
        Mapping::anonymous(self.data_at() + DATA).unwrap()
    }

    /// Makes the doorbells file.
    pub fn doorbells(&self) -> Mapping {
        Mapping::anonymous(2 * DOORBELLS).unwrap()
    }

    /// Makes the state, in which no queue exists.
    pub fn state_memory(&self) -> Mapping {
        let memory = Mapping::anonymous(State::<Mapping>::len(MOST, self.slots)).unwrap();
        let mapped = self.mode == Mode::Mapped;
        let constants = Constants { queues: MOST, slots: self.slots, mapped, cap: 0, vs: 0 };
        State::create(memory.clone(), &constants).unwrap();
        memory
    }

    /// Returns the guest's memory as a device sees it.
    pub fn guest<M: SharedMemory>(&self, memory: &M) -> GuestMemory<M> {
        GuestMemory::new(vec![Region { guest: GUEST, user: GUEST, memory: memory.clone() }]).unwrap()
    }

    fn area<M: SharedMemory>(&self, memory: &M, at: usize, len: usize) -> Area<M> {
        Area { memory: memory.clone(), at, len, guest: GUEST + at as u64 }
    }

    fn shadow<M: SharedMemory>(&self, memory: &M, doorbell: usize) -> [Area<M>; 2] {
        let at = self.shadow_at() + doorbell - DOORBELLS;
        [self.area(memory, at, 4), self.area(memory, at + PAGE, 4)]
    }

    /// Returns the offset of the doorbell of the completion queue, or of submission queue `index`.
    pub fn doorbell_at(&self, submission: Option<u16>) -> usize {
        match submission {
            Some(index) => submission_doorbell(index + 1, STRIDE),
            None => completion_doorbell(COMPLETION, STRIDE),
        }
    }

    fn doorbell<M: SharedMemory>(&self, memory: &M, doorbells: &M, at: usize) -> Doorbell<M> {
        let doorbell = Doorbell::new(doorbells.clone(), at).unwrap();
        let [value, event] = self.shadow(memory, at);
        match self.mode {
            Mode::Shadow => doorbell.with_shadow_of_predecessor(&value, &event).unwrap(),
            Mode::Mapped | Mode::Trapped => doorbell,
        }
    }

    /// Creates the queues.
    pub fn create<M: SharedMemory>(&self, memory: &M, doorbells: &M, state: &M) {
        let state = State::open(state.clone()).unwrap();
        let doorbell = |submission| self.doorbell(memory, doorbells, self.doorbell_at(submission));
        let record =
            CompletionRecord { created: 1, base: GUEST, size: self.completions, vector: 1, interrupts: true };
        state.create_completion(COMPLETION, &record, &doorbell(None)).unwrap();
        for index in 0..self.submissions {
            let base = GUEST + self.submission_at(index) as u64;
            let record = SubmissionRecord { created: 1, base, size: self.size, completion: COMPLETION };
            state.create_submission(index + 1, &record, &doorbell(Some(index))).unwrap();
        }
    }

    /// Returns the device's side of the queues, which takes over from a previous one.
    pub fn group<M: SharedMemory>(
        &self,
        memory: &M,
        doorbells: &M,
        state: &M,
    ) -> Result<QueueGroup<M>, SetupError> {
        let state = State::open(state.clone())?;
        let setup = |submission: Option<u16>| {
            let (at, len) = match submission {
                Some(index) => (self.submission_at(index), 64 * usize::from(self.size)),
                None => (0, 16 * usize::from(self.completions)),
            };
            QueueSetup {
                id: submission.map_or(COMPLETION, |index| index + 1),
                ring: self.area(memory, at, len),
                doorbell: self.doorbell(memory, doorbells, self.doorbell_at(submission)),
            }
        };
        QueueGroup::new(&state, setup(None), (0..self.submissions).map(|index| setup(Some(index))).collect())
    }

    /// Returns the driver's side of new queues. `commands` is the most that each submission queue can have outstanding.
    pub fn driver<M: SharedMemory>(&self, memory: &M, doorbells: &M, commands: u16) -> Driver<M> {
        let doorbell = |submission| {
            let at = self.doorbell_at(submission);
            let [value, event] = self.shadow(memory, at);
            match self.mode {
                Mode::Mapped => {
                    DriverDoorbell::Mapped(Area { memory: doorbells.clone(), at, len: 4, guest: 0 })
                }
                Mode::Trapped => DriverDoorbell::Trapped,
                Mode::Shadow => DriverDoorbell::Shadow { value, event },
            }
        };
        let submissions = (0..self.submissions).map(|index| {
            let ring = self.area(memory, self.submission_at(index), 64 * usize::from(self.size));
            DriverSubmissions::new(index + 1, self.size, commands, ring, doorbell(Some(index))).unwrap()
        });
        let ring = self.area(memory, 0, 16 * usize::from(self.completions));
        Driver {
            rig: *self,
            doorbells: doorbells.clone(),
            submissions: submissions.collect(),
            completions: DriverCompletions::new(COMPLETION, self.completions, ring, doorbell(None)).unwrap(),
        }
    }
}

/// The driver's side of a group, and the holder, which stores what is written to registers.
pub struct Driver<M: SharedMemory> {
    rig: Rig,
    doorbells: M,
    /// The submission queues.
    pub submissions: Vec<DriverSubmissions<M>>,
    /// The completion queue.
    pub completions: DriverCompletions<M>,
}

impl<M: SharedMemory> Driver<M> {
    /// Submits a command to a queue, which the device does not see yet.
    #[inline]
    pub fn submit(&mut self, index: usize, command: Command) -> Option<u16> {
        self.submissions[index].submit(command)
    }

    /// Shows the device what was submitted to a queue. Returns whether the device must be notified.
    #[inline]
    pub fn ring(&mut self, index: usize) -> bool {
        let value = self.submissions[index].ring();
        self.write(Some(index as u16), value)
    }

    /// Takes the next completion, and returns the index of its queue.
    #[inline]
    pub fn reap(&mut self) -> Result<Option<(usize, Completion)>, Corrupt> {
        let Some(completion) = self.completions.reap() else { return Ok(None) };
        let index = usize::from(completion.sqid).wrapping_sub(1);
        let queue = self.submissions.get_mut(index).ok_or(Corrupt::Queue(completion.sqid))?;
        queue.completed(&completion)?;
        Ok(Some((index, completion)))
    }

    /// Gives entries of the completion queue back. Returns whether the device must be notified.
    #[inline]
    pub fn release(&mut self) -> bool {
        let value = self.completions.ring();
        self.write(None, value)
    }

    fn write(&self, submission: Option<u16>, value: Option<u32>) -> bool {
        let Some(value) = value else { return false };
        self.doorbells.store_release_u32(self.rig.doorbell_at(submission), value);
        true
    }
}
