//! Hidden files that are removed when the program ends, even by a signal.

use super::root::os;
use rustix::fs::{AtFlags, unlinkat};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError, Weak};

/// A hidden file. Dropping the value removes the file, unless it is to be kept.
pub struct HiddenFile(Arc<Entry>);

struct Entry {
    folder: Arc<OwnedFd>,
    name: Vec<u8>,
    keep: AtomicBool,
}

static ALL: Mutex<Vec<Weak<Entry>>> = Mutex::new(Vec::new());

impl HiddenFile {
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

    /// Sets whether the file is kept if it is never completed.
    pub fn keep(&self, keep: bool) {
        self.0.keep.store(keep, Ordering::Relaxed);
    }

    /// Notes that the file no longer exists under this name.
    pub fn gone(&self) {
        self.keep(true);
    }
}

impl Entry {
    fn sweep(&self) {
        if !self.keep.swap(true, Ordering::Relaxed) {
            // A file that cannot be removed stays hidden, and the next copy of the same file finds it.
            let _ = unlinkat(&self.folder, os(&self.name), AtFlags::empty());
        }
    }
}

impl Drop for HiddenFile {
    fn drop(&mut self) {
        self.0.sweep();
    }
}

/// Removes the files when a signal ends the program, and then ends it as the signal would have done.
fn watch_signals() {
    let Ok(mut signals) = Signals::new([SIGINT, SIGTERM, SIGHUP]) else { return };
    let watch = move || {
        if let Some(signal) = signals.forever().next() {
            let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
            all.iter().filter_map(Weak::upgrade).for_each(|entry| entry.sweep());
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    // Without this thread, only a normal end removes the files.
    let _ = std::thread::Builder::new().name("signals".into()).spawn(watch);
}
