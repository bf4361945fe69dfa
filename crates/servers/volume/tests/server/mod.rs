//! A process that serves a volume, for tests.
#![allow(dead_code)] // Each test program uses only a part of this module.

use ginnel_volume_bench::{Client, Error, NvmeClient, NvmeOptions, Options, Status};
use kit::wait::{WATCHDOG, wait_for, wait_until};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// Returns the status that the volume has answered with. Panics on any other error.
pub fn status(result: Result<(), Error>) -> Status {
    match result {
        Err(Error::Failed { status, .. }) => status,
        Ok(()) => Status::Ok,
        Err(error) => panic!("{error}"),
    }
}

pub struct Server {
    pub dir: TempDir,
    command: Vec<String>,
    process: Child,
    /// The holder of an NVMe volume; `process` is its engine.
    holder: Option<Child>,
    log: Arc<Mutex<String>>,
}

impl Server {
    /// Starts a volume with these flags. `IMAGE` in them stands for the path of its image, an existing file of `bytes`
    /// bytes. With `--nvme`, its holder starts first.
    pub fn start(bytes: u64, flags: &str) -> Self {
        Self::start_under(&[], bytes, flags)
    }

    /// Like [`Server::start`], but `wrapper` is a command that runs the volume.
    pub fn start_under(wrapper: &[&str], bytes: u64, flags: &str) -> Self {
        // The folder is on a disk, not in memory, because direct I/O behaves differently there.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        std::fs::File::create(dir.path().join("image")).unwrap().set_len(bytes).unwrap();
        std::fs::File::create(dir.path().join("image.faults")).unwrap();
        let image = dir.path().join("image");
        let socket = dir.path().join("v.sock");
        let mut command: Vec<String> =
            wrapper.iter().map(|word| word.replace("DIR", dir.path().to_str().unwrap())).collect();
        command.push(env!("CARGO_BIN_EXE_ginnel-volume").to_owned());
        command.extend(["v", "--socket", socket.to_str().unwrap()].map(str::to_owned));
        command.extend(flags.split_whitespace().map(|word| word.replace("IMAGE", image.to_str().unwrap())));
        let log = Arc::default();
        let holder = flags.contains("--nvme").then(|| run(&holder_of(&command), &log));
        let process = run(&command, &log);
        let server = Self { dir, command, process, holder, log };
        server.wait_for_line("serving", 1);
        server
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("v.sock")
    }

    pub fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    /// Starts another volume on this image, which is already in use. Returns an error with its output unless it refuses
    /// to start and explains why in one line.
    pub fn refuses_another(&self) -> Result<(), String> {
        let another = Command::new(env!("CARGO_BIN_EXE_ginnel-volume"))
            .args(["w", "--socket"])
            .arg(self.dir.path().join("w.sock"))
            .arg("--path")
            .arg(self.image())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&another.stderr).into_owned();
        let refused = !another.status.success() && said.contains("is in use") && said.lines().count() == 1;
        if refused { Ok(()) } else { Err(said) }
    }

    /// Path of the file that tells a volatile disk which requests must fail.
    pub fn faults(&self) -> PathBuf {
        self.dir.path().join("image.faults")
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    pub fn options(&self) -> Options {
        Options::new(self.socket())
    }

    pub fn connect(&self) -> Client {
        Client::connect(self.options()).unwrap()
    }

    pub fn nvme_options(&self) -> NvmeOptions {
        NvmeOptions { patience: WATCHDOG, ..NvmeOptions::new(self.socket()) }
    }

    pub fn connect_nvme(&self) -> NvmeClient {
        NvmeClient::connect(self.nvme_options()).unwrap()
    }

    /// SIGKILL to the holder.
    pub fn kill_holder(&mut self) {
        let mut holder = self.holder.take().expect("it is an NVMe volume");
        holder.kill().unwrap();
        holder.wait().unwrap();
    }

    /// Starts the holder again.
    pub fn launch_holder(&mut self) {
        let before = self.count("holding");
        self.holder = Some(run(&holder_of(&self.command), &self.log));
        self.wait_for_line("holding", before + 1);
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    pub fn restart(&mut self) {
        let before = self.count("serving");
        self.launch();
        self.wait_for_line("serving", before + 1);
    }

    /// Starts the volume again, without waiting until it serves.
    pub fn launch(&mut self) {
        self.process = run(&self.command, &self.log);
    }

    /// SIGTERM.
    pub fn terminate(&mut self) -> ExitStatus {
        kit::process::signal(&self.process, rustix::process::Signal::TERM);
        wait_for("the volume's end", || self.process.try_wait().unwrap())
    }

    /// SIGHUP.
    pub fn hang_up(&self) {
        kit::process::signal(&self.process, rustix::process::Signal::HUP);
    }

    pub fn is_running(&mut self) -> bool {
        self.process.try_wait().unwrap().is_none()
    }

    /// Returns everything that the volume has logged so far, including its earlier processes.
    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub fn count(&self, text: &str) -> usize {
        self.log().lines().filter(|line| line.contains(text)).count()
    }

    pub fn wait_for_line(&self, text: &str, times: usize) {
        wait_until(&format!("a line with {text:?}"), || self.count(text) >= times);
    }

    /// Waits until the volume has taken `count` requests.
    pub fn wait_for_taken(&self, count: u64) {
        wait_until(&format!("{count} requests to be taken"), || self.sum_of_queues("taken") >= count);
    }

    /// Waits until the volume holds `count` requests for an operator.
    pub fn wait_for_held(&self, count: u64) {
        wait_until(&format!("{count} requests to be held"), || self.sum_of_queues("held") == count);
    }

    fn sum_of_queues(&self, number: &str) -> u64 {
        let answer: serde_json::Value = serde_json::from_str(&self.control(r#"{"op":"stat"}"#)).unwrap();
        let queues = answer["stat"]["queues"].as_array().unwrap();
        queues.iter().map(|queue| queue[number].as_u64().unwrap()).sum()
    }

    /// Sends a request to the control socket and returns the answer.
    pub fn control(&self, request: &str) -> String {
        let mut stream = UnixStream::connect(self.dir.path().join("v.ctl")).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        writeln!(stream, "{request}").unwrap();
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        answer
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for process in [&mut self.process].into_iter().chain(&mut self.holder) {
            let _ = process.kill();
            let _ = process.wait();
        }
        if std::thread::panicking() {
            eprintln!("--- the volume said:\n{}", self.log());
        }
    }
}

/// Returns the command for the holder of an NVMe volume. What wraps the engine does not wrap it.
fn holder_of(command: &[String]) -> Vec<String> {
    let program = command.iter().position(|word| word == env!("CARGO_BIN_EXE_ginnel-volume")).unwrap();
    command[program..].iter().cloned().chain(["--holder".to_owned()]).collect()
}

fn run(command: &[String], log: &Arc<Mutex<String>>) -> Child {
    let mut process = Command::new(&command[0])
        .args(&command[1..])
        .stderr(Stdio::piped())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(process.stderr.take().unwrap()).lines();
    let log = log.clone();
    std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            *log.lock().unwrap() += &(line + "\n");
        }
    });
    process
}
