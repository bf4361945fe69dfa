//! The harness's end of the connection to the agent in a guest. It connects again after each reboot, and hands each frame that
//! arrives to the job or transfer for which it is meant.

use crate::protocol::{Frame, MAX_PAYLOAD, VERSION};
use crate::record::Record;
use anyhow::{Context, Result, bail, ensure};
use std::collections::HashMap;
use std::io::{BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// A transfer without progress for this long has failed, and so has a write to a guest that does not read.
const STALLED: Duration = Duration::from_secs(60);

/// The number of pieces of a pulled file that may wait for the reader. With more, the agent is held back.
const PULL_AHEAD: usize = 64;

pub(crate) struct AgentConnection {
    socket: PathBuf,
    state: Mutex<State>,
    changed: Condvar,
    /// Held while a frame is written, so that frames do not mix.
    writer: Mutex<()>,
}

#[derive(Default)]
struct State {
    /// The connection, once QEMU has accepted it.
    stream: Option<Arc<UnixStream>>,
    /// The boot id of the guest, once the agent has answered.
    boot_id: Option<String>,
    /// Set for ever when QEMU has ended, so that no agent can come any more; the text says why.
    closed: Option<String>,
    /// The running jobs. Output of a job without a handle is discarded.
    jobs: HashMap<u32, Weak<Record>>,
    transfers: HashMap<u32, mpsc::SyncSender<Frame>>,
    last_id: u32,
}

impl AgentConnection {
    /// Starts a thread that connects to the agent behind QEMU's socket.
    pub fn open(socket: &Path) -> Arc<AgentConnection> {
        let connection = Arc::new(AgentConnection {
            socket: socket.to_owned(),
            state: Mutex::default(),
            changed: Condvar::new(),
            writer: Mutex::new(()),
        });
        let receiver = connection.clone();
        thread::spawn(move || {
            while receiver.lock().closed.is_none() {
                let why = match receiver.serve() {
                    Ok(()) => "the agent's port was closed".to_owned(),
                    Err(e) => format!("the agent's port failed: {e:#}"),
                };
                receiver.forget_agent(&why);
            }
        });
        connection
    }

    /// Gives up all that is under way, because the guest has rebooted or the agent is gone, and connects to a new agent.
    pub fn reset(&self, why: &str) {
        self.forget_agent(why);
    }

    /// Gives up all that is under way, because QEMU has ended.
    pub fn close(&self, why: &str) {
        self.lock().closed.get_or_insert(why.to_owned());
        self.forget_agent(why);
    }

    /// Makes later ids differ from those of `other`, whose jobs may still run in a guest that migrates from there.
    pub fn number_from(&self, other: &AgentConnection) {
        let last = other.lock().last_id;
        let mut state = self.lock();
        state.last_id = state.last_id.max(last);
    }

    /// Waits for an agent, if `old` is given for one of another boot. Returns the id of its boot.
    pub fn wait_ready(&self, old: Option<&str>, timeout: Duration) -> Result<String> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            match &state.boot_id {
                Some(boot) if old != Some(boot) => return Ok(boot.clone()),
                _ => {}
            }
            if let Some(why) = &state.closed {
                bail!("{why}");
            }
            let left = deadline.checked_duration_since(Instant::now());
            let left = left.context("its agent does not answer")?;
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Starts a job and returns its id and record.
    pub fn spawn(&self, command: &str) -> Result<(u32, Arc<Record>)> {
        ensure!(
            command.len() <= MAX_PAYLOAD,
            "a command of more than {MAX_PAYLOAD} bytes; push a script instead"
        );
        let record = Arc::new(Record::default());
        let id = self.begin(|state, id| {
            state.jobs.insert(id, Arc::downgrade(&record));
        })?;
        self.send(&Frame::Spawn { id, command: command.to_owned() })?;
        Ok((id, record))
    }

    pub fn signal(&self, id: u32, signal: i32, group: bool) -> Result<()> {
        self.send(&Frame::Signal { id, signal, group })
    }

    /// Writes a file in the guest.
    pub fn push(&self, mut source: impl Read, path: &str, mode: u32) -> Result<()> {
        let (id, answers) = self.begin_transfer()?;
        let result = (|| {
            self.send(&Frame::Put { id, mode, path: path.to_owned() })?;
            let mut buffer = vec![0; MAX_PAYLOAD];
            let mut total = 0;
            loop {
                let n = source.read(&mut buffer).context("cannot read the file to push")?;
                if n == 0 {
                    break;
                }
                total += n as u64;
                self.send(&Frame::Data { id, bytes: buffer[..n].to_vec() })?;
                if let Ok(Frame::Failed { message, .. }) = answers.try_recv() {
                    bail!("{message}");
                }
            }
            self.send(&Frame::End { id, total })?;
            match answers.recv_timeout(STALLED) {
                Ok(Frame::End { total: stored, .. }) => {
                    ensure!(stored == total, "{stored} of {total} bytes arrived");
                    Ok(())
                }
                Ok(Frame::Failed { message, .. }) => bail!("{message}"),
                Ok(other) => bail!("the agent answered {other:?}"),
                Err(_) => bail!("the agent did not confirm it"),
            }
        })();
        self.lock().transfers.remove(&id);
        result
    }

    /// Reads a file of the guest.
    pub fn pull(&self, path: &str, mut to: impl Write) -> Result<()> {
        let (id, answers) = self.begin_transfer()?;
        let result = (|| {
            self.send(&Frame::Get { id, path: path.to_owned() })?;
            let mut have = 0;
            loop {
                match answers.recv_timeout(STALLED) {
                    Ok(Frame::Data { bytes, .. }) => {
                        to.write_all(&bytes).context("cannot write the pulled file")?;
                        have += bytes.len() as u64;
                    }
                    Ok(Frame::End { total, .. }) => {
                        ensure!(have == total, "{have} of {total} bytes arrived");
                        return to.flush().context("cannot write the pulled file");
                    }
                    Ok(Frame::Failed { message, .. }) => bail!("{message}"),
                    Ok(other) => bail!("the agent answered {other:?}"),
                    Err(_) => bail!("the agent stopped sending"),
                }
            }
        })();
        self.lock().transfers.remove(&id);
        result
    }

    fn begin_transfer(&self) -> Result<(u32, mpsc::Receiver<Frame>)> {
        let (tell, answers) = mpsc::sync_channel(PULL_AHEAD);
        let id = self.begin(|state, id| {
            state.transfers.insert(id, tell);
        })?;
        Ok((id, answers))
    }

    /// Takes an unused id, if an agent is there, and lets `enter` register it.
    fn begin(&self, enter: impl FnOnce(&mut State, u32)) -> Result<u32> {
        let mut state = self.lock();
        if state.boot_id.is_none() {
            bail!("no agent: {}", state.closed.as_deref().unwrap_or("the guest is not ready (wait_ready)"));
        }
        state.last_id = state.last_id.wrapping_add(1);
        let id = state.last_id;
        enter(&mut state, id);
        Ok(id)
    }

    fn send(&self, frame: &Frame) -> Result<()> {
        let stream = self.lock().stream.clone().context("no agent: its port is closed")?;
        let _writing = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        (&*stream).write_all(&frame.encode()).inspect_err(|_| {
            // A part of the frame may have been written, so the agent would not understand anything that follows.
            let _ = stream.shutdown(Shutdown::Both);
        })?;
        Ok(())
    }

    /// Serves one connection from its greeting to its end.
    fn serve(&self) -> Result<()> {
        let stream = Arc::new(self.connect()?);
        stream.set_write_timeout(Some(STALLED))?;
        // The nonce distinguishes the answer to this greeting from an answer to an earlier one.
        let nonce = {
            let mut state = self.lock();
            if state.closed.is_some() {
                return Ok(());
            }
            state.stream = Some(stream.clone());
            state.last_id = state.last_id.wrapping_add(1);
            u64::from(state.last_id)
        };
        self.send(&Frame::Hello { nonce })?;
        let mut reader = BufReader::with_capacity(MAX_PAYLOAD, &*stream);
        while let Some(frame) = Frame::read_from(&mut reader)? {
            if let Frame::Welcome { nonce: told, version, boot_id } = &frame
                && *told == nonce
            {
                ensure!(*version == VERSION, "the agent speaks version {version}, not {VERSION}");
                self.lock().boot_id = Some(boot_id.clone());
                self.changed.notify_all();
            } else {
                self.dispatch(frame);
            }
        }
        Ok(())
    }

    fn dispatch(&self, frame: Frame) {
        let mut state = self.lock();
        let job = |id| state.jobs.get(id).and_then(Weak::upgrade);
        match &frame {
            Frame::Started { id, pid } => job(id).inspect(|job| job.started(*pid)),
            Frame::Stdout { id, bytes } => job(id).inspect(|job| job.stdout(bytes)),
            Frame::Stderr { id, bytes } => job(id).inspect(|job| job.stderr(bytes)),
            Frame::Exited { id, exit } => job(id).inspect(|job| job.exited(*exit)),
            Frame::Failed { id, message } if state.jobs.contains_key(id) => {
                state.jobs.remove(id).and_then(|job| job.upgrade()).inspect(|job| job.lost(message))
            }
            Frame::Data { id, .. } | Frame::End { id, .. } | Frame::Failed { id, .. } => {
                let transfer = state.transfers.get(id).cloned();
                drop(state); // the reader may be slow, and needs this lock to end the transfer
                if let Some(transfer) = transfer {
                    let _ = transfer.send(frame);
                }
                None
            }
            _ => None,
        };
    }

    /// Connects to QEMU's socket. QEMU listens as soon as it runs, so a refusal means that it does not run yet, or not any
    /// more.
    fn connect(&self) -> Result<UnixStream> {
        loop {
            match UnixStream::connect(&self.socket) {
                Ok(stream) => return Ok(stream),
                Err(e) => {
                    if let Some(why) = &self.lock().closed {
                        bail!("{why} ({e})");
                    }
                }
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn forget_agent(&self, why: &str) {
        let mut state = self.lock();
        state.boot_id = None;
        state.transfers.clear();
        let jobs = std::mem::take(&mut state.jobs);
        if let Some(stream) = state.stream.take() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(state);
        for job in jobs.into_values().filter_map(|job| job.upgrade()) {
            job.lost(why);
        }
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
