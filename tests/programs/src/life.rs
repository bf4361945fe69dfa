//! Whether a program still does something. How long it takes depends on how busy the machine is, so only one that is awake for far longer
//! than any takes is given up.

use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::process::{Child, ExitStatus};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A program hangs if neither it nor one of its descendants does anything for this long.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// None takes nearly as long, so one that is awake after this time gets nowhere.
const LONGEST: Duration = Duration::from_secs(20 * 60);
/// The pause between two looks.
const PACE: Duration = Duration::from_secs(1);

/// The life of a program.
pub struct Life {
    process: u32,
    begun: Instant,
    longest: Duration,
    looked: Instant,
    /// The CPU time that it had used when it did something last, and when that was.
    used: u64,
    active: Instant,
}

impl Life {
    /// Watches a process, which nobody may have waited for.
    pub fn of(process: u32) -> Self {
        let now = Instant::now();
        Self { process, begun: now, longest: LONGEST, looked: now, used: 0, active: now }
    }

    /// Returns whether the program does nothing any more, or only what leads nowhere.
    pub fn hangs(&mut self) -> bool {
        let now = Instant::now();
        if now < self.looked + PACE {
            return false;
        }
        self.looked = now;
        let used = cpu_time(self.process);
        if used != self.used {
            (self.used, self.active) = (used, now);
        }
        now > self.active + PATIENCE || now > self.begun + self.longest
    }
}

/// Waits for the end of a program. Returns `None` if it hangs; it is killed then, with all its descendants.
pub fn end(child: &mut Child) -> Option<ExitStatus> {
    end_within(LONGEST, child)
}

/// Does the same for a program that takes less time.
pub fn end_within(longest: Duration, child: &mut Child) -> Option<ExitStatus> {
    let mut life = Life { longest, ..Life::of(child.id()) };
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if life.hangs() {
            for process in family(child.id()) {
                // It may have ended meanwhile.
                let _ = kill_process(Pid::from_raw(process as i32).unwrap(), Signal::KILL);
            }
            child.wait().unwrap();
            return None;
        }
        sleep(Duration::from_millis(5));
    }
}

/// Returns a process and its descendants.
fn family(process: u32) -> Vec<u32> {
    let processes: Vec<(u32, u32)> = numbers("/proc").filter_map(|id| Some((id, parent(id)?))).collect();
    let mut family = vec![process];
    let mut at = 0;
    while let Some(&one) = family.get(at) {
        family.extend(processes.iter().filter(|(_, parent)| *parent == one).map(|(id, _)| id));
        at += 1;
    }
    family
}

/// Returns the CPU time, in nanoseconds, of the threads of a process and of its descendants.
fn cpu_time(process: u32) -> u64 {
    let of_thread = |file: String| -> Option<u64> {
        fs::read_to_string(file).ok()?.split_whitespace().next()?.parse().ok()
    };
    let of_process = |id: u32| -> u64 {
        let tasks = format!("/proc/{id}/task");
        numbers(&tasks).filter_map(|thread| of_thread(format!("{tasks}/{thread}/schedstat"))).sum()
    };
    family(process).into_iter().map(of_process).sum()
}

/// Returns the entries of a folder that are numbers.
fn numbers(folder: &str) -> impl Iterator<Item = u32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns the parent of a process; `None` if it has gone meanwhile.
fn parent(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::process::Process;
    use kit::wait::wait_until;
    use std::process::{Command, Stdio};

    #[test]
    fn what_a_descendant_does_counts_and_sleep_does_not() {
        // The descendant sleeps until it is told to work. It ends by itself, because nobody kills it.
        let line = "sh -c 'read line; n=0; while [ $n -lt 1000000 ]; do n=$((n + 1)); done' <&0 & wait";
        let mut command = Command::new("bash");
        command.args(["-c", line]).stdin(Stdio::piped());
        let mut shell = Process(command.spawn().unwrap());
        let used = |shell: &Process| cpu_time(shell.id());
        let mut last = 0;
        let rests = || {
            let before = std::mem::replace(&mut last, used(&shell));
            sleep(Duration::from_millis(100));
            before > 0 && before == last
        };
        wait_until("rest", rests);
        drop(shell.stdin.take());
        let before = used(&shell);
        wait_until("work", || used(&shell) > before + 10_000_000);
    }

    #[test]
    fn the_end_of_a_program_is_seen() {
        let mut child = Command::new("sh").args(["-c", "exit 3"]).spawn().unwrap();
        assert_eq!(end(&mut child).unwrap().code(), Some(3));
    }
}
