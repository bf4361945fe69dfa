//! The library survives what programs do with signals: threads that block them, and handlers that replace the library's. Each
//! test runs in a child process, which may be killed.
#![allow(unsafe_code)] // Signals, and faults on purpose.

use ginnel_shmem::{Mapping, Protection, SharedMemory};
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, exit};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const LEN: usize = 64 << 10;
const CHILD: &str = "GINNEL_TEST_SIGNALS";

fn file() -> File {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(LEN as u64).unwrap();
    file
}

fn map(file: &File) -> Mapping {
    Mapping::of_file(file, 0, LEN, Protection::ReadWrite).unwrap()
}

/// Runs the test `test`, whose name is `name`, in a child, and returns how the child ends. In the child it does not return.
fn in_a_child(name: &str, test: impl FnOnce()) -> ExitStatus {
    if std::env::var_os(CHILD).is_some() {
        test();
        exit(0);
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap().status
}

fn block_all_signals() {
    // SAFETY: plain calls with valid pointers.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut set);
        assert_eq!(libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut()), 0);
    }
}

type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

static OLD: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

fn install(handler: Handler) {
    // SAFETY: plain calls with valid pointers; the handlers below are async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let mut old: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGBUS, &raw const action, &raw mut old), 0);
        OLD.store(old.sa_sigaction as *mut (), Ordering::Relaxed);
    }
}

/// The next fault is in memory that the library does not watch.
static FOREIGN: AtomicBool = AtomicBool::new(false);

/// Ends the process in its own way, as a crash reporter does: with 7, or with 8 if the library should have survived the
/// fault.
extern "C" fn ends_with_7(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: async-signal-safe.
    unsafe { libc::_exit(if FOREIGN.load(Ordering::Relaxed) { 7 } else { 8 }) }
}

/// Passes every fault on to the handler that was there before.
extern "C" fn hands_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let old = OLD.load(Ordering::Relaxed);
    // SAFETY: `sigaction` has returned this handler, which in these tests has this signature.
    let old: Handler = unsafe { std::mem::transmute(old) };
    old(signal, info, context);
}

/// Faults in a mapping that is not watched.
fn fault_elsewhere() {
    FOREIGN.store(true, Ordering::Relaxed);
    let foreign = file();
    // SAFETY: a new mapping at an address of the kernel's choice, and a load from it, which is meant to fault.
    unsafe {
        let (prot, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
        let p = rustix::mm::mmap(std::ptr::null_mut(), LEN, prot, flags, &foreign, 0).unwrap();
        foreign.set_len(0).unwrap();
        p.cast::<u8>().read_volatile();
    }
    unreachable!("read where there is nothing");
}

#[test]
fn a_thread_that_blocks_all_signals_survives() {
    let status = in_a_child("a_thread_that_blocks_all_signals_survives", || {
        let file = file();
        let m = map(&file);
        thread::scope(|scope| {
            scope.spawn(|| {
                block_all_signals();
                m.attend();
                file.set_len(0).unwrap();
                assert_eq!(m.load_relaxed_u64(0), 0);
                assert!(m.is_broken());
            });
        });
    });
    assert!(status.success(), "{status}");
}

#[test]
fn a_store_without_right_in_a_thread_that_blocks_all_signals_is_survived() {
    let status = in_a_child("a_store_without_right_in_a_thread_that_blocks_all_signals_is_survived", || {
        let file = file();
        let m = map(&file);
        thread::scope(|scope| {
            scope.spawn(|| {
                block_all_signals();
                // The thread is prepared for one kind of fault; the other is watched only from now on.
                m.attend();
                thread::scope(|scope| {
                    scope.spawn(|| m.guard_stores(4096).unwrap());
                });
                m.forbid_stores().unwrap();
                m.attend();
                m.store_relaxed_u64(0, 1);
                assert!(m.take_denied(&file, 0).unwrap());
            });
        });
    });
    assert!(status.success(), "{status}");
}

#[test]
fn a_handler_that_the_program_installs_later_is_put_below_ours() {
    let name = "a_handler_that_the_program_installs_later_is_put_below_ours";
    let status = in_a_child(name, || {
        let files = [file(), file(), file()];
        let (a, b) = (map(&files[0]), map(&files[1]));
        // The library notices this at the next mapping ...
        install(ends_with_7);
        let c = map(&files[2]);
        files[0].set_len(0).unwrap();
        assert_eq!(a.load_relaxed_u64(0), 0);
        // ... by a thread's first operation ...
        install(ends_with_7);
        files[1].set_len(0).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                b.attend();
                assert_eq!(b.load_relaxed_u64(0), 0);
            });
        });
        // ... and before a sleep.
        install(ends_with_7);
        c.before_sleep();
        files[2].set_len(0).unwrap();
        assert_eq!(c.load_relaxed_u64(0), 0);
        assert!(a.is_broken() && b.is_broken() && c.is_broken());
        // A fault in other memory goes to the program's handler.
        fault_elsewhere();
    });
    assert_eq!(status.code(), Some(7), "{status}");
}

/// Returns whether the kernel calls this handler.
fn is_installed(handler: Handler) -> bool {
    // SAFETY: plain calls with valid pointers; nothing is changed.
    unsafe {
        let mut present: libc::sigaction = std::mem::zeroed();
        assert_eq!(libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut present), 0);
        present.sa_sigaction == handler as *const () as usize
    }
}

#[test]
fn a_side_that_sleeps_again_and_again_notices_each_handler() {
    let name = "a_side_that_sleeps_again_and_again_notices_each_handler";
    let status = in_a_child(name, || {
        let file = file();
        let m = map(&file);
        for _ in 0..3 {
            install(ends_with_7);
            let begun = Instant::now();
            while is_installed(ends_with_7) {
                m.before_sleep();
                assert!(begun.elapsed() < Duration::from_secs(30), "the handler is not noticed");
            }
        }
    });
    assert!(status.success(), "{status}");
}

#[test]
fn a_handler_that_passes_on_to_ours_makes_no_endless_loop() {
    let status = in_a_child("a_handler_that_passes_on_to_ours_makes_no_endless_loop", || {
        let file = file();
        let m = map(&file);
        install(hands_on);
        m.before_sleep();
        fault_elsewhere();
    });
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
}

#[test]
fn the_first_handler_is_called_last() {
    let status = in_a_child("the_first_handler_is_called_last", || {
        install(ends_with_7);
        let file = file();
        let m = map(&file);
        install(hands_on);
        m.before_sleep();
        fault_elsewhere();
    });
    assert_eq!(status.code(), Some(7), "{status}");
}
