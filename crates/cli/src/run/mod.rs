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
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the library reads from the environment.
const MODE: &str = "GINNEL_SOCKETS";
const REPORT: &str = "GINNEL_SOCKETS_REPORT";

/// As env(1), nohup(1) and timeout(1) have them.
const WE_FAILED: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Runs a program whose TCP connections may leave the kernel for shared memory.
///
/// Loads libginnel-preload.so into the program and those that it starts (LD_PRELOAD). A connection begins on TCP as always. If the
/// program at its other end runs with the library too, on this host or in one of its VMs, and both may use a common segment, the
/// connection changes over to shared memory while it runs. All others stay on TCP: connections to other hosts, and
/// those of programs that cannot load the library (statically linked, set-user-ID, written in Go).
///
/// A memcached client's GETs to a ginnel-cache are answered in the program, out of the cache's memory, if the program may attach to its
/// segment. GINNEL_CACHE=PORT[,PORT...] names the ports of caches (default: 11211); GINNEL_CACHE=off turns it off.
///
/// With --verbs, the program also finds Ginnel's libibverbs and librdmacm in place of the system's (LD_LIBRARY_PATH): each segment with
/// `verbs = true` that this user may use is an RDMA device for it, beside the devices that the machine has. A small library (LD_PRELOAD)
/// gives each of these devices a file for programs that look for one, below /dev/infiniband.
///
/// Exit status: the program's, 128 + N if signal N has ended it and there is no report, and that same signal with a report. 125
/// if ginnel fails, 126 if the program cannot be executed, 127 if it is not found.
#[derive(clap::Args)]
pub struct Args {
    /// Print at the end what has become of each connection, on stderr, and write it to FILE as lines of JSON.
    ///
    /// FILE is written anew. Programs that go on in the background are in the table with what they had written until then.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    report: Option<Option<PathBuf>>,
    /// When the daemon is asked about a connection.
    #[arg(long, value_enum, default_value_t = Mode::Auto, env = MODE)]
    mode: Mode,
    /// Segments are RDMA devices for the program.
    #[arg(long)]
    verbs: bool,
    /// The program, looked up in the PATH, and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// When the library asks the daemon about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Once it has shown that it lives for a while.
    Auto,
    /// At once.
    Eager,
    /// Never: the library does nothing.
    Off,
}

/// The program was not run, and the exit status that says so.
#[derive(Debug)]
pub struct NotRun {
    /// The status.
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

/// Returns only if it fails.
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

/// Tells the program's dynamic loader of a library.
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
