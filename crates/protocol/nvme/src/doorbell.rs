//! Doorbells: the words in which a driver stores the tails and heads of its queues.
//!
//! Without a shadow, the word lies in the doorbells file, where the guest writes it itself (mapped), or where the holder stores what it
//! trapped. With a shadow (Doorbell Buffer Config, 5.7), the driver stores the value in its own memory first. Then it writes the real
//! doorbell only if it passes the *event index*, which the device stores beside it. Both are positions in the queue, not
//! numbers that run on. Linux compares them as 16-bit numbers (`nvme_dbbuf_need_event`): it writes the doorbell if the event index lies
//! in the range from the old value to the new one, without the new one.

use crate::error::SetupError;
use crate::ring::check;
use ginnel_guest_memory::Area;
use ginnel_shmem::SharedMemory;

/// A doorbell as the device sees it.
#[derive(Clone)]
pub struct Doorbell<M> {
    /// The word with the value.
    value: Word<M>,
    /// The word with the event index, if the value is a shadow.
    event: Option<Word<M>>,
}

#[derive(Clone)]
struct Word<M> {
    memory: M,
    at: usize,
}

impl<M: SharedMemory> Word<M> {
    fn new(name: &'static str, area: &Area<M>) -> Result<Self, SetupError> {
        check(name, area, 4, 4)?;
        Ok(Self { memory: area.memory.clone(), at: area.at })
    }

    fn store(&self, value: u16) {
        self.memory.store_relaxed_u32(self.at, value.into());
    }
}

impl<M: SharedMemory> Doorbell<M> {
    /// Returns the doorbell at an offset of the doorbells file. An offset that is outside or not a multiple of 4 is an error.
    pub fn new(memory: M, at: usize) -> Result<Self, SetupError> {
        let len = memory.len().saturating_sub(at);
        let value = Word::new("doorbell", &Area { memory, at, len, guest: at as u64 })?;
        Ok(Self { value, event: None })
    }

    /// Returns the doorbell with a shadow: its value, and its event index, of 4 bytes each. The present value is stored in the shadow,
    /// since the driver may have written the doorbell before it had shadows.
    pub fn with_shadow(&self, value: &Area<M>, event: &Area<M>) -> Result<Self, SetupError> {
        let (value, event) = (Word::new("shadow doorbell", value)?, Word::new("event index", event)?);
        value.memory.store_relaxed_u32(value.at, self.load());
        Ok(Self { value, event: Some(event) })
    }

    /// Returns the same doorbell with a shadow that [`with_shadow`](Self::with_shadow) made in a previous process: nothing is stored.
    pub fn with_shadow_of_predecessor(&self, value: &Area<M>, event: &Area<M>) -> Result<Self, SetupError> {
        let (value, event) = (Word::new("shadow doorbell", value)?, Word::new("event index", event)?);
        Ok(Self { value, event: Some(event) })
    }

    /// Stores 0 in the word and in the shadow, as at the creation of a queue (3.1.25). Some drivers leave an old value in a shadow.
    pub(crate) fn reset(&self) {
        self.value.store(0);
        self.ask(0);
    }

    /// Returns the present value, for people who look at a guest that hangs.
    pub fn value(&self) -> u32 {
        self.load()
    }

    /// Loads the value, and acquires what the driver wrote before it.
    #[inline]
    pub(crate) fn load(&self) -> u32 {
        // ORDER nvme.doorbell: the commands before the tail are seen; completions before the head have been read. Pairs with: the
        // driver's store of the doorbell, or the holder's for a trapped write.
        self.value.memory.load_acquire_u32(self.value.at)
    }

    /// Returns whether the driver looks at an event index.
    #[inline]
    pub(crate) fn has_event(&self) -> bool {
        self.event.is_some()
    }

    /// Asks for a notification when the driver stores another value than this one, or when it passes this one.
    #[inline]
    pub(crate) fn ask(&self, value: u16) {
        if let Some(event) = &self.event {
            event.store(value);
        }
    }
}
