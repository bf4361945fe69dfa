//! Message rings: a ring that carries messages with boundaries.
//!
//! ```text
//!            consumed        published                 free
//!      ______________________________________________________________
//! data |     .........|R R R R R R R R R|0                           |
//!      ------------------------------------------------------------------
//!                     ^ consumer's position        ^ producer's position, its header zero
//! ```
//!
//! The producer claims room for a record, fills it in place, commits it, and publishes all committed records at once by
//! writing the header of the *first* of them last. The consumer polls the header at its position: zero means that nothing is
//! published yet. Dropping a claim abandons it, and the consumer never sees anything of it.

use crate::cursor::Cursor;
use crate::error::{Corrupt, RecvError, SendError};
use crate::side;
use crate::wait::{Armed, Bell, Look, Waitable, Watch, Watchable};
use ginnel_layout::board::Place;
use ginnel_layout::ring::{
    self, CONSUMER_STATE, DATA_ARMED, HEAD, HEADER, PRODUCER_STATE, RECORD_ALIGN, RECORD_HEADER,
    RecordHeader, RecordKind, SPACE_ARMED, SideState, record_span,
};
use ginnel_shmem::{SharedMemory, SharedSlice};

/// Returns the offset of a position from the start of the ring.
#[inline]
fn at(position: u64, capacity: usize) -> usize {
    HEADER + (position as usize & (capacity - 1))
}

/// The sending side of a message ring.
#[derive(Debug)]
pub struct Producer<M: SharedMemory> {
    memory: M,
    capacity: usize,
    /// Position of the next record.
    tail: u64,
    /// Bytes that the consumer has released, as last seen.
    head: u64,
    /// Position and header of the first committed but unpublished record, whose header is not written yet.
    held: Option<(u64, RecordHeader)>,
    /// Why nothing can be sent any more. Once set, it stays: a corrupt peer cannot become valid again.
    ended: Option<SendError>,
    armed: Armed,
    bell: Bell,
    /// Bytes of the message for which the sleeping producer waits.
    wanted: usize,
    /// Records that end at or before this position can be sent without further checks: they fit before the end of the ring
    /// and into what the consumer has released, no header is held back and neither side has ended. 0 if this is not known.
    clear_to: u64,
    /// Valid while `clear_to` is not 0: the headers of the cache lines after the tail up to here are zero already
    /// ([`Producer::clean`]).
    clean_to: u64,
}

/// How far ahead of its tail the producer of short records zeroes headers, in bytes.
const CLEAN: u64 = 8 * RECORD_ALIGN as u64;
/// Maximum bytes of a record for which zeroing ahead is worth it. A longer record overwrites most of the zeroed headers.
const SHORT: u64 = CLEAN / 2;

impl<M: SharedMemory> Producer<M> {
    /// Becomes the producer of the ring at the beginning of `memory`, and resets the producer's words. The ring must have no
    /// other producer. Panics if the capacity is not valid or the ring does not fit.
    pub fn new(memory: M, capacity: usize) -> Self {
        side::begin_producing(&memory, capacity, HEADER);
        Self::at(memory, capacity, Cursor::default(), None)
    }

    /// Becomes the producer of a ring where another producer has stopped. Panics as `new` does. It continues before or after
    /// what the other was about to publish, and [`Producer::cursor`] then returns where. The caller must call
    /// [`Producer::take_owed`] afterwards.
    pub fn resume(memory: M, capacity: usize, cursor: Cursor) -> Result<Self, Corrupt> {
        let ended = side::resume_producing(&memory, capacity);
        let mut producer = Self::at(memory, capacity, cursor.check_records(capacity)?, ended);
        producer.settle(cursor.pending)?;
        Ok(producer)
    }

    /// Moves the position behind what the earlier producer was about to publish, if that producer has published it. The
    /// header there is zero, since a producer writes it before it publishes what is in front of it.
    fn settle(&mut self, pending: u64) -> Result<(), Corrupt> {
        let header = |position| RecordHeader(self.memory.load_relaxed_u64(at(position, self.capacity)));
        if pending > 0 && header(self.tail).is_for(self.tail) {
            self.tail += pending;
        }
        let found = header(self.tail).0;
        if found != 0 && !side::is_lost(&self.memory) {
            return Err(Corrupt::Stamp { header: found, position: self.tail });
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
            held: None,
            ended,
            armed: Armed::resume(SPACE_ARMED, cursor.token),
            bell: Bell::resume(DATA_ARMED, cursor.rung),
            wanted: 0,
            clear_to: 0,
            clean_to: 0,
        }
    }

    /// Returns the position of this side, and what is committed and not published yet. To be saved directly before each
    /// publish.
    pub fn cursor(&self) -> Cursor {
        let position = self.held.map_or(self.tail, |(first, _)| first);
        Cursor {
            position,
            pending: self.tail - position,
            released: self.head,
            token: self.armed.token(),
            rung: self.bell.rung(),
        }
    }

    /// Returns the maximum length of a message, in bytes.
    pub fn max_message(&self) -> usize {
        ring::max_message(self.capacity)
    }

    /// Claims room for a message of `len` bytes. The consumer sees nothing of it until it is committed and published.
    #[inline]
    pub fn claim(&mut self, len: usize) -> Result<Claim<'_, M>, SendError> {
        let position = self.reserve(len)?;
        Ok(Claim { producer: self, position, len })
    }

    /// Finds room and returns the position of the record. Inserts a padding record first if necessary.
    #[inline]
    fn reserve(&mut self, len: usize) -> Result<u64, SendError> {
        self.clear_to = 0;
        if let Some(ended) = self.ended {
            return Err(ended);
        }
        if len > self.max_message() {
            return Err(SendError::TooLong { len, max: self.max_message() });
        }
        if let Err(end) = side::consumer_ended(&self.memory) {
            return Err(*self.ended.insert(end));
        }
        let span = record_span(len);
        let to_end = self.capacity - (self.tail as usize & (self.capacity - 1));
        let padding = if to_end < span { to_end } else { 0 };
        // The zero header behind the record needs one more cache line.
        let need = padding + span + RECORD_ALIGN;
        if self.free() < need {
            if let Err(end) = self.refresh_head() {
                return Err(*self.ended.insert(end));
            }
            if self.free() < need {
                return Err(SendError::Full);
            }
        }
        if padding > 0 {
            let header = RecordHeader::new(RecordKind::PAD, self.tail, padding - RECORD_HEADER);
            self.enqueue(self.tail, header);
            self.tail += padding as u64;
        }
        Ok(self.tail)
    }

    fn free(&self) -> usize {
        self.capacity - (self.tail - self.head) as usize
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
        if head < self.head || head > self.tail || !head.is_multiple_of(RECORD_ALIGN as u64) {
            return Err(match side::is_lost(&self.memory) {
                true => SendError::Broken,
                false => Corrupt::Head { head, seen: self.head, tail: self.tail }.into(),
            });
        }
        self.head = head;
        Ok(())
    }

    /// Writes a record's header, or holds it back if it is the first of the batch.
    #[inline]
    fn enqueue(&mut self, position: u64, header: RecordHeader) {
        if self.held.is_none() {
            self.held = Some((position, header));
        } else {
            self.memory.store_relaxed_u64(at(position, self.capacity), header.0);
        }
    }

    /// Makes all committed messages visible at once. Returns true if the consumer sleeps and its doorbell must be rung.
    #[inline]
    #[must_use = "the consumer may have to be woken"]
    pub fn publish(&mut self) -> bool {
        let Some((position, header)) = self.held.take() else { return false };
        self.memory.store_relaxed_u64(at(self.tail, self.capacity), 0);
        // ORDER ring.publish: the payloads, the headers of the rest of the batch, and the zero header behind it are visible
        // before this header.
        // Pairs with: `Consumer::poll`.
        self.memory.store_release_u64(at(position, self.capacity), header.0);
        self.bell.needed(&self.memory)
    }

    /// Copies a message into the ring and publishes it. Returns true if the consumer's doorbell must be rung.
    #[inline]
    pub fn send(&mut self, message: &[u8]) -> Result<bool, SendError> {
        match self.put(message) {
            Some(ring) => Ok(ring),
            None => self.send_by_claim(message),
        }
    }

    /// The fast path of [`Producer::send`]. Returns `None`, without a visible effect, if further checks are necessary. (If
    /// the memory is gone, the stores have happened, but no one can see them.)
    #[inline(always)]
    pub fn put(&mut self, message: &[u8]) -> Option<bool> {
        self.memory.attend();
        let (position, len) = (self.tail, message.len());
        let end = position + record_span(len) as u64;
        let state = self.memory.load_relaxed_u32(CONSUMER_STATE);
        // One branch checks both: a difference is negative, as a signed word, if the message does not fit.
        let room = self.clear_to.wrapping_sub(end) | (self.max_message().wrapping_sub(len)) as u64;
        if (room >> 63) | u64::from(state & !SideState::OPEN.0) != 0 {
            return None;
        }
        let header = RecordHeader::new(RecordKind::DATA, position, len);
        let place = at(position, self.capacity);
        // The line at which the consumer looks is stored last, because the consumer takes that line away between two stores
        // that are far apart.
        if end > self.clean_to {
            self.memory.store_relaxed_u64(at(end, self.capacity), 0);
            self.clean_to = end;
        }
        self.memory.write(place + RECORD_HEADER, message);
        // ORDER ring.publish: as in `publish`. Pairs with: `Consumer::poll`, `Consumer::take`.
        self.memory.store_release_u64(place, header.0);
        let ring = self.bell.needed(&self.memory);
        // Checked last: a message that was written to memory that is gone does not arrive.
        if self.memory.is_broken() {
            return None;
        }
        self.tail = end;
        if self.clean_to - end < end - position {
            self.clean(end - position);
        }
        Some(ring)
    }

    /// Zeroes headers ahead of the tail, so that the next sends of records of this span need not do so. The consumer had
    /// these lines last. A zero that is stored directly before a message delays the message, and the fence after it, until
    /// the line has arrived. Here all lines arrive at once, and while no message waits for them.
    #[inline(never)]
    fn clean(&mut self, span: u64) {
        if span > SHORT {
            return;
        }
        // The producer may write only to free lines.
        let end = self.clear_to.min(self.tail + CLEAN);
        // Nothing else is stored in between, not even to fields of `self`, because the CPU would then fetch fewer lines at
        // once.
        let mut position = self.clean_to;
        while position < end {
            position += RECORD_ALIGN as u64;
            self.memory.store_relaxed_u64(at(position, self.capacity), 0);
        }
        self.clean_to = position;
    }

    #[cold]
    fn send_by_claim(&mut self, message: &[u8]) -> Result<bool, SendError> {
        let claim = self.claim(message.len())?;
        claim.slice().write(0, message);
        let ring = claim.publish(message.len());
        if self.memory.is_broken() {
            return Err(*self.ended.insert(SendError::Broken));
        }
        let end_of_lap = (self.tail | (self.capacity as u64 - 1)) + 1;
        let released = self.head + (self.capacity - RECORD_ALIGN) as u64;
        self.clear_to = end_of_lap.min(released);
        // The program may have filled more of the claim than it committed, so the lines behind the record may not be zero.
        self.clean_to = self.tail;
        Ok(ring)
    }

    /// Publishes what is committed, and marks that nothing more comes. Returns true if the consumer's doorbell must be rung.
    #[must_use = "the consumer may have to be woken"]
    pub fn finish(&mut self) -> bool {
        let woken = self.publish();
        self.clear_to = 0;
        self.ended.get_or_insert(SendError::AfterFinish);
        side::end_producing(&self.memory, SideState::FINISHED);
        self.bell.needed(&self.memory) || woken
    }

    /// Ends the ring at once: nothing more comes, and all data that the consumer has not taken is void. The consumer's next
    /// look returns [`RecvError::Aborted`]. Messages that are committed and not published are dropped. Returns true if the
    /// consumer's doorbell must be rung.
    #[must_use = "the consumer may have to be woken"]
    pub fn abort(&mut self) -> bool {
        self.held = None;
        self.clear_to = 0;
        self.ended.get_or_insert(SendError::AfterFinish);
        side::end_producing(&self.memory, SideState::ABORTED);
        self.bell.needed(&self.memory)
    }

    /// Sets the condition of [`Waitable::ready`]: room for a message of `len` bytes, or an error.
    pub fn want(&mut self, len: usize) -> &mut Self {
        self.wanted = len;
        self
    }

    /// Returns the memory of the ring.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Returns the number of bytes that are published and not yet released by the consumer, as last seen.
    pub fn in_flight(&self) -> usize {
        (self.tail - self.head) as usize
    }
}

impl<M: SharedMemory> Waitable for Producer<M> {
    fn ready(&mut self) -> bool {
        // This only asks: a padding record that `reserve` may have added is held back until the next publish.
        !matches!(self.reserve(self.wanted), Err(SendError::Full)) || self.memory.is_broken()
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

/// Room for one message. Dropping it abandons the message.
#[must_use = "a claim does nothing until it is committed"]
pub struct Claim<'p, M: SharedMemory> {
    producer: &'p mut Producer<M>,
    position: u64,
    len: usize,
}

impl<M: SharedMemory> Claim<'_, M> {
    /// Returns the bytes to fill.
    #[inline]
    pub fn slice(&self) -> SharedSlice<'_, M> {
        SharedSlice::new(
            &self.producer.memory,
            at(self.position, self.producer.capacity) + RECORD_HEADER,
            self.len,
        )
    }

    /// Makes a message of the first `len` bytes, which the next [`Producer::publish`] makes visible. A `len` that is greater
    /// than the claim is reduced to it.
    #[inline]
    pub fn commit(self, len: usize) {
        let len = len.min(self.len);
        self.producer.enqueue(self.position, RecordHeader::new(RecordKind::DATA, self.position, len));
        self.producer.tail = self.position + record_span(len) as u64;
    }

    /// Commits and publishes. Returns true if the consumer's doorbell must be rung. If the memory is gone, the next claim
    /// returns [`SendError::Broken`].
    #[inline]
    #[must_use = "the consumer may have to be woken"]
    pub fn publish(self, len: usize) -> bool {
        let len = len.min(self.len);
        let Self { producer, position, .. } = self;
        producer.enqueue(position, RecordHeader::new(RecordKind::DATA, position, len));
        producer.tail = position + record_span(len) as u64;
        producer.publish()
    }
}

/// The consumer's knowledge of the record at its position.
#[derive(Clone, Copy, Debug)]
enum Next {
    /// The consumer has not seen a record there yet.
    Unknown,
    /// A message with this many bytes, seen and checked.
    Message(usize),
    /// There will never be a message. Once set, it stays: a corrupt peer cannot become valid again.
    Never(RecvError),
}

/// The receiving side of a message ring.
#[derive(Debug)]
pub struct Consumer<M: SharedMemory> {
    memory: M,
    capacity: usize,
    /// Position of the next record.
    position: u64,
    /// Bytes that are released, as stored for the producer.
    returned: u64,
    next: Next,
    /// One more than the maximum length of a message that [`Consumer::take`] takes; 0 once no message will ever come.
    limit: usize,
    /// Number of consecutive messages that [`Consumer::take`] has found at its first look.
    run: u32,
    /// Number of CPU pauses of the last [`Consumer::stay_away`].
    away: usize,
    /// The producer's doorbell must be rung, because it waits for space that was returned.
    owed: bool,
    armed: Armed,
    bell: Bell,
}

/// A producer that had this many messages ready, one after the other, sends without a pause.
const RUN: u32 = 8;
/// Number of CPU pauses for which the consumer then stays away from the producer's line: the first time, and at most.
const AWAY: [usize; 2] = [4, 64];
/// A smaller ring allows fewer pauses, because the producer would fill it meanwhile.
const BYTES_A_PAUSE: usize = 1024;

const _: () = assert!(AWAY[0] <= ring::MIN_CAPACITY / BYTES_A_PAUSE);

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
        let cursor = cursor.check_records(capacity)?;
        side::resume_consuming(&memory, capacity, &cursor)?;
        let mut consumer = Self::at(memory, capacity, cursor);
        // Otherwise the space that the earlier consumer took and did not return would never be returned if no further message
        // came.
        consumer.advance(0);
        Ok(consumer)
    }

    fn at(memory: M, capacity: usize, cursor: Cursor) -> Self {
        Self {
            memory,
            capacity,
            position: cursor.position,
            returned: cursor.released,
            next: Next::Unknown,
            limit: ring::max_message(capacity) + 1,
            run: 0,
            away: 0,
            owed: false,
            armed: Armed::resume(DATA_ARMED, cursor.token),
            bell: Bell::resume(SPACE_ARMED, cursor.rung),
        }
    }

    /// Returns the position of this side. A message that is not released comes again; see [`Message::cursor`].
    pub fn cursor(&self) -> Cursor {
        Cursor {
            position: self.position,
            pending: 0,
            released: self.returned,
            token: self.armed.token(),
            rung: self.bell.rung(),
        }
    }

    /// Looks whether a message is there. [`RecvError::Empty`] is the only error that is not final.
    #[inline]
    pub fn poll(&mut self) -> Result<(), RecvError> {
        if let Next::Never(end) = self.next {
            return Err(end);
        }
        self.memory.attend();
        if side::producer_aborted(&self.memory) {
            return Err(self.end(RecvError::Aborted));
        }
        if let Next::Message(_) = self.next {
            return Ok(());
        }
        // ORDER ring.publish: the payload and the header behind it are seen once this header is seen.
        // Pairs with: `Producer::publish`.
        let header = self.memory.load_acquire_u64(at(self.position, self.capacity));
        if header == 0 {
            return self.empty();
        }
        self.accept(RecordHeader(header))
    }

    /// Checks a header, which may have any value.
    #[inline]
    fn accept(&mut self, header: RecordHeader) -> Result<(), RecvError> {
        let position = self.position;
        if !header.is_for(position) {
            // A mapping that breaks reads as zeros only from some moment on.
            return Err(self.end(if side::is_lost(&self.memory) {
                RecvError::Broken
            } else {
                Corrupt::Stamp { header: header.0, position }.into()
            }));
        }
        let len = header.len();
        let to_end = self.capacity - (position as usize & (self.capacity - 1));
        match header.kind() {
            RecordKind::DATA => {
                if len > ring::max_message(self.capacity) || record_span(len) > to_end {
                    return Err(self.end(Corrupt::Length { len, position }.into()));
                }
                self.next = Next::Message(len);
                Ok(())
            }
            RecordKind::PAD => {
                // A producer pads only in front of a record that did not fit, and never at the start of the ring. Therefore
                // two padding records in a row are impossible, and this recursion is one deep.
                if to_end == self.capacity || len + RECORD_HEADER != to_end {
                    return Err(self.end(Corrupt::Padding { len, position }.into()));
                }
                // Its space is released with the next record: until then, a cursor from before is valid.
                self.position += to_end as u64;
                self.poll()
            }
            RecordKind(kind) => Err(self.end(Corrupt::Kind(kind).into())),
        }
    }

    /// Records that no message will come any more.
    #[cold]
    fn end(&mut self, why: RecvError) -> RecvError {
        self.next = Next::Never(why);
        self.limit = 0;
        why
    }

    /// Returns the error if nothing is published. The space that is not returned yet is kept: the longest message finds room
    /// without it (see [`ring::max_message`]), and returning it would cost both sides one more cache line and one more fence
    /// per message.
    #[inline]
    fn empty(&mut self) -> Result<(), RecvError> {
        if self.memory.is_broken() {
            return Err(self.end(RecvError::Broken));
        }
        let Err(end) = side::producer_ended(&self.memory) else { return Err(RecvError::Empty) };
        // The producer may have published a last record and then ended, both after this side looked for a record. So look once
        // more, unless the producer has aborted: then its records are void.
        match self.memory.load_acquire_u64(at(self.position, self.capacity)) {
            header if header == 0 || end == RecvError::Aborted => Err(self.end(end)),
            header => self.accept(RecordHeader(header)),
        }
    }

    /// Returns the next message, in place. It stays in the ring until it is released; if the value is dropped, the next call
    /// returns the message again.
    #[inline]
    pub fn peek(&mut self) -> Result<Message<'_, M>, RecvError> {
        self.poll()?;
        match self.next {
            Next::Message(len) => Ok(Message { consumer: self, len }),
            Next::Unknown => Err(RecvError::Empty),
            Next::Never(end) => Err(end),
        }
    }

    /// Copies the next message into `into` and releases it. Returns the length of the message; if it is longer than `into`,
    /// the rest is lost. The caller must call [`Consumer::take_owed`] afterwards.
    #[inline]
    pub fn recv(&mut self, into: &mut [u8]) -> Result<usize, RecvError> {
        if let Some((len, owed)) = self.take(into, 1) {
            self.owed |= owed;
            return Ok(len);
        }
        let message = self.peek()?;
        let len = message.len();
        message.slice().read(0, into);
        // Bytes that were copied while the memory went away are zeros, not the message.
        if message.consumer.memory.is_broken() {
            return Err(message.consumer.end(RecvError::Broken));
        }
        message.consumer.advance(record_span(len));
        Ok(len)
    }

    /// The fast path of [`Consumer::recv`], with at most `looks` looks for a message. Returns the message's length, and
    /// whether the producer's doorbell must be rung. Returns `None` if further checks are necessary: there is no message, a
    /// side has ended, the header needs a closer look, or the buffer is too short.
    #[inline(always)]
    pub fn take(&mut self, into: &mut [u8], looks: u32) -> Option<(usize, bool)> {
        let position = self.position;
        self.memory.attend();
        let place = at(position, self.capacity);
        // Everything that is known before the message comes is computed here, so that one comparison is left for afterwards:
        // a header that is not of a plain message at this place differs in a bit above the bits of its length.
        let expected = RecordHeader::new(RecordKind::DATA, position, 0).0;
        let to_end = self.capacity - (position as usize & (self.capacity - 1));
        let room = self.limit.min(to_end - RECORD_HEADER + 1).min(into.len() + 1);
        // ORDER ring.publish: as in `poll`. Pairs with: `Producer::put`, `Producer::publish`.
        let mut header = self.memory.load_acquire_u64(place);
        if header != 0 {
            self.run = self.run.saturating_add(1);
        } else if looks > 1 {
            self.stay_away();
            // ORDER ring.publish: as above. Pairs with: `Producer::put`, `Producer::publish`.
            header = self.memory.await_acquire_u64(place, looks - 1);
        }
        let len = (header ^ expected) as usize;
        if len >= room || side::producer_aborted(&self.memory) {
            return None;
        }
        self.memory.read(place + RECORD_HEADER, &mut into[..len]);
        let next = position + record_span(len) as u64;
        if self.memory.is_broken() | (next - self.returned >= self.capacity as u64 / 8) {
            return self.take_rarely(len);
        }
        self.next = Next::Unknown;
        self.position = next;
        Some((len, false))
    }

    /// Lets a producer that sends without a pause get ahead, before the first look that may find nothing. If the consumer
    /// kept looking at the next line, each store to that line would have to fetch it back first, and a message would cost
    /// both sides several times as much (temporal slipping: Giacomoni et al., FastForward, PPoPP 2008). If each message waits
    /// for an answer, there is no run of messages, and the consumer never pauses.
    #[inline]
    fn stay_away(&mut self) {
        if std::mem::take(&mut self.run) <= RUN {
            self.away = 0;
            return;
        }
        self.away = (2 * self.away).clamp(AWAY[0], AWAY[1].min(self.capacity / BYTES_A_PAUSE));
        for _ in 0..self.away {
            std::hint::spin_loop();
        }
    }

    /// The end of [`Consumer::take`] if the memory is gone or space must be returned.
    #[cold]
    fn take_rarely(&mut self, len: usize) -> Option<(usize, bool)> {
        if self.memory.is_broken() {
            return None;
        }
        self.advance(record_span(len));
        Some((len, self.take_owed()))
    }

    fn advance(&mut self, span: usize) {
        self.next = Next::Unknown;
        self.position += span as u64;
        // Space is returned in eighths, so that the producer's look at this counter costs one cache line for many messages.
        if self.position - self.returned >= self.capacity as u64 / 8 {
            self.return_space();
        }
    }

    fn return_space(&mut self) {
        self.returned = self.position;
        // ORDER ring.release: this side is finished with these bytes. Pairs with: `Producer::refresh_head`.
        self.memory.store_release_u64(HEAD, self.position);
        self.owed |= self.bell.needed(&self.memory);
    }

    /// Returns whether the producer's doorbell must be rung, because it sleeps and space has been returned. The caller asks
    /// after it has received. Returns true only once.
    #[inline]
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
        if !matches!(self.next, Next::Never(_)) {
            self.end(RecvError::Aborted);
        }
        side::end_consuming(&self.memory, SideState::ABORTED);
        self.bell.needed(&self.memory) || self.take_owed()
    }

    /// Returns the memory of the ring.
    pub fn memory(&self) -> &M {
        &self.memory
    }
}

impl<M: SharedMemory> Waitable for Consumer<M> {
    #[inline]
    fn ready(&mut self) -> bool {
        !matches!(self.poll(), Err(RecvError::Empty))
    }
    #[inline]
    fn glance(&self) -> bool {
        self.memory.load_relaxed_u64(at(self.position, self.capacity)) != 0
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
        let look = Look {
            memory: self.memory.clone(),
            word: at(self.position, self.capacity),
            seen: 0,
            state: PRODUCER_STATE,
        };
        Watch { look, armed: self.armed.clone() }
    }
    fn unwatch(&mut self, watch: Watch<M>) {
        self.armed = watch.armed;
    }
    fn notify_at(&mut self, place: Place) {
        self.armed.notify_at(&self.memory, place);
    }
}

/// A received message, still in the ring.
pub struct Message<'c, M: SharedMemory> {
    consumer: &'c mut Consumer<M>,
    len: usize,
}

impl<M: SharedMemory> Message<'_, M> {
    /// Returns the bytes of payload.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the payload is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the payload. A hostile peer can still change it: copy what must not change, and then check the copy.
    #[inline]
    pub fn slice(&self) -> SharedSlice<'_, M> {
        SharedSlice::new(
            &self.consumer.memory,
            at(self.consumer.position, self.consumer.capacity) + RECORD_HEADER,
            self.len,
        )
    }

    /// Returns whether the memory is gone, so that what was copied from [`Message::slice`] may be zeros.
    pub fn is_broken(&self) -> bool {
        self.consumer.memory.is_broken()
    }

    /// Returns the position of the consumer once this message is released. To be saved directly before that.
    pub fn cursor(&self) -> Cursor {
        let cursor = self.consumer.cursor();
        Cursor { position: cursor.position + record_span(self.len) as u64, ..cursor }
    }

    /// Gives the room back to the producer. Returns true if the producer's doorbell must be rung.
    #[inline]
    pub fn release(self) -> bool {
        self.consumer.advance(record_span(self.len));
        self.consumer.take_owed()
    }
}
