//! The farm: one manager, many workers.

use crate::boundary::{
    Growing, Outcome, birthplace, borrow, borrow_mut, chosen, close, fill, give, given, invalid, length,
    name_array, number, place, status, text, there,
};
use crate::endpoint::wait_mode;
use crate::places::handle;
use crate::status::Failure;
use crate::status::Status::{
    GINNEL_ERR_CALLBACK, GINNEL_ERR_NO_WORKER, GINNEL_ERR_NULL, GINNEL_ERR_PIECE, GINNEL_ERR_TIMED_OUT,
    GINNEL_ERR_TOO_LONG,
};
use ginnel::{AttachOptions, ChannelOptions, Mapping, MessageChannel, SharedSlice};
use ginnel_farm::{
    Departure, Error, Manager, Options, Piece, Refusal, Report, Run, Source, Step as RustStep, Task, Worker,
    WorkerProcesses, equal,
};
use libc::{c_int, ssize_t};
use std::ffi::{CStr, CString, OsStr, c_char, c_void};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use std::ptr::NonNull;
use std::time::Duration;

/// One who has work done by many: a manager, and the job that it has in hand. For one thread at a time. Made by
/// ginnel_farm_open(), freed by ginnel_farm_close().
pub struct Farm {
    // In front of the manager, of which it holds the only reference while there is one.
    job: Option<Job>,
    manager: NonNull<Manager>,
    /// Of the last job.
    report: Report,
    processes: WorkerProcesses,
}
handle!(Farm, "farm");

/// How long workers that were started may take to end when their manager has gone.
const LAST_PATIENCE: Duration = Duration::from_secs(5);

impl Farm {
    /// The manager, while it has no job in hand.
    fn idle(&mut self) -> Outcome<&mut Manager> {
        match self.job {
            // SAFETY: made by `ginnel_farm_open` and freed by `drop`; nobody else has a reference.
            None => Ok(unsafe { self.manager.as_mut() }),
            Some(_) => Err(invalid("a job is in hand; finish it, or call ginnel_farm_stop()")),
        }
    }

    fn busy(&mut self) -> Outcome<&mut Job> {
        self.job.as_mut().ok_or_else(|| invalid("no job is in hand; call ginnel_farm_start()"))
    }

    fn start(&mut self, asked: &FarmJob) -> Outcome<()> {
        let name = given_text(asked.name, "job->name")?;
        let fill = asked.fill.ok_or_else(|| missing("job->fill"))?;
        let fold = asked.fold.ok_or_else(|| missing("job->fold"))?;
        let context = asked.context;
        self.idle()?;
        let mut manager = self.manager;
        // SAFETY: as in `idle`; the run that borrows it for so long goes before the manager does, and `idle` hands out no
        // other reference meanwhile.
        let manager: &'static mut Manager = unsafe { manager.as_mut() };
        let pieces: Pieces = match asked.next {
            Some(next) => Box::new(Cut { next, context }),
            None if asked.piece > 0 => Box::new(equal(asked.bytes, asked.piece)),
            None => Box::new(equal(asked.bytes, manager.longest_piece())),
        };
        let run = manager.start(name, pieces, Fill { fill, context })?;
        self.job = Some(Job { run, fold, context });
        Ok(())
    }

    /// The job is over, well or not.
    fn end(&mut self) {
        if let Some(job) = self.job.take() {
            self.report = job.run.report();
        }
    }
}

impl Drop for Farm {
    fn drop(&mut self) {
        self.job = None;
        // SAFETY: made by `Box::into_raw`, and the job, which borrowed it, is gone.
        drop(unsafe { Box::from_raw(self.manager.as_ptr()) });
        self.processes.finish(LAST_PATIENCE);
    }
}

type Pieces = Box<dyn Iterator<Item = Range<u64>>>;

struct Job {
    run: Run<'static, Pieces, Fill>,
    fold: unsafe extern "C" fn(*mut c_void, *const FarmPiece, *const c_void, usize) -> c_int,
    context: *mut c_void,
}

impl Job {
    /// What is done with a result.
    fn taking(&self) -> impl FnMut(&Piece, &[u8]) -> Result<(), Refusal> + use<> {
        let (fold, context) = (self.fold, self.context);
        move |piece: &Piece, result: &[u8]| {
            let piece = FarmPiece {
                size: size_of::<FarmPiece>(),
                number: piece.number,
                offset: piece.offset,
                length: piece.len,
                tries: piece.tries,
            };
            // SAFETY: who calls a C function vouches for its pointers; ours are valid until it returns.
            match unsafe { fold(context, &piece, result.as_ptr().cast(), result.len()) } {
                0 => Ok(()),
                1 => Err(Refusal::Nonsense("the program says so".into())),
                other => Err(Refusal::Fatal(format!("fold() has returned {other}").into())),
            }
        }
    }
}

/// Unequal pieces, as the program cuts them.
struct Cut {
    next: unsafe extern "C" fn(*mut c_void, *mut u64, *mut usize) -> c_int,
    context: *mut c_void,
}

impl Iterator for Cut {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Self::Item> {
        let (mut offset, mut length) = (0u64, 0usize);
        // SAFETY: who calls a C function vouches for its pointers; ours are valid until it returns.
        let more = unsafe { (self.next)(self.context, &mut offset, &mut length) } > 0;
        more.then(|| offset..offset.saturating_add(length as u64))
    }
}

struct Fill {
    fill: unsafe extern "C" fn(*mut c_void, u64, *mut c_void, usize) -> c_int,
    context: *mut c_void,
}

impl Source for Fill {
    fn fill(&mut self, offset: u64, room: SharedSlice<'_, Mapping>) -> std::io::Result<()> {
        // SAFETY: who calls a C function vouches for its pointers; the room is there until it returns.
        match unsafe { (self.fill)(self.context, offset, room.as_ptr().cast(), room.len()) } {
            0 => Ok(()),
            other => Err(std::io::Error::other(format!("fill() has returned {other}"))),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match error {
            Error::Ginnel(error) => return error.into(),
            Error::NoWorker { .. } => GINNEL_ERR_NO_WORKER,
            Error::Piece { .. } => GINNEL_ERR_PIECE,
            Error::TooLong { .. } => GINNEL_ERR_TOO_LONG,
            _ => GINNEL_ERR_CALLBACK,
        };
        Self::new(status, error.to_string())
    }
}

fn missing(what: &str) -> Failure {
    Failure::new(GINNEL_ERR_NULL, format!("{what} is NULL"))
}

fn given_text<'a>(string: *const c_char, name: &str) -> Outcome<&'a str> {
    // SAFETY: who calls a C function vouches for its pointers, as said on top of ginnel.h.
    unsafe { text(string, name) }
}

fn chosen_or<T: Default + PartialEq>(value: T, otherwise: T) -> T {
    if value == T::default() { otherwise } else { value }
}

/// How a farm's manager works. Fill it with zeros, set `size`, then what you want otherwise.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FarmOptions {
    /// sizeof(ginnel_farm_options).
    pub size: usize,
    /// The longest piece, in bytes. A worker's channel takes about eight times as much shared memory. 0: what fits into
    /// rings of 1 MiB.
    pub piece: usize,
    /// Pieces that a worker may hold: one that it works on, and others that are transferred meanwhile. 0: the default.
    pub window: usize,
    /// How the manager waits: one of GINNEL_WAIT_*.
    pub wait: c_int,
    /// How often a piece is tried. 0: five times.
    pub tries: u32,
    /// For GINNEL_WAIT_ADAPTIVE: how long to look, in nanoseconds. 0: the default, 100000.
    pub budget_ns: u64,
    /// A worker that takes longer for a piece is dismissed. 0: it may take any time.
    pub piece_timeout_ns: u64,
    /// How long a job goes on without any worker. 0: 30 s; UINT64_MAX: for ever.
    pub patience_ns: u64,
}
// SAFETY: as the trait asks.
unsafe impl Growing for FarmOptions {}

/// A piece of a job's input.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FarmPiece {
    /// sizeof(ginnel_farm_piece) of the library that runs.
    pub size: usize,
    /// Its number; its manager never uses it again.
    pub number: u64,
    /// Where in the input it begins.
    pub offset: u64,
    /// Its bytes.
    pub length: usize,
    /// How often it has been given to a worker.
    pub tries: u32,
}

/// Cuts the next piece of the input: sets `*offset` and `*length`, and returns 1; 0 if there is none.
pub type FarmNext =
    Option<unsafe extern "C" fn(context: *mut c_void, offset: *mut u64, length: *mut usize) -> c_int>;

/// Writes the input's `length` bytes from `offset` to `room`, which lies in the worker's ring. Must give the same bytes each
/// time: a piece whose worker has died is asked for again. Returns 0; anything else ends the job with GINNEL_ERR_CALLBACK.
pub type FarmFill = Option<
    unsafe extern "C" fn(context: *mut c_void, offset: u64, room: *mut c_void, length: usize) -> c_int,
>;

/// Takes a worker's result, `length` bytes at `result`, which end with the call. Called once for each piece, in the order in
/// which results come. Returns 0; 1 if the result is nonsense (its worker is dismissed, and another gets the piece);
/// anything else ends the job with GINNEL_ERR_CALLBACK.
pub type FarmFold = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        piece: *const FarmPiece,
        result: *const c_void,
        length: usize,
    ) -> c_int,
>;

/// A job. Fill it with zeros, set `size`, then the rest.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FarmJob {
    /// sizeof(ginnel_farm_job).
    pub size: usize,
    /// What the workers are told that it is.
    pub name: *const c_char,
    /// Bytes of the input, which is cut into equal pieces, unless there is `next`.
    pub bytes: u64,
    /// Bytes of an equal piece. 0: as long as a worker's channel takes.
    pub piece: usize,
    /// Cuts the input into pieces of any lengths; or NULL.
    pub next: FarmNext,
    /// Where the input comes from.
    pub fill: FarmFill,
    /// Where the results go.
    pub fold: FarmFold,
    /// For the three functions.
    pub context: *mut c_void,
}
// SAFETY: as the trait asks.
unsafe impl Growing for FarmJob {}

/// How far a job is.
#[repr(C)]
#[allow(non_camel_case_types)] // The names are C's.
pub enum Step {
    /// All is done.
    GINNEL_FARM_DONE = 0,
    /// There is more to do at once: call again.
    GINNEL_FARM_WORKING = 1,
    /// Nothing can be done until a worker says something: wait for ginnel_farm_fd(), then call again.
    GINNEL_FARM_WAITING = 2,
}

/// What happened in a job.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FarmReport {
    /// sizeof(ginnel_farm_report).
    pub size: usize,
    /// From the start to the last result, or to now, in nanoseconds.
    pub time_ns: u64,
    /// Results that were taken.
    pub pieces: u64,
    /// Bytes of these pieces.
    pub bytes: u64,
    /// Pieces that were given to a second worker because the first died, left, was dismissed or failed.
    pub reassigned: u64,
    /// Everybody who had a part in it: see ginnel_farm_get_worker().
    pub workers: usize,
    /// How many of them have died.
    pub deaths: usize,
}
// SAFETY: as the trait asks.
unsafe impl Growing for FarmReport {}

/// How a worker went.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types)] // The names are C's.
pub enum FarmDeparture {
    /// It did not: it was there to the end.
    GINNEL_FARM_STAYED = 0,
    /// Its process or its VM died.
    GINNEL_FARM_DIED = 1,
    /// It closed its channel.
    GINNEL_FARM_LEFT = 2,
    /// It was dismissed: it broke the protocol, answered nonsense, or took too long.
    GINNEL_FARM_DISMISSED = 3,
}

/// What one worker did in a job.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FarmWorkerReport {
    /// sizeof(ginnel_farm_worker_report).
    pub size: usize,
    /// When it came, from the start of the job, in nanoseconds; 0 if it was there before.
    pub joined_ns: u64,
    /// When its last result came.
    pub last_ns: u64,
    /// Its results that were taken.
    pub pieces: u64,
    /// Bytes of these pieces.
    pub bytes: u64,
    /// Pieces that it could make nothing of.
    pub failed: u64,
    /// Pieces that were taken from it and given to others.
    pub lost: u64,
    /// How it went: one of GINNEL_FARM_STAYED and so on.
    pub departure: c_int,
    /// What it calls itself, and whose member it is.
    pub name: [c_char; 64],
}
// SAFETY: as the trait asks.
unsafe impl Growing for FarmWorkerReport {}

/// Makes a manager without workers. `options` may be NULL. On success `*farm` is the caller's, to be freed with
/// ginnel_farm_close(); on failure it is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_open(options: *const FarmOptions, farm: *mut *mut Farm) -> c_int {
    status(|| {
        let place = given!(birthplace(farm));
        let asked = given!(chosen(options));
        let default = Options::default();
        let nanoseconds = |ns| (ns > 0).then(|| Duration::from_nanos(ns));
        let manager = Manager::new(Options {
            mode: wait_mode(asked.wait, asked.budget_ns)?,
            window: chosen_or(asked.window, default.window),
            piece: chosen_or(asked.piece, default.piece),
            piece_timeout: nanoseconds(asked.piece_timeout_ns),
            patience: match asked.patience_ns {
                0 => default.patience,
                u64::MAX => None,
                ns => Some(Duration::from_nanos(ns)),
            },
            tries: chosen_or(asked.tries, default.tries),
        })?;
        let manager = NonNull::from(Box::leak(Box::new(manager)));
        give(
            place,
            Farm { job: None, manager, report: Report::default(), processes: WorkerProcesses::default() },
        );
        Ok(())
    })
}

/// Attaches to the segment of `address`, which is "segment/name", and lets workers come there: one, with a slice of its own,
/// or as many as like in a segment that they share. May be called again, for more addresses, while no job is in hand.
///
/// Blocks like ginnel_attach(). Errors: those of ginnel_attach() and ginnel_endpoint_listen().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_listen(farm: *mut Farm, address: *const c_char) -> c_int {
    status(|| {
        let manager = given!(borrow_mut(farm)).idle()?;
        Ok(manager.listen_at(given!(text(address)))?)
    })
}

/// Starts a program as a child of this process: `argv` is its name, which is looked for in $PATH, its arguments, and NULL at
/// the end. It should work for this farm (ginnel_farm_connect(), or "ginnel farm work ADDRESS") and end when the farm is
/// closed. Its standard input is empty, and its standard output goes nowhere.
///
/// Errors: GINNEL_ERR_SYSTEM if it cannot be started.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_spawn(farm: *mut Farm, argv: *const *const c_char) -> c_int {
    status(|| {
        let farm = given!(borrow_mut(farm));
        let mut words = Vec::new();
        there(argv, "argv")?;
        // SAFETY: not null, and the caller says that NULL is at the end.
        let mut at = argv;
        loop {
            // SAFETY: not behind the NULL yet.
            let word = unsafe { at.read() };
            if word.is_null() {
                break;
            }
            // SAFETY: not null, and a string as C has them.
            words.push(OsStr::from_bytes(unsafe { CStr::from_ptr(word) }.to_bytes()));
            // SAFETY: the array goes on to its NULL.
            at = unsafe { at.add(1) };
        }
        let (program, arguments) = words.split_first().ok_or_else(|| invalid("argv is empty"))?;
        let started = farm.processes.start(Command::new(program).args(arguments));
        started.map_err(|source| Failure::from(ginnel::Error::System { what: "starting a worker", source }))
    })
}

/// Waits until `count` workers are here. A job needs not wait for that: who comes later gets work too. Not while a job is in
/// hand.
///
/// Blocks for at most `timeout_ns` nanoseconds: 0 means not at all, a negative number for ever. Errors:
/// GINNEL_ERR_TIMED_OUT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_wait_for_workers(
    farm: *mut Farm,
    count: usize,
    timeout_ns: i64,
) -> c_int {
    status(|| {
        let manager = given!(borrow_mut(farm)).idle()?;
        let timeout = crate::boundary::timeout(timeout_ns).unwrap_or(Duration::MAX);
        if manager.wait_for_workers(count, timeout)? { Ok(()) } else { Err(GINNEL_ERR_TIMED_OUT.into()) }
    })
}

/// The longest piece that a worker's channel takes, in bytes, or a negative status. Not while a job is in hand.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_longest_piece(farm: *mut Farm) -> ssize_t {
    length(|| Ok(given!(borrow_mut(farm)).idle()?.longest_piece()))
}

/// Has a job done: scatters its pieces over the workers, and gathers their results, until all is done. The workers stay for
/// the next job.
///
/// Blocks until then. Errors, after which no job is in hand: GINNEL_ERR_NO_WORKER if there was none for as long as the
/// manager waits, GINNEL_ERR_PIECE if a piece failed or took its worker along as often as it is tried, GINNEL_ERR_TOO_LONG
/// for a piece that is longer than a worker's channel takes, GINNEL_ERR_CALLBACK.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_run(farm: *mut Farm, job: *const FarmJob) -> c_int {
    status(|| {
        let farm = given!(borrow_mut(farm));
        farm.start(&given!(chosen(job)))?;
        let job = farm.busy()?;
        let done = job.run.finish(job.taking());
        farm.end();
        Ok(done?)
    })
}

/// Takes a job in hand, which ginnel_farm_step() does: for programs with an event loop. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_start(farm: *mut Farm, job: *const FarmJob) -> c_int {
    status(|| {
        let farm = given!(borrow_mut(farm));
        farm.start(&given!(chosen(job)))
    })
}

/// Does what can be done of the job without waiting. Returns GINNEL_FARM_WORKING, GINNEL_FARM_WAITING or GINNEL_FARM_DONE
/// (then no job is in hand), or a negative status: those of ginnel_farm_run(), and the job has ended;
/// GINNEL_ERR_UNSUPPORTED in a VM without interrupts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_step(farm: *mut Farm) -> c_int {
    number(|| {
        let farm = given!(borrow_mut(farm));
        let job = farm.busy()?;
        let step = job.run.step(job.taking());
        if !matches!(step, Ok(RustStep::Working | RustStep::Waiting)) {
            farm.end();
        }
        Ok(match step? {
            RustStep::Done => Step::GINNEL_FARM_DONE,
            RustStep::Working => Step::GINNEL_FARM_WORKING,
            RustStep::Waiting => Step::GINNEL_FARM_WAITING,
        } as c_int)
    })
}

/// A file descriptor for poll(2) and epoll(7), or a negative status: after ginnel_farm_step() has returned
/// GINNEL_FARM_WAITING it becomes readable when a worker has said something, has come or has gone, or when a time has run
/// out. It belongs to the farm: do not read or close it, nor use it after the farm is closed. Only while a job is in hand;
/// it is the same for all jobs. Errors: GINNEL_ERR_UNSUPPORTED in a VM without interrupts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_fd(farm: *mut Farm) -> c_int {
    number(|| Ok(given!(borrow_mut(farm)).busy()?.run.poll_fd()?.as_raw_fd()))
}

/// Gives up the job that is in hand, if any. The workers stay; what they still make of its pieces is thrown away.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_stop(farm: *mut Farm) -> c_int {
    status(|| {
        given!(borrow_mut(farm)).end();
        Ok(())
    })
}

/// Fills in `*report`, whose `size` the caller has set: of the job in hand so far, or of the last one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_get_report(farm: *mut Farm, report: *mut FarmReport) -> c_int {
    status(|| {
        let known = given!(borrow_mut(farm)).look();
        let facts = FarmReport {
            size: 0,
            time_ns: nanoseconds(known.time),
            pieces: known.pieces,
            bytes: known.bytes,
            reassigned: known.reassigned,
            workers: known.workers.len(),
            deaths: known.deaths(),
        };
        given!(fill(report, facts));
        Ok(())
    })
}

/// Fills in `*worker`, whose `size` the caller has set, with what a worker did in the job in hand or the last one: `index`
/// counts from 0, in the order in which they came. Errors: GINNEL_ERR_INVALID beyond the last.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_get_worker(
    farm: *mut Farm,
    index: usize,
    worker: *mut FarmWorkerReport,
) -> c_int {
    status(|| {
        let report = given!(borrow_mut(farm)).look();
        let count = report.workers.len();
        let known =
            report.workers.get(index).ok_or_else(|| invalid(format!("{count} workers, and none {index}")))?;
        let facts = FarmWorkerReport {
            size: 0,
            joined_ns: nanoseconds(known.joined),
            last_ns: nanoseconds(known.last),
            pieces: known.pieces,
            bytes: known.bytes,
            failed: known.failed,
            lost: known.lost,
            departure: match known.departure {
                None => FarmDeparture::GINNEL_FARM_STAYED,
                Some(Departure::Died) => FarmDeparture::GINNEL_FARM_DIED,
                Some(Departure::Left) => FarmDeparture::GINNEL_FARM_LEFT,
                Some(Departure::Dismissed(_)) => FarmDeparture::GINNEL_FARM_DISMISSED,
            } as c_int,
            name: name_array(&known.name),
        };
        given!(fill(worker, facts));
        Ok(())
    })
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Farm {
    /// The report of the job in hand, or of the last one.
    fn look(&mut self) -> &Report {
        if let Some(job) = &self.job {
            self.report = job.run.report();
        }
        &self.report
    }
}

/// Frees a farm. Its workers are told that there is no more; those that ginnel_farm_spawn() has started are waited for, for
/// at most 5 s, and then killed. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_close(farm: *mut Farm) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { close(farm) }
}

/// A worker of a farm: a channel to its manager. For one thread at a time. Made by ginnel_farm_connect(), freed by
/// ginnel_farm_worker_close().
pub struct FarmWorker(Worker);
handle!(FarmWorker, "worker");

/// How to work. Fill it with zeros, set `size`, then what you want otherwise.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FarmWorkerOptions {
    /// sizeof(ginnel_farm_worker_options).
    pub size: usize,
    /// How long to wait for a manager, in nanoseconds. 0: not at all.
    pub patience_ns: u64,
    /// For GINNEL_WAIT_ADAPTIVE: how long to look, in nanoseconds. 0: the default, 100000.
    pub budget_ns: u64,
    /// How to wait for pieces: one of GINNEL_WAIT_*.
    pub wait: c_int,
}
// SAFETY: as the trait asks.
unsafe impl Growing for FarmWorkerOptions {}

/// A piece, as its worker sees it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FarmTask {
    /// sizeof(ginnel_farm_task) of the library that runs.
    pub size: usize,
    /// Name of the job.
    pub job: *const c_char,
    /// Number of the piece.
    pub number: u64,
    /// Where in the input it begins.
    pub offset: u64,
    /// Its bytes, where the manager has put them, aligned to 8. A hostile manager can still change them.
    pub data: *const c_void,
    /// How many.
    pub length: usize,
}

/// Works on a piece: writes the result to `result`, which has room for `room` bytes, and returns its length. A negative
/// number means that nothing can be made of the piece, which is then tried elsewhere; why may be written to `result`, as a
/// string. Nothing of `task` is there after it has returned.
pub type FarmWork = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        task: *const FarmTask,
        result: *mut c_void,
        room: usize,
    ) -> ssize_t,
>;

/// Attaches to the segment of `address`, which is "segment/name", and connects to the manager that listens there. `options`
/// may be NULL. On success `*worker` is the caller's, to be freed with ginnel_farm_worker_close(); on failure it is NULL.
///
/// Blocks like ginnel_attach(), and for as long as `options->patience_ns`. Errors: those of ginnel_attach() and
/// ginnel_endpoint_connect().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_connect(
    address: *const c_char,
    options: *const FarmWorkerOptions,
    worker: *mut *mut FarmWorker,
) -> c_int {
    status(|| {
        let place = given!(birthplace(worker));
        let (segment, name) = ginnel::split(given!(text(address)))?;
        let asked = given!(chosen(options));
        let mode = wait_mode(asked.wait, asked.budget_ns)?;
        let options = AttachOptions { mode, ..AttachOptions::default() };
        let endpoint = ginnel::Endpoint::attach_with(segment, &options)?;
        let patience = Duration::from_nanos(asked.patience_ns);
        let options = ChannelOptions { patience, ..ChannelOptions::default() };
        let channel: MessageChannel = endpoint.connect_with(name, &options)?;
        give(place, FarmWorker(Worker::over(channel)));
        Ok(())
    })
}

/// Works until the manager has no more jobs: calls `work` for each piece, with `context`.
///
/// Blocks until then. Errors: GINNEL_ERR_PEER_DEAD if the manager has died, GINNEL_ERR_CLOSED if it has dismissed this
/// worker, GINNEL_ERR_SYSTEM if it breaks the protocol.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_serve(
    worker: *mut FarmWorker,
    work: FarmWork,
    context: *mut c_void,
) -> c_int {
    status(|| {
        let FarmWorker(worker) = given!(borrow_mut(worker));
        let work = work.ok_or_else(|| missing("work"))?;
        // One byte more, so that a reason always ends.
        let mut room = vec![0u8; worker.longest_result() + 1];
        let longest = worker.longest_result();
        let mut job = CString::default();
        Ok(worker.serve(|task, result| {
            if job.to_bytes() != task.job.as_bytes() {
                // A manager can put a zero into the name; the name ends there.
                let bytes = task.job.as_bytes().split(|byte| *byte == 0).next().unwrap_or_default();
                job = CString::new(bytes).unwrap_or_default();
            }
            let Task { number, offset, data, .. } = *task;
            let task = FarmTask {
                size: size_of::<FarmTask>(),
                job: job.as_ptr(),
                number,
                offset,
                data: data.as_ptr().cast_const().cast(),
                length: data.len(),
            };
            room[0] = 0;
            // SAFETY: who calls a C function vouches for its pointers; ours are valid until it returns.
            let made = unsafe { work(context, &task, room.as_mut_ptr().cast(), longest) };
            match usize::try_from(made) {
                Ok(len) if len <= longest => result.extend_from_slice(&room[..len]),
                Ok(len) => return Err(format!("work() says {len} bytes, and there is room for {longest}")),
                Err(_) => {
                    let why = CStr::from_bytes_until_nul(&room).unwrap_or_default();
                    return Err(why.to_string_lossy().into_owned());
                }
            }
            Ok(())
        })?)
    })
}

/// Pieces that a worker has answered so far, and their bytes. Either may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_worker_get_done(
    worker: *const FarmWorker,
    pieces: *mut u64,
    bytes: *mut u64,
) -> c_int {
    status(|| {
        let FarmWorker(worker) = given!(borrow(worker));
        let done = worker.done();
        if !pieces.is_null() {
            given!(place(pieces)).write(done.0);
        }
        if !bytes.is_null() {
            given!(place(bytes)).write(done.1);
        }
        Ok(())
    })
}

/// Frees a worker; its manager gives what it still holds to others. NULL is allowed. Tells the daemon, for at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_worker_close(worker: *mut FarmWorker) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { close(worker) }
}
