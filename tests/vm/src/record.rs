//! The output of a job so far and how it ended. One thread writes it; the test reads it and waits for it.

use crate::protocol::Exit;
use anyhow::{Result, bail};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most bytes that are kept of one stream. A job that writes more fails: it should write to a file.
const LIMIT: usize = 64 << 20;

/// The result of a command that has ended.
#[derive(Clone, Debug)]
pub struct Output {
    /// The command, for messages.
    pub command: String,
    /// How it ended.
    pub exit: Exit,
    /// Its standard output; bytes that are not valid text are replaced.
    pub stdout: String,
    /// Its standard error, in the same form.
    pub stderr: String,
}

impl Output {
    /// Returns itself if the exit status is 0, otherwise an error that shows both streams.
    pub fn ok(self) -> Result<Output> {
        if self.exit == Exit::Code(0) {
            return Ok(self);
        }
        bail!("`{}` ended with {}{}", self.command, self.exit, self.streams());
    }

    /// Returns the exit status, or `None` if a signal killed the command.
    pub fn code(&self) -> Option<i32> {
        match self.exit {
            Exit::Code(code) => Some(code),
            Exit::Signal(_) => None,
        }
    }

    fn streams(&self) -> String {
        let mut text = String::new();
        for (name, stream) in [("stdout", &self.stdout), ("stderr", &self.stderr)] {
            if !stream.is_empty() {
                text += &format!("\n--- {name} ---\n{}", tail(stream, 60));
            }
        }
        text
    }
}

/// Returns the last lines of a text.
pub(crate) fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.trim_end().lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// The state of a job, shared by the thread that receives its output and by those that wait for it.
#[derive(Default)]
pub(crate) struct Record {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    pid: Option<u32>,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    end: Option<End>,
}

enum End {
    Exit(Exit),
    /// Nothing more can be received, for this reason.
    Lost(String),
}

impl Record {
    pub fn started(&self, pid: u32) {
        self.update(|state| state.pid = Some(pid));
    }

    pub fn stdout(&self, bytes: &[u8]) {
        self.update(|state| append(&mut state.stdout, bytes, &mut state.end));
    }

    pub fn stderr(&self, bytes: &[u8]) {
        self.update(|state| append(&mut state.stderr, bytes, &mut state.end));
    }

    pub fn exited(&self, exit: Exit) {
        self.update(|state| {
            state.end.get_or_insert(End::Exit(exit));
        });
    }

    pub fn lost(&self, why: &str) {
        self.update(|state| {
            state.end.get_or_insert(End::Lost(why.to_owned()));
        });
    }

    pub fn is_running(&self) -> bool {
        self.lock().end.is_none()
    }

    pub fn said(&self) -> (String, String) {
        let state = self.lock();
        (text(&state.stdout), text(&state.stderr))
    }

    /// Waits until the job has a process, and returns its id.
    pub fn wait_started(&self, command: &str, timeout: Duration) -> Result<u32> {
        self.wait(timeout, |state| match (&state.pid, &state.end) {
            (Some(pid), _) => Some(Ok(*pid)),
            (None, Some(End::Lost(why))) => Some(Err(format!("`{command}` was not started: {why}"))),
            _ => None,
        })
        .unwrap_or_else(|| Err(format!("`{command}` was not started within {timeout:?}")))
        .map_err(anyhow::Error::msg)
    }

    /// Waits for the end and returns the output.
    pub fn wait_ended(&self, command: &str, timeout: Duration) -> Result<Output> {
        let ended = self.wait(timeout, |state| {
            let end = state.end.as_ref()?;
            let output = |exit| Output {
                command: command.to_owned(),
                exit,
                stdout: text(&state.stdout),
                stderr: text(&state.stderr),
            };
            Some(match end {
                End::Exit(exit) => Ok(output(*exit)),
                End::Lost(why) => Err((why.clone(), output(Exit::Code(-1)))),
            })
        });
        match ended {
            Some(Ok(output)) => Ok(output),
            Some(Err((why, so_far))) => bail!("`{command}` was lost: {why}{}", so_far.streams()),
            None => bail!("`{command}` has not ended within {timeout:?}{}", self.streams(command)),
        }
    }

    /// Waits for a line of either stream that contains `pattern`, and returns it.
    pub fn wait_for_line(&self, command: &str, pattern: &str, timeout: Duration) -> Result<String> {
        let found = self.wait(timeout, |state| {
            let line = [&state.stdout, &state.stderr].into_iter().find_map(|stream| {
                let whole = stream.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
                // The last line counts without its newline once no more output can come.
                let stream = if state.end.is_some() { &stream[..] } else { &stream[..whole] };
                text(stream).lines().find(|line| line.contains(pattern)).map(str::to_owned)
            });
            match (line, &state.end) {
                (Some(line), _) => Some(Ok(line)),
                (None, Some(End::Exit(exit))) => Some(Err(format!("it ended with {exit}"))),
                (None, Some(End::Lost(why))) => Some(Err(why.clone())),
                (None, None) => None,
            }
        });
        let why = match found {
            Some(Ok(line)) => return Ok(line),
            Some(Err(why)) => why,
            None => format!("not within {timeout:?}"),
        };
        bail!("`{command}` did not say '{pattern}': {why}{}", self.streams(command))
    }

    fn streams(&self, command: &str) -> String {
        let (stdout, stderr) = self.said();
        Output { command: command.to_owned(), exit: Exit::Code(0), stdout, stderr }.streams()
    }

    fn wait<T>(&self, timeout: Duration, mut look: impl FnMut(&State) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            if let Some(found) = look(&state) {
                return Some(found);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn update(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn append(stream: &mut Vec<u8>, bytes: &[u8], end: &mut Option<End>) {
    if stream.len() + bytes.len() <= LIMIT {
        stream.extend(bytes);
    } else if end.is_none() {
        *end =
            Some(End::Lost(format!("it said more than {} MiB; write to a file and pull that", LIMIT >> 20)));
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const SOON: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn a_line_is_found_when_it_is_whole() {
        let record = Record::default();
        record.stdout(b"one\nlistening on 7");
        assert!(record.wait_for_line("x", "listening", SOON).is_err());
        thread::scope(|scope| {
            scope.spawn(|| record.stdout(b"000\nmore"));
            assert_eq!(record.wait_for_line("x", "listening", LONG).unwrap(), "listening on 7000");
        });
    }

    #[test]
    fn a_line_that_cannot_come_any_more_is_an_error_at_once() {
        let record = Record::default();
        record.stderr(b"no such device");
        record.exited(Exit::Code(1));
        let error = record.wait_for_line("ginneld", "listening", LONG).unwrap_err().to_string();
        assert!(error.contains("exit status 1") && error.contains("no such device"), "{error}");
        assert_eq!(record.wait_for_line("ginneld", "such", LONG).unwrap(), "no such device");
    }

    #[test]
    fn a_bad_end_shows_what_was_said() {
        let record = Record::default();
        record.stdout(b"half");
        record.lost("the guest rebooted");
        record.exited(Exit::Code(0));
        let error = record.wait_ended("job", LONG).unwrap_err().to_string();
        assert!(error.contains("rebooted") && error.contains("half"), "{error}");
    }

    #[test]
    fn a_flood_is_an_error_and_is_not_kept() {
        let record = Record::default();
        for _ in 0..65 {
            record.stdout(&vec![b'x'; 1 << 20]);
        }
        assert!(record.wait_ended("yes", LONG).unwrap_err().to_string().contains("more than 64 MiB"));
        assert!(record.said().0.len() <= LIMIT);
    }
}
