//! Measures how long a member takes to join: a stock QEMU with its devices, from its start until it has all its doorbells. Its
//! guest does not run, so that 64 of them fit on a small machine. What a guest does later does not depend on the number of
//! other members.

use crate::report::{Better, Report, median};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmtest::installation::Plan;
use vmtest::{HostJob, TestBed};

/// The numbers of members at the end, including the host.
const MEMBERS: [usize; 4] = [2, 8, 32, 64];
/// The greatest permitted ratio of the medians with the most and with the fewest members.
const FLAT: f64 = 1.3;
/// The least number of QEMUs for a median: installations are made anew until there are so many.
const ENOUGH: usize = 9;
/// A QEMU has joined when no doorbell has arrived for this long.
const QUIET: Duration = Duration::from_millis(100);
/// The time between two checks.
const LOOK: Duration = Duration::from_millis(1);
const PATIENCE: Duration = Duration::from_secs(30);

/// Which members share a segment.
#[derive(Clone, Copy)]
enum Shape {
    /// One segment for all members.
    One,
    /// A slice for each VM, which it shares with the host.
    Star,
}

impl Shape {
    fn name(self) -> &'static str {
        match self {
            Self::One => "all in one segment",
            Self::Star => "a star of slices",
        }
    }

    /// Returns the configuration of the segments.
    fn config(self, vms: &[String]) -> String {
        match self {
            Self::One => {
                let members: Vec<_> = ["host".to_owned()].iter().chain(vms).cloned().collect();
                format!("[segment.shared]\nsize = \"4M\"\nmembers = {members:?}\n")
            }
            Self::Star => {
                format!("[segment.shared]\nsize = \"4M\"\nmembers = [\"host\"]\nslices = {vms:?}\n")
            }
        }
    }
}

/// A QEMU that has started.
struct Qemu {
    /// The time in seconds until its last doorbell arrived.
    seconds: f64,
    eventfds: usize,
    /// The number of its open file descriptors.
    fds: usize,
    _job: Arc<HostJob>,
}

/// A VM that has joined.
struct Joined {
    /// The number of messages on its ivshmem socket. All but three of them carry a doorbell.
    messages: usize,
    qemu: Qemu,
}

/// Adds the rows for both shapes.
pub fn joining(report: &mut Report) -> Result<()> {
    for shape in [Shape::One, Shape::Star] {
        let mut first = Vec::new();
        for members in MEMBERS {
            let (mut times, mut last) = (Vec::new(), None);
            while times.len() < ENOUGH {
                let all = join(shape, members - 1)?;
                times.extend(all.iter().map(|one| one.qemu.seconds * 1e3));
                last = all.last().map(|one| (one.messages, one.qemu.fds));
            }
            let (messages, fds) = last.context("nobody has joined")?;
            if members == MEMBERS[0] {
                first = times.clone();
            }
            let case = format!("join, {}, {members} members, each", shape.name());
            let note = format!("of medians; the last QEMU was told {messages} messages and has {fds} fds");
            let target = (members == MEMBERS[MEMBERS.len() - 1]).then_some(1.0 / FLAT);
            let (ours, few) = ([median(times)], [median(first.clone())]);
            report.pairs(&case, "ms", Better::Lower, &ours, "2 members", &few, target, &note);
        }
    }
    Ok(())
}

/// Lets `count` VMs join an installation, one after the other. The host is a member from the start.
fn join(shape: Shape, count: usize) -> Result<Vec<Joined>> {
    let bed = TestBed::new("joining")?;
    let names: Vec<_> = (0..count).map(|number| format!("vm{number}")).collect();
    let plan = names.iter().fold(Plan::new(&bed), |plan, name| plan.vm(name));
    let ginnel = plan.config(&shape.config(&names)).start()?;
    // A QEMU has some eventfds for its own use.
    let own = start(&bed, "alone", "", 0)?.eventfds;
    names
        .iter()
        .map(|name| {
            let devices = ginnel.devices(name)?;
            let qemu = start(&bed, name, &devices, own + 1)?;
            Ok(Joined { messages: qemu.eventfds - own + 3, qemu })
        })
        .collect()
}

/// Starts a QEMU with these devices. Waits until it has at least `eventfds` eventfds and no more arrive.
fn start(bed: &TestBed, name: &str, devices: &str, eventfds: usize) -> Result<Qemu> {
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args(["-S", "-M", "q35", "-accel", "tcg", "-m", "32,slots=4,maxmem=8G"])
        .args(["-nodefaults", "-no-user-config", "-display", "none"])
        .args(devices.split_whitespace());
    let begin = Instant::now();
    let job = bed.host_spawn_command(name, command)?;
    let mut seen = (Duration::ZERO, 0);
    loop {
        std::thread::sleep(LOOK);
        let fds = fds(job.pid())?;
        let now = begin.elapsed();
        ensure!(job.is_running() && now < PATIENCE, "the QEMU of {name} does not join: {:?}", job.said());
        if fds.1 != seen.1 {
            seen = (now, fds.1);
        } else if fds.1 >= eventfds && now > seen.0 + QUIET {
            return Ok(Qemu { seconds: seen.0.as_secs_f64(), eventfds: fds.1, fds: fds.0, _job: job });
        }
    }
}

/// Returns how many file descriptors a process has, and how many of them are eventfds.
fn fds(pid: u32) -> Result<(usize, usize)> {
    let (mut all, mut events) = (0, 0);
    for fd in fs::read_dir(format!("/proc/{pid}/fd"))? {
        all += 1;
        // The process may have closed it meanwhile.
        let what = fs::read_link(fd?.path()).unwrap_or_default();
        events += usize::from(what.as_os_str() == "anon_inode:[eventfd]");
    }
    Ok((all, events))
}
