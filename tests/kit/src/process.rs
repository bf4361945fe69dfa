//! Processes that a test has started.

use rustix::process::{Pid, Signal, kill_process};
use std::ops::{Deref, DerefMut};
use std::process::Child;

/// A child process that is killed when the value is dropped.
#[derive(Debug)]
pub struct Process(pub Child);

impl Process {
    /// Sends it a signal.
    pub fn signal(&self, to_send: Signal) {
        signal(&self.0, to_send);
    }
}

impl Deref for Process {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Process {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends a signal to a child.
pub fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal)
        .expect("a child can be sent a signal until somebody waits for it");
}

/// Returns whether a thread of this process sleeps in the kernel.
pub fn is_asleep(thread: Pid) -> bool {
    let stat = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    let stat = std::fs::read_to_string(stat).expect("the thread is there");
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::wait_until;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;
    use std::sync::mpsc::channel;

    #[test]
    fn a_process_gets_signals_and_ends_with_its_value() {
        let sleep = || Process(Command::new("sleep").arg("600").spawn().unwrap());
        let mut process = sleep();
        process.signal(Signal::TERM);
        assert_eq!(process.wait().unwrap().signal(), Some(Signal::TERM.as_raw()));
        let process = sleep();
        let folder = format!("/proc/{}", process.id());
        drop(process);
        assert!(!std::path::Path::new(&folder).exists());
    }

    #[test]
    fn a_thread_sleeps_while_it_waits() {
        let (number, waiting) = (channel(), channel::<()>());
        let thread = std::thread::spawn(move || {
            number.0.send(rustix::thread::gettid()).unwrap();
            let _ = waiting.1.recv();
        });
        let number = number.1.recv().unwrap();
        wait_until("sleep", || is_asleep(number));
        drop(waiting.0);
        thread.join().unwrap();
        assert!(!is_asleep(rustix::thread::gettid()), "who asks is awake");
    }
}
