//! Pages of the program that peers can reach: they are moved into an arena, in place, and stay there.
//!
//! Registering is in units of 2 MiB of the program's addresses, the chunks, of which only the pages that are needed are moved. They stay after a region
//! has ended, so that to register them again costs nothing but a look whether they are still there: the program may have unmapped them.
//!
//! A store of another thread during a move would be lost, and whatever lies on the same pages with it. So a process with more than one thread
//! cannot register memory for others yet, and neither can a stack be registered.
#![allow(unsafe_code)] // Pages of the program are replaced.

use ginnel_layout::verbs::{CHUNK, Chunk};
use ginnel_shmem::{Mapping, Placed};
use ginnel_verbs::device::{Device, DeviceError};
use ginnel_verbs::regions::chunks_of;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

const PAGE: usize = 4096;
const PAGES: usize = CHUNK / PAGE;

/// Why pages cannot be registered.
#[derive(Debug)]
pub enum NotMoved {
    /// This kind of memory, or of process, is not supported yet.
    Unsupported,
    /// The range is not mapped, or must not be read.
    Fault,
    /// There is no room.
    Full,
}

impl NotMoved {
    /// The error that C is told.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Unsupported => libc::EOPNOTSUPP,
            Self::Fault => libc::EFAULT,
            Self::Full => libc::ENOMEM,
        }
    }
}

/// What of a chunk of addresses has been moved.
struct Held {
    device: Arc<Device>,
    chunk: Chunk,
    memory: Mapping,
    file: Arc<OwnedFd>,
    file_at: u64,
    placed: Vec<Placed>,
}

/// By the first address of each chunk.
static HELD: Mutex<BTreeMap<u64, Held>> = Mutex::new(BTreeMap::new());

fn held() -> MutexGuard<'static, BTreeMap<u64, Held>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The chunks of a range, all of whose pages have been moved.
pub fn move_range(
    device: &Arc<Device>,
    file: &Arc<OwnedFd>,
    range: Range<u64>,
) -> Result<Vec<Chunk>, NotMoved> {
    follow_forks();
    let first = range.start / PAGE as u64 * PAGE as u64;
    let end = range.end.checked_next_multiple_of(PAGE as u64).ok_or(NotMoved::Fault)?;
    let mut held = held();
    let mut chunks = Vec::new();
    for at in chunks_of(first, end - first) {
        let known = match held.entry(at) {
            // A page lies in one segment.
            Entry::Occupied(known) if !Arc::ptr_eq(&known.get().device, device) => {
                return Err(NotMoved::Unsupported);
            }
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(vacant) => {
                let (chunk, memory, file_at) = device.take_chunk().map_err(|error| match error {
                    DeviceError::Full(_) | DeviceError::Ginnel(_) => NotMoved::Full,
                    _ => NotMoved::Unsupported,
                })?;
                let (device, file) = (device.clone(), file.clone());
                vacant.insert(Held { device, chunk, memory, file, file_at, placed: Vec::new() })
            }
        };
        let wanted = first.max(at)..end.min(at + CHUNK as u64);
        known.place((wanted.start - at) as usize / PAGE..(wanted.end - at) as usize / PAGE, at)?;
        chunks.push(known.chunk);
    }
    Ok(chunks)
}

impl Held {
    /// Moves those of these pages that are not there yet.
    fn place(&mut self, wanted: Range<usize>, chunk: u64) -> Result<(), NotMoved> {
        let mut is_there = [false; PAGES];
        let mut i = 0;
        while let Some(placed) = self.placed.get(i) {
            let first = (placed.start().as_ptr() as u64 - chunk) as usize / PAGE;
            let pages = first..first + placed.len() / PAGE;
            if !placed.is_in_place().unwrap_or(false) {
                // The program has unmapped it, and what is there now is new.
                self.placed.swap_remove(i).abandon();
                continue;
            }
            is_there[pages].fill(true);
            i += 1;
        }
        if is_there[wanted.clone()].iter().all(|is_there| *is_there) {
            return Ok(());
        }
        let (start, end) = (chunk + (wanted.start * PAGE) as u64, chunk + (wanted.end * PAGE) as u64);
        check_process(start..end)?;
        let mut page = wanted.start;
        while page < wanted.end {
            let run = is_there[page..wanted.end].iter().take_while(|there| **there == is_there[page]).count();
            if !is_there[page] {
                self.place_run(page, run, chunk)?;
            }
            page += run;
        }
        Ok(())
    }

    fn place_run(&mut self, first: usize, count: usize, chunk: u64) -> Result<(), NotMoved> {
        let (at, len) = ((first * PAGE) as u64, count * PAGE);
        let start = NonNull::new((chunk + at) as *mut u8).ok_or(NotMoved::Fault)?;
        // The exchange must not find the vector in the middle of growing.
        self.placed.reserve(1);
        // SAFETY: the program has asked for its pages to be registered, and this is its only thread, whose stack is elsewhere.
        let placed = unsafe { self.memory.place(&*self.file, self.file_at + at, start, len, PAGE) };
        match placed {
            Ok(placed) => {
                self.placed.push(placed);
                Ok(())
            }
            // Pages that are protected in different ways are moved one by one.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput && count > 1 => {
                (first..first + count).try_for_each(|page| self.place_run(page, 1, chunk))
            }
            Err(error) => Err(match error.kind() {
                io::ErrorKind::InvalidInput => NotMoved::Unsupported,
                io::ErrorKind::OutOfMemory => NotMoved::Full,
                _ => NotMoved::Fault,
            }),
        }
    }
}

/// Whether pages of this range can be moved in this process.
fn check_process(range: Range<u64>) -> Result<(), NotMoved> {
    let threads = fs::read_dir("/proc/self/task").map(Iterator::count).unwrap_or(usize::MAX);
    let maps = fs::read_to_string("/proc/self/maps").map_err(|_| NotMoved::Unsupported)?;
    let stack = maps.lines().find(|line| line.ends_with("[stack]")).and_then(|line| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
    });
    let is_stack = stack.is_none_or(|stack| range.start < stack.end && stack.start < range.end);
    if threads > 1 || is_stack { Err(NotMoved::Unsupported) } else { Ok(()) }
}

/// The child of a fork gets pages of its own, with what is on them at that moment: what the parent has registered is the parent's.
fn follow_forks() {
    static ONCE: Once = Once::new();
    // SAFETY: functions of this library.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child));
    });
}

thread_local! {
    /// What the thread that forks holds meanwhile, so that the child finds it whole.
    static FORKING: std::cell::Cell<Option<MutexGuard<'static, BTreeMap<u64, Held>>>> = const { std::cell::Cell::new(None) };
}

extern "C" fn before_fork() {
    FORKING.set(Some(held()));
}

extern "C" fn after_fork() {
    drop(FORKING.take());
}

extern "C" fn in_child() {
    if let Some(mut held) = FORKING.take() {
        for (_, known) in std::mem::take(&mut *held) {
            for placed in known.placed {
                // SAFETY: this is the child's only thread, and nothing of its stack was moved. What its parent stores meanwhile may or may
                // not be seen, as with a store before or after the fork.
                if let Err((placed, _)) = unsafe { placed.lift() } {
                    drop(placed);
                }
            }
            // The device is the parent's, and so is its chunk.
            std::mem::forget(known.device);
        }
    }
}
