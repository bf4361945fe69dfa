//! Descriptors that hold up whoever uses or closes them, as an ordinary user can make them.
#![allow(unsafe_code)] // System calls with an address whose memory never comes, and the mount and fork that make it.

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{CWD, FileType, Mode, OFlags, chmod, makedev, mknodat, open};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::net::sockopt::set_socket_linger;
use rustix::process::{DumpableBehavior, Resource, getrlimit, set_dumpable_behavior};
use rustix::thread::{Gid, Uid, set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::ffi::{CString, c_void};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Makes this process one of an ordinary user, if root runs the test.
pub fn become_user(user: u32) {
    if rustix::process::geteuid().is_root() {
        set_thread_groups(&[]).unwrap();
        let (user, group) = (Uid::from_raw(user), Gid::from_raw(user));
        set_thread_res_gid(group, group, group).unwrap();
        set_thread_res_uid(user, user, user).unwrap();
        // Otherwise the process could not write its own files in /proc.
        set_dumpable_behavior(DumpableBehavior::Dumpable).unwrap();
    }
}

/// Adds this many waiters to a descriptor. They wait until the returned epolls are closed.
pub fn crowd(fd: &OwnedFd, waiters: u64) -> Vec<OwnedFd> {
    let numbers = 100..getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX).min(1 << 20) as i32 - 100;
    let (mut epolls, mut added) = (Vec::new(), 0);
    while added < waiters {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        // An epoll may have a file once for each number of a descriptor, and keeps it when the descriptor is closed.
        for number in numbers.clone().take((waiters - added) as usize) {
            let again = fcntl_dupfd_cloexec(fd, number).unwrap();
            // A number that is in use yields the next one, which comes again.
            let flags = epoll::EventFlags::IN;
            added += u64::from(epoll::add(&epoll, &again, epoll::EventData::new_u64(0), flags).is_ok());
        }
        epolls.push(epoll);
    }
    epolls
}

/// Returns a socket whose last close blocks for a day, and its other end, which never reads.
pub fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    set_socket_linger(&near, Some(Duration::from_secs(24 * 3600))).unwrap();
    near.set_nonblocking(true).unwrap();
    while rustix::io::write(&near, &[0; 65536]).is_ok() {}
    (near.into(), far)
}

/// A file on a file system that does not deliver its contents: a system call that copies from or to its memory blocks, with all
/// locks that it holds, and so does closing the file. A signal ends none of this; the end of this process does.
#[derive(Debug)]
pub struct SilentFile {
    /// The file.
    pub file: File,
    memory: usize,
    used: usize,
    /// Has a byte for each page that somebody waits for.
    asked: File,
}

const PAGE: usize = 4096;
/// The pages of the file. Each is for one system call.
const PAGES: usize = 64;
/// The number of the file system's only file; the root has number 1.
const FILE: u64 = 2;

impl SilentFile {
    /// Mounts a file system of its own (FUSE) at an empty folder, with a node of the device, in a user namespace of its own. This
    /// process must have one thread. An error says what this machine forbids.
    pub fn mount(device: &Path, at: &Path) -> Result<Self, String> {
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        // SAFETY: the process has one thread, and shares no memory that depends on its namespaces.
        if unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) } != 0 {
            return Err(format!("no user namespace: {}", std::io::Error::last_os_error()));
        }
        let say =
            |path: &str, text: String| std::fs::write(path, text).map_err(|error| format!("{path}: {error}"));
        say("/proc/self/setgroups", "deny".into())?;
        say("/proc/self/uid_map", format!("0 {uid} 1"))?;
        say("/proc/self/gid_map", format!("0 {gid} 1"))?;
        let device = open(device, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| format!("{}: {errno}", device.display()))?;
        let text = |text: &[u8]| CString::new(text).unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let (place, options) = (text(at.as_os_str().as_encoded_bytes()), text(options.as_bytes()));
        let flags = libc::MS_NOSUID | libc::MS_NODEV;
        // SAFETY: all strings end in a zero and outlive the call.
        let mounted = unsafe {
            libc::mount(c"silent".as_ptr(), place.as_ptr(), c"fuse".as_ptr(), flags, options.as_ptr().cast())
        };
        if mounted != 0 {
            return Err(format!("FUSE cannot be mounted: {}", std::io::Error::last_os_error()));
        }
        let (asked, ask) = rustix::pipe::pipe().unwrap();
        // A process of its own serves the file system, because the kernel gives up the waits when that ends. It ends with this one.
        // SAFETY: this process has one thread, so the child can do whatever this one can.
        if unsafe { libc::fork() } == 0 {
            drop(asked);
            // SAFETY: the call takes two numbers.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            serve(File::from(device), File::from(ask));
            std::process::exit(0);
        }
        drop((device, ask));
        let file = File::options().read(true).write(true).open(at.join("file")).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, and nothing else is there.
        let memory =
            unsafe { mmap(std::ptr::null_mut(), PAGES * PAGE, protection, MapFlags::SHARED, &file, 0) };
        Ok(Self { file, memory: memory.unwrap() as usize, used: 0, asked: File::from(asked) })
    }

    /// Lets a thread send over a socket, and returns when it holds the socket's lock, for ever.
    pub fn send_over(&mut self, socket: &impl AsRawFd) {
        let socket = socket.as_raw_fd();
        // SAFETY: the kernel finds out by itself whether it can read there.
        self.block_in(move |page| unsafe { libc::send(socket, page as *const c_void, PAGE, 0) });
    }

    /// Lets a thread receive from a socket that has something to read, and returns when it holds the lock of receivers, for ever.
    pub fn receive_from(&mut self, socket: &impl AsRawFd) {
        let socket = socket.as_raw_fd();
        // SAFETY: nothing else uses the page, and the kernel finds out by itself whether it can write there.
        self.block_in(move |page| unsafe { libc::recv(socket, page as *mut c_void, PAGE, 0) });
    }

    /// Lets a thread write to a file, and returns when it holds the lock of the file's inode, for ever.
    pub fn write_to(&mut self, file: &impl AsRawFd) {
        let file = file.as_raw_fd();
        // SAFETY: the kernel finds out by itself whether it can read there.
        self.block_in(move |page| unsafe { libc::pwrite(file, page as *const c_void, PAGE, 0) });
    }

    /// Lets a thread list a folder, and returns when it holds the lock of the folder's inode, for ever. (Others can list it too.)
    pub fn list(&mut self, folder: &impl AsRawFd) {
        let folder = folder.as_raw_fd();
        // SAFETY: nothing else uses the page, and the kernel finds out by itself whether it can write there.
        self.block_in(move |page| unsafe {
            libc::syscall(libc::SYS_getdents64, folder, page, PAGE) as isize
        });
    }

    /// Returns an eventfd whose last close blocks, because it has to leave an epoll instance whose lock is held for ever.
    pub fn poison(&mut self) -> OwnedFd {
        self.poisons(1).remove(0)
    }

    /// Returns this many of them.
    pub fn poisons(&mut self, count: usize) -> Vec<OwnedFd> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let add = |epoll: &OwnedFd, file: BorrowedFd<'_>| {
            epoll::add(epoll, file, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
        };
        let event = || {
            let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            add(&epoll, event.as_fd()).unwrap();
            event
        };
        let events = (0..count).map(|_| event()).collect();
        let file = self.file.try_clone().unwrap();
        // To add a file, the kernel asks whether the file is readable, and holds the lock meanwhile.
        self.block_in(move |_| add(&epoll, file.as_fd()).map_or(-1, |()| 0));
        events
    }

    fn block_in(&mut self, call: impl FnOnce(usize) -> isize + Send + 'static) {
        let page = self.memory + self.used * PAGE;
        self.used += 1;
        assert!(self.used <= PAGES);
        std::thread::spawn(move || {
            let result = call(page);
            eprintln!("a call has not blocked: {result}, {}", std::io::Error::last_os_error());
            std::process::exit(1);
        });
        self.asked.read_exact(&mut [0]).unwrap();
    }
}

/// Returns the path of a node of the FUSE device that any user may open: one that this makes in the folder, if root runs the test
/// where only root may open the usual node.
pub fn device(folder: &Path) -> PathBuf {
    let node = folder.join("fuse");
    let all = Mode::from_raw_mode(0o666);
    let made = mknodat(CWD, &node, FileType::CharacterDevice, all, makedev(10, 229));
    // The mode does not depend on this process's mask.
    match made.and_then(|()| chmod(&node, all)) {
        Ok(()) => node,
        Err(_) => "/dev/fuse".into(),
    }
}

/// Answers what is needed to open the file, and nothing else.
fn serve(mut device: File, mut ask: File) {
    let mut request = vec![0; 1 << 17];
    while let Ok(len) = device.read(&mut request) {
        let number = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        let (opcode, node) = (number(4), u64::from_ne_bytes(request[16..24].try_into().unwrap()));
        assert!(len >= 40);
        let numbers = |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
        let attributes = |node: u64| {
            let (mode, size) = if node == 1 { (0o040_777, 0) } else { (0o100_666, (PAGES * PAGE) as u32) };
            let mut words = vec![node as u32, 0, size, 0, 8, 0];
            words.extend([0; 9]); // Times.
            words.extend([mode, 1, 0, 0, 0, PAGE as u32, 0]);
            words
        };
        let body = match opcode {
            // INIT: version 7.31.
            26 => numbers(&[7, 31, 0, 0, 0, PAGE as u32, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            // LOOKUP
            1 => numbers(&[&[FILE as u32, 0, 0, 0, 3600, 0, 3600, 0, 0, 0][..], &attributes(FILE)].concat()),
            // GETATTR
            3 => numbers(&[&[3600, 0, 0, 0][..], &attributes(node)].concat()),
            // OPEN
            14 => numbers(&[0, 0, 0, 0]),
            // READ and POLL: they wait.
            15 | 40 => {
                ask.write_all(&[1]).unwrap();
                continue;
            }
            // FORGET, RELEASE, FLUSH, INTERRUPT and BATCH_FORGET: no answer.
            2 | 18 | 25 | 36 | 42 => continue,
            _ => Vec::new(),
        };
        let error = if body.is_empty() { -libc::ENOSYS } else { 0 };
        let mut answer = numbers(&[16 + body.len() as u32, error as u32]);
        answer.extend(&request[8..16]);
        answer.extend(body);
        let _ = device.write(&answer);
    }
}
