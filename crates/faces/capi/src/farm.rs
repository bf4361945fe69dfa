//! The farm: one manager and many workers.

use crate::boundary::{
    Growing, Outcome, borrow, borrow_mut, checked, close, fill, invalid, length, name_array, number, output,
    output_handle, read_options, require, return_handle, status, text,
};
use crate::endpoint::wait_mode;
use crate::handle_table::handle;
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

/// A farm's manager, which distributes a job to its workers. One thread at a time may use it. Created by
/// ginnel_farm_open(), freed by ginnel_farm_close().
pub struct Farm {
    // Declared before the manager: while a job is in progress, it holds the only reference to the manager.
    job: Option<Job>,
    manager: NonNull<Manager>,
    /// The report of the last job.
    report: Report,
    processes: WorkerProcesses,
}
handle!(Farm, "farm");

/// How long the workers that were started may take to end after their manager is gone.
const LAST_PATIENCE: Duration = Duration::from_secs(5);

impl Farm {
    /// Returns the manager, if no job is in progress.
    fn idle(&mut self) -> Outcome<&mut Manager> {
        match self.job {
            // SAFETY: made by `ginnel_farm_open` and freed by `drop`; there is no other reference.
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
        // SAFETY: made by `ginnel_farm_open` and freed by `drop`. The run that borrows the manager is dropped before
        // the manager is, and `idle` returns no other reference meanwhile.
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

    /// Ends the job, whether it succeeded or not.
    fn end(&mut self) {
        if let Some(job) = self.job.take() {
            self.report = job.run.report();
        }
    }
}

impl Drop for Farm {
    fn drop(&mut self) {
        self.job = None;
        // SAFETY: made by `Box::into_raw`, and the job that borrowed it is gone.
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
    /// Calls the program's function for a result.
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
            // SAFETY: the caller of the C function is responsible for its pointers; ours are valid until it returns.
            match unsafe { fold(context, &piece, result.as_ptr().cast(), result.len()) } {
                0 => Ok(()),
                1 => Err(Refusal::Nonsense("the program says so".into())),
                other => Err(Refusal::Fatal(format!("fold() has returned {other}").into())),
            }
        }
    }
}

/// Pieces of different lengths, as the program's function cuts them.
struct Cut {
    next: unsafe extern "C" fn(*mut c_void, *mut u64, *mut usize) -> c_int,
    context: *mut c_void,
}

impl Iterator for Cut {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Self::Item> {
        let (mut offset, mut length) = (0u64, 0usize);
        // SAFETY: the caller of the C function is responsible for its pointers; ours are valid until it returns.
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
        // SAFETY: the caller of the C function is responsible for its pointers; the room is valid until it returns.
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
    // SAFETY: the caller of the C function is responsible for its pointers, as the head of ginnel.h says.
    unsafe { text(string, name) }
}

fn chosen_or<T: Default + PartialEq>(value: T, otherwise: T) -> T {
    if value == T::default() { otherwise } else { value }
}

/// Options for a farm's manager. Fill the structure with zeros, set `size`, then the members that should differ from
/// the default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FarmOptions {
    /// sizeof(ginnel_farm_options).
    pub size: usize,
    /// Length of the longest piece, in bytes. A worker's channel takes about eight times as much shared memory. 0: as
    /// much as fits into rings of 1 MiB.
    pub piece: usize,
    /// The most pieces that a worker may hold: one that it works on, and others that are transferred meanwhile. 0: the
    /// default, 2.
    pub window: usize,
    /// How the manager waits: one of GINNEL_WAIT_*.
    pub wait: c_int,
    /// The most attempts at one piece. 0: five.
    pub tries: u32,
    /// For GINNEL_WAIT_ADAPTIVE: how long to spin, in nanoseconds. 0: the default, 100000.
    pub budget_ns: u64,
    /// How long a worker may take for one piece before it is dismissed, in nanoseconds. 0: without a limit.
    pub piece_timeout_ns: u64,
    /// How long a job continues without any worker, in nanoseconds. 0: 30 s; UINT64_MAX: for ever.
    pub patience_ns: u64,
}
// SAFETY: the structure is as the trait requires.
unsafe impl Growing for FarmOptions {}

/// A piece of a job's input.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FarmPiece {
    /// sizeof(ginnel_farm_piece) of the library that runs.
    pub size: usize,
    /// Number of the piece, which its manager never reuses.
    pub number: u64,
    /// Offset of the piece in the input, in bytes.
    pub offset: u64,
    /// Length of the piece in bytes.
    pub length: usize,
    /// Number of times that the piece has been given to a worker.
    pub tries: u32,
}

/// Cuts the next piece of the input: sets `*offset` and `*length` (both in bytes) and returns 1, or returns 0 if there
/// is none.
pub type FarmNext =
    Option<unsafe extern "C" fn(context: *mut c_void, offset: *mut u64, length: *mut usize) -> c_int>;

/// Writes the input's `length` bytes from `offset` to `room`, which lies in the worker's ring. It must write the same
/// bytes each time, because it is called again for a piece whose worker has died. Returns 0; any other result ends the
/// job with GINNEL_ERR_CALLBACK.
pub type FarmFill = Option<
    unsafe extern "C" fn(context: *mut c_void, offset: u64, room: *mut c_void, length: usize) -> c_int,
>;

/// Takes a worker's result: `length` bytes at `result`, which are valid only during the call. It is called once for
/// each piece, in the order in which the results arrive. Returns 0; or 1 if the result is nonsense, in which case its
/// worker is dismissed and another one gets the piece; any other result ends the job with GINNEL_ERR_CALLBACK.
pub type FarmFold = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        piece: *const FarmPiece,
        result: *const c_void,
        length: usize,
    ) -> c_int,
>;

/// A job. Fill the structure with zeros, set `size`, then the other members.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FarmJob {
    /// sizeof(ginnel_farm_job).
    pub size: usize,
    /// Name of the job, which the workers are told.
    pub name: *const c_char,
    /// Length of the input in bytes, which is cut into equal pieces. Unused if `next` is set.
    pub bytes: u64,
    /// Length of an equal piece in bytes. 0: as long as a worker's channel takes.
    pub piece: usize,
    /// Cuts the input into pieces of any lengths, unless it is NULL.
    pub next: FarmNext,
    /// Writes a piece of the input.
    pub fill: FarmFill,
    /// Takes a result.
    pub fold: FarmFold,
    /// Argument for the three functions.
    pub context: *mut c_void,
}
// SAFETY: the structure is as the trait requires.
unsafe impl Growing for FarmJob {}

/// The progress of a job.
#[repr(C)]
#[allow(non_camel_case_types)] // The names are C's.
pub enum Step {
    /// The job is complete.
    GINNEL_FARM_DONE = 0,
    /// There is more to do at once: call ginnel_farm_step() again.
    GINNEL_FARM_WORKING = 1,
    /// Nothing can be done until a worker sends something: wait for ginnel_farm_fd(), then call ginnel_farm_step()
    /// again.
    GINNEL_FARM_WAITING = 2,
}

/// The report of a job.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FarmReport {
    /// sizeof(ginnel_farm_report).
    pub size: usize,
    /// Time from the start to the last result, or until now, in nanoseconds.
    pub time_ns: u64,
    /// Number of results that were taken.
    pub pieces: u64,
    /// Number of input bytes in the pieces with these results.
    pub bytes: u64,
    /// Number of pieces that were given to another worker because the first one died, left, was dismissed or failed.
    pub reassigned: u64,
    /// Number of workers that took part: see ginnel_farm_get_worker().
    pub workers: usize,
    /// Number of these workers that have died.
    pub deaths: usize,
}
// SAFETY: the structure is as the trait requires.
unsafe impl Growing for FarmReport {}

/// How a worker left the farm.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types)] // The names are C's.
pub enum FarmDeparture {
    /// It did not leave.
    GINNEL_FARM_STAYED = 0,
    /// Its process or its VM died.
    GINNEL_FARM_DIED = 1,
    /// It closed its channel.
    GINNEL_FARM_LEFT = 2,
    /// It was dismissed because it broke the protocol, returned nonsense, or took too long.
    GINNEL_FARM_DISMISSED = 3,
}

/// The work of one worker in a job.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FarmWorkerReport {
    /// sizeof(ginnel_farm_worker_report).
    pub size: usize,
    /// Time from the start of the job until it connected, in nanoseconds; 0 if it was there before.
    pub joined_ns: u64,
    /// Time from the start of the job until its last result, in nanoseconds.
    pub last_ns: u64,
    /// Number of its results that were taken.
    pub pieces: u64,
    /// Number of input bytes in the pieces with these results.
    pub bytes: u64,
    /// Number of pieces that it could not process.
    pub failed: u64,
    /// Number of pieces that were taken from it and given to others.
    pub lost: u64,
    /// How it left: one of GINNEL_FARM_STAYED and so on.
    pub departure: c_int,
    /// Its endpoint's name, and its member's.
    pub name: [c_char; 64],
}
// SAFETY: the structure is as the trait requires.
unsafe impl Growing for FarmWorkerReport {}

/// Creates a manager without workers. `options` may be NULL. On success the caller must free `*farm` with
/// ginnel_farm_close(); on failure it is NULL. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_open(options: *const FarmOptions, farm: *mut *mut Farm) -> c_int {
    status(|| {
        let place = checked!(output_handle(farm));
        let asked = checked!(read_options(options));
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
        return_handle(
            place,
            Farm { job: None, manager, report: Report::default(), processes: WorkerProcesses::default() },
        );
        Ok(())
    })
}

/// Attaches to the segment of `address`, which is "segment/name", and lets workers connect there: one worker in a slice
/// of its own, or any number in a segment that they share. It may be called again for more addresses while no job is in
/// progress.
///
/// Blocks like ginnel_attach(). Errors: those of ginnel_attach() and ginnel_endpoint_listen().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_listen(farm: *mut Farm, address: *const c_char) -> c_int {
    status(|| {
        let manager = checked!(borrow_mut(farm)).idle()?;
        Ok(manager.listen_at(checked!(text(address)))?)
    })
}

/// Starts a program as a child of this process. `argv` holds its name, which is looked up in $PATH, its arguments, and
/// NULL at the end. The program should work for this farm (with ginnel_farm_connect(), or "ginnel farm work ADDRESS")
/// and end when the farm is closed. Its standard input is empty, and its standard output is discarded.
///
/// Errors: GINNEL_ERR_SYSTEM if it cannot be started.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_spawn(farm: *mut Farm, argv: *const *const c_char) -> c_int {
    status(|| {
        let farm = checked!(borrow_mut(farm));
        let mut words = Vec::new();
        require(argv, "argv")?;
        // SAFETY: not null, and the caller says that NULL is at the end.
        let mut at = argv;
        loop {
            // SAFETY: not behind the NULL yet.
            let word = unsafe { at.read() };
            if word.is_null() {
                break;
            }
            // SAFETY: not null, and a C string, as the caller says.
            words.push(OsStr::from_bytes(unsafe { CStr::from_ptr(word) }.to_bytes()));
            // SAFETY: the array continues up to its NULL.
            at = unsafe { at.add(1) };
        }
        let (program, arguments) = words.split_first().ok_or_else(|| invalid("argv is empty"))?;
        let started = farm.processes.start(Command::new(program).args(arguments));
        started.map_err(|source| Failure::from(ginnel::Error::System { what: "starting a worker", source }))
    })
}

/// Waits until `count` workers have connected. A job need not wait for that, because workers that connect later get
/// work too. Must not be called while a job is in progress.
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
        let manager = checked!(borrow_mut(farm)).idle()?;
        let timeout = crate::boundary::timeout(timeout_ns).unwrap_or(Duration::MAX);
        if manager.wait_for_workers(count, timeout)? { Ok(()) } else { Err(GINNEL_ERR_TIMED_OUT.into()) }
    })
}

/// Returns the length of the longest piece that a worker's channel takes, in bytes, or a negative status. Must not be
/// called while a job is in progress.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_longest_piece(farm: *mut Farm) -> ssize_t {
    length(|| Ok(checked!(borrow_mut(farm)).idle()?.longest_piece()))
}

/// Runs a job: distributes its pieces to the workers and collects their results, until all are done. The workers stay
/// for the next job.
///
/// Blocks until then. Errors, after which no job is in progress: GINNEL_ERR_NO_WORKER if there was no worker for as
/// long as the manager waits, GINNEL_ERR_PIECE if a piece failed, or its worker died, on each attempt,
/// GINNEL_ERR_TOO_LONG if a piece is longer than a worker's channel permits, GINNEL_ERR_CALLBACK.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_run(farm: *mut Farm, job: *const FarmJob) -> c_int {
    status(|| {
        let farm = checked!(borrow_mut(farm));
        farm.start(&checked!(read_options(job)))?;
        let job = farm.busy()?;
        let done = job.run.finish(job.taking());
        farm.end();
        Ok(done?)
    })
}

/// Begins a job, which ginnel_farm_step() executes; for programs with an event loop. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_start(farm: *mut Farm, job: *const FarmJob) -> c_int {
    status(|| {
        let farm = checked!(borrow_mut(farm));
        farm.start(&checked!(read_options(job)))
    })
}

/// Does as much of the job as is possible without waiting. Returns GINNEL_FARM_WORKING, GINNEL_FARM_WAITING or
/// GINNEL_FARM_DONE (after which no job is in progress), or a negative status: one of those of ginnel_farm_run(), after
/// which the job has ended, or GINNEL_ERR_UNSUPPORTED in a VM without interrupts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_step(farm: *mut Farm) -> c_int {
    number(|| {
        let farm = checked!(borrow_mut(farm));
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

/// Returns a file descriptor for poll(2) and epoll(7), or a negative status. After ginnel_farm_step() has returned
/// GINNEL_FARM_WAITING, the descriptor becomes readable when a worker has sent something, has connected or has ended,
/// or when a timeout has expired. It belongs to the farm: do not read or close it, and do not use it after the farm is
/// closed. It may be used only while a job is in progress, and is the same for all jobs. Errors: GINNEL_ERR_UNSUPPORTED
/// in a VM without interrupts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_fd(farm: *mut Farm) -> c_int {
    number(|| Ok(checked!(borrow_mut(farm)).busy()?.run.poll_fd()?.as_raw_fd()))
}

/// Cancels the job that is in progress, if any. The workers stay; their later results for its pieces are discarded.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_stop(farm: *mut Farm) -> c_int {
    status(|| {
        checked!(borrow_mut(farm)).end();
        Ok(())
    })
}

/// Fills in `*report`, whose `size` the caller has set, for the job in progress, or for the last one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_get_report(farm: *mut Farm, report: *mut FarmReport) -> c_int {
    status(|| {
        let known = checked!(borrow_mut(farm)).look();
        let facts = FarmReport {
            size: 0,
            time_ns: nanoseconds(known.time),
            pieces: known.pieces,
            bytes: known.bytes,
            reassigned: known.reassigned,
            workers: known.workers.len(),
            deaths: known.deaths(),
        };
        checked!(fill(report, facts));
        Ok(())
    })
}

/// Fills in `*worker`, whose `size` the caller has set, with the work of one worker in the job in progress or the last
/// one. `index` counts from 0, in the order in which the workers connected. Errors: GINNEL_ERR_INVALID beyond the last.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_get_worker(
    farm: *mut Farm,
    index: usize,
    worker: *mut FarmWorkerReport,
) -> c_int {
    status(|| {
        let report = checked!(borrow_mut(farm)).look();
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
        checked!(fill(worker, facts));
        Ok(())
    })
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Farm {
    /// Returns the report of the job in progress, or of the last one.
    fn look(&mut self) -> &Report {
        if let Some(job) = &self.job {
            self.report = job.run.report();
        }
        &self.report
    }
}

/// Frees a farm. Its workers are told that there is no more work. Workers that ginnel_farm_spawn() has started get at
/// most 5 s to end, and are then killed. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_close(farm: *mut Farm) -> c_int {
    // SAFETY: the caller is responsible for it.
    unsafe { close(farm) }
}

/// A worker of a farm: a channel to its manager. One thread at a time may use it. Created by ginnel_farm_connect(),
/// freed by ginnel_farm_worker_close().
pub struct FarmWorker(Worker);
handle!(FarmWorker, "worker");

/// Options for a worker. Fill the structure with zeros, set `size`, then the members that should differ from the
/// default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FarmWorkerOptions {
    /// sizeof(ginnel_farm_worker_options).
    pub size: usize,
    /// How long to wait for a manager, in nanoseconds. 0: not at all.
    pub patience_ns: u64,
    /// For GINNEL_WAIT_ADAPTIVE: how long to spin, in nanoseconds. 0: the default, 100000.
    pub budget_ns: u64,
    /// How to wait for pieces: one of GINNEL_WAIT_*.
    pub wait: c_int,
}
// SAFETY: the structure is as the trait requires.
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
    /// Offset of the piece in the input, in bytes.
    pub offset: u64,
    /// The bytes of the piece, in the ring, aligned to 8. A hostile manager can still change them.
    pub data: *const c_void,
    /// Length of the piece in bytes.
    pub length: usize,
}

/// Works on a piece: writes the result to `result`, which has room for `room` bytes, and returns its length. A negative
/// number means that the piece cannot be processed; the reason may be written to `result`, as a string, and the piece
/// is tried elsewhere. `task` and everything in it are valid only during the call.
pub type FarmWork = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        task: *const FarmTask,
        result: *mut c_void,
        room: usize,
    ) -> ssize_t,
>;

/// Attaches to the segment of `address`, which is "segment/name", and connects to the manager that listens there.
/// `options` may be NULL. On success the caller must free `*worker` with ginnel_farm_worker_close(); on failure it is
/// NULL.
///
/// Blocks like ginnel_attach(), and for up to `options->patience_ns` if no manager listens. Errors: those of
/// ginnel_attach() and ginnel_endpoint_connect().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_connect(
    address: *const c_char,
    options: *const FarmWorkerOptions,
    worker: *mut *mut FarmWorker,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(worker));
        let (segment, name) = ginnel::split(checked!(text(address)))?;
        let asked = checked!(read_options(options));
        let mode = wait_mode(asked.wait, asked.budget_ns)?;
        let options = AttachOptions { mode, ..AttachOptions::default() };
        let endpoint = ginnel::Endpoint::attach_with(segment, &options)?;
        let patience = Duration::from_nanos(asked.patience_ns);
        let options = ChannelOptions { patience, ..ChannelOptions::default() };
        let channel: MessageChannel = endpoint.connect_with(name, &options)?;
        return_handle(place, FarmWorker(Worker::over(channel)));
        Ok(())
    })
}

/// Works until the manager has no more jobs: calls `work` for each piece, with `context`.
///
/// Blocks until then. Errors: GINNEL_ERR_PEER_DEAD if the manager has died, GINNEL_ERR_CLOSED if it has dismissed this
/// worker, GINNEL_ERR_SYSTEM if it violates the protocol.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_serve(
    worker: *mut FarmWorker,
    work: FarmWork,
    context: *mut c_void,
) -> c_int {
    status(|| {
        let FarmWorker(worker) = checked!(borrow_mut(worker));
        let work = work.ok_or_else(|| missing("work"))?;
        // One byte more than the room, so that a reason always ends with a zero.
        let mut room = vec![0u8; worker.longest_result() + 1];
        let longest = worker.longest_result();
        let mut job = CString::default();
        Ok(worker.serve(|task, result| {
            if job.to_bytes() != task.job.as_bytes() {
                // A manager can put a zero into the name; the C string ends there.
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
            // SAFETY: the caller of the C function is responsible for its pointers; ours are valid until it returns.
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

/// Stores the number of pieces that a worker has answered so far, and the number of their bytes. Either pointer may be
/// NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_worker_get_done(
    worker: *const FarmWorker,
    pieces: *mut u64,
    bytes: *mut u64,
) -> c_int {
    status(|| {
        let FarmWorker(worker) = checked!(borrow(worker));
        let done = worker.done();
        if !pieces.is_null() {
            checked!(output(pieces)).write(done.0);
        }
        if !bytes.is_null() {
            checked!(output(bytes)).write(done.1);
        }
        Ok(())
    })
}

/// Frees a worker. Its manager gives the pieces that the worker still holds to others. NULL is allowed. Informs the
/// daemon, which takes at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_farm_worker_close(worker: *mut FarmWorker) -> c_int {
    // SAFETY: the caller is responsible for it.
    unsafe { close(worker) }
}
