//! QEMU's control socket (QMP): commands, answers, and the events that QEMU sends by itself.

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The number of events that are kept until somebody waits for them. Beyond it the oldest ones are discarded.
const EVENTS: usize = 1000;

/// How long QEMU may take to answer a command.
const ANSWER: Duration = Duration::from_secs(30);

pub(crate) struct Qmp {
    writer: Mutex<UnixStream>,
    next: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    answers: HashMap<u64, Value>,
    events: Vec<Value>,
    closed: Option<String>,
}

impl Qmp {
    /// Greets QEMU over a new connection. A thread calls `on_event` for each event.
    pub fn open(stream: UnixStream, on_event: impl Fn(&Value) + Send + 'static) -> Result<Arc<Qmp>> {
        stream.set_write_timeout(Some(ANSWER))?;
        let reader = BufReader::new(stream.try_clone()?);
        let qmp = Arc::new(Qmp {
            writer: Mutex::new(stream),
            next: AtomicU64::new(1),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let hear = qmp.clone();
        thread::spawn(move || {
            let mut why = "QEMU closed its control socket".to_owned();
            for line in reader.lines() {
                match line.map_err(anyhow::Error::from).and_then(|line| Ok(serde_json::from_str(&line)?)) {
                    Ok(message) => hear.heard(message, &on_event),
                    Err(e) => {
                        why = format!("bad message on QEMU's control socket: {e}");
                        break;
                    }
                }
            }
            hear.lock().closed = Some(why);
            hear.changed.notify_all();
        });
        qmp.execute(&json!({"execute": "qmp_capabilities"})).context("QEMU's greeting failed")?;
        Ok(qmp)
    }

    /// Sends a command such as `{"execute": "stop"}` and returns QEMU's answer.
    pub fn execute(&self, command: &Value) -> Result<Value> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut request = command.clone();
        request.as_object_mut().context("a QMP command is a JSON object")?.insert("id".into(), id.into());
        let line = format!("{request}\n");
        self.writer
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .write_all(line.as_bytes())
            .context("QMP")?;
        let mut answer =
            self.wait(ANSWER, &format!("answer to {command}"), |state| state.answers.remove(&id))?;
        match answer.get_mut("return") {
            Some(value) => Ok(value.take()),
            None => Err(anyhow!("QEMU refused {command}: {}", answer["error"]["desc"])),
        }
    }

    /// Waits for an event of this name and removes it. An event that arrived before this call counts too.
    pub fn wait_event(&self, name: &str, timeout: Duration) -> Result<Value> {
        self.wait(timeout, &format!("event {name}"), |state| {
            let at = state.events.iter().position(|event| event["event"] == name)?;
            Some(state.events.remove(at))
        })
    }

    fn heard(&self, message: Value, on_event: &impl Fn(&Value)) {
        if message.get("event").is_some() {
            on_event(&message);
            let mut state = self.lock();
            if state.events.len() == EVENTS {
                state.events.remove(0);
            }
            state.events.push(message);
        } else if let Some(id) = message["id"].as_u64() {
            self.lock().answers.insert(id, message);
        }
        self.changed.notify_all();
    }

    fn wait<T>(
        &self,
        timeout: Duration,
        what: &str,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            if let Some(found) = look(&mut state) {
                return Ok(found);
            }
            if let Some(why) = &state.closed {
                bail!("no {what}: {why}");
            }
            let left = deadline.checked_duration_since(Instant::now());
            let left = left.with_context(|| format!("no {what} within {timeout:?}"))?;
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
