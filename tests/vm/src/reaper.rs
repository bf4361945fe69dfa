//! Kills what host jobs of a killed test have left: the kernel kills a job's shell together with the test, but not the
//! processes that the shell has started.
//!
//! Each test bed has a small process that knows the process groups of its jobs, waits at a pipe for the end of the test bed,
//! and kills the groups if that end was not announced.

use anyhow::{Context, Result};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

const SCRIPT: &str = r#"
groups=
while read -r line; do
    test "$line" = done && exit
    groups="$groups -$line"
done
kill -9 $groups
"#;

pub(crate) struct Reaper(Mutex<Child>);

impl Reaper {
    pub fn new() -> Result<Reaper> {
        let child = Command::new("/bin/sh")
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0) // A signal from the terminal must not reach it.
            .spawn()
            .context("cannot start a shell")?;
        Ok(Reaper(Mutex::new(child)))
    }

    /// Remembers a process group.
    pub fn note(&self, group: u32) -> Result<()> {
        self.tell(&group.to_string()).context("the reaper of the test bed is gone")
    }

    fn tell(&self, line: &str) -> std::io::Result<()> {
        let mut child = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut child.stdin {
            Some(stdin) => stdin.write_all(format!("{line}\n").as_bytes()),
            None => Ok(()),
        }
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        let _ = self.tell("done");
        let _ = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).wait();
    }
}
