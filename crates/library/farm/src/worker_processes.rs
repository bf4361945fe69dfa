//! Workers that are processes of this machine, started by their manager.

use std::io;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Worker processes that a manager has started. Dropping this kills those that still run.
#[derive(Debug, Default)]
pub struct WorkerProcesses(Vec<Child>);

impl WorkerProcesses {
    /// Starts one more process. Its standard input is empty, its standard output is discarded, and its standard error is that of
    /// this process.
    pub fn start(&mut self, command: &mut Command) -> io::Result<()> {
        self.0.push(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?);
        Ok(())
    }

    /// Waits up to `patience` until all processes have exited, as they do without a signal when their manager is gone. Returns
    /// whether all have exited.
    pub fn finish(&mut self, patience: Duration) -> bool {
        let begun = Instant::now();
        loop {
            self.0.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
            if self.0.is_empty() || begun.elapsed() >= patience {
                return self.0.is_empty();
            }
            // No system call waits for just some of a process's children.
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for WorkerProcesses {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_end_by_themselves_or_are_ended() {
        let mut processes = WorkerProcesses::default();
        processes.start(&mut Command::new("true")).unwrap();
        assert!(processes.finish(Duration::from_secs(60)));
        processes.start(Command::new("sleep").arg("1000")).unwrap();
        assert!(!processes.finish(Duration::from_millis(10)));
        let begun = Instant::now();
        drop(processes);
        assert!(begun.elapsed() < Duration::from_secs(100));
        assert!(WorkerProcesses::default().start(&mut Command::new("/no/such/program")).is_err());
    }
}
