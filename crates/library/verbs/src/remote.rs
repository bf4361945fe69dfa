//! The executor: works on the peer's queue pair on behalf of a thread that posts to this one.
//!
//! The thread that posts a request executes it: it checks the peer's key, copies, and writes the peer's completion. Before it looks at
//! anything that the peer may take away (a region or the rings), it writes into the peer's `executing` word what it is about to access.
//! The peer takes a thing away first, and looks at the word afterwards. Both sides execute a full fence between the two steps, so at
//! least one of them sees the other.

use crate::peer::{FindPlace, Peer, Target, Windows};
use crate::program::ProgramMemory;
use crate::shadow::{ErrandClient, ErrandRequest, PeerWords, Step};
use crate::shared_copy::{self, Next, Offer, Shareable, Sharing};
use crate::work::{Element, Operation, Status, total};
use ginnel_layout::verbs::{
    Access, Armed, Claimer, Completion, Errand, Executing, Executor, Key, Kind, Place, QP_TABLE, QPS,
    QpNumber, QpState, completion, qp, receive,
};
use ginnel_shmem::SharedMemory;
use std::ops::Range;
use std::sync::Arc;

/// The largest number of ring entries that a poster accepts from a peer.
pub const MAX_ENTRIES: usize = 1 << 15;

/// The reason why a request has not been executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The peer has posted no receive. The request may be tried again.
    NotReady,
    /// The peer's process has been asked to execute the request, and has not answered yet. The request has to be tried again.
    Asked,
    /// The peer is still copying its last piece of a shared copy. The request has to be tried again.
    Shared,
    /// The peer's queue pair has ended, or is in the error state.
    Gone,
    /// The peer's region does not allow the access.
    Access,
    /// The request is invalid for the peer; for example, the message is longer than its receive.
    Invalid,
    /// The peer's receive is itself invalid.
    Operation,
}

impl Failure {
    /// Returns the status of the completion.
    pub fn status(self) -> Status {
        match self {
            Self::NotReady => Status::RNR_RETRY_EXC_ERR,
            Self::Gone | Self::Asked | Self::Shared => Status::RETRY_EXC_ERR,
            Self::Access => Status::REM_ACCESS_ERR,
            Self::Invalid => Status::REM_INV_REQ_ERR,
            Self::Operation => Status::REM_OP_ERR,
        }
    }
}

/// The reason why there is no connection to a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotConnected {
    /// The peer's queue pair is not ready to receive yet, or not from this queue pair.
    NotYet,
    /// The peer's tables contain values that no correct peer writes.
    Corrupt,
}

/// The sending side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sender {
    /// Number of the sending queue pair.
    pub number: QpNumber,
    /// Kind of the queue pair.
    pub kind: Kind,
    /// The identity under which its endpoint claims receives.
    pub claimer: Claimer,
    /// The local identifier (LID) of its port.
    pub lid: u16,
}

/// A queue pair of a peer, to which this one is connected or sends datagrams.
pub struct Remote<M> {
    peer: Arc<Peer<M>>,
    from: Sender,
    to: QpNumber,
    /// Offsets in the peer's tables: of the queue pair, and of the queue that has its receives.
    at: usize,
    queue_at: usize,
    /// Offset of the word group for shared copies.
    copy_at: usize,
    /// Whether other senders may use the same receives.
    is_shared: bool,
    /// Number of bytes in front of a message.
    prefix: u32,
    /// Whether the peer may ever be asleep, and the `ARMED` value for which it was last woken.
    may_sleep: bool,
    rung: Armed,
    incarnation: u32,
    /// What this sender has written into the `executing` word.
    mark: Executing,
    /// Protection domains of the queue pair, and of its receives.
    domain: u32,
    queue_domain: u32,
    ring: (M, usize),
    completions: (M, usize),
    entries: usize,
    stride: usize,
    /// Number of receives used so far.
    head: u64,
    /// Number of receives posted at the last look, and the length of the shortest of them.
    tail: u64,
    shortest: u32,
    windows: Windows<M>,
    /// Executes requests on shadow regions, by way of the peer's process.
    errand_client: Box<ErrandClient<M>>,
    /// The state of copies that the peer helps with.
    sharing: Sharing,
    /// Set when the bytes of an RDMA WRITE with immediate data have been copied, but the peer had no receive for it. Used only if the
    /// peer may take part in the copy.
    is_written: bool,
}

impl<M: SharedMemory> Remote<M> {
    /// Connects one queue pair to another, if the other is ready to receive from it.
    pub fn connect(peer: Arc<Peer<M>>, to: QpNumber, from: Sender) -> Result<Self, NotConnected> {
        Self::connect_by(Peer::place, peer, to, from)
    }

    /// The same as [`Remote::connect`], with a choice of the function that finds the peer's memory.
    pub(crate) fn connect_by(
        find: FindPlace<M>,
        peer: Arc<Peer<M>>,
        to: QpNumber,
        from: Sender,
    ) -> Result<Self, NotConnected> {
        let at = to.at().ok_or(NotConnected::Corrupt)?;
        let copy_at = to.copy_at().ok_or(NotConnected::Corrupt)?;
        let tables = peer.tables();
        // ORDER verbs.state: the state is loaded before the words that belong to it. Pairs with: `QueuePair::publish`.
        let state = tables.load_acquire_u64(at + qp::STATE);
        let is_for_us = from.kind == Kind::UD || tables.load_relaxed_u32(at + qp::PEER) == from.number.0;
        if !QpState(state as u32).receives() || !is_for_us {
            return Err(NotConnected::NotYet);
        }
        let is_known = Executor(tables.load_relaxed_u32(at + qp::EXECUTOR)) == Executor::POSTER
            && Kind(tables.load_relaxed_u32(at + qp::KIND)) == from.kind;
        let queue = tables.load_relaxed_u32(at + qp::QUEUE) as usize;
        if !is_known || queue >= QPS {
            return Err(NotConnected::Corrupt);
        }
        let queue_at = QP_TABLE + queue * ginnel_layout::verbs::QP;
        let entries = tables.load_relaxed_u32(queue_at + qp::ENTRIES) as usize;
        let stride = tables.load_relaxed_u32(queue_at + qp::STRIDE) as usize;
        let has_shape = entries.is_power_of_two() && entries <= MAX_ENTRIES;
        let has_stride = (1..=receive::MOST).any(|elements| receive::stride(elements) == stride);
        if !has_shape || !has_stride {
            return Err(NotConnected::Corrupt);
        }
        let place = |word, len| find(&peer, Place(tables.load_relaxed_u64(queue_at + word)), len);
        let ring = place(qp::RING, entries * stride).ok_or(NotConnected::Corrupt)?;
        let completions = place(qp::COMPLETIONS, entries * completion::ENTRY).ok_or(NotConnected::Corrupt)?;
        let [domain, queue_domain] = [at, queue_at].map(|at| tables.load_relaxed_u32(at + qp::DOMAIN));
        let incarnation = (state >> 32) as u32;
        // A sender that connects again after a reset continues at the old position. No other sender writes this word.
        let head = tables.load_relaxed_u64(at + qp::HEAD);
        if head > u64::MAX / 2 {
            return Err(NotConnected::Corrupt);
        }
        let may_sleep = Armed(tables.load_relaxed_u32(at + qp::ARMED)).is_ever();
        let windows = Windows::new(peer.clone());
        Ok(Self {
            peer,
            from,
            to,
            at,
            queue_at,
            copy_at,
            is_shared: from.kind == Kind::UD || queue_at != at,
            prefix: from.kind.prefix() as u32,
            may_sleep,
            rung: Armed::NEVER,
            incarnation,
            mark: Executing::NONE,
            domain,
            queue_domain,
            ring,
            completions,
            entries,
            stride,
            head,
            tail: 0,
            shortest: 0,
            windows,
            errand_client: Box::new(ErrandClient::new()),
            sharing: Sharing::default(),
            is_written: false,
        })
    }

    /// Returns whether the peer may be copying a piece for a request of this side.
    pub fn is_sharing(&self) -> bool {
        self.sharing.is_open()
    }

    /// Returns whether the peer's endpoint has ended.
    pub fn is_dead(&self) -> bool {
        self.peer.is_dead()
    }

    /// Prefetches the cache line that is stored last, which the peer is polling. It arrives while the request is being checked.
    #[inline(always)]
    pub fn prefetch(&self, operation: &Operation, len: u32) {
        match *operation {
            Operation::Write { address, key, immediate: None, .. } if len > 0 => {
                self.windows.prefetch_to_store(key, address.wrapping_add(u64::from(len) - 1));
            }
            // If there are other senders, the position is only a guess.
            Operation::Send { .. } => self.completions.0.prefetch_to_store(self.completion_at()),
            _ => {}
        }
    }

    /// Executes an operation with these ranges of the program's memory.
    #[inline]
    pub fn execute(
        &mut self,
        program: &impl ProgramMemory<M>,
        operation: &Operation,
        elements: &[Element],
    ) -> Result<(), Failure> {
        let result = match *operation {
            Operation::Send { immediate, solicited } => self.send(program, elements, immediate, solicited),
            Operation::Write { address, key, immediate: None, .. } => {
                self.write(program, elements, address, key, Executing::region(self.incarnation, key))
            }
            Operation::Write { address, key, immediate: Some(immediate), solicited } => {
                self.write_with_immediate(program, elements, address, key, immediate, solicited)
            }
            Operation::Read { address, key } => self.read(program, elements, address, key),
            Operation::CompareAndSwap { address, key, compare, swap } => {
                let errand = (Errand::COMPARE_AND_SWAP, [compare, swap]);
                self.atomic(program, elements, address, key, errand, |memory, at| {
                    match memory.compare_exchange_u64(at, compare, swap) {
                        Ok(()) => compare,
                        Err(found) => found,
                    }
                })
            }
            Operation::FetchAndAdd { address, key, add } => {
                let errand = (Errand::FETCH_AND_ADD, [add, 0]);
                self.atomic(program, elements, address, key, errand, |memory, at| {
                    memory.fetch_add_u64(at, add)
                })
            }
        };
        self.finish(result);
        if let Err(failure) = result
            && !matches!(failure, Failure::Asked | Failure::Shared | Failure::NotReady)
        {
            self.errand_client.forget();
            self.is_written = false;
        }
        if let Err(Failure::Access | Failure::Invalid | Failure::Operation) = result
            && self.from.kind == Kind::RC
        {
            self.report(result);
        }
        result
    }

    /// Sends a datagram. One that the peer cannot take, or that is not meant for it, is dropped.
    pub fn send_datagram(
        &mut self,
        program: &impl ProgramMemory<M>,
        elements: &[Element],
        immediate: Option<u32>,
        solicited: bool,
        qkey: u32,
    ) -> Result<(), Failure> {
        let (peer, senders) = (self.peer.clone(), self.at + qp::SENDERS);
        let tables = peer.tables();
        // ORDER verbs.senders: the count is visible before the load of the state. Pairs with: `QueuePair::are_rings_accessed`.
        tables.fetch_add_u64(senders, 1);
        tables.fence_after_exchange();
        let result = match self.check_state() {
            Ok(_) if tables.load_relaxed_u32(self.at + qp::QKEY) == qkey => {
                self.send(program, elements, immediate, solicited)
            }
            Ok(_) => Err(Failure::Access),
            Err(gone) => Err(gone),
        };
        // ORDER verbs.senders: the accesses before the end. Pairs with: `QueuePair::are_rings_accessed`.
        tables.fetch_add_u64(senders, u64::MAX);
        result
    }

    /// Puts the peer's queue pair in the error state too, and gives its owner the reason.
    #[cold]
    fn report(&mut self, result: Result<(), Failure>) {
        let status = result.err().map_or(Status::SUCCESS, Failure::status);
        let word = u64::from(self.incarnation) << 32 | u64::from(status.0);
        self.peer.tables().store_release_u64(self.at + qp::ERROR, word);
        if self.may_sleep {
            self.wake(true);
        }
    }

    /// Announces what is about to be accessed, and checks that the peer's queue pair is still the same. Returns its access rights.
    #[inline(always)]
    fn begin(&mut self, executing: Executing) -> Result<u32, Failure> {
        // The owner of a datagram queue pair does not wait for one particular sender: the sender counts itself, and claims receives.
        if self.from.kind != Kind::UD {
            let (tables, at) = (self.peer.tables(), self.at + qp::EXECUTING);
            // ORDER verbs.executing: the mark is visible before all loads of words that the owner may take away. Pairs with:
            // `Regions::remove`, `QueuePair::is_accessed`.
            if tables.compare_exchange_u64(at, self.mark.0, executing.0).is_err() {
                self.mark_anew(executing)?;
            }
            tables.fence_after_exchange();
            self.mark = executing;
        }
        self.check_state()
    }

    /// Handles an `executing` word that does not contain this sender's value. The value is from a sender to an earlier or a later queue
    /// pair with this number. Only the sender to the present one counts.
    #[cold]
    fn mark_anew(&self, executing: Executing) -> Result<(), Failure> {
        let (tables, at) = (self.peer.tables(), self.at + qp::EXECUTING);
        // The loop is bounded, so a peer that keeps changing the word cannot keep this sender busy.
        for _ in 0..8 {
            let found = tables.load_acquire_u64(at);
            self.check_state()?;
            if tables.compare_exchange_u64(at, found, executing.0).is_ok() {
                return Ok(());
            }
        }
        Err(Failure::Gone)
    }

    /// Announces that nothing is being accessed any more.
    #[inline(always)]
    fn finish(&mut self, result: Result<(), Failure>) {
        let (tables, at) = (self.peer.tables(), self.at + qp::EXECUTING);
        let mark = std::mem::replace(&mut self.mark, Executing::NONE);
        // ORDER verbs.executing: the accesses before the end. Pairs with: `QueuePair::is_accessed`.
        match result {
            // The word may belong to a later queue pair now.
            Err(Failure::Gone) => drop(tables.compare_exchange_u64(at, mark.0, Executing::NONE.0)),
            _ => tables.store_release_u64(at, Executing::NONE.0),
        }
    }

    #[inline(always)]
    fn check_state(&self) -> Result<u32, Failure> {
        let tables = self.peer.tables();
        // ORDER verbs.state: see `Remote::connect`.
        let state = tables.load_acquire_u64(self.at + qp::STATE);
        if (state >> 32) as u32 != self.incarnation || !QpState(state as u32).receives() {
            return Err(Failure::Gone);
        }
        Ok(tables.load_relaxed_u32(self.at + qp::ACCESS))
    }

    /// The same as `begin`, for an operation that the peer's queue pair must allow.
    #[inline(always)]
    fn begin_remote(&mut self, executing: Executing, wanted: u32) -> Result<(), Failure> {
        let allowed = Access(self.begin(executing)?);
        if !allowed.allows(wanted) {
            return Err(Failure::Access);
        }
        Ok(())
    }

    #[inline(always)]
    fn write(
        &mut self,
        program: &impl ProgramMemory<M>,
        elements: &[Element],
        address: u64,
        key: Key,
        executing: Executing,
    ) -> Result<(), Failure> {
        self.begin_remote(executing, Access::REMOTE_WRITE)?;
        let len = total(elements).ok_or(Failure::Invalid)?;
        if len == 0 {
            return Ok(());
        }
        let target = self.windows.look_up(key, address, len, Access::REMOTE_WRITE, self.domain);
        let Ok(target) = target else { return self.write_shadow(program, elements, address, key, len) };
        if len as usize >= shared_copy::LEAST
            && let Some(what) = Shareable::new(self.from.kind, Errand::WRITE, key, address, elements)
        {
            return self.write_shared(program, &what);
        }
        let (mut to, mut left) = (address, len as usize);
        for element in elements {
            let (mut from, mut rest) = (element.address, element.length as usize);
            while rest > 0 {
                let (memory, at, n) = target.piece(to, rest);
                left -= n;
                program.copy_in(from, memory, at, n, left == 0);
                (from, to, rest) = (from + n as u64, to + n as u64, rest - n);
            }
        }
        Ok(())
    }

    #[inline(never)]
    fn write_with_immediate(
        &mut self,
        program: &impl ProgramMemory<M>,
        elements: &[Element],
        address: u64,
        key: Key,
        immediate: u32,
        solicited: bool,
    ) -> Result<(), Failure> {
        let len = total(elements).ok_or(Failure::Invalid)?;
        let executing = Executing::region_and_rings(self.incarnation, key);
        // A copy in which the peer takes part comes before a receive is claimed. Otherwise other senders would wait for that receive
        // until the peer has done its part.
        let is_shared = self.from.kind == Kind::RC && len as usize >= shared_copy::LEAST;
        let is_first = key.is_shadow() || is_shared;
        if is_first && !self.is_written {
            self.write(program, elements, address, key, executing)?;
        }
        self.begin(Executing::rings(self.incarnation))?;
        let has_entry = self.has_entry();
        // Only a request of a reliable connection is tried again.
        self.is_written = is_first && !has_entry && self.from.kind == Kind::RC;
        if !has_entry {
            return Err(Failure::NotReady);
        }
        // The claimed receive belongs to this sender during the copy.
        if !is_first && let Err(failure) = self.write(program, elements, address, key, executing) {
            self.unclaim();
            return Err(failure);
        }
        if let Err(gone) = self.begin(Executing::rings(self.incarnation)) {
            self.unclaim();
            return Err(gone);
        }
        let solicited = if solicited { Completion::SOLICITED } else { 0 };
        let header = Completion::new(
            self.head,
            Completion::WRITE_WITH_IMMEDIATE,
            Completion::HAS_IMMEDIATE | solicited,
        );
        self.complete(header, len, immediate);
        Ok(())
    }

    #[inline(never)]
    fn read(
        &mut self,
        program: &impl ProgramMemory<M>,
        elements: &[Element],
        address: u64,
        key: Key,
    ) -> Result<(), Failure> {
        self.begin_remote(Executing::region(self.incarnation, key), Access::REMOTE_READ)?;
        let len = total(elements).ok_or(Failure::Invalid)?;
        if len == 0 {
            return Ok(());
        }
        let target = self.windows.look_up(key, address, len, Access::REMOTE_READ, self.domain);
        let Ok(target) = target else { return self.read_shadow(program, elements, address, key, len) };
        if len as usize >= shared_copy::LEAST
            && let Some(what) = Shareable::new(self.from.kind, Errand::READ, key, address, elements)
        {
            return self.read_shared(program, &what);
        }
        let mut from = address;
        for element in elements {
            let (mut to, mut rest) = (element.address, element.length as usize);
            while rest > 0 {
                let (memory, at, n) = target.piece(from, rest);
                program.copy_out(memory, at, to, n);
                (from, to, rest) = (from + n as u64, to + n as u64, rest - n);
            }
        }
        Ok(())
    }

    #[inline(never)]
    fn atomic(
        &mut self,
        program: &impl ProgramMemory<M>,
        elements: &[Element],
        address: u64,
        key: Key,
        errand: (Errand, [u64; 2]),
        operation: impl FnOnce(&M, usize) -> u64,
    ) -> Result<(), Failure> {
        self.begin_remote(Executing::region(self.incarnation, key), Access::REMOTE_ATOMIC)?;
        if !address.is_multiple_of(8) {
            return Err(Failure::Invalid);
        }
        let target = self.windows.look_up(key, address, 8, Access::REMOTE_ATOMIC, self.domain);
        let Ok(target) = target else {
            return self.atomic_shadow(program, elements, address, key, errand);
        };
        let (memory, at, _) = target.piece(address, 8);
        put_word(program, elements, operation(memory, at));
        Ok(())
    }

    #[cold]
    fn atomic_shadow(
        &mut self,
        program: &impl ProgramMemory<M>,
        elements: &[Element],
        address: u64,
        key: Key,
        (errand, operands): (Errand, [u64; 2]),
    ) -> Result<(), Failure> {
        let asked = ErrandRequest { errand, key, address, length: 8, rest: 8, operands };
        let drain = |memory: &M, at, _, _| {
            let mut before = [0; 8];
            memory.read(at, &mut before);
            put_word(program, elements, u64::from_ne_bytes(before));
        };
        self.ask(&asked, |_, _, _, _| (), drain)
    }

    /// Asks the peer's process to execute an operation on a shadow region, and proceeds as far as possible without waiting.
    #[cold]
    fn ask(
        &mut self,
        asked: &ErrandRequest,
        fill: impl FnOnce(&M, usize, usize, usize),
        drain: impl FnOnce(&M, usize, usize, usize),
    ) -> Result<(), Failure> {
        if !asked.key.is_shadow() {
            return Err(Failure::Access);
        }
        let way = PeerWords { peer: &self.peer, at: self.at, incarnation: self.incarnation };
        match self.errand_client.proceed(way, asked, fill, drain) {
            Step::Done => Ok(()),
            Step::Waits => Err(Failure::Asked),
            Step::Failed(Status::REM_ACCESS_ERR) => Err(Failure::Access),
            Step::Failed(Status::REM_INV_REQ_ERR) => Err(Failure::Invalid),
            Step::Failed(_) => Err(Failure::Operation),
        }
    }

    #[cold]
    fn write_shadow(
        &mut self,
        program: &impl ProgramMemory<M>,
        elements: &[Element],
        address: u64,
        key: Key,
        len: u32,
    ) -> Result<(), Failure> {
        let asked =
            ErrandRequest { errand: Errand::WRITE, key, address, length: 0, rest: len, operands: [0; 2] };
        let fill = |memory: &M, mut at, from, len| {
            for_each_run(elements, from, len, |address, len| {
                program.copy_in(address, memory, at, len, false);
                at += len;
            });
        };
        self.ask(&asked, fill, |_, _, _, _| ())
    }

    #[cold]
    fn read_shadow(
        &mut self,
        program: &impl ProgramMemory<M>,
        elements: &[Element],
        address: u64,
        key: Key,
        len: u32,
    ) -> Result<(), Failure> {
        let asked =
            ErrandRequest { errand: Errand::READ, key, address, length: 0, rest: len, operands: [0; 2] };
        let drain = |memory: &M, mut at, from, len| {
            for_each_run(elements, from, len, |address, len| {
                program.copy_out(memory, at, address, len);
                at += len;
            });
        };
        self.ask(&asked, |_, _, _, _| (), drain)
    }

    #[inline(never)]
    fn write_shared(&mut self, program: &impl ProgramMemory<M>, what: &Shareable) -> Result<(), Failure> {
        let copy = |target: &Target<'_, M>, range: Range<usize>| {
            let (first, end) = (range.start as u64, range.end as u64);
            target.for_each_piece(what.address + first..what.address + end, |to, memory, at, n| {
                let is_last = to + n as u64 == what.address + end;
                program.copy_in(what.local.address + (to - what.address), memory, at, n, is_last);
            });
        };
        self.share(what, copy)
    }

    #[inline(never)]
    fn read_shared(&mut self, program: &impl ProgramMemory<M>, what: &Shareable) -> Result<(), Failure> {
        let copy = |target: &Target<'_, M>, range: Range<usize>| {
            let range = what.address + range.start as u64..what.address + range.end as u64;
            target.for_each_piece(range, |from, memory, at, n| {
                program.copy_out(memory, at, what.local.address + (from - what.address), n);
            });
        };
        self.share(what, copy)
    }

    /// Copies together with the peer, if the peer polls meanwhile. Proceeds as far as possible without waiting.
    fn share(
        &mut self,
        what: &Shareable,
        copy: impl Fn(&Target<'_, M>, Range<usize>),
    ) -> Result<(), Failure> {
        let (wanted, _) = what.wanted().ok_or(Failure::Operation)?;
        let Self { windows, sharing, peer, copy_at, .. } = self;
        let target = windows.look_up(what.key, what.address, what.local.length, wanted, self.domain);
        let target = target.map_err(|_| Failure::Access)?;
        let tables = peer.tables();
        sharing.offer(tables, *copy_at, self.incarnation, what);
        loop {
            match sharing.next(tables, *copy_at, what) {
                Next::Copy(piece) => copy(&target, piece),
                Next::Wait => return Err(Failure::Shared),
                Next::Corrupt => return Err(Failure::Operation),
                Next::End => break,
            }
        }
        let rest = what.rest();
        if !rest.is_empty() {
            copy(&target, rest);
        }
        Ok(())
    }

    /// Prepares to help with a copy that this peer shares with the owner of `own`: looks up the two regions if they are not known yet.
    /// Returns whether this side can help.
    pub(crate) fn prepare_to_help(&mut self, own: &mut Windows<M>, what: &Shareable) -> bool {
        own.know(what.key) && self.windows.know(Key(what.local.key))
    }

    /// Copies one piece of a copy that this peer shares with the owner of `own`, whose queue pair is in this domain. Returns the length
    /// of the piece in bytes, or `None` if there is nothing left to do.
    pub(crate) fn help(&mut self, own: &mut Windows<M>, domain: u32, offer: &Offer<'_, M>) -> Option<usize> {
        let begun = self.begin(Executing::region(self.incarnation, Key(offer.what.local.key)));
        let helped = begun.is_ok().then(|| self.help_piece(own, domain, offer));
        self.finish(begun.map(drop));
        helped.flatten()
    }

    fn help_piece(&mut self, own: &mut Windows<M>, domain: u32, offer: &Offer<'_, M>) -> Option<usize> {
        let what = &offer.what;
        let (wanted, local) = what.wanted()?;
        let Element { address, length, key } = what.local;
        // If a region has changed since `prepare_to_help`, it is not looked up here, because others may be waiting for this side.
        let theirs = self.windows.look_up_known(Key(key), address, length, local, self.domain).ok()?;
        let ours = own.look_up_known(what.key, what.address, length, wanted, domain).ok()?;
        offer.help(|piece| {
            let range = what.address + piece.start as u64..what.address + piece.end as u64;
            ours.for_each_piece(range, |run, memory, at, n| {
                let mut at = at;
                let local = address + (run - what.address);
                theirs.for_each_piece(local..local + n as u64, |_, other, there, n| {
                    match what.errand {
                        Errand::READ => memory.copy_into(at, other, there, n),
                        _ => other.copy_into(there, memory, at, n),
                    }
                    at += n;
                });
            });
        })
    }

    /// Returns whether the peer has posted a receive that is not used yet. That receive then belongs to this message until it is
    /// completed.
    #[inline]
    fn has_entry(&mut self) -> bool {
        if self.is_shared {
            return self.claim_entry();
        }
        if self.head < self.tail {
            return true;
        }
        self.look_for_entries();
        self.head < self.tail
    }

    fn look_for_entries(&mut self) {
        let tables = self.peer.tables();
        // ORDER verbs.receive: the tail is loaded before the entries, and before `SHORTEST`. Pairs with: `ReceiveQueue::post`.
        let tail = tables.load_acquire_u64(self.queue_at + qp::TAIL);
        // A peer that writes a false value only makes a sender use its own receives twice.
        self.tail = if self.is_shared { tail } else { tail.min(self.head + self.entries as u64) };
        self.shortest = tables.load_relaxed_u32(self.queue_at + qp::SHORTEST);
    }

    /// Claims a receive for which there may be other senders.
    fn claim_entry(&mut self) -> bool {
        self.look_for_entries();
        let entries = self.entries as u64;
        let hint = self.peer.tables().load_relaxed_u64(self.queue_at + qp::HEAD);
        // Other senders write this hint, so it may have any value.
        let first = if hint <= self.tail { hint } else { self.tail };
        self.head = first.max(self.tail.saturating_sub(entries));
        while self.head < self.tail {
            let (memory, at) = (&self.completions.0, self.completion_at() + completion::HEADER);
            let found = Completion(memory.load_acquire_u64(at));
            let claim = Completion::claim(self.head, self.from.claimer);
            // ORDER verbs.executing: the claim is visible before all loads of words that the owner may take away. Pairs with:
            // `ReceiveQueue::has_claims`.
            if found.is_free(self.head, entries) && memory.compare_exchange_u64(at, found.0, claim.0).is_ok()
            {
                memory.fence_after_exchange();
                self.peer.tables().store_relaxed_u64(self.queue_at + qp::HEAD, self.head + 1);
                return true;
            }
            self.head += 1;
        }
        false
    }

    /// Gives a claimed receive back.
    #[cold]
    fn unclaim(&mut self) {
        if self.is_shared {
            let header = Completion::new(self.head, Completion::VOID, 0);
            self.complete(header, 0, 0);
        }
    }

    #[inline(always)]
    fn send(
        &mut self,
        program: &impl ProgramMemory<M>,
        elements: &[Element],
        immediate: Option<u32>,
        solicited: bool,
    ) -> Result<(), Failure> {
        let len = total(elements).ok_or(Failure::Invalid)?;
        self.begin(Executing::rings(self.incarnation))?;
        if !self.has_entry() {
            return Err(Failure::NotReady);
        }
        let mut flags = if solicited { Completion::SOLICITED } else { 0 };
        if immediate.is_some() {
            flags |= Completion::HAS_IMMEDIATE;
        }
        let immediate = immediate.unwrap_or(0);
        if self.is_shared && self.check_state().is_err() {
            // The queue pair has ended between the last check and the claim, and its owner may be waiting for the receive.
            self.unclaim();
            return Err(Failure::Gone);
        }
        let is_short = len as usize <= completion::INLINE;
        if is_short && len.checked_add(self.prefix).is_some_and(|len| len <= self.shortest) {
            let mut payload = [0; completion::INLINE];
            let mut at = 0;
            for element in elements {
                let end = at + element.length as usize;
                program.get(element.address, &mut payload[at..end]);
                at = end;
            }
            let place = self.completion_at();
            self.completions.0.write(place + completion::PAYLOAD, &payload);
            flags |= Completion::IN_ENTRY;
        } else {
            self.deliver(program, elements, len)?;
        }
        let header = Completion::new(self.head, Completion::RECEIVE, flags);
        self.complete(header, len, immediate);
        Ok(())
    }

    /// Copies a message into the buffers of the peer's next receive.
    fn deliver(
        &mut self,
        program: &impl ProgramMemory<M>,
        elements: &[Element],
        len: u32,
    ) -> Result<(), Failure> {
        let (memory, ring) = &self.ring;
        let mut entry = [0; receive::stride(receive::MOST)];
        let entry = &mut entry[..self.stride];
        memory.read(ring + self.slot() * self.stride, entry);
        let word = |at: usize| u32::from_ne_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]]);
        let (room, count) = (word(receive::LENGTH), word(receive::COUNT) as usize);
        if receive::ELEMENTS + count.min(receive::MOST) * receive::ELEMENT > self.stride
            || count > receive::MOST
        {
            return self.refuse(Completion::PROTECTION, Failure::Operation);
        }
        if len.checked_add(self.prefix).is_none_or(|len| len > room) {
            return self.refuse(Completion::TOO_LONG, Failure::Invalid);
        }
        let mut sources = elements.iter().copied();
        let mut source = Element::default();
        let (mut left, mut prefix) = (len as usize, self.prefix as usize);
        for i in 0..count {
            let at = receive::ELEMENTS + i * receive::ELEMENT;
            let mut to = u64::from(word(at + 4)) << 32 | u64::from(word(at));
            let skipped = prefix.min(word(at + 8) as usize);
            prefix -= skipped;
            to = to.wrapping_add(skipped as u64);
            let mut rest = (word(at + 8) as usize - skipped).min(left);
            if rest == 0 {
                continue;
            }
            let key = Key(word(at + 12));
            if let Err(gone) = self.begin(Executing::region_and_rings(self.incarnation, key)) {
                self.unclaim();
                return Err(gone);
            }
            let target = self.windows.look_up(key, to, rest as u32, Access::LOCAL_WRITE, self.queue_domain);
            let Ok(target) = target else {
                if key == Key::PLACE && rest == len as usize {
                    return self.deliver_in_place(program, elements, Place(to), rest);
                }
                return self.refuse(Completion::PROTECTION, Failure::Operation);
            };
            while rest > 0 {
                while source.length == 0 {
                    let Some(next) = sources.next() else { return Ok(()) };
                    source = next;
                }
                let (memory, at, n) = target.piece(to, rest.min(source.length as usize));
                left -= n;
                program.copy_in(source.address, memory, at, n, left == 0);
                source.address += n as u64;
                source.length -= n as u32;
                (to, rest) = (to + n as u64, rest - n);
            }
        }
        match left {
            0 => Ok(()),
            _ => self.refuse(Completion::PROTECTION, Failure::Operation),
        }
    }

    /// Copies a message for a buffer in a shadow region to the place from which the peer fetches it.
    #[cold]
    fn deliver_in_place(
        &mut self,
        program: &impl ProgramMemory<M>,
        elements: &[Element],
        place: Place,
        len: usize,
    ) -> Result<(), Failure> {
        let Some((memory, mut at)) = self.peer.place(place, len) else {
            return self.refuse(Completion::PROTECTION, Failure::Operation);
        };
        for_each_run(elements, 0, len, |address, len| {
            program.copy_in(address, &memory, at, len, false);
            at += len;
        });
        Ok(())
    }

    /// Tells the peer that its next receive has failed.
    #[cold]
    fn refuse(&mut self, kind: u8, failure: Failure) -> Result<(), Failure> {
        let header = Completion::new(self.head, kind, 0);
        self.complete(header, 0, 0);
        Err(failure)
    }

    /// Writes the peer's completion.
    #[inline]
    fn complete(&mut self, header: Completion, len: u32, immediate: u32) {
        let (at, memory) = (self.completion_at(), &self.completions.0);
        memory.store_relaxed_u64(at + completion::LENGTH, u64::from(len) | u64::from(immediate) << 32);
        if self.is_shared {
            memory.store_relaxed_u32(at + completion::SOURCE, self.from.number.0);
            memory.store_relaxed_u32(at + completion::TARGET, self.to.0);
            memory.store_relaxed_u16(at + completion::LID, self.from.lid);
        }
        // ORDER verbs.completion: the message and the entry are visible before the header. Pairs with: `ReceiveQueue::header`.
        memory.store_release_u64(at + completion::HEADER, header.0);
        self.head += 1;
        if !self.is_shared {
            self.peer.tables().store_relaxed_u64(self.at + qp::HEAD, self.head);
        }
        if self.may_sleep && header.kind() != Completion::VOID {
            self.wake(header.is_solicited());
        }
    }

    /// Wakes the peer, if it wants to be woken for such a completion and this side has not woken it since it armed.
    #[cold]
    fn wake(&mut self, is_solicited: bool) {
        let tables = self.peer.tables();
        // ORDER verbs.armed: the completion is visible before this load. Pairs with: `QueuePair::arm`.
        tables.full_fence();
        let armed = Armed(tables.load_relaxed_u32(self.at + qp::ARMED));
        if armed.wants(is_solicited) && armed != self.rung {
            self.rung = armed;
            self.peer.ring();
        }
    }

    fn completion_at(&self) -> usize {
        self.completions.1 + self.slot() * completion::ENTRY
    }

    fn slot(&self) -> usize {
        self.head as usize & (self.entries - 1)
    }
}

/// Writes a word to the program's buffers, as much of it as fits.
fn put_word<M: SharedMemory>(program: &impl ProgramMemory<M>, elements: &[Element], word: u64) {
    let word = word.to_ne_bytes();
    let mut bytes = &word[..];
    for element in elements {
        let (part, rest) = bytes.split_at(bytes.len().min(element.length as usize));
        program.put(element.address, part);
        bytes = rest;
    }
}

/// Calls `each` with the address and length of each range of the program's memory that holds a part of `len` bytes of the message, from
/// the offset `from` on.
pub(crate) fn for_each_run(elements: &[Element], from: usize, len: usize, mut each: impl FnMut(u64, usize)) {
    let (mut skip, mut left) = (from, len);
    for element in elements {
        let skipped = skip.min(element.length as usize);
        skip -= skipped;
        let n = left.min(element.length as usize - skipped);
        if n > 0 {
            each(element.address.wrapping_add(skipped as u64), n);
            left -= n;
        }
    }
}
