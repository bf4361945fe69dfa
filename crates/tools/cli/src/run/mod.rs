//! `ginnel run`.

mod program;
mod report;
mod signals;

use crate::libraries::{DEVICE_FILES, Library, PRELOAD, VERBS};
use crate::output;
use anyhow::{Context, Result};
use clap::ValueEnum;
use program::Fit;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Environment variables that the library reads.
const MODE: &str = "GINNEL_SOCKETS";
const REPORT: &str = "GINNEL_SOCKETS_REPORT";

/// Exit statuses, as in env(1), nohup(1) and timeout(1).
const WE_FAILED: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Runs a program whose TCP connections can change over to shared memory.
///
/// Loads libginnel-preload.so into the program and into those that it starts (LD_PRELOAD). A connection begins on TCP
/// as always. If the program at its other end also runs with the library, on this host or in one of its VMs, and both
/// may use a common segment, the connection changes over to shared memory while it is in use. All other connections
/// stay on TCP: those to other hosts, and those of programs that cannot load the library (statically linked,
/// set-user-ID, written in Go).
///
/// The GETs of a memcached client to a ginnel-cache are answered inside the program, from the cache's memory, if the
/// program may attach to its segment. GINNEL_CACHE=PORT[,PORT...] names the ports of caches (default: 11211);
/// GINNEL_CACHE=off disables this.
///
/// With --verbs, the program also finds Ginnel's libibverbs and librdmacm instead of the system's (LD_LIBRARY_PATH):
/// each segment with `verbs = true` that this user may use is an RDMA device for it, in addition to the machine's
/// devices. A small library (LD_PRELOAD) provides a file for each of these devices below /dev/infiniband, for programs
/// that look for one.
///
/// Exit status: the program's. If signal N has ended the program, the status is 128 + N without a report; with a
/// report, ginnel ends by the same signal. 125 if ginnel fails, 126 if the program cannot be executed, 127 if it is not
/// found.
#[derive(clap::Args)]
pub struct Args {
    /// Print at the end what each connection used, on stderr, and write it to FILE as lines of JSON.
    ///
    /// FILE is overwritten. For programs that continue in the background, the table has what they had written until
    /// then.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    report: Option<Option<PathBuf>>,
    /// When to ask the daemon about a connection.
    #[arg(long, value_enum, default_value_t = Mode::Auto, env = MODE)]
    mode: Mode,
    /// Make segments available to the program as RDMA devices.
    #[arg(long)]
    verbs: bool,
    /// The program, which is looked up in the PATH, and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// When the library asks the daemon about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// When the connection has existed for a while.
    Auto,
    /// At once.
    Eager,
    /// Never: the library does nothing.
    Off,
}

/// The program was not run; `status` is the exit status for that.
#[derive(Debug)]
pub struct NotRun {
    /// The exit status of this command.
    pub status: u8,
    why: anyhow::Error,
}

impl std::fmt::Display for NotRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#}", self.why)
    }
}

impl std::error::Error for NotRun {}

pub fn run(args: Args) -> Result<()> {
    let failed = |why: anyhow::Error| {
        let status =
            why.downcast_ref::<program::Unusable>().map_or(WE_FAILED, |unusable| match unusable.0.kind() {
                io::ErrorKind::NotFound => NOT_FOUND,
                _ => NOT_EXECUTABLE,
            });
        NotRun { status, why }
    };
    Ok(execute(args).map_err(failed)?)
}

/// Runs the program. Returns only if that fails.
fn execute(args: Args) -> Result<()> {
    let (name, arguments) = args.command.split_first().context("no program is named")?;
    let path = program::find(name)?;
    let library = PRELOAD.find()?;
    let mut command = Command::new(name);
    command.args(arguments).env(MODE, word(args.mode));
    let fit = if args.mode == Mode::Off { Fit::Loads } else { program::look(&path, &library) };
    if let Fit::Ignores(why) | Fit::Breaks(why) = &fit {
        output::note(format!("ginnel: warning: {why}: its connections stay on TCP"));
    }
    if args.mode != Mode::Off && matches!(fit, Fit::Loads) {
        warn_without_daemon(&ginnel::AttachOptions::default().socket);
    }
    if !matches!(fit, Fit::Breaks(_)) {
        load(&mut command, &PRELOAD, &library)?;
    }
    if args.verbs {
        let folder = VERBS.find()?;
        load(&mut command, &PRELOAD, &folder.join(DEVICE_FILES))?;
        load(&mut command, &VERBS, &folder)?;
    }
    let Some(file) = args.report else {
        return Err(program::Unusable(command.exec()).at(&path));
    };
    let file = report::File::new(file)?;
    command.env(REPORT, file.path()?);
    let status = signals::run(&mut command).map_err(|error| program::Unusable(error).at(&path))?;
    match file.read() {
        Ok(report) => output::note(report::page(&report)),
        Err(error) => output::note(format!("ginnel: {error:#}")),
    }
    drop(file);
    signals::end_as(status)
}

/// Says so if the program could not reach a daemon now. It may start later.
fn warn_without_daemon(socket: &Path) {
    // The daemon's socket takes no streams, so nobody there learns of this attempt.
    let Err(error) = UnixStream::connect(socket) else { return };
    if error.raw_os_error() != Some(libc::EPROTOTYPE) {
        let path = socket.display();
        output::note(format!(
            "ginnel: warning: no daemon can be reached at {path} ({error}): connections stay on TCP until one can"
        ));
    }
}

/// Adds a library to the program's variables for the dynamic loader.
fn load(command: &mut Command, library: &Library, place: &Path) -> Result<()> {
    let variable = OsStr::new(library.variable);
    let told = command.get_envs().find(|(name, _)| *name == variable).and_then(|(_, value)| value);
    let others = told.map(OsStr::to_owned).or_else(|| std::env::var_os(variable));
    command.env(variable, library.first(place, others)?);
    Ok(())
}

fn word(mode: Mode) -> &'static str {
    match mode {
        Mode::Auto => "auto",
        Mode::Eager => "eager",
        Mode::Off => "off",
    }
}
