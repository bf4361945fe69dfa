//! Files are truncated under their mappings, while other mappings come and go. No process dies, and only the mappings of
//! truncated files are reported as broken.
#![allow(unsafe_code)] // One test faults in a mapping that the crate knows nothing of.

use ginnel_shmem::{Mapping, Protection, SharedMemory};
use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

const LEN: usize = 64 << 10;

fn file() -> File {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(LEN as u64).unwrap();
    file
}

#[test]
fn truncation_while_mappings_come_and_go() {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        // Keeps the handler's table changing, with ranges of different lengths at addresses that are used again.
        for pages in [1, 3, 16] {
            let stop = &stop;
            scope.spawn(move || {
                let file = file();
                while !stop.load(Ordering::Relaxed) {
                    let m = Mapping::of_file(&file, 0, pages * 4096, Protection::ReadWrite).unwrap();
                    m.store_release_u64(pages * 4096 - 8, 7);
                    assert_eq!(m.load_acquire_u64(pages * 4096 - 8), 7);
                    assert!(!m.is_broken());
                }
            });
        }
        for round in 0..2000 {
            let (gone, kept) = (file(), file());
            let a = Mapping::of_file(&gone, 0, LEN, Protection::ReadWrite).unwrap();
            let b = Mapping::of_file(&kept, 0, LEN, Protection::ReadWrite).unwrap();
            a.store_relaxed_u64(LEN - 8, 1);
            b.store_relaxed_u64(LEN - 8, 2);
            gone.set_len(round % 2 * 4096).unwrap();
            assert_eq!(a.load_relaxed_u64(LEN - 8), 0);
            assert!(a.is_broken());
            assert_eq!(b.load_relaxed_u64(LEN - 8), 2);
            assert!(!b.is_broken());
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn all_threads_that_meet_the_truncation_go_on() {
    for _ in 0..50 {
        let file = file();
        let m = Mapping::of_file(&file, 0, LEN, Protection::ReadWrite).unwrap();
        thread::scope(|scope| {
            for t in 0..4 {
                let m = m.clone();
                scope.spawn(move || {
                    let mut bytes = [0; 999];
                    while !m.is_broken() {
                        m.read(t * 4096 + 1, &mut bytes);
                        m.write(t * 8192 + 3, &bytes);
                    }
                });
            }
            file.set_len(0).unwrap();
        });
        assert_eq!(m.load_relaxed_u32(0), 0);
    }
}

#[test]
fn a_read_only_mapping_survives_too() {
    let file = file();
    let m = Mapping::of_file(&file, 0, LEN, Protection::Read).unwrap();
    let part = m.part(4096, 4096).unwrap();
    file.set_len(0).unwrap();
    assert_eq!(part.load_acquire_u64(0), 0);
    assert!(part.is_broken() && m.is_broken(), "the parts of a mapping break together");
}

#[test]
fn system_calls_report_what_has_gone() {
    use ginnel_shmem::SharedSlice;
    use std::os::fd::AsFd;
    let (gone, sink) = (file(), file());
    let m = Mapping::of_file(&gone, 0, LEN, Protection::ReadWrite).unwrap();
    gone.set_len(0).unwrap();
    let slice = SharedSlice::new(&m, 0, LEN);
    assert_eq!(slice.write_to(sink.as_fd()).unwrap_err().raw_os_error(), Some(14), "EFAULT");
    assert_eq!(slice.read_from(sink.as_fd()).unwrap_err().raw_os_error(), Some(14), "EFAULT");
}

/// Runs in a child process, which the test kills.
#[test]
fn a_fault_elsewhere_kills_as_it_always_did() {
    use std::os::unix::process::ExitStatusExt;
    const CHILD: &str = "GINNEL_TEST_FAULT";
    const NAME: &str = "a_fault_elsewhere_kills_as_it_always_did";
    if std::env::var_os(CHILD).is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output = child.args(["--exact", NAME]).env(CHILD, "1").output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
        return;
    }
    let (watched, foreign) = (file(), file());
    let m = Mapping::of_file(&watched, 0, LEN, Protection::ReadWrite).unwrap();
    // SAFETY: a new mapping at an address of the kernel's choice; it is never unmapped.
    let p = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            LEN,
            rustix::mm::ProtFlags::READ,
            rustix::mm::MapFlags::SHARED,
            &foreign,
            0,
        )
    };
    foreign.set_len(0).unwrap();
    // SAFETY: mapped above; the access is meant to fault.
    let byte = unsafe { p.unwrap().cast::<u8>().read_volatile() };
    unreachable!("read {byte} where there is nothing; the watched mapping is broken: {}", m.is_broken());
}
