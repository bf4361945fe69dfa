//! A holder's process, and an engine that only pretends.

use ginnel_layout::nvme_attach::Reason;
use ginnel_nvme::State;
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use ginnel_vfio_user::client::Client;
use ginnel_volume::attach::{EngineEnd, FromHolder};
use ginnel_volume_control::config::attach_socket;
use kit::wait::{WATCHDOG, wait_for, wait_until};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{FlockOperation, MemfdFlags, flock, fstat, ftruncate, memfd_create};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

pub struct Holder {
    dir: TempDir,
    process: Child,
    log: Arc<Mutex<String>>,
}

impl Holder {
    pub fn start(flags: &str) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let log: Arc<Mutex<String>> = Arc::default();
        let process = run(&dir.path().join("v.sock"), flags, log.clone());
        let holder = Self { dir, process, log };
        holder.wait_for_line("holding", 1);
        holder
    }

    /// Starts another holder in place of this one, which has ended.
    pub fn restart(&mut self, flags: &str) {
        self.process = run(&self.socket(), flags, self.log.clone());
        self.wait_for_line("holding", 2);
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("v.sock")
    }

    /// Connects as QEMU does. An answer that does not come fails the test.
    pub fn connect(&self) -> Client {
        // The last client's end may not have been noticed yet, and then this one is refused.
        let client = wait_for("a connection", || Client::connect(&self.socket()).ok());
        client.set_patience(Some(WATCHDOG)).unwrap();
        client
    }

    /// Attaches an engine, once the lock of the last one is free.
    pub fn attach(&self, queues: usize) -> Engine {
        let turn = File::create(self.lock()).unwrap();
        wait_until("the turn", || flock(&turn, FlockOperation::NonBlockingLockExclusive).is_ok());
        self.attach_with_turn(queues, turn)
    }

    /// Attaches an engine that has the lock already.
    pub fn attach_with_turn(&self, queues: usize, turn: File) -> Engine {
        // The end of the last engine may not have been noticed yet.
        let witness = || File::open(self.lock()).unwrap();
        let mut engine = wait_for("an engine to be attached", || {
            Engine::try_attach(&self.socket(), queues, witness()).ok()
        });
        engine.turn = turn;
        engine
    }

    fn lock(&self) -> PathBuf {
        self.dir.path().join("v.sock.lock")
    }

    /// Starts another holder of this volume, which must refuse. Returns what it says.
    pub fn another(&self) -> String {
        let output = command(&self.socket(), "--queues 1").output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub fn wait_for_line(&self, text: &str, times: usize) {
        wait_until(&format!("a line with {text:?}"), || {
            self.log().lines().filter(|line| line.contains(text)).count() >= times
        });
    }

    /// Returns the number of descriptors that the process has open.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.process.id())).unwrap().count()
    }

    /// Lets it have no further descriptors, or as many as it likes.
    pub fn limit_descriptors(&self, is_limited: bool) {
        let is_free = |number: &u64| !Path::new(&format!("/proc/{}/fd/{number}", self.process.id())).exists();
        let most = getrlimit(Resource::Nofile);
        // A new descriptor has the lowest number that is free.
        let current = if is_limited { (0..).find(is_free) } else { most.current };
        prlimit(Some(Pid::from_child(&self.process)), Resource::Nofile, Rlimit { current, ..most }).unwrap();
    }

    /// Returns the processor time that it has used, in hundredths of a second.
    pub fn processor_time(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap();
        // utime and stime, behind the name in brackets (proc_pid_stat(5)).
        let fields = stat.rsplit(')').next().unwrap().split_whitespace();
        fields.skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum()
    }

    /// SIGTERM.
    pub fn terminate(&mut self) -> ExitStatus {
        kit::process::signal(&self.process, rustix::process::Signal::TERM);
        self.wait()
    }

    pub fn wait(&mut self) -> ExitStatus {
        wait_for("the holder's end", || self.process.try_wait().unwrap())
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            eprintln!("--- the holder said:\n{}", self.log());
        }
    }
}

/// Starts a holder that adds to this log.
fn run(socket: &Path, flags: &str, log: Arc<Mutex<String>>) -> Child {
    let mut process = command(socket, flags).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(process.stderr.take().unwrap()).lines();
    std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            *log.lock().unwrap() += &(line + "\n");
        }
    });
    process
}

fn command(socket: &Path, flags: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ginnel-volume"));
    command.args(["v", "--holder", "--device", "nvme", "--backend", "ram", "--size", "16M", "--socket"]);
    command.arg(socket).args(flags.split_whitespace()).stdin(Stdio::null());
    command
}

/// Runs a volume that must refuse its command line. Returns what it says.
pub fn refuses(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_ginnel-volume")).args(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// An engine that is attached.
#[derive(Debug)]
pub struct Engine {
    pub end: EngineEnd,
    pub kicks: Vec<OwnedFd>,
    /// The locked file.
    pub turn: File,
    /// What it was told when it attached: address, length, offset, whether it can be written.
    pub ranges: Vec<(u64, u64, u64, bool)>,
    pub vectors: Vec<Option<OwnedFd>>,
    state: Mapping,
    doorbells: Mapping,
}

impl Engine {
    /// Connects, and says nothing.
    pub fn connect(socket: &Path) -> std::io::Result<EngineEnd> {
        EngineEnd::connect(&attach_socket(socket))
    }

    /// Attaches. An error is the refusal, or none if the connection has ended.
    pub fn try_attach(socket: &Path, queues: usize, witness: File) -> Result<Self, Option<(Reason, u32)>> {
        let end = Self::connect(socket).map_err(|_| None)?;
        let kicks = eventfds(queues + 1);
        end.hello(witness.as_fd(), &kicks).map_err(|_| None)?;
        let (terms, state, doorbells) = match end.receive(true) {
            Ok(Some(FromHolder::Welcome { terms, state, doorbells })) => (terms, state, doorbells),
            Ok(Some(FromHolder::Refused { reason, have })) => return Err(Some((reason, have))),
            _ => return Err(None),
        };
        assert_eq!((terms.queues as usize, terms.vectors as usize), (queues, queues + 1));
        let map = |file: &OwnedFd| {
            let len = fstat(file).unwrap().st_size as usize;
            Mapping::of_file(file, 0, len, Protection::ReadWrite).unwrap()
        };
        let (state, doorbells) = (map(&state), map(&doorbells));
        let constants = State::open(state.clone()).unwrap().constants();
        assert_eq!((constants.queues as usize, constants.mapped), (queues, terms.mapped));
        let (ranges, vectors) = (Vec::new(), (0..terms.vectors).map(|_| None).collect());
        let mut engine = Self { end, kicks, turn: witness, ranges, vectors, state, doorbells };
        loop {
            match engine.next() {
                FromHolder::Map { range, .. } => {
                    engine.ranges.push((range.iova, range.len, range.offset, range.writable));
                }
                FromHolder::Vector { number, eventfd } => engine.vectors[number as usize] = eventfd,
                FromHolder::Control { id } => {
                    engine.end.done(id).unwrap();
                    return Ok(engine);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Returns the next message.
    pub fn next(&mut self) -> FromHolder {
        wait_for("a message of the holder", || self.end.receive(false).unwrap())
    }

    pub fn load(&self, word: usize) -> u64 {
        self.state.load_acquire_u64(word)
    }

    pub fn store(&self, word: usize, value: u64) {
        self.state.store_release_u64(word, value);
    }

    pub fn doorbell(&self, at: usize) -> u32 {
        self.doorbells.load_acquire_u32(at)
    }

    /// Waits until a queue's eventfd is written, and empties it.
    pub fn wait_for_kick(&mut self, queue: usize) {
        wait_until("a kick", || rustix::io::read(&self.kicks[queue], &mut [0; 8]).is_ok());
    }
}

pub fn eventfds(count: usize) -> Vec<OwnedFd> {
    (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()).collect()
}

/// Returns a file in memory.
pub fn memory(bytes: u64) -> OwnedFd {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, bytes).unwrap();
    file
}

/// Returns whether something can be read at this moment.
pub fn is_readable(fd: impl AsFd) -> bool {
    let mut polls = [PollFd::new(&fd, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polls, Some(&now)).unwrap() > 0
}
