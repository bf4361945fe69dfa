//! Tries each system call that an attacker who controls a volume's process could use to escape.
#![allow(unsafe_code)] // System calls and io_uring entries, as an attacker would make them.

use super::*;
use crate::backend::uring::ring::{OPERATIONS, Ring};
use io_uring::{opcode, squeue, types};
use libc::c_long;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// A system call that the sandbox must answer by killing the process.
struct Door {
    name: &'static str,
    call: c_long,
    arguments: [u64; 6],
}

/// The calls use only what an attacker has: descriptor 0 stands for any open one. Pointers are null, because the filter
/// must stop the call before the kernel dereferences them.
#[rustfmt::skip]
fn doors() -> Vec<Door> {
    let door = |name, call, arguments: &[i64]| {
        let mut all = [0; 6];
        for (to, &from) in all.iter_mut().zip(arguments) {
            *to = from as u64;
        }
        Door { name, call, arguments: all }
    };
    let fcntl = |name, command: i32| door(name, libc::SYS_fcntl, &[0, command.into(), 0]);
    let (level, here) = (i64::from(libc::SOL_SOCKET), i64::from(libc::AT_FDCWD));
    let namespace = i64::from(libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_VM | libc::CLONE_NEWNET);
    let address = 4096;
    vec![
        door("socket", libc::SYS_socket, &[libc::AF_UNIX.into(), libc::SOCK_STREAM.into(), 0]),
        door("socket of UDP", libc::SYS_socket, &[libc::AF_INET.into(), libc::SOCK_DGRAM.into(), 0]),
        door("socketpair", libc::SYS_socketpair, &[libc::AF_UNIX.into(), libc::SOCK_STREAM.into(), 0, 0]),
        door("bind", libc::SYS_bind, &[0, 0, 0]),
        door("connect", libc::SYS_connect, &[0, 0, 0]),
        door("listen", libc::SYS_listen, &[0, 1]),
        door("sendto an address", libc::SYS_sendto, &[0, 0, 0, 0, address, 16]),
        door("sendmmsg", libc::SYS_sendmmsg, &[0, 0, 0, 0]),
        door("getsockopt of IP", libc::SYS_getsockopt, &[0, 0, 1, 0, 0]),
        door("setsockopt SO_ATTACH_FILTER", libc::SYS_setsockopt, &[0, level, libc::SO_ATTACH_FILTER.into(), 0, 0]),
        door("setsockopt of TCP", libc::SYS_setsockopt, &[0, 6, libc::SO_RCVTIMEO.into(), 0, 0]),
        door("io_uring_setup", libc::SYS_io_uring_setup, &[1, 0]),
        door("io_uring_register of files", libc::SYS_io_uring_register, &[0, 2, 0, 0]),
        door("io_uring_register of new files", libc::SYS_io_uring_register, &[0, 6, 0, 0]),
        door("io_uring_register of credentials", libc::SYS_io_uring_register, &[0, 9, 0, 0]),
        fcntl("F_SETFL", libc::F_SETFL),
        fcntl("F_SETLK", libc::F_SETLK),
        fcntl("F_SETOWN", libc::F_SETOWN),
        fcntl("F_SETOWN_EX", 15),
        fcntl("F_SETSIG", 10),
        fcntl("F_SETLEASE", libc::F_SETLEASE),
        fcntl("F_NOTIFY", libc::F_NOTIFY),
        fcntl("F_SETPIPE_SZ", libc::F_SETPIPE_SZ),
        door("FIOASYNC", libc::SYS_ioctl, &[0, 0x5452, 0]),
        // The neighbours of BLKDISCARD.
        door("BLKROSET", libc::SYS_ioctl, &[0, 0x125d, 0]),
        door("BLKRRPART", libc::SYS_ioctl, &[0, 0x125f, 0]),
        door("BLKFLSBUF", libc::SYS_ioctl, &[0, 0x1261, 0]),
        door("BLKTRACESETUP", libc::SYS_ioctl, &[0, 0xc048_1273, 0]),
        door("BLKSECDISCARD", libc::SYS_ioctl, &[0, 0x127d, 0]),
        door("BLKZEROOUT", libc::SYS_ioctl, &[0, 0x127f, 0]),
        door("LOOP_CHANGE_FD", libc::SYS_ioctl, &[0, 0x4c06, 0]),
        door("FITRIM", libc::SYS_ioctl, &[0, 0xc018_5879, 0]),
        door("TIOCSTI", libc::SYS_ioctl, &[0, 0x5412, 0]),
        door("setxattr", libc::SYS_setxattr, &[0, 0, 0, 0, 0]),
        door("fsetxattr", libc::SYS_fsetxattr, &[0, 0, 0, 0, 0]),
        door("getxattr", libc::SYS_getxattr, &[0, 0, 0, 0]),
        door("listxattr", libc::SYS_listxattr, &[0, 0, 0]),
        door("removexattr", libc::SYS_removexattr, &[0, 0]),
        door("renameat2", libc::SYS_renameat2, &[here, 0, here, 0, 0]),
        door("linkat", libc::SYS_linkat, &[here, 0, here, 0, 0]),
        door("symlinkat", libc::SYS_symlinkat, &[0, here, 0]),
        door("mkdirat", libc::SYS_mkdirat, &[here, 0, 0]),
        door("mknodat", libc::SYS_mknodat, &[here, 0, 0, 0]),
        door("fchmodat", libc::SYS_fchmodat, &[here, 0, 0]),
        door("fchownat", libc::SYS_fchownat, &[here, 0, 0, 0, 0]),
        door("utimensat", libc::SYS_utimensat, &[here, 0, 0, 0]),
        door("open_by_handle_at", libc::SYS_open_by_handle_at, &[here, 0, 0]),
        door("inotify_init1", libc::SYS_inotify_init1, &[0]),
        door("chdir", libc::SYS_chdir, &[0]),
        door("chroot", libc::SYS_chroot, &[0]),
        door("mount", libc::SYS_mount, &[0, 0, 0, 0, 0]),
        door("dup3", libc::SYS_dup3, &[0, 1, 0]),
        door("execve", libc::SYS_execve, &[0, 0, 0]),
        door("execveat", libc::SYS_execveat, &[here, 0, 0, 0, 0]),
        door("a process", libc::SYS_clone, &[libc::SIGCHLD.into(), 0, 0, 0, 0]),
        door("a thread in another network", libc::SYS_clone, &[namespace, 0, 0, 0, 0]),
        door("unshare", libc::SYS_unshare, &[libc::CLONE_NEWUSER.into()]),
        door("setns", libc::SYS_setns, &[0, 0]),
        door("kill", libc::SYS_kill, &[1, 0]),
        door("tgkill of another", libc::SYS_tgkill, &[1, 1, 0]),
        door("pidfd_open", libc::SYS_pidfd_open, &[1, 0]),
        door("pidfd_getfd", libc::SYS_pidfd_getfd, &[0, 0, 0]),
        door("ptrace", libc::SYS_ptrace, &[0, 0, 0, 0]),
        door("process_vm_writev", libc::SYS_process_vm_writev, &[1, 0, 0, 0, 0, 0]),
        door("sched_setaffinity of another", libc::SYS_sched_setaffinity, &[1, 0, 0]),
        door("prlimit64", libc::SYS_prlimit64, &[0, 0, address, 0]),
        door("prctl", libc::SYS_prctl, &[libc::PR_SET_DUMPABLE.into(), 1]),
        door("a handler of SIGSYS", libc::SYS_rt_sigaction, &[libc::SIGSYS.into(), 0, 0, 8]),
        door("memory to execute", libc::SYS_mmap, &[0, 4096, libc::PROT_EXEC.into(), 0x22, -1, 0]),
        door("to execute memory", libc::SYS_mprotect, &[address, 4096, libc::PROT_EXEC.into()]),
        door("bpf", libc::SYS_bpf, &[0, 0, 0]),
        door("perf_event_open", libc::SYS_perf_event_open, &[0, 0, 0, 0, 0]),
        door("userfaultfd", libc::SYS_userfaultfd, &[0]),
        door("keyctl", libc::SYS_keyctl, &[0, 0]),
        door("io_setup", libc::SYS_io_setup, &[1, 0]),
    ]
}

/// Makes the call of this name. Runs in a process of its own.
pub(super) fn try_door(name: &str) {
    let door = doors().into_iter().find(|door| door.name == name).unwrap();
    let [a, b, c, d, e, f] = door.arguments;
    // SAFETY: whatever the call does, it affects only this process, which has no other purpose.
    let result = unsafe { libc::syscall(door.call, a, b, c, d, e, f) };
    println!("the door was open: {result}, {}", std::io::Error::last_os_error());
    // SAFETY: `_exit` takes only a number, and ends this process. If the call has made a copy of the process, the copy must
    // not go on with the tests.
    unsafe { libc::_exit(0) }
}

#[test]
fn each_door_is_shut() {
    for Door { name, call, .. } in doors() {
        let output = child(child_in_the_sandbox, &format!("door {name}"));
        let told = text(&output);
        assert_eq!(output.status.code(), Some(128 + libc::SIGSYS), "{name}: {told}");
        assert!(told.contains(&format!("system call {call},")), "{name}: {told}");
    }
}

/// A ring like those of the workers, and files that it must not be able to reach.
pub(super) struct Hole {
    ring: Ring,
    /// The file that the ring may read and write.
    image: File,
    /// The socket of another process's listener.
    listener: UnixListener,
    socket: std::os::fd::OwnedFd,
    /// A file of another owner.
    other: PathBuf,
    _folder: tempfile::TempDir,
}

impl Hole {
    /// Prepares everything before the process enters the sandbox.
    pub(super) fn new() -> Self {
        use rustix::event::{EventfdFlags, eventfd};
        use rustix::net::{AddressFamily, SocketType};
        let folder = tempfile::tempdir().unwrap();
        let image =
            File::options().read(true).write(true).create_new(true).open(folder.path().join("i")).unwrap();
        image.set_len(4096).unwrap();
        let other = folder.path().join("other");
        std::fs::write(&other, "precious").unwrap();
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        Self {
            ring: Ring::new(&OPERATIONS, &[image.as_raw_fd()], Some(bell.as_fd())).unwrap(),
            image,
            listener: UnixListener::bind(folder.path().join("listener")).unwrap(),
            socket: rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap(),
            other,
            _folder: folder,
        }
    }

    /// Submits an entry and returns its result.
    fn ask(&mut self, entry: &squeue::Entry) -> i32 {
        // SAFETY: the memory that the entry refers to lives until its completion has arrived.
        unsafe { self.ring.push(entry) };
        loop {
            self.ring.submit().unwrap();
            if let Some((_, result)) = self.ring.take() {
                return result;
            }
        }
    }

    /// Tries all operations inside the sandbox.
    pub(super) fn try_all(mut self) {
        self.ring.enable().unwrap();
        let c = |path: &Path| CString::new(path.as_os_str().as_bytes()).unwrap();
        let (other, new) = (c(&self.other), c(&self.other.with_file_name("new")));
        let here = types::Fd(libc::AT_FDCWD);
        let path = self.other.with_file_name("listener");
        let address = rustix::net::SocketAddrUnix::new(&path).unwrap();
        let mut raw: libc::sockaddr_un = nobody();
        raw.sun_family = libc::AF_UNIX as u16;
        for (to, from) in raw.sun_path.iter_mut().zip(address.path_bytes().unwrap()) {
            *to = *from as libc::c_char;
        }
        let name = CString::new("user.door").unwrap();
        let (mut byte, how) = ([7u8], types::OpenHow::new());
        let image = types::Fd(self.image.as_raw_fd());
        let len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        let socket = types::Fd(self.socket.as_raw_fd());
        let entries = [
            ("socket", opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build()),
            ("UDP", opcode::Socket::new(libc::AF_INET, libc::SOCK_DGRAM, 0).build()),
            ("connect", opcode::Connect::new(socket, (&raw const raw).cast(), len).build()),
            (
                "accept",
                opcode::Accept::new(
                    types::Fd(self.listener.as_raw_fd()),
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                )
                .build(),
            ),
            ("send", opcode::Send::new(socket, byte.as_ptr(), 1).build()),
            ("openat", opcode::OpenAt::new(here, other.as_ptr()).build()),
            ("openat2", opcode::OpenAt2::new(here, other.as_ptr(), &raw const how).build()),
            ("unlinkat", opcode::UnlinkAt::new(here, other.as_ptr()).build()),
            ("renameat", opcode::RenameAt::new(here, other.as_ptr(), here, new.as_ptr()).build()),
            ("linkat", opcode::LinkAt::new(here, other.as_ptr(), here, new.as_ptr()).build()),
            ("symlinkat", opcode::SymlinkAt::new(here, other.as_ptr(), new.as_ptr()).build()),
            ("mkdirat", opcode::MkDirAt::new(here, new.as_ptr()).build()),
            (
                "setxattr",
                opcode::SetXattr::new(name.as_ptr(), byte.as_ptr().cast(), other.as_ptr(), 1).build(),
            ),
            ("fsetxattr", opcode::FSetXattr::new(image, name.as_ptr(), byte.as_ptr().cast(), 1).build()),
            ("nothing at all", opcode::Nop::new().build()),
            // An operation that the ring may use, on a descriptor that is not the image's.
            ("another file", opcode::Read::new(image, byte.as_mut_ptr(), 1).build()),
        ];
        for (what, entry) in entries {
            for flags in [squeue::Flags::empty(), squeue::Flags::FIXED_FILE] {
                if flags.is_empty() || what != "another file" {
                    assert_eq!(self.ask(&entry.clone().flags(flags)), -libc::EACCES, "{what}, {flags:?}");
                }
            }
        }
        // All other operations, by number. Numbers that the kernel does not know are invalid.
        for number in (0..=u8::MAX).filter(|number| !OPERATIONS.contains(number)) {
            let mut bytes = [0u8; 64];
            (bytes[0], bytes[1]) = (number, squeue::Flags::FIXED_FILE.bits());
            // SAFETY: a plain structure of the kernel's interface, for which all bit patterns are valid.
            let entry: squeue::Entry = unsafe { std::mem::transmute(bytes) };
            let result = self.ask(&entry);
            assert!([-libc::EACCES, -libc::EINVAL].contains(&result), "operation {number}: {result}");
        }
        let read = opcode::Read::new(types::Fixed(0), byte.as_mut_ptr(), 1).build();
        assert_eq!((self.ask(&read), byte), (1, [0]), "the image is there as ever");
        self.listener.set_nonblocking(true).unwrap();
        assert!(self.listener.accept().is_err());
        println!("all doors of the ring are shut");
    }
}

/// Returns an address at which nobody listens.
fn nobody() -> libc::sockaddr_un {
    // SAFETY: all zeroes is a valid value of this plain structure.
    unsafe { std::mem::zeroed() }
}

#[test]
fn no_door_leads_through_a_ring() {
    let output = child(child_in_the_sandbox, "ring");
    assert!(
        output.status.success() && text(&output).contains("all doors of the ring are shut"),
        "{}",
        text(&output)
    );
}
