//! Hidden files that must not stay behind, whatever ends the program.

use super::root::os;
use rustix::fs::{AtFlags, unlinkat};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError, Weak};

/// A hidden file. Dropping the value removes it, unless it is to be kept.
pub struct Hidden(Arc<Entry>);

struct Entry {
    folder: Arc<OwnedFd>,
    name: Vec<u8>,
    keep: AtomicBool,
}

static ALL: Mutex<Vec<Weak<Entry>>> = Mutex::new(Vec::new());

impl Hidden {
    /// Takes charge of a file that exists.
    pub fn new(folder: Arc<OwnedFd>, name: Vec<u8>) -> Self {
        static WATCH: Once = Once::new();
        WATCH.call_once(watch_signals);
        let entry = Arc::new(Entry { folder, name, keep: AtomicBool::new(false) });
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|entry| entry.strong_count() > 0);
        all.push(Arc::downgrade(&entry));
        Self(entry)
    }

    pub fn name(&self) -> &[u8] {
        &self.0.name
    }

    /// Whether the file is worth keeping if it is never completed.
    pub fn keep(&self, keep: bool) {
        self.0.keep.store(keep, Ordering::Relaxed);
    }

    /// There is no such file any more.
    pub fn gone(&self) {
        self.keep(true);
    }
}

impl Entry {
    fn sweep(&self) {
        if !self.keep.swap(true, Ordering::Relaxed) {
            // What cannot be removed stays hidden, and is found by the next copy of the same file.
            let _ = unlinkat(&self.folder, os(&self.name), AtFlags::empty());
        }
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        self.0.sweep();
    }
}

/// Removes the litter when the program is told to end, and then ends as if nobody had caught the signal.
fn watch_signals() {
    let Ok(mut signals) = Signals::new([SIGINT, SIGTERM, SIGHUP]) else { return };
    let watch = move || {
        if let Some(signal) = signals.forever().next() {
            let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
            all.iter().filter_map(Weak::upgrade).for_each(|entry| entry.sweep());
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    // Without a thread for it, only orderly ends tidy up.
    let _ = std::thread::Builder::new().name("signals".into()).spawn(watch);
}
