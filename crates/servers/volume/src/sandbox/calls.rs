//! The system calls of a running volume.
//!
//! There are three filters, of which the strictest answer counts. A call that is not listed traps. Opening a file fails
//! as if permission was denied, so that a panic can still be printed. `clone3`, whose arguments no filter can see,
//! fails as if it did not exist, so that the C library uses `clone`.
//!
//! Filters do not see the operations of an io_uring. So no ring can be created any more, and the existing rings were
//! restricted when they were created: to a few operations, on the images (`backend/uring/ring.rs`).
//!
//! Descriptors still arrive with the messages of a front end: an attacker who has taken the process over *and* controls
//! its front end gets the front end's descriptors. A list of calls cannot distinguish those descriptors from the
//! process' own. It does prevent that any of them is bound, connected, used to open files, or made to send signals; on
//! kernels before 6.7, such a descriptor could be another process' io_uring.

use crate::backend::uring::ring::{REGISTER_BUFFERS, REGISTER_ENABLE_RINGS, UNREGISTER_BUFFERS};
use crate::sandbox::Role;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::collections::BTreeMap;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;
type Result<T> = std::result::Result<T, seccompiler::BackendError>;

/// Calls that are allowed with any arguments.
#[rustfmt::skip]
const ALLOWED: &[i64] = &[
    // Requests: guest memory by address, images by descriptor.
    libc::SYS_io_uring_enter,
    libc::SYS_read, libc::SYS_write, libc::SYS_readv, libc::SYS_writev, libc::SYS_pread64, libc::SYS_pwrite64,
    libc::SYS_preadv, libc::SYS_pwritev, libc::SYS_preadv2, libc::SYS_pwritev2,
    libc::SYS_fsync, libc::SYS_fdatasync, libc::SYS_fallocate, libc::SYS_ftruncate, libc::SYS_lseek,
    libc::SYS_fstat, libc::SYS_newfstatat, libc::SYS_statx, libc::SYS_fstatfs,
    // Front ends and operators, on sockets that are already bound.
    libc::SYS_accept4, libc::SYS_recvfrom, libc::SYS_recvmsg, libc::SYS_sendmsg, libc::SYS_shutdown,
    libc::SYS_getsockname, libc::SYS_getpeername,
    // Descriptors: kicks, calls, in-flight memory.
    libc::SYS_close, libc::SYS_eventfd2, libc::SYS_memfd_create, libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2, libc::SYS_ppoll,
    // The end of the turn.
    libc::SYS_flock,
    // Memory.
    libc::SYS_munmap, libc::SYS_mremap, libc::SYS_madvise, libc::SYS_mlock, libc::SYS_munlock, libc::SYS_brk,
    libc::SYS_membarrier, libc::SYS_getrandom,
    // Threads and time.
    libc::SYS_futex, libc::SYS_sched_yield, libc::SYS_sched_getaffinity, libc::SYS_set_robust_list,
    libc::SYS_rseq, libc::SYS_gettid, libc::SYS_getpid, libc::SYS_exit, libc::SYS_exit_group, libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep, libc::SYS_nanosleep, libc::SYS_restart_syscall, libc::SYS_uname,
    // Signals, which can only go to this process: Landlock or the rule for tgkill in `allowed` ensure that.
    libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn, libc::SYS_sigaltstack,
    #[cfg(target_arch = "x86_64")] libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")] libc::SYS_poll,
];

/// Calls of a holder that are allowed with any arguments. It has one thread, which never waits except in `poll`.
#[rustfmt::skip]
const ALLOWED_TO_HOLDER: &[i64] = &[
    // QEMU and engines, on sockets that are already bound.
    libc::SYS_accept4, libc::SYS_recvfrom, libc::SYS_recvmsg, libc::SYS_sendmsg, libc::SYS_shutdown, libc::SYS_ppoll,
    // Descriptors: kicks, guest memory by name only, the lock of the last engine, the log.
    libc::SYS_read, libc::SYS_write, libc::SYS_writev, libc::SYS_close, libc::SYS_fstat, libc::SYS_newfstatat, libc::SYS_statx, libc::SYS_flock,
    // Memory.
    libc::SYS_munmap, libc::SYS_mremap, libc::SYS_madvise, libc::SYS_brk, libc::SYS_getrandom,
    // Time, and the end.
    libc::SYS_futex, libc::SYS_sched_yield, libc::SYS_gettid, libc::SYS_getpid, libc::SYS_exit, libc::SYS_exit_group,
    libc::SYS_clock_gettime, libc::SYS_restart_syscall,
    libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn, libc::SYS_sigaltstack,
    #[cfg(target_arch = "x86_64")] libc::SYS_poll,
];

/// Calls that fail with `EACCES`: those that a panic makes while it prints its location.
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

/// Returns the filters for a process with this role, to be installed in this order. Each only adds restrictions.
pub fn filters(role: Role) -> Result<Vec<BpfProgram>> {
    let arch = std::env::consts::ARCH.try_into()?;
    let filter =
        |rules, otherwise, matching| SeccompFilter::new(rules, otherwise, matching, arch)?.try_into();
    let errno = |number: i32| SeccompAction::Errno(number.unsigned_abs());
    Ok(vec![
        filter(plain(REFUSED), SeccompAction::Allow, errno(libc::EACCES))?,
        filter(plain(&[libc::SYS_clone3]), SeccompAction::Allow, errno(libc::ENOSYS))?,
        filter(allowed(role)?, SeccompAction::Trap, SeccompAction::Allow)?,
    ])
}

/// Returns rules without conditions.
fn plain(calls: &[i64]) -> Rules {
    calls.iter().map(|&call| (call, Vec::new())).collect()
}

fn allowed(role: Role) -> Result<Rules> {
    let argument =
        |index, operator, value: u64| SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value);
    let rule = |conditions: Vec<_>| SeccompRule::new(conditions);
    let mut rules = plain(if role == Role::Holder { ALLOWED_TO_HOLDER } else { ALLOWED });
    // The other two filters answer these.
    rules.extend(plain(REFUSED));
    rules.extend(plain(&[libc::SYS_clone3]));
    let one_of = |index, values: &[u64]| {
        let one = |&value| rule(vec![argument(index, SeccompCmpOp::Eq, value)?]);
        values.iter().map(one).collect::<Result<Vec<_>>>()
    };
    let zero = |index| SeccompCondition::new(index, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0);
    // Threads, but no processes and no namespaces.
    let thread = libc::CLONE_THREAD as u64;
    rules.insert(
        libc::SYS_clone,
        vec![rule(vec![argument(0, SeccompCmpOp::MaskedEq(thread | NAMESPACES), thread)?])?],
    );
    // A thread may set its own CPUs.
    rules.insert(libc::SYS_sched_setaffinity, vec![rule(vec![zero(0)?])?]);
    // Rings that were created before may be enabled, and memory may be pinned in them.
    let registers = [REGISTER_BUFFERS, UNREGISTER_BUFFERS, REGISTER_ENABLE_RINGS].map(u64::from);
    rules.insert(libc::SYS_io_uring_register, one_of(1, &registers)?);
    // Copies of descriptors, locks on the image, seals on in-flight memory; no commands that send signals or watch
    // folders.
    rules.insert(libc::SYS_fcntl, one_of(1, &FCNTLS.map(|command| command as u64))?);
    // Data may be sent only to the peer to which the socket is connected.
    rules.insert(libc::SYS_sendto, vec![rule(vec![zero(4)?])?]);
    // The identity of a front end, and the timeouts for it.
    for (call, options) in [
        (libc::SYS_getsockopt, &[libc::SO_PEERCRED, libc::SO_ERROR][..]),
        (libc::SYS_setsockopt, &[libc::SO_RCVTIMEO, libc::SO_SNDTIMEO, SO_RCVTIMEO_NEW, SO_SNDTIMEO_NEW]),
    ] {
        let option = |&option: &libc::c_int| {
            rule(vec![
                argument(1, SeccompCmpOp::Eq, libc::SOL_SOCKET as u64)?,
                argument(2, SeccompCmpOp::Eq, option as u64)?,
            ])
        };
        rules.insert(call, options.iter().map(option).collect::<Result<_>>()?);
    }
    // Signals may be sent to this process's own threads, for the abort of a panic.
    let own = u64::from(std::process::id());
    rules.insert(libc::SYS_tgkill, vec![rule(vec![argument(0, SeccompCmpOp::Eq, own)?])?]);
    // Any signal handler may be changed, except that of the trap itself.
    let trap = libc::SIGSYS as u64;
    rules.insert(libc::SYS_rt_sigaction, vec![rule(vec![argument(0, SeccompCmpOp::Ne, trap)?])?]);
    // Memory is readable and writable, never executable.
    let exec = libc::PROT_EXEC as u64;
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![rule(vec![argument(2, SeccompCmpOp::MaskedEq(exec), 0)?])?]);
    }
    // Names of threads, and names that the allocator gives to memory.
    rules.insert(libc::SYS_prctl, one_of(0, &[libc::PR_SET_NAME as u64, libc::PR_SET_VMA as u64])?);
    // Discards are allowed, for devices that io_uring cannot discard on; they destroy nothing that could not be overwritten as
    // well. Setting the blocking mode of a socket is allowed too.
    // A volume that drives an NVMe device may also change which of its memory that device reaches.
    let more = if role == Role::Driver { &[VFIO_IOMMU_MAP_DMA, VFIO_IOMMU_UNMAP_DMA][..] } else { &[] };
    rules.insert(libc::SYS_ioctl, one_of(1, &[&[BLKDISCARD, FIONBIO], more].concat())?);
    // Resource limits may be read.
    rules.insert(libc::SYS_prlimit64, vec![rule(vec![zero(2)?])?]);
    if role == Role::Holder {
        // No threads, no rings, no timeouts.
        for call in [
            libc::SYS_clone,
            libc::SYS_sched_setaffinity,
            libc::SYS_io_uring_register,
            libc::SYS_setsockopt,
            libc::SYS_prlimit64,
        ] {
            rules.remove(&call);
        }
        // What the eventfds of an engine and the files of a VM are.
        rules.insert(
            libc::SYS_fcntl,
            one_of(1, &[libc::F_GETFD, libc::F_GETFL].map(|command| command as u64))?,
        );
        rules.insert(libc::SYS_ioctl, one_of(1, &[FIONBIO])?);
        // The guest's memory cannot be mapped, nor any other file.
        let anonymous = libc::MAP_ANONYMOUS as u64;
        let map = vec![
            argument(2, SeccompCmpOp::MaskedEq(exec), 0)?,
            argument(3, SeccompCmpOp::MaskedEq(anonymous), anonymous)?,
        ];
        rules.insert(libc::SYS_mmap, vec![rule(map)?]);
    }
    Ok(rules)
}

// The same options with 64-bit times, from asm-generic/socket.h.
const SO_RCVTIMEO_NEW: libc::c_int = 66;
const SO_SNDTIMEO_NEW: libc::c_int = 67;

/// The allowed commands of `fcntl`.
const FCNTLS: [libc::c_int; 7] = [
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_GETFL,
    libc::F_OFD_SETLK,
    libc::F_OFD_GETLK,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
];

/// Flags for new namespaces, which `clone` accepts for threads too.
const NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64;

// From linux/fs.h and asm-generic/ioctls.h.
const BLKDISCARD: u64 = 0x1277;
const FIONBIO: u64 = 0x5421;
// From linux/vfio.h.
const VFIO_IOMMU_MAP_DMA: u64 = 0x3b71;
const VFIO_IOMMU_UNMAP_DMA: u64 = 0x3b72;
