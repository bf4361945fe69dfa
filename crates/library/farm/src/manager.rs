//! The manager, which gives out pieces and gathers results.

use crate::error::{Error, Refusal};
use crate::job_state::{JobState, Piece};
use crate::message::{Answer, HEADER};
use crate::report::{Departure, Report};
use crate::source::Source;
use crate::wait::Watch;
use crate::worker_channel::{WORTH, WorkerChannel};
use ginnel::{ChannelOptions, Endpoint, Listener, MessageChannel, WaitMode};
use ginnel_layout::ring;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// The options of a manager.
#[derive(Clone, Debug)]
pub struct Options {
    /// How the manager waits for its workers. Default: [`Options::MODE`].
    pub mode: WaitMode,
    /// The pieces that a worker may hold: one that it works on, and others that are transferred meanwhile. Default:
    /// 2.
    pub window: usize,
    /// The longest piece, in bytes. It determines how much shared memory a channel takes (about eight times as much,
    /// in powers of two). Default: [`Options::PIECE`].
    pub piece: usize,
    /// A worker that takes longer than this for a piece is dismissed, and its pieces are given to others. Default: no
    /// limit.
    pub piece_timeout: Option<Duration>,
    /// The time for which a job waits without any worker before it fails. `None`: for ever. Default: 30 s.
    pub patience: Option<Duration>,
    /// The most attempts at one piece: the job fails after this many failed attempts. An attempt also fails if the
    /// worker dies or leaves. Default: 5.
    pub tries: u32,
}

impl Options {
    /// Spins for a moment before it sleeps, because counting or copying a piece takes less time than waking a thread.
    /// If there are more workers than processors, a spinning thread leaves its processor to others
    /// ([`WaitMode::Poll`]).
    pub const MODE: WaitMode = WaitMode::Adaptive { budget: WaitMode::DEFAULT_BUDGET };

    /// The longest piece for which rings of 1 MiB are enough.
    pub const PIECE: usize = ring::max_message(1 << 20) - HEADER;

    /// Returns the size, in data bytes, of rings that hold as many pieces of [`Options::piece`] bytes as the window
    /// allows.
    fn capacity(&self) -> usize {
        let longest = self.piece.min(1 << 36) + HEADER;
        let all = ring::record_span(longest).saturating_mul(self.window.saturating_add(1)).min(1 << 40);
        let mut capacity = ring::MIN_CAPACITY;
        while ring::max_message(capacity) < longest || capacity < all {
            capacity *= 2;
        }
        capacity
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            mode: Self::MODE,
            window: 2,
            piece: Self::PIECE,
            piece_timeout: None,
            patience: Some(Duration::from_secs(30)),
            tries: 5,
        }
    }
}

/// A manager, which has work done by many workers. Workers stay connected from job to job. Dropping the manager tells
/// them that there are no more jobs.
pub struct Manager {
    options: Options,
    doors: Vec<Listener<MessageChannel>>,
    /// The address of the first listener, for messages.
    address: String,
    /// The channels of the workers, in the order of their keys.
    channels: Vec<WorkerChannel>,
    watch: Watch,
    /// Why a worker was turned away, until this has been reported.
    turned_away: Option<String>,
    /// The number of the next job's first piece.
    next: u64,
}

impl Manager {
    /// Makes a manager without workers and without a listener.
    pub fn new(options: Options) -> Result<Self, Error> {
        let watch = Watch::new()?;
        Ok(Self {
            options,
            doors: Vec::new(),
            address: "SEGMENT/farm".into(),
            channels: Vec::new(),
            watch,
            turned_away: None,
            next: 1,
        })
    }

    /// Listens at `name` in the endpoint's segment for workers: one worker if the segment is its own slice, or any
    /// number in a segment that they share.
    pub fn listen(&mut self, endpoint: &Endpoint, name: &str) -> Result<(), Error> {
        let options = ChannelOptions { capacity: self.options.capacity(), ..ChannelOptions::default() };
        let door = endpoint.listen_with(name, &options)?;
        self.watch.door(endpoint, &door)?;
        self.doors.push(door);
        Ok(())
    }

    /// Attaches to the segment of `address` (`segment/name`), and listens for workers there.
    pub fn listen_at(&mut self, address: &str) -> Result<(), Error> {
        let (segment, name) = ginnel::split(address)?;
        self.listen(&Endpoint::attach(segment)?, name)?;
        if self.doors.len() == 1 {
            self.address = address.into();
        }
        Ok(())
    }

    /// Returns the longest piece that every worker's channel takes, in bytes.
    pub fn longest_piece(&self) -> usize {
        ring::max_message(self.options.capacity()) - HEADER
    }

    /// Returns the number of connected workers.
    pub fn workers(&self) -> usize {
        self.channels.len()
    }

    /// Waits until `count` workers are connected. Returns false if the time runs out first. A job need not wait for
    /// that: workers that come later get pieces too. The reason why a worker was turned away is reported by the next
    /// job that finds no worker.
    pub fn wait_for_workers(&mut self, count: usize, timeout: Duration) -> Result<bool, Error> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            self.welcome()?;
            self.channels.retain_mut(|channel| !channel.is_gone());
            if self.channels.len() >= count {
                return Ok(true);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            self.watch.wait(&mut self.channels, WaitMode::Interrupt, deadline)?;
        }
    }

    /// Runs a job: gives the pieces of `source` to the workers, and calls `fold` with each piece and its result, once
    /// for each piece, in the order in which results come. Waits until all pieces are done.
    pub fn run<I: Iterator<Item = Range<u64>>>(
        &mut self,
        job: &str,
        pieces: I,
        source: impl Source,
        mut fold: impl FnMut(&Piece, &[u8]) -> Result<(), Refusal>,
    ) -> Result<Report, Error> {
        let mut run = self.start(job, pieces, source)?;
        run.finish(&mut fold)?;
        Ok(run.report())
    }

    /// Begins a job that the caller drives with [`Run::step`] and [`Run::poll_fd`].
    pub fn start<'m, I: Iterator<Item = Range<u64>>, S: Source>(
        &'m mut self,
        job: &str,
        pieces: I,
        source: S,
    ) -> Result<Run<'m, I, S>, Error> {
        let mut state = JobState::new(pieces, self.next);
        for channel in &mut self.channels {
            channel.worker = state.join(channel.name(), false);
            channel.told = false;
        }
        let now = Instant::now();
        Ok(Run {
            manager: self,
            job: job.into(),
            source,
            state,
            buffer: Vec::new(),
            had_worker: now,
            last: String::new(),
        })
    }

    /// Notes which workers have sent something, and whether new workers have come. Does not wait.
    fn look(&mut self) -> Result<(), Error> {
        self.watch.look(&mut self.channels)
    }

    /// Accepts new workers. Returns how many have been accepted.
    fn welcome(&mut self) -> Result<usize, Error> {
        let before = self.channels.len();
        for door in &self.doors {
            loop {
                match door.try_accept() {
                    Ok(channel) => match WorkerChannel::new(channel, &mut self.watch) {
                        Ok(channel) => self.channels.push(channel),
                        // A member that leaves no memory for a readiness board keeps out only its own workers.
                        Err(error) => self.turned_away = Some(error.to_string()),
                    },
                    Err(ginnel::Error::WouldBlock) => break,
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(self.channels.len() - before)
    }
}

/// The progress of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// There is more to do at once: call again.
    Working,
    /// Nothing can be done until a worker sends something: wait on [`Run::poll_fd`], then call again.
    Waiting,
    /// All pieces are done.
    Done,
}

/// The time between two checks for new workers while a manager polls, because it looks only for answers while it
/// waits.
const LOOK: Duration = Duration::from_millis(5);

/// A job in progress. Dropping it abandons the job; the workers stay.
pub struct Run<'m, I: Iterator<Item = Range<u64>>, S> {
    manager: &'m mut Manager,
    job: String,
    source: S,
    state: JobState<I>,
    buffer: Vec<u8>,
    /// The last time at which a worker was connected.
    had_worker: Instant,
    /// How the last worker departed.
    last: String,
}

impl<I: Iterator<Item = Range<u64>>, S: Source> Run<'_, I, S> {
    /// Completes the job, as [`Manager::run`] does. Waits as the manager's mode says.
    pub fn finish(
        &mut self,
        mut fold: impl FnMut(&Piece, &[u8]) -> Result<(), Refusal>,
    ) -> Result<(), Error> {
        loop {
            match self.turn(&mut fold)? {
                Step::Done => return Ok(()),
                Step::Working => {}
                Step::Waiting => self.wait()?,
            }
        }
    }

    /// Does what is possible without waiting: passes results to `fold`, and gives out pieces. If it returns
    /// [`Step::Waiting`], the file descriptor becomes readable when another step is worthwhile.
    pub fn step(
        &mut self,
        mut fold: impl FnMut(&Piece, &[u8]) -> Result<(), Refusal>,
    ) -> Result<Step, Error> {
        let step = self.turn(&mut fold)?;
        if step == Step::Waiting {
            let deadline = self.deadline();
            if self.manager.watch.arm(deadline)? {
                return Ok(Step::Working);
            }
        }
        Ok(step)
    }

    /// Returns one file descriptor for all workers, for poll and epoll. After [`Step::Waiting`] it becomes readable
    /// when a worker has sent something, has come or has gone, or when a time limit has passed. Fails in a VM without
    /// interrupts.
    pub fn poll_fd(&self) -> Result<BorrowedFd<'_>, Error> {
        self.manager.watch.fd()
    }

    /// Returns a report of the job so far.
    pub fn report(&self) -> Report {
        self.state.report()
    }

    /// Returns the number of pieces, and of their bytes, that are done so far.
    pub fn done(&self) -> (u64, u64) {
        self.state.done()
    }

    /// Waits until another turn is worthwhile, as the manager's mode says.
    fn wait(&mut self) -> Result<(), Error> {
        let deadline = self.deadline();
        let Manager { channels, watch, options, .. } = &mut *self.manager;
        // A polling manager never sleeps, and sees new workers only in its next turn.
        let look = (options.mode == WaitMode::Poll).then(|| Instant::now() + LOOK);
        let first = [deadline, look].into_iter().flatten().min();
        watch.wait(channels, options.mode, first)
    }

    /// Returns when the next time limit passes.
    fn deadline(&self) -> Option<Instant> {
        let options = &self.manager.options;
        if self.manager.channels.is_empty() {
            return options.patience.and_then(|patience| self.had_worker.checked_add(patience));
        }
        let timeout = options.piece_timeout?;
        let since = self
            .manager
            .channels
            .iter()
            .filter_map(|channel| self.state.waiting_since(channel.worker))
            .min()?;
        since.checked_add(timeout)
    }

    /// Gathers results and gives out pieces once: at most one piece for each worker, so that a caller with other
    /// things to do gets to them.
    fn turn(&mut self, fold: &mut impl FnMut(&Piece, &[u8]) -> Result<(), Refusal>) -> Result<Step, Error> {
        self.meet_newcomers()?;
        let mut worked = false;
        for round in 0..self.manager.channels.len() {
            if round > 0 {
                self.manager.look()?;
            }
            worked |= self.gather_from_all(fold)?;
            if !self.scatter()? {
                break;
            }
            worked = true;
        }
        if self.state.is_done() {
            return Ok(Step::Done);
        }
        self.check_times()?;
        if worked {
            return Ok(Step::Working);
        }
        self.manager.channels.iter_mut().for_each(|channel| channel.wake(true));
        Ok(Step::Waiting)
    }

    fn gather_from_all(
        &mut self,
        fold: &mut impl FnMut(&Piece, &[u8]) -> Result<(), Refusal>,
    ) -> Result<bool, Error> {
        let mut worked = false;
        let mut n = 0;
        while n < self.manager.channels.len() {
            match self.gather(n, fold)? {
                Ok(did) => {
                    worked |= did;
                    n += 1;
                }
                Err(departure) => {
                    worked = true;
                    self.dismiss(n, departure)?;
                }
            }
        }
        Ok(worked)
    }

    /// Gives one piece to the worker that has least to do. Returns false if there is no piece, or no worker can take
    /// one.
    ///
    /// Among equally loaded workers it chooses the one that answered last. So if the manager is the bottleneck, a few
    /// workers that are awake and have warm caches do all the work, and the others stay asleep. If the work is the
    /// bottleneck, every worker has a piece before any has two.
    fn scatter(&mut self) -> Result<bool, Error> {
        if !self.state.has_more() {
            return Ok(false);
        }
        let window = self.manager.options.window.max(1);
        loop {
            let state = &self.state;
            let free = self.manager.channels.iter().enumerate().filter_map(|(n, channel)| {
                let holds = state.holds(channel.worker) + channel.stale.len();
                let level = holds / channel.batch(window / 2);
                (holds < window && !channel.full).then_some((level, std::cmp::Reverse(channel.heard), n))
            });
            let Some((_, _, n)) = free.min() else { return Ok(false) };
            match self.give(n)? {
                Ok(true) => return Ok(true),
                Ok(false) => self.manager.channels[n].full = true,
                Err(departure) => {
                    self.dismiss(n, departure)?;
                    return Ok(true);
                }
            }
        }
    }

    fn meet_newcomers(&mut self) -> Result<(), Error> {
        self.manager.look()?;
        let came = if self.manager.watch.knocked() { self.manager.welcome()? } else { 0 };
        // This includes workers that came before this job.
        if let Some(why) = self.manager.turned_away.take() {
            self.last = format!("; the last worker was turned away: {why}");
        }
        let channels = &mut self.manager.channels;
        let known = channels.len() - came;
        for channel in &mut channels[known..] {
            channel.worker = self.state.join(channel.name(), true);
        }
        Ok(())
    }

    /// Gathers all that a worker has sent. Returns whether that was anything, or how the worker departed.
    fn gather(
        &mut self,
        n: usize,
        fold: &mut impl FnMut(&Piece, &[u8]) -> Result<(), Refusal>,
    ) -> Result<Result<bool, Departure>, Error> {
        let channel = &mut self.manager.channels[n];
        let worker = channel.worker;
        channel.full = false;
        let since = self.state.waiting_since(worker);
        let mut answers = 0;
        while channel.awake {
            let answer = match channel.answer(&mut self.buffer) {
                Ok(Some(answer)) => answer,
                Ok(None) => break,
                Err(departure) => return Ok(Err(departure)),
            };
            answers += 1;
            let (Answer::Result(number) | Answer::Failed(number)) = answer;
            if channel.stale.remove(&number) {
                continue;
            }
            let Some(piece) = self.state.held(worker, number) else {
                let what = format!("it answered piece {number}, which it does not hold");
                return Ok(Err(Departure::Dismissed(what)));
            };
            if let Answer::Failed(_) = answer {
                self.state.failed(worker, number);
                let why = format!("said: {}", String::from_utf8_lossy(&self.buffer));
                give_up(&self.manager.options, piece, why)?;
                continue;
            }
            match fold(&piece, &self.buffer) {
                Ok(()) => {
                    self.state.answered(worker, number);
                }
                Err(Refusal::Nonsense(why)) => {
                    let what = format!("its result of the piece at {} is nonsense: {why}", piece.offset);
                    return Ok(Err(Departure::Dismissed(what)));
                }
                Err(Refusal::Fatal(why)) => {
                    // The worker has finished this piece, so the next job must not expect an answer to it.
                    self.state.failed(worker, number);
                    return Err(Error::Result { piece, worker: self.state.name(worker).into(), why });
                }
            }
        }
        if let Some(since) = since.filter(|_| answers > 0) {
            channel.answered(answers, since);
        }
        // The worker may by now have slept long enough, although it has pieces, to be woken.
        channel.wake(false);
        Ok(Ok(answers > 0))
    }

    /// Sends a piece to a worker. Returns false if there is no room for it now.
    fn give(&mut self, n: usize) -> Result<Result<bool, Departure>, Error> {
        let enough = self.manager.options.window / 2;
        let channel = &mut self.manager.channels[n];
        let worker = channel.worker;
        if !channel.told {
            match channel.tell(&self.job) {
                Ok(told) => channel.told = told,
                Err(departure) => return Ok(Err(departure)),
            }
            if !channel.told {
                return Ok(Ok(false));
            }
        }
        let Some(piece) = self.state.give(worker) else { return Ok(Ok(false)) };
        if piece.len > channel.longest() {
            self.state.take_back(worker);
            return Err(Error::TooLong { piece, worker: channel.name(), max: channel.longest() });
        }
        match channel.has_room(piece.len) {
            Ok(true) => {}
            Ok(false) => {
                self.state.take_back(worker);
                return Ok(Ok(false));
            }
            Err(departure) => return Ok(Err(departure)),
        }
        let (source, begun) = (&mut self.source, Instant::now());
        match channel.send(&piece, |room| source.fill(piece.offset, room)) {
            Ok(Ok(())) => {
                // The next piece may take as long as this one.
                let slow = begun.elapsed() >= WORTH;
                channel.wake(slow || self.state.holds(worker) >= channel.batch(enough));
                Ok(Ok(true))
            }
            Ok(Err(source)) => {
                self.state.take_back(worker);
                Err(Error::Source { piece, source })
            }
            Err(departure) => Ok(Err(departure)),
        }
    }

    /// Removes a worker, and makes its pieces available to others.
    fn dismiss(&mut self, n: usize, departure: Departure) -> Result<(), Error> {
        let channel = self.manager.channels.remove(n);
        self.had_worker = Instant::now();
        let why = format!("({}) {departure}", self.state.name(channel.worker));
        self.last = format!("; the last worker {why}");
        match self.state.depart(channel.worker, departure) {
            Some(piece) => give_up(&self.manager.options, piece, why),
            None => Ok(()),
        }
    }

    /// Dismisses workers that take too long, and checks whether the job has been without workers for too long.
    fn check_times(&mut self) -> Result<(), Error> {
        if let Some(timeout) = self.manager.options.piece_timeout {
            let mut n = 0;
            while n < self.manager.channels.len() {
                let since = self.state.waiting_since(self.manager.channels[n].worker);
                if since.is_some_and(|since| since.elapsed() >= timeout) {
                    let why = format!("it has not answered a piece for {timeout:?}");
                    self.dismiss(n, Departure::Dismissed(why))?;
                } else {
                    n += 1;
                }
            }
        }
        if !self.manager.channels.is_empty() {
            return Ok(());
        }
        match self.manager.options.patience {
            Some(patience) if self.had_worker.elapsed() >= patience => Err(Error::NoWorker {
                waited: patience,
                address: self.manager.address.clone(),
                left: match self.state.done() {
                    (0, _) => "all is".into(),
                    (n, _) => format!("more than the {n} pieces done so far is"),
                },
                last: self.last.clone(),
            }),
            _ => Ok(()),
        }
    }
}

/// Fails if all attempts at a piece that the options allow are used up.
fn give_up(options: &Options, piece: Piece, why: String) -> Result<(), Error> {
    if piece.tries < options.tries.max(1) { Ok(()) } else { Err(Error::Piece { piece, why }) }
}

impl<I: Iterator<Item = Range<u64>>, S> Drop for Run<'_, I, S> {
    fn drop(&mut self) {
        self.manager.next = self.state.next_number();
        for channel in &mut self.manager.channels {
            channel.wake(true);
            // These pieces belong to an abandoned job.
            channel.stale.extend(self.state.held_by(channel.worker));
        }
    }
}
