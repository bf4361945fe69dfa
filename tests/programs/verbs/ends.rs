//! A program that runs twice. The two processes are connected by queue pairs.

use programs::verbs::{DEVICE, Killed, Verbs};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

/// Compiles a program of this folder. Returns its path.
pub fn compiled(verbs: &Verbs, name: &str) -> String {
    let program = verbs.world.files().join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("verbs/{name}.c"));
    let status = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .args([&program, &source])
        .args(["-lrdmacm", "-libverbs"])
        .status()
        .unwrap();
    assert!(status.success(), "{name}.c cannot be compiled");
    program.to_str().unwrap().to_owned()
}

/// One of the two processes.
pub struct End {
    child: Killed,
    /// The process ends when this is closed.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl End {
    /// Starts the first or the second process.
    pub fn start(verbs: &Verbs, program: &str, which: usize, arguments: &[&str]) -> Self {
        Self::named(verbs, &[&[program, DEVICE, &which.to_string()], arguments].concat())
    }

    /// Starts a program that has no peer, with its arguments.
    pub fn named(verbs: &Verbs, program: &[&str]) -> Self {
        let mut command = verbs.command(program);
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child: Killed(Some(child)), input, output }
    }

    /// Returns its next line. The programs themselves limit how long they run.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        if line.is_empty() {
            let (status, said) = self.ended();
            panic!("it has ended: {status}, {said}");
        }
        line
    }

    pub fn tell(&mut self, line: &str) {
        // If the process has ended meanwhile, its next line is missing.
        let _ = self.input.as_mut().unwrap().write_all(line.as_bytes());
    }

    /// Kills the process with SIGKILL.
    pub fn kill(self) {
        drop(self);
    }

    /// Returns its exit status, if it has ended.
    pub fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.0.as_mut().unwrap().try_wait().unwrap()
    }

    /// Tells it to end, and waits for that. Returns its exit status, and what it has printed since.
    pub fn ended(&mut self) -> (ExitStatus, String) {
        drop(self.input.take());
        let mut said = String::new();
        self.output.read_to_string(&mut said).unwrap();
        let output = self.child.0.take().unwrap().wait_with_output().unwrap();
        (output.status, said + &String::from_utf8_lossy(&output.stderr))
    }
}

/// Starts both processes, and tells each where to find the other.
pub fn start(verbs: &Verbs, program: &str, arguments: [&[&str]; 2]) -> [End; 2] {
    let mut ends = [0, 1].map(|which| End::start(verbs, program, which, arguments[which]));
    let lines = ends.each_mut().map(End::line);
    ends[0].tell(&lines[1]);
    ends[1].tell(&lines[0]);
    ends
}
