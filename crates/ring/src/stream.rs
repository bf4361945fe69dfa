//! A stream of bytes.
//!
//! Two counters that only grow: the producer's tail (bytes published) and the consumer's head (bytes released). Each
//! side keeps its own and a cached copy of the other's, and looks at the real one only when the cached one leaves it
//! nothing to do. Long writes are published in pieces, so that the reader copies out while the writer copies in. Short ones are published
//! at once, around the end of the ring too: who receives finds all of what was sent in one call, as with TCP, if the ring had room for it.
//!
//! The consumer returns space in eighths of the ring, also when it has read everything: the producer may find only seven
//! eighths of an empty ring free.

use crate::cursor::Cursor;
use crate::error::{Corrupt, RecvError, SendError};
use crate::side;
use crate::wait::{Armed, Bell, Look, Waitable, Watch, Watchable};
use ginnel_layout::board::Place;
use ginnel_layout::ring::{
    CONSUMER_STATE, DATA_ARMED, HEAD, HEADER, PRODUCER_STATE, SPACE_ARMED, SideState, TAIL,
};
use ginnel_shmem::{SharedMemory, SharedSlice};

/// Long copies are handed over in pieces of this part of the ring.
const PIECES: usize = 8;

/// Writes of so many bytes are not.
const AT_ONCE: usize = 4096;

/// The writing side.
#[derive(Debug)]
pub struct Producer<M: SharedMemory> {
    memory: M,
    capacity: usize,
    tail: u64,
    head: u64,
    /// Why nothing can be sent any more. Once set, it stays: a peer cannot talk itself back into order.
    ended: Option<SendError>,
    armed: Armed,
    bell: Bell,
}

impl<M: SharedMemory> Producer<M> {
    /// Becomes the producer of the ring that `memory` begins with, and resets the producer's words. There must be no
    /// other. Panics if the capacity is not valid or the ring does not fit.
    pub fn new(memory: M, capacity: usize) -> Self {
        side::begin_producing(&memory, capacity, TAIL);
        Self::at(memory, capacity, Cursor::default(), None)
    }

    /// Becomes the producer of a ring where another producer has stopped. Panics as `new` does. Where it goes on, which is before
    /// or behind what the other was about to publish, is said by [`Producer::cursor`]. Ask [`Producer::take_owed`] afterwards.
    pub fn resume(memory: M, capacity: usize, cursor: Cursor) -> Result<Self, Corrupt> {
        let ended = side::resume_producing(&memory, capacity);
        let mut producer = Self::at(memory, capacity, cursor.check(capacity)?, ended);
        producer.settle(cursor.pending)?;
        Ok(producer)
    }

    /// Goes behind what the earlier producer was about to publish if it has done so.
    fn settle(&mut self, pending: u64) -> Result<(), Corrupt> {
        let tail = self.memory.load_relaxed_u64(TAIL);
        if tail == self.tail + pending {
            self.tail = tail;
        } else if tail != self.tail && !side::is_lost(&self.memory) {
            return Err(Corrupt::Tail { tail, seen: self.tail, head: self.head });
        }
        Ok(())
    }

    /// Whether the consumer's doorbell must be rung for what an earlier producer has published. To be asked after
    /// [`Producer::resume`]; answers true once for each sleep of the consumer.
    #[must_use = "the consumer may have to be woken"]
    pub fn take_owed(&mut self) -> bool {
        self.bell.needed(&self.memory)
    }

    fn at(memory: M, capacity: usize, cursor: Cursor, ended: Option<SendError>) -> Self {
        Self {
            memory,
            capacity,
            tail: cursor.position,
            head: cursor.released,
            ended,
            armed: Armed::resume(SPACE_ARMED, cursor.token),
            bell: Bell::resume(DATA_ARMED, cursor.rung),
        }
    }

    /// Where this side is; see [`Room::cursor`].
    pub fn cursor(&self) -> Cursor {
        Cursor {
            position: self.tail,
            pending: 0,
            released: self.head,
            token: self.armed.token(),
            rung: self.bell.rung(),
        }
    }

    fn free(&self) -> usize {
        self.capacity - (self.tail - self.head) as usize
    }

    /// Room for at least `least` bytes (of a ring that may hold more), or why not.
    fn room(&mut self, least: usize) -> Result<usize, SendError> {
        if let Some(ended) = self.ended {
            return Err(ended);
        }
        if let Err(end) = side::consumer_ended(&self.memory) {
            return Err(*self.ended.insert(end));
        }
        if self.free() < least
            && let Err(end) = self.refresh_head()
        {
            return Err(*self.ended.insert(end));
        }
        match self.free() {
            0 => Err(SendError::Full),
            free => Ok(free),
        }
    }

    /// Looks at how much the consumer has released.
    fn refresh_head(&mut self) -> Result<(), SendError> {
        // ORDER ring.release: the consumer has done with these bytes before we overwrite them.
        // Pairs with: `Consumer::return_space`.
        let head = self.memory.load_acquire_u64(HEAD);
        // Asked afterwards, because this load may be the first to find the memory gone.
        if self.memory.is_broken() {
            return Err(SendError::Broken);
        }
        if head < self.head || head > self.tail {
            return Err(match side::is_lost(&self.memory) {
                true => SendError::Broken,
                false => Corrupt::Head { head, seen: self.head, tail: self.tail }.into(),
            });
        }
        self.head = head;
        Ok(())
    }

    /// Room for at most `most` bytes in one run, to be filled in place.
    pub fn claim(&mut self, most: usize) -> Result<Room<'_, M>, SendError> {
        let start = self.tail as usize & (self.capacity - 1);
        let run = self.capacity - start;
        let len = self.room(most.clamp(1, self.capacity / PIECES))?.min(most).min(run);
        Ok(Room { producer: self, start: HEADER + start, len })
    }

    /// Copies in as much of `from` as there is room for, in pieces of 4 KiB or more that are published as they come; `ring` is called
    /// where the consumer's doorbell must be rung. Returns how many bytes went, at least one unless `from` is empty.
    pub fn write(&mut self, from: &[u8], mut ring: impl FnMut()) -> Result<usize, SendError> {
        let mut sent = 0;
        while sent < from.len() {
            let piece = (from.len() - sent).min(AT_ONCE.max(self.capacity / PIECES));
            match self.put(&from[sent..sent + piece]) {
                Ok(n) => {
                    // A signal handler may leave this call for good at any instruction: then the next one rings.
                    if let Some(token) = self.bell.asked(&self.memory) {
                        ring();
                        self.bell.answered(token);
                    }
                    sent += n;
                }
                Err(_) if sent > 0 => break,
                Err(error) => return Err(error),
            }
        }
        // Bytes that went into memory that has gone away arrive nowhere.
        if self.memory.is_broken() {
            return Err(*self.ended.insert(SendError::Broken));
        }
        Ok(sent)
    }

    /// Copies in as much of a piece as there is room for, and publishes it.
    #[inline]
    fn put(&mut self, piece: &[u8]) -> Result<usize, SendError> {
        let len = self.room(piece.len())?.min(piece.len());
        let start = self.tail as usize & (self.capacity - 1);
        let (first, second) = piece[..len].split_at(len.min(self.capacity - start));
        SharedSlice::new(&self.memory, HEADER + start, first.len()).write(0, first);
        if !second.is_empty() {
            SharedSlice::new(&self.memory, HEADER, second.len()).write(0, second);
        }
        self.advance(len);
        Ok(len)
    }

    #[inline]
    fn advance(&mut self, len: usize) {
        self.tail += len as u64;
        // ORDER stream.publish: the bytes before the counter. Pairs with: `Consumer::poll`.
        self.memory.store_release_u64(TAIL, self.tail);
    }

    /// Says that nothing more comes. True if the consumer's doorbell must be rung.
    #[must_use = "the consumer may have to be woken"]
    pub fn finish(&mut self) -> bool {
        self.ended.get_or_insert(SendError::AfterFinish);
        side::end_producing(&self.memory, SideState::FINISHED);
        self.bell.needed(&self.memory)
    }

    /// Says that nothing more comes, and that what the consumer has not taken is void: its next look says
    /// [`RecvError::Aborted`]. True if the consumer's doorbell must be rung.
    #[must_use = "the consumer may have to be woken"]
    pub fn abort(&mut self) -> bool {
        self.ended.get_or_insert(SendError::AfterFinish);
        side::end_producing(&self.memory, SideState::ABORTED);
        self.bell.needed(&self.memory)
    }

    /// The memory of the ring.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Whether the consumer has aborted: it takes nothing more.
    pub fn is_aborted(&self) -> bool {
        side::consumer_ended(&self.memory) == Err(SendError::Aborted)
    }

    /// Whether it has said that nothing more comes ([`Producer::finish`]).
    pub fn is_finished(&self) -> bool {
        self.ended == Some(SendError::AfterFinish)
    }

    /// A copy of all that was published and the consumer has not released. Empty if nothing is known of that.
    pub fn unreleased(&mut self) -> Vec<u8> {
        if self.refresh_head().is_err() {
            return Vec::new();
        }
        let (len, start) = (self.in_flight(), self.head as usize & (self.capacity - 1));
        let run = len.min(self.capacity - start);
        let mut bytes = vec![0; len];
        SharedSlice::new(&self.memory, HEADER + start, run).read(0, &mut bytes[..run]);
        SharedSlice::new(&self.memory, HEADER, len - run).read(0, &mut bytes[run..]);
        bytes
    }

    /// Bytes published and not yet released by the consumer, as last seen.
    pub fn in_flight(&self) -> usize {
        (self.tail - self.head) as usize
    }
}

impl<M: SharedMemory> Waitable for Producer<M> {
    fn ready(&mut self) -> bool {
        !matches!(self.room(1), Err(SendError::Full)) || self.memory.is_broken()
    }
    #[inline]
    fn glance(&self) -> bool {
        self.memory.load_relaxed_u64(HEAD) != self.head
    }
    fn arm(&mut self) {
        self.armed.arm(&self.memory);
    }
    fn disarm(&mut self) {
        self.armed.disarm(&self.memory);
    }
}

impl<M: SharedMemory> Watchable for Producer<M> {
    type Memory = M;
    fn watch(&self) -> Watch<M> {
        let look = Look { memory: self.memory.clone(), word: HEAD, seen: self.head, state: CONSUMER_STATE };
        Watch { look, armed: self.armed.clone() }
    }
    fn unwatch(&mut self, watch: Watch<M>) {
        self.armed = watch.armed;
    }
    fn notify_at(&mut self, place: Place) {
        self.armed.notify_at(&self.memory, place);
    }
}

/// Room in the ring. Dropping it abandons it.
#[must_use = "room does nothing until it is published"]
pub struct Room<'p, M: SharedMemory> {
    producer: &'p mut Producer<M>,
    start: usize,
    len: usize,
}

impl<M: SharedMemory> Room<'_, M> {
    /// The bytes to fill.
    #[inline]
    pub fn slice(&self) -> SharedSlice<'_, M> {
        SharedSlice::new(&self.producer.memory, self.start, self.len)
    }

    /// Where the producer is, and that it is about to publish the first `len` bytes. To be saved right before that.
    pub fn cursor(&self, len: usize) -> Cursor {
        Cursor { pending: len.min(self.len) as u64, ..self.producer.cursor() }
    }

    /// Makes the first `len` bytes part of the stream (cut to what was claimed). True if the consumer's doorbell must be
    /// rung. If the memory has gone away meanwhile, the next claim says so: [`SendError::Broken`].
    #[inline]
    #[must_use = "the consumer may have to be woken"]
    pub fn publish(self, len: usize) -> bool {
        self.producer.advance(len.min(self.len));
        self.producer.bell.needed(&self.producer.memory)
    }
}

/// The reading side.
#[derive(Debug)]
pub struct Consumer<M: SharedMemory> {
    memory: M,
    capacity: usize,
    head: u64,
    returned: u64,
    tail: u64,
    /// Why nothing more can come. Once set, it stays: a peer cannot talk itself back into order.
    ended: Option<RecvError>,
    owed: bool,
    armed: Armed,
    bell: Bell,
}

impl<M: SharedMemory> Consumer<M> {
    /// Becomes the consumer of the ring that `memory` begins with, and resets the consumer's words. There must be no
    /// other. Panics if the capacity is not valid or the ring does not fit.
    pub fn new(memory: M, capacity: usize) -> Self {
        side::begin_consuming(&memory, capacity);
        Self::at(memory, capacity, Cursor::default())
    }

    /// Becomes the consumer of a ring where another consumer has stopped. Panics as `new` does. Ask [`Consumer::take_owed`]
    /// afterwards.
    pub fn resume(memory: M, capacity: usize, cursor: Cursor) -> Result<Self, Corrupt> {
        let cursor = cursor.check(capacity)?;
        side::resume_consuming(&memory, capacity, &cursor)?;
        let mut consumer = Self::at(memory, capacity, cursor);
        // What the earlier consumer had taken and not returned would else stay so, if it was the last that came.
        consumer.return_if_due();
        Ok(consumer)
    }

    fn at(memory: M, capacity: usize, cursor: Cursor) -> Self {
        Self {
            memory,
            capacity,
            head: cursor.position,
            returned: cursor.released,
            tail: cursor.position,
            ended: None,
            owed: false,
            armed: Armed::resume(DATA_ARMED, cursor.token),
            bell: Bell::resume(SPACE_ARMED, cursor.rung),
        }
    }

    /// Where this side is. Bytes that are not released are still to come; see [`Bytes::cursor`].
    pub fn cursor(&self) -> Cursor {
        Cursor {
            position: self.head,
            pending: 0,
            released: self.returned,
            token: self.armed.token(),
            rung: self.bell.rung(),
        }
    }

    /// Looks whether bytes are there, and how many. [`RecvError::Empty`] is the only error that can pass.
    #[inline]
    pub fn poll(&mut self) -> Result<usize, RecvError> {
        self.memory.attend();
        if side::producer_aborted(&self.memory) {
            self.end(RecvError::Aborted);
        }
        if self.tail == self.head {
            self.look()?;
        }
        Ok((self.tail - self.head) as usize)
    }

    /// The same, with those that have come since bytes were seen that are not taken yet.
    pub fn poll_all(&mut self) -> Result<usize, RecvError> {
        let seen = self.poll()?;
        match self.look() {
            // What was seen before the end is there.
            Ok(()) | Err(RecvError::Finished | RecvError::PeerDead) => Ok((self.tail - self.head) as usize),
            Err(RecvError::Empty) => Ok(seen),
            Err(error) => Err(error),
        }
    }

    /// Nothing comes after this, and nothing that is there is taken.
    #[cold]
    fn end(&mut self, why: RecvError) {
        self.ended.get_or_insert(why);
        self.tail = self.head;
    }

    #[inline]
    fn look(&mut self) -> Result<(), RecvError> {
        if let Some(ended) = self.ended {
            return Err(ended);
        }
        let mut seen = self.refresh_tail();
        if seen.is_ok() && self.tail == self.head {
            seen = self.empty();
        }
        if let Err(end) = seen
            && !matches!(end, RecvError::Empty)
        {
            self.ended = Some(end);
        }
        seen
    }

    fn refresh_tail(&mut self) -> Result<(), RecvError> {
        // ORDER stream.publish: the bytes are seen once the counter is. Pairs with: `Room::publish`.
        let tail = self.memory.load_acquire_u64(TAIL);
        if tail < self.tail || tail - self.head > self.capacity as u64 {
            return Err(if side::is_lost(&self.memory) {
                RecvError::Broken
            } else {
                Corrupt::Tail { tail, seen: self.tail, head: self.head }.into()
            });
        }
        self.tail = tail;
        Ok(())
    }

    /// Nothing is published; sees whether more can come. The space that is not returned yet (less than an eighth) stays so: a
    /// producer waits only for a ring that is full for it, which a ring that the consumer has emptied is not. Returning it
    /// would cost both sides a cache line and the consumer a fence for each exchange of short messages.
    fn empty(&mut self) -> Result<(), RecvError> {
        if self.memory.is_broken() {
            return Err(RecvError::Broken);
        }
        let Err(end) = side::producer_ended(&self.memory) else { return Err(RecvError::Empty) };
        if end == RecvError::Aborted {
            return Err(end);
        }
        // The state may have been set after a last publish that we looked for too early.
        self.refresh_tail()?;
        if self.tail == self.head { Err(end) } else { Ok(()) }
    }

    /// The bytes that are there, in place, as one run; what passes the end of the ring comes with the next call.
    #[inline]
    pub fn peek(&mut self) -> Result<Bytes<'_, M>, RecvError> {
        let available = self.poll()?;
        let start = self.head as usize & (self.capacity - 1);
        let len = available.min(self.capacity - start);
        Ok(Bytes { consumer: self, start: HEADER + start, len })
    }

    /// Copies out as much as is there and fits, in pieces whose room goes back as they are done; `ring` is called
    /// where the producer's doorbell must be rung. Returns how many bytes came, at least one unless `into` is empty.
    pub fn read(&mut self, into: &mut [u8], mut ring: impl FnMut()) -> Result<usize, RecvError> {
        let mut got = 0;
        while got < into.len() {
            let piece = (into.len() - got).min(self.capacity / PIECES);
            match self.peek() {
                Ok(bytes) => {
                    let n = bytes.slice().read(0, &mut into[got..got + piece]);
                    if bytes.release(n) {
                        ring();
                    }
                    got += n;
                }
                Err(error) if got == 0 => {
                    if self.take_owed() {
                        ring();
                    }
                    return Err(error);
                }
                Err(_) => break,
            }
        }
        if self.take_owed() {
            ring();
        }
        // Bytes copied while the memory went away are zeros, not the stream.
        if self.memory.is_broken() {
            return Err(*self.ended.insert(RecvError::Broken));
        }
        Ok(got)
    }

    #[inline]
    fn return_if_due(&mut self) {
        if self.head - self.returned >= (self.capacity / PIECES) as u64 {
            self.return_space();
        }
    }

    fn return_space(&mut self) {
        self.returned = self.head;
        // ORDER ring.release: we have done with these bytes. Pairs with: `Producer::refresh_head`.
        self.memory.store_release_u64(HEAD, self.head);
        self.owed |= self.bell.needed(&self.memory);
    }

    /// Whether the producer's doorbell must be rung, because it sleeps and space has been returned. To be asked after
    /// receiving; answers true once.
    #[must_use = "the producer may have to be woken"]
    pub fn take_owed(&mut self) -> bool {
        std::mem::take(&mut self.owed)
    }

    /// Says that nothing more will be taken. True if the producer's doorbell must be rung.
    #[must_use = "the producer may have to be woken"]
    pub fn finish(&mut self) -> bool {
        side::end_consuming(&self.memory, SideState::FINISHED);
        self.bell.needed(&self.memory) || self.take_owed()
    }

    /// Says that nothing more will be taken, and that what is there and not taken is dropped: the producer's next call says
    /// [`SendError::Aborted`]. True if the producer's doorbell must be rung.
    #[must_use = "the producer may have to be woken"]
    pub fn abort(&mut self) -> bool {
        self.end(RecvError::Aborted);
        side::end_consuming(&self.memory, SideState::ABORTED);
        self.bell.needed(&self.memory) || self.take_owed()
    }

    /// The memory of the ring.
    pub fn memory(&self) -> &M {
        &self.memory
    }
}

impl<M: SharedMemory> Waitable for Consumer<M> {
    fn ready(&mut self) -> bool {
        !matches!(self.poll(), Err(RecvError::Empty))
    }
    #[inline]
    fn glance(&self) -> bool {
        self.memory.load_relaxed_u64(TAIL) != self.tail
    }
    fn arm(&mut self) {
        self.armed.arm(&self.memory);
    }
    fn disarm(&mut self) {
        self.armed.disarm(&self.memory);
    }
}

impl<M: SharedMemory> Watchable for Consumer<M> {
    type Memory = M;
    fn watch(&self) -> Watch<M> {
        let look = Look { memory: self.memory.clone(), word: TAIL, seen: self.tail, state: PRODUCER_STATE };
        Watch { look, armed: self.armed.clone() }
    }
    fn unwatch(&mut self, watch: Watch<M>) {
        self.armed = watch.armed;
    }
    fn notify_at(&mut self, place: Place) {
        self.armed.notify_at(&self.memory, place);
    }
}

/// Received bytes, still in the ring. Dropping the value keeps them for the next call.
pub struct Bytes<'c, M: SharedMemory> {
    consumer: &'c mut Consumer<M>,
    start: usize,
    len: usize,
}

impl<M: SharedMemory> Bytes<'_, M> {
    /// How many.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes. A hostile peer can still change them: copy what must not change before checking it.
    #[inline]
    pub fn slice(&self) -> SharedSlice<'_, M> {
        SharedSlice::new(&self.consumer.memory, self.start, self.len)
    }

    /// Where the consumer will be once the first `len` bytes are released. To be saved right before that.
    pub fn cursor(&self, len: usize) -> Cursor {
        let cursor = self.consumer.cursor();
        Cursor { position: cursor.position + len.min(self.len) as u64, ..cursor }
    }

    /// Gives the first `len` bytes' room back to the producer (cut to what is there). True if the producer's doorbell
    /// must be rung.
    #[inline]
    pub fn release(self, len: usize) -> bool {
        let consumer = self.consumer;
        consumer.head += len.min(self.len) as u64;
        consumer.return_if_due();
        consumer.take_owed()
    }
}
