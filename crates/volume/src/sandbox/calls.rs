//! The system calls of a volume that serves.
//!
//! Three filters, of which the strictest answer counts: what is not listed at all traps; opening files is refused as if there
//! were no right to it, so that a panic can still be written; and `clone3`, whose arguments no filter can see, is said not to
//! exist, so that the C library takes `clone`.
//!
//! What io_uring does is not seen by filters. The process has only its own descriptors for it to work on, and Landlock
//! keeps paths closed there too.

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::collections::BTreeMap;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;
type Result<T> = std::result::Result<T, seccompiler::BackendError>;

/// Allowed with any arguments.
#[rustfmt::skip]
const ALLOWED: &[i64] = &[
    // Requests: guest memory by address, images by descriptor.
    libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register,
    libc::SYS_read, libc::SYS_write, libc::SYS_readv, libc::SYS_writev, libc::SYS_pread64, libc::SYS_pwrite64,
    libc::SYS_preadv, libc::SYS_pwritev, libc::SYS_preadv2, libc::SYS_pwritev2,
    libc::SYS_fsync, libc::SYS_fdatasync, libc::SYS_fallocate, libc::SYS_ftruncate, libc::SYS_lseek,
    libc::SYS_fstat, libc::SYS_newfstatat, libc::SYS_statx, libc::SYS_fstatfs,
    // Front ends and operators, on sockets that are bound already.
    libc::SYS_accept4, libc::SYS_recvfrom, libc::SYS_recvmsg, libc::SYS_sendto, libc::SYS_sendmsg,
    libc::SYS_shutdown, libc::SYS_getsockopt, libc::SYS_setsockopt, libc::SYS_getsockname, libc::SYS_getpeername,
    // Descriptors: kicks, calls, in-flight memory.
    libc::SYS_close, libc::SYS_dup, libc::SYS_dup3, libc::SYS_fcntl, libc::SYS_eventfd2, libc::SYS_memfd_create,
    libc::SYS_pipe2, libc::SYS_timerfd_create, libc::SYS_timerfd_settime, libc::SYS_signalfd4,
    libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2, libc::SYS_ppoll,
    // Memory.
    libc::SYS_munmap, libc::SYS_mremap, libc::SYS_madvise, libc::SYS_mlock, libc::SYS_munlock, libc::SYS_brk,
    libc::SYS_membarrier, libc::SYS_getrandom,
    // Threads and time.
    libc::SYS_futex, libc::SYS_sched_yield, libc::SYS_sched_setaffinity, libc::SYS_sched_getaffinity, libc::SYS_set_robust_list,
    libc::SYS_rseq, libc::SYS_gettid, libc::SYS_getpid, libc::SYS_exit, libc::SYS_exit_group, libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep, libc::SYS_nanosleep, libc::SYS_restart_syscall, libc::SYS_uname,
    // Signals, to itself: Landlock or the tgkill of `allowed` see to that.
    libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn, libc::SYS_sigaltstack,
    // The sockets' names, at the end; Landlock sees to it that it is those folders only.
    libc::SYS_unlinkat,
    #[cfg(target_arch = "x86_64")] libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")] libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")] libc::SYS_poll,
];

/// Refused with `EACCES`: what a panic tries while it writes where it happened.
const REFUSED: &[i64] = &[
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_readlinkat,
    libc::SYS_getcwd,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
];

/// The filters, to be installed in this order: each only adds to what is forbidden.
pub fn filters() -> Result<Vec<BpfProgram>> {
    let arch = std::env::consts::ARCH.try_into()?;
    let filter =
        |rules, otherwise, matching| SeccompFilter::new(rules, otherwise, matching, arch)?.try_into();
    let errno = |number: i32| SeccompAction::Errno(number.unsigned_abs());
    Ok(vec![
        filter(plain(REFUSED), SeccompAction::Allow, errno(libc::EACCES))?,
        filter(plain(&[libc::SYS_clone3]), SeccompAction::Allow, errno(libc::ENOSYS))?,
        filter(allowed()?, SeccompAction::Trap, SeccompAction::Allow)?,
    ])
}

/// Without conditions.
fn plain(calls: &[i64]) -> Rules {
    calls.iter().map(|&call| (call, Vec::new())).collect()
}

fn allowed() -> Result<Rules> {
    let argument =
        |index, operator, value: u64| SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value);
    let rule = |conditions: Vec<_>| SeccompRule::new(conditions);
    let mut rules = plain(ALLOWED);
    // The other two filters answer these.
    rules.extend(plain(REFUSED));
    rules.extend(plain(&[libc::SYS_clone3]));
    // Threads, no processes.
    let thread = libc::CLONE_THREAD as u64;
    rules.insert(libc::SYS_clone, vec![rule(vec![argument(0, SeccompCmpOp::MaskedEq(thread), thread)?])?]);
    // Signals to its own threads: a panic's abort.
    let own = u64::from(std::process::id());
    rules.insert(libc::SYS_tgkill, vec![rule(vec![argument(0, SeccompCmpOp::Eq, own)?])?]);
    // Any handler but that of the trap itself.
    let trap = libc::SIGSYS as u64;
    rules.insert(libc::SYS_rt_sigaction, vec![rule(vec![argument(0, SeccompCmpOp::Ne, trap)?])?]);
    // Memory is readable and writable, never executable.
    let exec = libc::PROT_EXEC as u64;
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![rule(vec![argument(2, SeccompCmpOp::MaskedEq(exec), 0)?])?]);
    }
    // Names of threads, and of memory by the allocator.
    let names = [libc::PR_SET_NAME as u64, libc::PR_SET_VMA as u64];
    let name = |n| rule(vec![argument(0, SeccompCmpOp::Eq, n)?]);
    rules.insert(libc::SYS_prctl, names.into_iter().map(name).collect::<Result<_>>()?);
    // What a file or device can do: its size, blocks, discard; whether a socket blocks.
    let ioctls = [
        BLKGETSIZE64,
        BLKSSZGET,
        BLKPBSZGET,
        BLKDISCARD,
        BLKZEROOUT,
        BLKDISCARDZEROES,
        BLKROGET,
        FIONBIO,
        FIONREAD,
    ];
    let ioctl = |n| rule(vec![argument(1, SeccompCmpOp::Eq, n)?]);
    rules.insert(libc::SYS_ioctl, ioctls.into_iter().map(ioctl).collect::<Result<_>>()?);
    // Resource limits may be looked at.
    rules.insert(
        libc::SYS_prlimit64,
        vec![rule(vec![SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?])?],
    );
    Ok(rules)
}

// linux/fs.h and asm-generic/ioctls.h.
const BLKROGET: u64 = 0x125e;
const BLKSSZGET: u64 = 0x1268;
const BLKGETSIZE64: u64 = 0x8008_1272;
const BLKDISCARD: u64 = 0x1277;
const BLKPBSZGET: u64 = 0x127b;
const BLKDISCARDZEROES: u64 = 0x127c;
const BLKZEROOUT: u64 = 0x127f;
const FIONREAD: u64 = 0x541b;
const FIONBIO: u64 = 0x5421;
