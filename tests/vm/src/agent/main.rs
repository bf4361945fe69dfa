//! The program that `/init` runs in a guest. It does what the harness asks for over a virtio-serial port.
//!
//! It serves one harness, never exits by itself, and knows nothing about Ginnel.

mod files;
mod job;
#[path = "../protocol.rs"]
#[allow(dead_code)] // each side uses its half
mod protocol;
mod sys;

use protocol::Frame;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufReader, Write};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// The process ids of the running jobs, by job id.
pub type Running = Arc<Mutex<HashMap<u32, i32>>>;

/// Sends frames to the harness. All threads share it, and frames do not mix.
#[derive(Clone)]
pub struct Outbox(Arc<Mutex<File>>);

impl Outbox {
    /// Blocks while the harness is not connected or does not read.
    pub fn send(&self, frame: &Frame) -> io::Result<()> {
        self.0.lock().unwrap().write_all(&frame.encode())
    }
}

fn main() {
    if let Err(e) = serve() {
        eprintln!("vm-agent: {e}"); // Printed on the console, which the harness shows; init starts the agent again.
        std::process::exit(1);
    }
}

fn serve() -> io::Result<()> {
    let port = open_port()?;
    let outbox = Outbox(Arc::new(Mutex::new(port.try_clone()?)));
    let mut inbox = BufReader::new(port);
    let running = Running::default();
    let mut incoming = files::Incoming::default();
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
    loop {
        let Some(frame) = Frame::read_from(&mut inbox)? else {
            // No process has the other end open. The port has no way to report when one opens it, so this program looks again.
            thread::sleep(Duration::from_millis(10));
            continue;
        };
        let answer = match frame {
            Frame::Hello { nonce } => {
                Some(Frame::Welcome { nonce, version: protocol::VERSION, boot_id: boot_id.clone() })
            }
            Frame::Spawn { id, command } => {
                refused(id, "cannot start a shell", job::spawn(id, &command, &running, &outbox))
            }
            Frame::Signal { id, signal, group } => {
                if let Some(&pid) = running.lock().unwrap().get(&id) {
                    // Fails only for a process that has just ended, which is reported anyway.
                    let _ = sys::send_signal(if group { -pid } else { pid }, signal);
                }
                None
            }
            Frame::Put { id, mode, path } => {
                refused(id, &format!("cannot write {path}"), incoming.begin(id, mode, &path))
            }
            Frame::Data { id, bytes } => refused(id, "cannot write", incoming.data(id, &bytes)),
            Frame::End { id, .. } => match incoming.end(id) {
                Ok(total) => total.map(|total| Frame::End { id, total }),
                Err(e) => refused(id, "cannot complete the file", Err(e)),
            },
            Frame::Get { id, path } => {
                let outbox = outbox.clone();
                thread::spawn(move || {
                    let result = files::send(id, &path, &outbox);
                    if let Some(failed) = refused(id, &format!("cannot read {path}"), result) {
                        let _ = outbox.send(&failed);
                    }
                });
                None
            }
            _ => None, // frames that only an agent sends
        };
        if let Some(answer) = answer {
            outbox.send(&answer)?;
        }
    }
}

fn refused(id: u32, what: &str, result: io::Result<()>) -> Option<Frame> {
    result.err().map(|e| Frame::Failed { id, message: format!("{what}: {e}") })
}

/// Finds the port by its name. The kernel announces ports some time after their driver was loaded.
fn open_port() -> io::Result<File> {
    for _ in 0..2000 {
        if let Ok(entries) = fs::read_dir("/sys/class/virtio-ports") {
            for entry in entries.flatten() {
                let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
                if name.trim() == protocol::PORT {
                    let device = std::path::Path::new("/dev").join(entry.file_name());
                    return File::options().read(true).write(true).open(device);
                }
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
    Err(io::Error::other(format!("no virtio-serial port is named {}", protocol::PORT)))
}
