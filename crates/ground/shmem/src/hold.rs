//! Holding the stores of other threads to a range for a moment, by write protection with userfaultfd.
//!
//! A thread that stores to a protected page sleeps in its fault until it is woken. Then it looks at its page tables again,
//! and stores to the page that is there by then. Loads continue. The kernel ensures that no store of another processor to the
//! old page is still in progress when the call that protects has returned.
//!
//! - *No one reads the events.* A thread that faults is put into a queue, and the call that wakes a range takes all threads
//!   in it, whether or not their event was read. No thread comes too late for this call: a fault is in the queue before it
//!   releases the kernel's lock on the mapping, for which the exchange of the pages waits; a later fault finds the new pages,
//!   which are not protected.
//! - *Absent pages* are not protected by kernels before 6.4, so there they are made present first. They may be the page of
//!   zeros.
//! - *System calls that store to the range* (`read`) sleep too, if this process is allowed to have that: root,
//!   `CAP_SYS_PTRACE`, a user that may open `/dev/userfaultfd`, or every user with `vm.unprivileged_userfaultfd = 1`. For all
//!   others, only user mode is held ([`Reach`]); then the kernel's own stores fail (`EFAULT`, or fewer bytes than requested).
//! - *The holding thread itself* must not store to the range, or it sleeps for ever. Therefore its signals are blocked
//!   ([`SignalsBlocked`]), and it allocates nothing.
//! - *A child* that another thread forks meanwhile has the old pages, with their content at that moment, and no protection.
//! - *Huge pages* are split by the kernel where the range ends.
//! - *A range that is registered with another userfaultfd* is refused (`EBUSY`).
//!
//! # Without userfaultfd
//!
//! Container engines forbid the system call, and private pages of a file (a program's initialized data) cannot be protected
//! with it. In these cases, on x86-64 with Linux 5.14, `mprotect` makes the range read-only, and the handler of SIGSEGV
//! sleeps until the exchange is over ([`is_survived`]). This holds instructions only, as in user mode. A thread that blocks
//! SIGSEGV would be killed, so the hold fails if there is such a thread. (A thread is killed if it blocks SIGSEGV in the few
//! microseconds between this check and the exchange, and stores to the range then.)

use crate::guard;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, Updater, ioctl};
use rustix::mm::{Advice, MprotectFlags, ProtFlags, UserfaultfdFlags, madvise, mprotect, userfaultfd};
use rustix::process::getpid;
use rustix::thread::futex;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{fs, io, ptr, thread};

/// Which stores are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Stores of instructions and of system calls.
    All,
    /// Stores of instructions.
    UserMode,
    /// Stores of instructions, without userfaultfd.
    ByHandler,
}

/// `struct uffdio_api` of linux/userfaultfd.h.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Span {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Register {
    range: Span,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct WriteProtect {
    range: Span,
    mode: u64,
}

const UFFD_API: u64 = 0xaa;
const PAGEFAULT_FLAG_WP: u64 = 1;
const WP_UNPOPULATED: u64 = 1 << 13;
const REGISTER_MODE_WP: u64 = 2;
const WRITEPROTECT_MODE_WP: u64 = 1;
const USER_MODE_ONLY: u32 = 1;

/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`, and so on.
const UFFDIO_API: Opcode = 0xc018_aa3f;
const UFFDIO_REGISTER: Opcode = 0xc020_aa00;
const UFFDIO_UNREGISTER: Opcode = 0x8010_aa01;
const UFFDIO_WAKE: Opcode = 0x8010_aa02;
const UFFDIO_WRITEPROTECT: Opcode = 0xc018_aa06;
/// `_IO(0xaa, 0)`, of `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;

/// A range to which stores can be held. When this is dropped, the held stores continue.
#[derive(Debug)]
pub(crate) struct Hold {
    how: How,
    range: Range<usize>,
    is_replaced: bool,
}

#[derive(Debug)]
enum How {
    Userfaultfd(OwnedFd),
    /// The protection that the range has, and a lock.
    Handler(ProtFlags, #[allow(dead_code)] MutexGuard<'static, ()>), // One range at a time.
}

impl Hold {
    /// Prepares to hold stores to a range of private pages with this protection, with the widest reach that this process may
    /// have.
    pub fn widest(range: Range<usize>, prot: ProtFlags) -> io::Result<Self> {
        let with = |reach| Self::new(range.clone(), prot, reach);
        with(Reach::All).or_else(|_| with(Reach::UserMode)).or_else(|error| match error.raw_os_error() {
            Some(libc::EPERM | libc::ENOSYS | libc::EINVAL) => with(Reach::ByHandler),
            _ => Err(error),
        })
    }

    pub fn new(range: Range<usize>, prot: ProtFlags, reach: Reach) -> io::Result<Self> {
        if reach == Reach::ByHandler {
            return Self::by_handler(range, prot);
        }
        let mut register = Register { range: span(&range), mode: REGISTER_MODE_WP, ioctls: 0 };
        let uffd = uffd(reach)?;
        // A kernel that does not know a feature has done nothing.
        let protects_absent = agree(&uffd, PAGEFAULT_FLAG_WP | WP_UNPOPULATED).is_ok();
        if !protects_absent {
            agree(&uffd, PAGEFAULT_FLAG_WP)?;
        }
        // SAFETY: the request reads and writes such a structure, which contains no pointers. The registered range continues
        // to work as before until it is protected.
        unsafe { ioctl(&uffd, Updater::<UFFDIO_REGISTER, Register>::new(&mut register)) }?;
        // The value is made only now, because dropping it unregisters: kernels before 6.15 would unregister what another
        // userfaultfd has registered.
        let hold = Self { how: How::Userfaultfd(uffd), range, is_replaced: false };
        if !protects_absent {
            hold.populate();
        }
        Ok(hold)
    }

    fn by_handler(range: Range<usize>, prot: ProtFlags) -> io::Result<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: it loads from a page, which changes nothing.
        let looks = unsafe { madvise(range.start as *mut c_void, 4096, Advice::LinuxPopulateRead) };
        if !cfg!(target_arch = "x86_64") || looks.is_err() {
            return Err(Errno::NOSYS.into());
        }
        guard::STORES.install()?;
        if does_any_thread_block(libc::SIGSEGV)? {
            return Err(Errno::PERM.into());
        }
        Ok(Self { how: How::Handler(prot, alone), range, is_replaced: false })
    }

    /// Makes all pages present.
    fn populate(&self) {
        let start = self.range.start as *mut c_void;
        // SAFETY: it loads from all pages, which changes nothing.
        if unsafe { madvise(start, self.range.len(), Advice::LinuxPopulateRead) }.is_ok() {
            return;
        }
        // Linux before 5.14.
        for at in self.range.clone().step_by(4096) {
            // SAFETY: the range can be read, as the caller of `Mapping::place` has ensured; the value of the byte is not
            // used.
            unsafe { ptr::read_volatile(at as *const u8) };
        }
    }

    /// Holds the stores of all other threads from now on. The caller must not store to the range any more, and must have
    /// blocked its signals.
    pub fn begin(&self, _: &SignalsBlocked) -> Result<(), Errno> {
        match &self.how {
            How::Userfaultfd(uffd) => write_protect(uffd, &self.range, WRITEPROTECT_MODE_WP),
            How::Handler(prot, _) => {
                HELD.begin(&self.range, *prot);
                self.protect(*prot - ProtFlags::WRITE)
            }
        }
    }

    fn protect(&self, prot: ProtFlags) -> Result<(), Errno> {
        let flags = MprotectFlags::from_bits_retain(prot.bits());
        // SAFETY: a store waits in the handler until this is dropped; everything else continues as before.
        unsafe { mprotect(self.range.start as *mut c_void, self.range.len(), flags) }
    }

    /// Records that other pages have taken the place of the range.
    pub fn replaced(&mut self) {
        self.is_replaced = true;
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Errors are ignored: they mean that the program has unmapped the range meanwhile.
        match &self.how {
            // Closing the descriptor would wake the sleepers too, but a child that was forked meanwhile has it as well.
            How::Userfaultfd(uffd) => {
                if !self.is_replaced {
                    let _ = write_protect(uffd, &self.range, 0);
                    // SAFETY: the request takes a range.
                    let _ = unsafe { ioctl(uffd, Setter::<UFFDIO_UNREGISTER, Span>::new(span(&self.range))) };
                }
                // SAFETY: the request takes a range, which contains no pointers, and only wakes the threads that sleep there.
                let _ = unsafe { ioctl(uffd, Setter::<UFFDIO_WAKE, Span>::new(span(&self.range))) };
            }
            How::Handler(prot, _) => {
                if !self.is_replaced {
                    let _ = self.protect(*prot);
                }
                HELD.end();
            }
        }
    }
}

fn span(range: &Range<usize>) -> Span {
    Span { start: range.start as u64, len: range.len() as u64 }
}

fn agree(uffd: &OwnedFd, features: u64) -> Result<(), Errno> {
    let mut api = Api { api: UFFD_API, features, ioctls: 0 };
    // SAFETY: the request reads and writes such a structure, which contains no pointers.
    unsafe { ioctl(uffd, Updater::<UFFDIO_API, Api>::new(&mut api)) }
}

fn write_protect(uffd: &OwnedFd, range: &Range<usize>, mode: u64) -> Result<(), Errno> {
    let mut wanted = WriteProtect { range: span(range), mode };
    // SAFETY: the request reads and writes such a structure, which contains no pointers. A thread that faults is woken when
    // the hold is dropped.
    unsafe { ioctl(uffd, Updater::<UFFDIO_WRITEPROTECT, WriteProtect>::new(&mut wanted)) }
}

fn uffd(reach: Reach) -> io::Result<OwnedFd> {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    let user_mode = UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY);
    // SAFETY: nothing is registered with it yet.
    let made = unsafe {
        userfaultfd(flags | if reach == Reach::All { UserfaultfdFlags::empty() } else { user_mode })
    };
    match made {
        // A process without this right may have access to the device, which exists since Linux 6.1.
        Err(Errno::PERM) if reach == Reach::All => uffd_of_device(flags).map_err(|_| Errno::PERM.into()),
        made => Ok(made?),
    }
}

fn uffd_of_device(flags: UserfaultfdFlags) -> io::Result<OwnedFd> {
    let device = open(c"/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    // SAFETY: this request takes flags, and returns a new descriptor or a negative number.
    unsafe {
        match libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags.bits()) {
            fd @ 0.. => Ok(OwnedFd::from_raw_fd(fd)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// The range whose stores the handler holds, if there is one.
struct Held {
    start: AtomicUsize,
    /// 0 if there is no range.
    end: AtomicUsize,
    prot: AtomicU32,
    /// The process that holds: a child has a copy of all this.
    process: AtomicI32,
    /// Number of beginnings and ends; odd while there is a range.
    turn: AtomicU32,
}

static HELD: Held = Held {
    start: AtomicUsize::new(0),
    end: AtomicUsize::new(0),
    prot: AtomicU32::new(0),
    process: AtomicI32::new(0),
    turn: AtomicU32::new(0),
};

impl Held {
    fn begin(&self, range: &Range<usize>, prot: ProtFlags) {
        self.start.store(range.start, Ordering::SeqCst);
        self.end.store(range.end, Ordering::SeqCst);
        self.prot.store(prot.bits(), Ordering::SeqCst);
        self.process.store(getpid().as_raw_nonzero().get(), Ordering::SeqCst);
        self.turn.fetch_add(1, Ordering::SeqCst);
    }

    fn end(&self) {
        self.end.store(0, Ordering::SeqCst);
        self.turn.fetch_add(1, Ordering::SeqCst);
        let _ = futex::wake(&self.turn, futex::Flags::PRIVATE, u32::MAX >> 1);
    }
}

/// Returns whether a fault is a store that is held or was held, so that the instruction can be tried again. Waits until the
/// hold is over. The handler of SIGSEGV calls this.
pub(crate) fn is_survived(address: usize, is_store: bool) -> bool {
    let mut seen = HELD.turn.load(Ordering::SeqCst);
    if seen == 0 || !is_store {
        return false;
    }
    loop {
        let range = HELD.start.load(Ordering::SeqCst)..HELD.end.load(Ordering::SeqCst);
        if seen % 2 == 1 && range.contains(&address) {
            let is_here = HELD.process.load(Ordering::SeqCst) == getpid().as_raw_nonzero().get();
            let patience = (!is_here).then_some(&futex::Timespec { tv_sec: 1, tv_nsec: 0 });
            let waited = futex::wait(&HELD.turn, futex::Flags::PRIVATE, seen, patience);
            // This is a child that was forked meanwhile, whose pages are not replaced. (A child of vfork has been woken.)
            if waited == Err(Errno::TIMEDOUT) {
                let flags = MprotectFlags::from_bits_retain(HELD.prot.load(Ordering::SeqCst));
                // SAFETY: it restores the protection that the range had.
                return unsafe { mprotect(range.start as *mut c_void, range.len(), flags) }.is_ok();
            }
        } else {
            let page = address / 4096 * 4096;
            // The hold may be over. SAFETY: it faults as a store would, and stores nothing.
            if unsafe { madvise(page as *mut c_void, 4096, Advice::LinuxPopulateWrite) }.is_ok() {
                return true;
            }
        }
        let turn = HELD.turn.load(Ordering::SeqCst);
        if turn == seen && !(turn % 2 == 1 && range.contains(&address)) {
            return false;
        }
        seen = turn;
    }
}

/// Number of looks at a thread that blocks a signal and wants a CPU: some seconds, since on a busy machine the thread may
/// wait that long for its turn. A sleeping thread is looked at 300 times, for a quarter of a second.
const PATIENCE: i32 = 6000;

/// Returns whether any thread blocks the signal, and not only for a moment, as the C library does in some of its functions.
fn does_any_thread_block(signal: libc::c_int) -> io::Result<bool> {
    for thread in fs::read_dir("/proc/self/task")? {
        let status = thread?.path().join("status");
        // `None`: the thread does not block the signal. Otherwise: whether it waits for something other than a CPU.
        let blocks = || {
            // A thread that has ended meanwhile blocks nothing.
            let status = fs::read_to_string(&status).ok()?;
            let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
            let blocked = field("SigBlk:").and_then(|set| u64::from_str_radix(set, 16).ok());
            let is_blocked = blocked.is_none_or(|set| set & 1 << (signal - 1) != 0);
            is_blocked.then(|| !field("State:").is_some_and(|state| state.starts_with('R')))
        };
        let (mut patience, mut looks) = (PATIENCE, 0);
        let is_for_long = loop {
            let Some(sleeps) = blocks() else { break false };
            patience -= if sleeps { PATIENCE / 300 } else { 1 };
            if patience <= 0 {
                break true;
            }
            thread::sleep(Duration::from_micros(if looks < 30 { 100 } else { 1000 }));
            looks += 1;
        };
        if is_for_long {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Blocks this thread's signals until it is dropped, except those that the thread's own instructions cause.
pub(crate) struct SignalsBlocked {
    before: u64,
    /// The value belongs to this thread.
    _thread: PhantomData<*const ()>,
}

impl SignalsBlocked {
    pub fn new() -> Self {
        let caused = [libc::SIGBUS, libc::SIGSEGV, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP];
        let all = !caused.iter().fold(0, |set, signal| set | 1 << (signal - 1));
        Self { before: change(libc::SIG_BLOCK, all), _thread: PhantomData }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        change(libc::SIG_SETMASK, self.before);
    }
}

/// Calls the kernel directly: the C library's function leaves out the signals that it uses itself, whose handlers store too.
fn change(how: libc::c_int, set: u64) -> u64 {
    let mut before = 0_u64;
    // SAFETY: the kernel's signal sets have 64 bits, as the variables behind the pointers do. The call cannot fail.
    unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, how, &raw const set, &raw mut before, size_of::<u64>());
    }
    before
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mapping, Placed, Protection, SharedMemory};
    use rustix::mm::{MapFlags, mmap_anonymous, munmap};
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::ptr::NonNull;
    use std::sync::atomic::{AtomicBool, AtomicU64};

    const PAGE: usize = 4096;
    const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

    /// Runs only one of these tests at a time: they depend on timing, and one of them forks.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the reaches that this process may have.
    fn reaches() -> Vec<Reach> {
        let may = |reach: &Reach| match reach {
            Reach::ByHandler => true,
            Reach::All | Reach::UserMode => match uffd(*reach) {
                Ok(_) => true,
                Err(error) => {
                    kit::skip!("{reach:?} is left out: userfaultfd: {error}");
                    false
                }
            },
        };
        [Reach::All, Reach::UserMode, Reach::ByHandler].into_iter().filter(may).collect()
    }

    /// Private pages which are moved one by one, while threads store to those around the page whose turn it is.
    struct Pages {
        start: NonNull<u8>,
        count: usize,
        file: File,
        arena: Mapping,
        turn: AtomicUsize,
        is_over: AtomicBool,
    }

    // SAFETY: the pages are only used as atomics, or as mutexes.
    unsafe impl Sync for Pages {}

    impl Pages {
        fn new(count: usize) -> Self {
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            file.set_len((count * PAGE) as u64).unwrap();
            let arena = Mapping::of_file(&file, 0, count * PAGE, Protection::ReadWrite).unwrap();
            // SAFETY: a new mapping at an address of the kernel's choice affects no other memory.
            let start =
                unsafe { mmap_anonymous(ptr::null_mut(), count * PAGE, READ_WRITE, MapFlags::PRIVATE) };
            let start = NonNull::new(start.unwrap().cast()).unwrap();
            Self { start, count, file, arena, turn: AtomicUsize::new(0), is_over: AtomicBool::new(false) }
        }

        fn page(&self, n: usize) -> NonNull<u8> {
            assert!(n < self.count);
            // SAFETY: inside the pages.
            unsafe { self.start.add(n * PAGE) }
        }

        fn word(&self, page: usize, word: usize) -> &AtomicU64 {
            assert!(word < PAGE / 8);
            // SAFETY: inside the pages, which stay mapped, aligned, and only used as atomics.
            unsafe { AtomicU64::from_ptr(self.page(page).cast::<u64>().add(word).as_ptr()) }
        }

        fn place(&self, first: usize, count: usize, reach: Reach) -> io::Result<Placed> {
            let at = first * PAGE;
            let (file, start) = (self.file.as_fd(), self.page(first));
            // SAFETY: the pages belong to the test, and are not part of a stack.
            unsafe { self.arena.exchange(file, at as u64, start, count * PAGE, PAGE, Some(reach)) }
        }

        /// Moves all pages, `step` at a time.
        fn place_all(&self, step: usize, reach: Reach) -> Vec<Placed> {
            let place = |n| {
                self.turn.store(n, Ordering::Relaxed);
                let placed = self.place(n, step.min(self.count - n), reach);
                // If this fails, the other threads end with the test.
                self.is_over.store(placed.is_err(), Ordering::Relaxed);
                placed.unwrap()
            };
            let placed: Vec<_> = (0..self.count).step_by(step).map(place).collect();
            self.is_over.store(true, Ordering::Relaxed);
            assert!(placed.iter().all(|placed| placed.is_in_place().unwrap()));
            placed
        }

        /// Calls `what` for the pages around the one whose turn it is, until all have been moved. Returns how often for each
        /// page.
        fn around(&self, mut what: impl FnMut(usize)) -> Vec<u64> {
            let mut done = vec![0; self.count];
            while !self.is_over.load(Ordering::Relaxed) {
                let turn = self.turn.load(Ordering::Relaxed);
                let first = turn.saturating_sub(1);
                for (at, done) in done.iter_mut().skip(first).take(4).enumerate() {
                    what(first + at);
                    *done += 1;
                }
            }
            done
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: made by `new`, and not used any more.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), self.count * PAGE) };
        }
    }

    fn abandon(placed: Vec<Placed>) {
        placed.into_iter().for_each(Placed::abandon);
    }

    #[test]
    fn no_store_is_lost() {
        let _alone = alone();
        for (reach, step) in reaches().into_iter().flat_map(|reach| [(reach, 1), (reach, 7)]) {
            let pages = Pages::new(if reach == Reach::ByHandler { 1000 } else { 3000 });
            thread::scope(|scope| {
                // Each thread has one word of its own and one for exchanges, and all threads share another.
                let threads: Vec<_> = (0..3)
                    .map(|thread| {
                        let pages = &pages;
                        scope.spawn(move || {
                            pages.around(|n| {
                                let own = pages.word(n, thread);
                                own.store(own.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                                pages.word(n, 100).fetch_add(1, Ordering::Relaxed);
                                let count = pages.word(n, PAGE / 8 - 1 - thread);
                                let old = count.load(Ordering::Relaxed);
                                count
                                    .compare_exchange(old, old + 1, Ordering::AcqRel, Ordering::Relaxed)
                                    .unwrap();
                            })
                        })
                    })
                    .collect();
                let placed = pages.place_all(step, reach);
                let done: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
                assert!(done[0].iter().sum::<u64>() > pages.count as u64, "it was done all the time");
                for n in 0..pages.count {
                    for (thread, done) in done.iter().enumerate() {
                        assert_eq!(pages.word(n, thread).load(Ordering::Relaxed), done[n], "{reach:?} {n}");
                        assert_eq!(pages.word(n, PAGE / 8 - 1 - thread).load(Ordering::Relaxed), done[n]);
                    }
                    let all: u64 = done.iter().map(|done| done[n]).sum();
                    assert_eq!(pages.word(n, 100).load(Ordering::Relaxed), all, "{reach:?} {n}");
                    assert_eq!(pages.arena.load_relaxed_u64(n * PAGE + 800), all, "in the file");
                }
                abandon(placed);
            });
        }
    }

    #[test]
    fn mutexes_keep_their_owners() {
        let _alone = alone();
        for reach in reaches() {
            let pages = Pages::new(1500);
            thread::scope(|scope| {
                let threads: Vec<_> = (0..3)
                    .map(|_| {
                        let pages = &pages;
                        scope.spawn(move || {
                            pages.around(|n| {
                                let mutex = pages.page(n).as_ptr().cast::<libc::pthread_mutex_t>();
                                let count = pages.word(n, 64);
                                // SAFETY: zeros are an unlocked mutex of the C library.
                                unsafe {
                                    assert_eq!(libc::pthread_mutex_lock(mutex), 0);
                                    let now = count.load(Ordering::Relaxed);
                                    if now.is_multiple_of(64) {
                                        // Other threads then sleep in a system call, and are woken after the exchange.
                                        thread::yield_now();
                                    }
                                    count.store(now + 1, Ordering::Relaxed);
                                    assert_eq!(libc::pthread_mutex_unlock(mutex), 0);
                                }
                            })
                        })
                    })
                    .collect();
                let placed = pages.place_all(1, reach);
                let done: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
                for n in 0..pages.count {
                    let all: u64 = done.iter().map(|done| done[n]).sum();
                    assert_eq!(pages.word(n, 64).load(Ordering::Relaxed), all, "{reach:?} {n}");
                }
                abandon(placed);
            });
        }
    }

    #[test]
    fn system_calls_that_store_wait_or_fail() {
        let _alone = alone();
        for reach in reaches() {
            let pages = Pages::new(1500);
            let (reader, mut writer) = io::pipe().unwrap();
            let failed = AtomicU64::new(0);
            thread::scope(|scope| {
                let (pages, failed) = (&pages, &failed);
                let thread = scope.spawn(move || {
                    let mut number = 0_u64;
                    pages.around(|n| {
                        number += 1;
                        writer.write_all(&number.to_ne_bytes()).unwrap();
                        loop {
                            // SAFETY: the kernel stores to a word of the pages.
                            match unsafe {
                                libc::read(reader.as_raw_fd(), pages.word(n, 5).as_ptr().cast(), 8)
                            } {
                                8 => break,
                                -1 if io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT) => {
                                    failed.fetch_add(1, Ordering::Relaxed);
                                }
                                n => panic!("{n} bytes"),
                            }
                        }
                        assert_eq!(pages.word(n, 5).load(Ordering::Relaxed), number, "{reach:?} {n}");
                    })
                });
                let placed = pages.place_all(1, reach);
                thread.join().unwrap();
                abandon(placed);
            });
            if reach == Reach::All {
                assert_eq!(failed.load(Ordering::Relaxed), 0);
            }
        }
    }

    #[test]
    fn a_signal_of_the_mover_waits() {
        static AT: AtomicUsize = AtomicUsize::new(0);
        static RUNS: AtomicU64 = AtomicU64::new(0);
        extern "C" fn handler(_: libc::c_int) {
            // SAFETY: this is a word of the page whose turn it is, as long as signals are sent.
            unsafe { AtomicU64::from_ptr(AT.load(Ordering::Relaxed) as *mut u64) }
                .fetch_add(1, Ordering::Relaxed);
            RUNS.fetch_add(1, Ordering::Relaxed);
        }
        let _alone = alone();
        // SAFETY: the handler does only what a handler may do.
        unsafe { libc::signal(libc::SIGUSR2, handler as *const () as usize) };
        // The last round has no hold.
        for reach in reaches().into_iter().map(Some).chain([None]) {
            let pages = Pages::new(1000);
            AT.store(pages.word(0, 3).as_ptr() as usize, Ordering::Relaxed);
            RUNS.store(0, Ordering::Relaxed);
            let (process, mover) = (getpid(), rustix::thread::gettid());
            thread::scope(|scope| {
                let pages = &pages;
                let sender = scope.spawn(move || {
                    pages.around(|_| {
                        let [process, mover] = [process, mover].map(|id| id.as_raw_nonzero().get());
                        // SAFETY: the thread waits for this one. (The C library's function blocks all signals meanwhile.)
                        unsafe { libc::syscall(libc::SYS_tgkill, process, mover, libc::SIGUSR2) };
                    })
                });
                let _over = kit::wait::AtEnd(|| pages.is_over.store(true, Ordering::Relaxed));
                // On a busy machine, all pages could be moved before the sender begins.
                kit::wait::spin_for("a signal", || (RUNS.load(Ordering::Relaxed) > 0).then_some(()));
                let mut placed = Vec::new();
                for n in 0..pages.count {
                    AT.store(pages.word(n, 3).as_ptr() as usize, Ordering::Relaxed);
                    pages.turn.store(n, Ordering::Relaxed);
                    let (file, at) = (pages.file.as_fd(), (n * PAGE) as u64);
                    // SAFETY: the pages belong to the test, and are not part of a stack. Without a hold, nothing stores to
                    // them: only this thread's handler does, and its signal is blocked meanwhile.
                    let one = unsafe { pages.arena.exchange(file, at, pages.page(n), PAGE, PAGE, reach) };
                    pages.is_over.store(one.is_err(), Ordering::Relaxed);
                    placed.push(one.unwrap());
                }
                pages.is_over.store(true, Ordering::Relaxed);
                sender.join().unwrap();
                let all: u64 = (0..pages.count).map(|n| pages.word(n, 3).load(Ordering::Relaxed)).sum();
                assert!(all > 0 && all == RUNS.load(Ordering::Relaxed), "{reach:?}: {all}");
                abandon(placed);
            });
        }
    }

    #[test]
    fn another_threads_child_is_not_held() {
        let _alone = alone();
        for reach in reaches() {
            let pages = Pages::new(1500);
            thread::scope(|scope| {
                let pages = &pages;
                let forks = scope.spawn(move || {
                    pages.around(|n| {
                        // SAFETY: the child only loads, stores and ends.
                        let child = unsafe { libc::fork() };
                        if child == 0 {
                            // If the child shared the page with its parent, its store would be visible to the parent.
                            pages.word(n, 9).fetch_add(1, Ordering::Relaxed);
                            // SAFETY: `_exit` takes only a number, and ends the child without running any code of its parent.
                            unsafe { libc::_exit(0) };
                        }
                        let mut status = -1;
                        // SAFETY: the child is this thread's own.
                        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                        assert_eq!(status, 0);
                    })
                });
                let stores = scope.spawn(move || {
                    pages.around(|n| {
                        pages.word(n, 8).fetch_add(1, Ordering::Relaxed);
                    })
                });
                let placed = pages.place_all(1, reach);
                forks.join().unwrap();
                let done = stores.join().unwrap();
                assert!((0..pages.count).all(|n| pages.word(n, 8).load(Ordering::Relaxed) == done[n]));
                abandon(placed);
            });
        }
    }

    #[test]
    fn after_an_error_stores_go_on() {
        let _alone = alone();
        for reach in reaches() {
            let pages = Pages::new(64);
            thread::scope(|scope| {
                let pages = &pages;
                pages.turn.store(10, Ordering::Relaxed);
                let stores = scope.spawn(move || {
                    pages.around(|n| {
                        pages.word(n, 8).fetch_add(1, Ordering::Relaxed);
                    })
                });
                pages.file.set_len(10 * PAGE as u64).unwrap();
                for _ in 0..300 {
                    assert!(pages.place(10, 3, reach).is_err(), "the file is too short");
                }
                pages.is_over.store(true, Ordering::Relaxed);
                let done = stores.join().unwrap();
                assert!((0..pages.count).all(|n| pages.word(n, 8).load(Ordering::Relaxed) == done[n]));
            });
            if reach == Reach::ByHandler {
                continue;
            }
            let _other =
                Hold::new(pages.start.as_ptr() as usize..pages.page(1).as_ptr() as usize, READ_WRITE, reach)
                    .unwrap();
            assert_eq!(pages.place(0, 2, reach).unwrap_err().raw_os_error(), Some(libc::EBUSY));
            pages.word(0, 8).store(77, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_huge_page_is_split() {
        const HUGE: usize = 2 << 20;
        let _alone = alone();
        for reach in reaches() {
            let pages = Pages::new(2 * HUGE / PAGE);
            // SAFETY: it changes nothing that can be seen.
            let _ = unsafe { madvise(pages.start.as_ptr().cast(), 2 * HUGE, Advice::LinuxHugepage) };
            (0..pages.count).for_each(|n| pages.word(n, 9).store(n as u64, Ordering::Relaxed));
            let middle = pages.count / 2;
            pages.turn.store(middle, Ordering::Relaxed);
            thread::scope(|scope| {
                let pages = &pages;
                let stores = scope.spawn(move || {
                    pages.around(|n| {
                        pages.word(n, 8).fetch_add(1, Ordering::Relaxed);
                    })
                });
                let mut placed: Vec<_> = (middle..middle + 30).map(|n| pages.place(n, 1, reach)).collect();
                placed.push(pages.place(0, middle, reach));
                pages.is_over.store(true, Ordering::Relaxed);
                let done = stores.join().unwrap();
                for (n, done) in done.into_iter().enumerate() {
                    assert_eq!(pages.word(n, 9).load(Ordering::Relaxed), n as u64);
                    assert_eq!(pages.word(n, 8).load(Ordering::Relaxed), done);
                }
                abandon(placed.into_iter().map(Result::unwrap).collect());
            });
        }
    }
}
