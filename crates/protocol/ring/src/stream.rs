//! Byte-stream rings: a ring that carries a stream of bytes.
//!
//! The ring has two counters that only grow: the producer's tail (bytes published) and the consumer's head (bytes released).
//! Each side keeps its own counter and a copy of the other's, and loads the other's counter only when the copy leaves it
//! nothing to do. Long writes are published in pieces, so that the reader copies out while the writer copies in. Short writes
//! are published at once, also across the end of the ring: a receiver gets everything that was sent in one call, as with TCP,
//! if the ring had room for it.
//!
//! The consumer returns space in eighths of the ring, also when it has read everything. Therefore the producer may find only
//! seven eighths of an empty ring free.

use crate::cursor::Cursor;
use crate::error::{Corrupt, RecvError, SendError};
use crate::side;
use crate::wait::{Armed, Bell, Look, Waitable, Watch, Watchable};
use ginnel_layout::board::Place;
use ginnel_layout::ring::{
    CONSUMER_STATE, DATA_ARMED, HEAD, HEADER, PRODUCER_STATE, SPACE_ARMED, SideState, TAIL,
};
use ginnel_shmem::{SharedMemory, SharedSlice};

/// Long copies are divided into pieces of one eighth of the ring.
const PIECES: usize = 8;

/// Writes of at most this many bytes are not divided.
const AT_ONCE: usize = 4096;

/// The sending side of a byte-stream ring.
#[derive(Debug)]
pub struct Producer<M: SharedMemory> {
    memory: M,
    capacity: usize,
    tail: u64,
    head: u64,
    /// Why nothing can be sent any more. Once set, it stays: a corrupt peer cannot become valid again.
    ended: Option<SendError>,
    armed: Armed,
    bell: Bell,
}

impl<M: SharedMemory> Producer<M> {
    /// Becomes the producer of the ring at the beginning of `memory`, and resets the producer's words. The ring must have no
    /// other producer. Panics if the capacity is not valid or the ring does not fit.
    pub fn new(memory: M, capacity: usize) -> Self {
        side::begin_producing(&memory, capacity, TAIL);
        Self::at(memory, capacity, Cursor::default(), None)
    }

    /// Becomes the producer of a ring where another producer has stopped. Panics as `new` does. It continues before or after
    /// what the other was about to publish, and [`Producer::cursor`] then returns where. The caller must call
    /// [`Producer::take_owed`] afterwards.
    pub fn resume(memory: M, capacity: usize, cursor: Cursor) -> Result<Self, Corrupt> {
        let ended = side::resume_producing(&memory, capacity);
        let mut producer = Self::at(memory, capacity, cursor.check(capacity)?, ended);
        producer.settle(cursor.pending)?;
        Ok(producer)
    }

    /// Moves the position behind what the earlier producer was about to publish, if that producer has published it.
    fn settle(&mut self, pending: u64) -> Result<(), Corrupt> {
        let tail = self.memory.load_relaxed_u64(TAIL);
        if tail == self.tail + pending {
            self.tail = tail;
        } else if tail != self.tail && !side::is_lost(&self.memory) {
            return Err(Corrupt::Tail { tail, seen: self.tail, head: self.head });
        }
        Ok(())
    }

    /// Returns whether the consumer's doorbell must be rung for what an earlier producer has published. The caller asks after
    /// [`Producer::resume`]. Returns true once for each sleep of the consumer.
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

    /// Returns the position of this side; see [`Room::cursor`].
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

    /// Returns how much room there is, which may be less than `least` bytes but not 0, or the reason why there is none. Loads
    /// the consumer's counter only if the known room is less than `least`.
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

    /// Returns how many bytes at most have room at once, sooner or later, whatever the consumer keeps.
    #[inline]
    pub fn at_once(&self) -> usize {
        self.capacity - self.capacity / PIECES
    }

    /// Returns whether so many bytes have room at once, or nothing can be sent any more.
    #[inline]
    pub fn has_room(&mut self, least: usize) -> bool {
        match self.room(least) {
            Ok(free) => free >= least,
            Err(SendError::Full) => self.memory.is_broken(),
            Err(_) => true,
        }
    }

    /// Loads how much the consumer has released, and checks it.
    fn refresh_head(&mut self) -> Result<(), SendError> {
        // ORDER ring.release: the consumer is finished with these bytes before this side overwrites them.
        // Pairs with: `Consumer::return_space`.
        let head = self.memory.load_acquire_u64(HEAD);
        // Checked after the load, which may be the first to find the memory gone.
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

    /// Claims contiguous room for at most `most` bytes, to be filled in place.
    pub fn claim(&mut self, most: usize) -> Result<Room<'_, M>, SendError> {
        let start = self.tail as usize & (self.capacity - 1);
        let run = self.capacity - start;
        let len = self.room(most.clamp(1, self.capacity / PIECES))?.min(most).min(run);
        Ok(Room { producer: self, start: HEADER + start, len })
    }

    /// Copies in as much of `from` as there is room for. Pieces of 4 KiB or more are published one by one. Calls `ring`
    /// whenever the consumer's doorbell must be rung. Returns how many bytes were copied, at least one unless `from` is
    /// empty.
    pub fn write(&mut self, from: &[u8], mut ring: impl FnMut()) -> Result<usize, SendError> {
        let mut sent = 0;
        while sent < from.len() {
            let piece = (from.len() - sent).min(AT_ONCE.max(self.capacity / PIECES));
            match self.put(&from[sent..sent + piece]) {
                Ok(n) => {
                    // A signal handler may leave this call for good at any instruction. Then the next call rings.
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
        // Bytes that were written to memory that is gone do not arrive.
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
        // ORDER stream.publish: the bytes are visible before the counter. Pairs with: `Consumer::poll`.
        self.memory.store_release_u64(TAIL, self.tail);
    }

    /// Marks that nothing more comes. Returns true if the consumer's doorbell must be rung.
    #[must_use = "the consumer may have to be woken"]
    pub fn finish(&mut self) -> bool {
        self.ended.get_or_insert(SendError::AfterFinish);
        side::end_producing(&self.memory, SideState::FINISHED);
        self.bell.needed(&self.memory)
    }

    /// Ends the ring at once: nothing more comes, and all data that the consumer has not taken is void. The consumer's next
    /// look returns [`RecvError::Aborted`]. Returns true if the consumer's doorbell must be rung.
    #[must_use = "the consumer may have to be woken"]
    pub fn abort(&mut self) -> bool {
        self.ended.get_or_insert(SendError::AfterFinish);
        side::end_producing(&self.memory, SideState::ABORTED);
        self.bell.needed(&self.memory)
    }

    /// Returns the memory of the ring.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Returns whether the consumer has aborted, so that it takes nothing more.
    pub fn is_aborted(&self) -> bool {
        side::consumer_ended(&self.memory) == Err(SendError::Aborted)
    }

    /// Returns whether the consumer has said that it takes nothing more.
    pub fn is_closed(&self) -> bool {
        side::consumer_ended(&self.memory) == Err(SendError::Closed)
    }

    /// Returns whether the consumer's process has died, as the daemon says.
    pub fn is_dead(&self) -> bool {
        side::consumer_ended(&self.memory) == Err(SendError::PeerDead)
    }

    /// Returns whether the producer has marked that nothing more comes ([`Producer::finish`]).
    pub fn is_finished(&self) -> bool {
        self.ended == Some(SendError::AfterFinish)
    }

    /// Returns a copy of everything that is published and not yet released by the consumer. Empty if the consumer's counter
    /// is invalid or the memory is gone.
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

    /// Returns the number of bytes that are published and not yet released by the consumer, as last seen.
    pub fn in_flight(&self) -> usize {
        (self.tail - self.head) as usize
    }
}

impl<M: SharedMemory> Waitable for Producer<M> {
    fn ready(&mut self) -> bool {
        self.has_room(1)
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

/// Room in the ring. Dropping it abandons the room.
#[must_use = "room does nothing until it is published"]
pub struct Room<'p, M: SharedMemory> {
    producer: &'p mut Producer<M>,
    start: usize,
    len: usize,
}

impl<M: SharedMemory> Room<'_, M> {
    /// Returns the bytes to fill.
    #[inline]
    pub fn slice(&self) -> SharedSlice<'_, M> {
        SharedSlice::new(&self.producer.memory, self.start, self.len)
    }

    /// Returns the position of the producer, with the information that it is about to publish the first `len` bytes. To be
    /// saved directly before that.
    pub fn cursor(&self, len: usize) -> Cursor {
        Cursor { pending: len.min(self.len) as u64, ..self.producer.cursor() }
    }

    /// Publishes the first `len` bytes (at most what was claimed). Returns true if the consumer's doorbell must be rung. If
    /// the memory is gone, the next claim returns [`SendError::Broken`].
    #[inline]
    #[must_use = "the consumer may have to be woken"]
    pub fn publish(self, len: usize) -> bool {
        self.producer.advance(len.min(self.len));
        self.producer.bell.needed(&self.producer.memory)
    }
}

/// The receiving side of a byte-stream ring.
#[derive(Debug)]
pub struct Consumer<M: SharedMemory> {
    memory: M,
    capacity: usize,
    head: u64,
    returned: u64,
    tail: u64,
    /// Why nothing more can come. Once set, it stays: a corrupt peer cannot become valid again.
    ended: Option<RecvError>,
    owed: bool,
    armed: Armed,
    bell: Bell,
}

impl<M: SharedMemory> Consumer<M> {
    /// Becomes the consumer of the ring at the beginning of `memory`, and resets the consumer's words. The ring must have no
    /// other consumer. Panics if the capacity is not valid or the ring does not fit.
    pub fn new(memory: M, capacity: usize) -> Self {
        side::begin_consuming(&memory, capacity);
        Self::at(memory, capacity, Cursor::default())
    }

    /// Becomes the consumer of a ring where another consumer has stopped. Panics as `new` does. The caller must call
    /// [`Consumer::take_owed`] afterwards.
    pub fn resume(memory: M, capacity: usize, cursor: Cursor) -> Result<Self, Corrupt> {
        let cursor = cursor.check(capacity)?;
        side::resume_consuming(&memory, capacity, &cursor)?;
        let mut consumer = Self::at(memory, capacity, cursor);
        // Otherwise the space that the earlier consumer took and did not return would never be returned if nothing further
        // came.
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

    /// Returns the position of this side. Bytes that are not released come again; see [`Bytes::cursor`].
    pub fn cursor(&self) -> Cursor {
        Cursor {
            position: self.head,
            pending: 0,
            released: self.returned,
            token: self.armed.token(),
            rung: self.bell.rung(),
        }
    }

    /// Returns how many bytes are there; never 0. [`RecvError::Empty`] is the only error that is not final. The result may be
    /// old: bytes that have come after the last look count only once those seen before are taken.
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

    /// Returns how many bytes are there, as [`Consumer::poll`] does, but always includes those that have come since the last
    /// look.
    pub fn poll_all(&mut self) -> Result<usize, RecvError> {
        let seen = self.poll()?;
        match self.look() {
            // Bytes that were seen before the end are still there.
            Ok(()) | Err(RecvError::Finished | RecvError::PeerDead) => Ok((self.tail - self.head) as usize),
            Err(RecvError::Empty) => Ok(seen),
            Err(error) => Err(error),
        }
    }

    /// Records that nothing more comes, and that nothing that is there is taken.
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
        // ORDER stream.publish: the bytes are seen once the counter is seen. Pairs with: `Room::publish`.
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

    /// Returns the error if nothing is published. The space that is not returned yet (less than an eighth) is kept: a
    /// producer waits only for a ring that is full for it, and a ring that the consumer has emptied is not. Returning it
    /// would cost both sides a cache line, and the consumer a fence, for each exchange of short messages.
    fn empty(&mut self) -> Result<(), RecvError> {
        if self.memory.is_broken() {
            return Err(RecvError::Broken);
        }
        let Err(end) = side::producer_ended(&self.memory) else { return Err(RecvError::Empty) };
        if end == RecvError::Aborted {
            return Err(end);
        }
        // The state may have been set after a last publish, for which we looked too early.
        self.refresh_tail()?;
        if self.tail == self.head { Err(end) } else { Ok(()) }
    }

    /// Returns the bytes that are there, in place and contiguous. The bytes beyond the end of the ring come with the next
    /// call.
    #[inline]
    pub fn peek(&mut self) -> Result<Bytes<'_, M>, RecvError> {
        let available = self.poll()?;
        let start = self.head as usize & (self.capacity - 1);
        let len = available.min(self.capacity - start);
        Ok(Bytes { consumer: self, start: HEADER + start, len })
    }

    /// Copies out as much as is there and fits, in pieces whose room is returned one by one. Calls `ring` whenever the
    /// producer's doorbell must be rung. Returns how many bytes were copied, at least one unless `into` is empty.
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
        // Bytes that were copied while the memory went away are zeros, not the stream.
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
        // ORDER ring.release: this side is finished with these bytes. Pairs with: `Producer::refresh_head`.
        self.memory.store_release_u64(HEAD, self.head);
        self.owed |= self.bell.needed(&self.memory);
    }

    /// Returns whether the producer's doorbell must be rung, because it sleeps and space has been returned. The caller asks
    /// after it has received. Returns true only once.
    #[must_use = "the producer may have to be woken"]
    pub fn take_owed(&mut self) -> bool {
        std::mem::take(&mut self.owed)
    }

    /// Marks that nothing more will be taken. Returns true if the producer's doorbell must be rung.
    #[must_use = "the producer may have to be woken"]
    pub fn finish(&mut self) -> bool {
        side::end_consuming(&self.memory, SideState::FINISHED);
        self.bell.needed(&self.memory) || self.take_owed()
    }

    /// Marks that nothing more will be taken, and drops what was not taken: the producer's next call returns
    /// [`SendError::Aborted`]. Returns true if the producer's doorbell must be rung.
    #[must_use = "the producer may have to be woken"]
    pub fn abort(&mut self) -> bool {
        self.end(RecvError::Aborted);
        side::end_consuming(&self.memory, SideState::ABORTED);
        self.bell.needed(&self.memory) || self.take_owed()
    }

    /// Tells the producer that the stream is broken, as [`Consumer::abort`] does, but goes on taking what was published before.
    pub fn refuse(&mut self) {
        side::end_consuming(&self.memory, SideState::ABORTED);
    }

    /// Returns the memory of the ring.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Returns whether the producer has finished or broken the stream. There may be bytes before that end.
    pub fn is_ending(&self) -> bool {
        matches!(side::producer_ended(&self.memory), Err(RecvError::Finished | RecvError::Aborted))
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
    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes. A hostile peer can still change them: copy what must not change, and then check the copy.
    #[inline]
    pub fn slice(&self) -> SharedSlice<'_, M> {
        SharedSlice::new(&self.consumer.memory, self.start, self.len)
    }

    /// Returns the position of the consumer once the first `len` bytes are released. To be saved directly before that.
    pub fn cursor(&self, len: usize) -> Cursor {
        let cursor = self.consumer.cursor();
        Cursor { position: cursor.position + len.min(self.len) as u64, ..cursor }
    }

    /// Gives the room of the first `len` bytes (at most what is there) back to the producer. Returns true if the producer's
    /// doorbell must be rung.
    #[inline]
    pub fn release(self, len: usize) -> bool {
        let consumer = self.consumer;
        consumer.head += len.min(self.len) as u64;
        consumer.return_if_due();
        consumer.take_owed()
    }
}
