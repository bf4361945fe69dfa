//! A program of an ordinary user holds locks of the kernel for ever: those of sockets and files that it has handed to the daemon, or got
//! from it. The daemon must go on serving everybody else, end when it is killed, and start anew.

use ginnel_daemon::packet;
use ginnel_fdpass::SendFlags;
use ginnel_layout::wire::{self, Header, Kind, SocketReport, SocketRole};
use kit::daemon::*;
use kit::hold::{SilentFile, become_user, lingering};
use kit::process::Process;
use kit::wait::{WATCHDOG, wait_for};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use serde_json::json;
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::process::Stdio;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

kit::test_that_skips_are_seen!();

const CONFIG: &str = "
[segment.web]
size = \"8M\"
members = [\"host\"]
allow_users = [65534]
";
const NOBODY: u32 = 65534;
/// Many connections, but not more than a user may have.
const FLOOD: usize = 3000;
/// The line that says that everything is held.
const HELD: &str = "held\n";

/// Reports a socket. Returns false if the daemon has ended the connection.
fn report<Fd: AsFd>(client: &Client, fds: &[Fd]) -> bool {
    let report = SocketReport { key: 7, role: SocketRole::ACCEPTOR, ..FromZeros::new_zeroed() };
    let header = Header { kind: Kind::SOCK_REPORT, flags: 0, request: 9 };
    packet::send(client.fd.as_fd(), &[header.as_bytes(), report.as_bytes()].concat(), fds).is_ok()
}

/// Returns the two ends of a TCP connection.
fn tcp() -> (OwnedFd, OwnedFd) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near.into(), listener.accept().unwrap().0.into())
}

fn hello(socket: &std::path::Path) -> Client {
    let mut client = Client::raw(socket);
    let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: wire::features::SOCKETS };
    client.ask::<wire::HelloOk>(Kind::HELLO, hello.as_bytes(), Kind::HELLO_OK).unwrap();
    client
}

/// Makes this process an ordinary user's, with a file system that does not answer. If that is impossible, says why.
fn silent_file() -> Option<SilentFile> {
    become_user(NOBODY);
    let path = |name| std::path::PathBuf::from(std::env::var_os(name).unwrap());
    SilentFile::mount(&path("TEST_FUSE"), &path("TEST_PLACE")).map_err(|why| println!("{why}")).ok()
}

/// Says that everything is held, and holds it as long as the test wants.
fn stay() {
    print!("{HELD}");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

kit::program! {
    fn holder() {
        let Some(mut silent) = silent_file() else { return };
        let socket = program_socket();
        let mut kept: Vec<OwnedFd> = Vec::new();
        let mut clients = Vec::new();
        for greeted in [true, false] {
            let client = || if greeted { hello(&socket) } else { Client::raw(&socket) };
            // A TCP socket that is locked by a sender.
            let (near, far) = tcp();
            silent.send_over(&near);
            let one = client();
            assert!(report(&one, &[&near]));
            // A Unix socket, with a descriptor that it lends, which is locked by a receiver.
            let kind = if greeted { SocketType::STREAM } else { SocketType::SEQPACKET };
            let (here, there) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
            ginnel_fdpass::send(here.as_fd(), &[0; 100], &[] as &[OwnedFd], SendFlags::empty()).unwrap();
            silent.receive_from(&there);
            let two = client();
            assert!(report(&two, &[&there]));
            // A file that cannot be closed.
            let three = client();
            assert!(report(&three, &[&silent.file]));
            // The same file where no file belongs.
            let four = client();
            let header = Header { kind: Kind::INSPECT, flags: 0, request: 9 };
            packet::send(four.fd.as_fd(), header.as_bytes(), &[&silent.file]).unwrap();
            clients.extend([one, two, three, four]);
            kept.extend([near, far, here, there]);
        }
        stay();
    }
}

kit::program! {
    fn poisoner() {
        let Some(mut silent) = silent_file() else { return };
        let socket = program_socket();
        let mut clients = Vec::new();
        // More than may be stuck at a time.
        for greeted in [false, true].into_iter().cycle().take(48) {
            let poison = silent.poison();
            let client = if greeted { hello(&socket) } else { Client::raw(&socket) };
            // The daemon takes the first ones at most, and ends a connection that does not begin with a greeting.
            let kind = if greeted { Kind::SOCK_REPORT } else { Kind::INSPECT };
            let header = Header { kind, flags: 0, request: 9 };
            let send = || {
                ginnel_fdpass::send(client.fd.as_fd(), header.as_bytes(), &[&poison], SendFlags::DONTWAIT)
            };
            (0..100).take_while(|_| send().is_ok()).for_each(drop);
            // This may be the last one that closes it.
            std::thread::spawn(move || drop(poison));
            clients.push(client);
        }
        stay();
    }
}

kit::program! {
    fn waiting_poisoner() {
        let Some(mut silent) = silent_file() else { return };
        let socket = program_socket();
        let mut clients = Vec::new();
        for _ in 0..4 {
            let poison = silent.poison();
            let client = Client::raw(&socket);
            ginnel_fdpass::send(client.fd.as_fd(), &[0], &[&poison], SendFlags::DONTWAIT).unwrap();
            clients.push(client);
        }
        stay();
    }
}

kit::program! {
    /// Sends what nobody can close over many connections, one after another.
    fn flooder() {
        let Some(mut silent) = silent_file() else { return };
        let socket = program_socket();
        for _ in 0..FLOOD / 500 {
            for poison in silent.poisons(500) {
                let client = Client::raw(&socket);
                let header = Header { kind: Kind::INSPECT, flags: 0, request: 9 };
                let _ = ginnel_fdpass::send(client.fd.as_fd(), header.as_bytes(), &[&poison], SendFlags::DONTWAIT);
                // This may be the last one that closes it.
                std::thread::spawn(move || drop(poison));
            }
        }
        stay();
    }
}

/// Starts a holder; `None` if the machine does not let it hold anything.
fn start_holder<F: Fn()>(daemon: &Daemon, program: F) -> Option<Process> {
    let place = daemon.dir.path().join("silent");
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::create_dir_all(&place).unwrap();
    for dir in [daemon.dir.path(), &place] {
        std::fs::set_permissions(dir, Clone::clone(&all)).unwrap();
    }
    // Where only root may open the device, root may still make another node of it.
    let own = tempfile::tempdir().unwrap();
    std::fs::set_permissions(&own, all).unwrap();
    let device = kit::hold::device(own.path());
    let mut command = daemon.program(program);
    command.env("TEST_PLACE", &place).env("TEST_FUSE", device).stdout(Stdio::piped());
    let mut child = Process(command.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    if line != HELD {
        assert!(!line.is_empty(), "the holder has failed");
        kit::skip!("no FUSE in a user namespace: {}", line.trim());
        return None;
    }
    Some(child)
}

/// Checks that others are served in time.
fn serves(daemon: &mut Daemon) {
    let before = Instant::now();
    for _ in 0..20 {
        daemon.attach("web", "honest");
    }
    assert!(daemon.is_running());
    assert!(before.elapsed() < WATCHDOG / 4, "served, but late: {:?}", before.elapsed());
}

#[test]
fn a_program_that_holds_locks_of_what_it_sends_holds_up_nobody_else() {
    for sockets in ["", "[sockets]\nenabled = false\n"] {
        let mut daemon = Daemon::start_new(&format!("{sockets}{CONFIG}"));
        let Some(holder) = start_holder(&daemon, holder) else { return };
        serves(&mut daemon);
        // Each connection whose descriptor blocks a helper ends.
        wait_for("the end of a connection", || daemon.log().contains("a helper is killed").then_some(()));
        serves(&mut daemon);
        // A successor, too, although helpers of the first one may live for ever.
        let before = Instant::now();
        daemon.restart();
        assert!(before.elapsed() < WATCHDOG / 4, "it ended late, or its successor began late");
        serves(&mut daemon);
        drop(holder);
        // What programs send is still examined.
        let no_connection = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = hello(&daemon.socket());
        wait_for("an answer to a report", || {
            assert!(report(&client, &[&no_connection]));
            readable(&client.fd, Duration::from_secs(1)).then_some(())
        });
    }
}

#[test]
fn what_nobody_can_close_in_the_queue_of_a_connection_does_not_keep_the_daemon_from_ending() {
    let mut daemon = Daemon::start_new(CONFIG);
    let Some(first) = start_holder(&daemon, poisoner) else { return };
    serves(&mut daemon);
    for _ in 0..2 {
        let before = Instant::now();
        daemon.restart();
        assert!(before.elapsed() < WATCHDOG / 4, "it ended late, or its successor began late");
        serves(&mut daemon);
    }
    drop(first);
    // With the program, what held up the closing ends. Then everything is closed.
    let before = open(&daemon);
    let second = start_holder(&daemon, poisoner);
    serves(&mut daemon);
    drop(second);
    wait_for("everything is closed", || (open(&daemon) <= before).then_some(()));
}

/// Returns how many descriptors the daemon has.
fn open(daemon: &Daemon) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count()
}

#[test]
fn what_nobody_can_close_takes_no_descriptors_of_the_daemon() {
    let mut daemon = Daemon::start_new(CONFIG);
    serves(&mut daemon);
    let before = open(&daemon);
    let Some(_flooder) = start_holder(&daemon, flooder) else { return };
    wait_for("room for descriptors", || {
        // What waits to be closed is tried again with the next connection.
        serves(&mut daemon);
        (open(&daemon) < before + FLOOD / 10).then_some(())
    });
    assert!(!daemon.log().contains("the last open files are kept"));
    daemon.restart();
    serves(&mut daemon);
}

#[test]
fn what_nobody_can_close_in_connections_that_wait_does_not_keep_the_daemon_from_ending() {
    for signal in [Signal::KILL, Signal::TERM] {
        let mut daemon = Daemon::start_new(CONFIG);
        daemon.signal(Signal::STOP);
        wait_for("it is stopped", || daemon.is_stopped().then_some(()));
        let Some(_poisoner) = start_holder(&daemon, waiting_poisoner) else { return };
        daemon.signal(signal);
        daemon.signal(Signal::CONT);
        daemon.ended();
        daemon.start();
        serves(&mut daemon);
    }
}

/// Returns the number of the process that looks at others for the daemon.
fn looker(daemon: &Daemon) -> Pid {
    let children = format!("/proc/{0}/task/{0}/children", daemon.pid());
    let of_name = |pid: &&str| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "ginneld-looker\n")
    };
    wait_for("a looker", || {
        let children = std::fs::read_to_string(&children).unwrap();
        let last = children.split_ascii_whitespace().rev().find(of_name)?;
        Pid::from_raw(last.parse().unwrap())
    })
}

#[test]
fn a_process_that_holds_up_whoever_looks_at_it_holds_up_nobody_else() {
    let mut daemon = Daemon::start_new(CONFIG);
    for signal in [Signal::STOP, Signal::KILL, Signal::STOP] {
        kill_process(looker(&daemon), signal).unwrap();
        serves(&mut daemon);
    }
    kill_process(looker(&daemon), Signal::STOP).unwrap();
    daemon.restart();
    serves(&mut daemon);
}

#[test]
fn without_free_descriptors_nobody_waits_for_sockets_that_linger() {
    let mut daemon = Daemon::start_new(CONFIG);
    let mut other = daemon.client();
    let (mut mine, mut ends) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        mine.push(hello(&daemon.socket()));
    }
    let pid = Pid::from_raw(daemon.pid() as i32);
    let maximum = getrlimit(Resource::Nofile).maximum;
    prlimit(pid, Resource::Nofile, Rlimit { current: Some(1), maximum }).unwrap();
    let before = Instant::now();
    for client in &mine {
        for _ in 0..8 {
            let (near, end) = lingering();
            ends.push(end);
            let sent = report(client, &[&near]);
            // If this is the last close, it blocks until this process ends.
            std::thread::spawn(move || drop(near));
            if !sent {
                break;
            }
        }
    }
    // The connections end, because there are not even descriptors for a helper.
    for client in &mine {
        while client.receive().is_some() {}
        other.status();
    }
    assert!(before.elapsed() < WATCHDOG / 2, "others wait");
    assert!(daemon.is_running());
    prlimit(pid, Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    serves(&mut daemon);
}

kit::program! {
    /// Attaches to the segments, punches a hole into the file of each, and holds the locks of the files.
    fn writer() {
        let Some(mut silent) = silent_file() else { return };
        let mut kept = Vec::new();
        for segment in ["web", "late"] {
            let mut client = hello(&program_socket());
            let body = wire::Attach { segment: name(segment), name: name("writer"), ..wire::Attach::new_zeroed() };
            let (_, fds) = client.ask::<wire::Attached>(Kind::ATTACH, body.as_bytes(), Kind::ATTACHED).unwrap();
            let flags = FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE;
            fallocate(&fds[0], flags, 6 << 20, 4096).unwrap();
            silent.write_to(&fds[0]);
            kept.push((client, fds));
        }
        stay();
    }
}

#[test]
fn a_program_that_holds_the_lock_of_a_segments_file_holds_up_neither_a_successor_nor_a_removal() {
    let mut daemon = Daemon::start_new(CONFIG);
    let late = json!({ "op": "segment-create", "name": "late", "size": "8M", "members": ["host"], "allow_users": [NOBODY] });
    daemon.admin(late.clone()).unwrap();
    let Some(writer) = start_holder(&daemon, writer) else { return };
    serves(&mut daemon);
    // The memory of the files must be allocated again, and the mode of one is to be another.
    daemon.write_config("", &format!("{CONFIG}mode = \"0600\"\n"));
    let before = Instant::now();
    daemon.restart();
    assert!(before.elapsed() < WATCHDOG / 4, "it ended late, or its successor began late");
    serves(&mut daemon);
    // The segment goes when its file does. Until then nobody gets its memory under its name, not even after a restart.
    let remove = json!({ "op": "segment-remove", "name": "late", "force": true });
    for _ in 0..2 {
        let refused = daemon.admin(remove.clone()).unwrap_err();
        assert!(refused.text.contains("cannot be removed yet"), "{refused:?}");
        serves(&mut daemon);
        daemon.restart();
    }
    drop(writer);
    wait_for("the removal", || daemon.admin(remove.clone()).ok());
    assert!(!daemon.shm("late").exists());
    daemon.admin(late).unwrap();
    // What was to be changed is changed now.
    let file = daemon.shm("web");
    wait_for("the mode of the file, and its memory", || {
        let stat = std::fs::metadata(&file).unwrap();
        (stat.mode() & 0o777 == 0o600 && stat.blocks() * 512 >= stat.len()).then_some(())
    });
    serves(&mut daemon);
}

/// Returns when a thread that does this waits in the kernel, where no signal ends the wait.
fn until_it_waits(call: impl FnOnce() + Send + 'static) {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        tell.send(rustix::thread::gettid()).unwrap();
        call();
    });
    let stat = format!("/proc/self/task/{}/stat", told.recv().unwrap());
    wait_for("a thread that holds the lock", || {
        std::fs::read_to_string(&stat).unwrap().contains(") D ").then_some(())
    });
}

kit::program! {
    /// Holds the lock of the daemon's own folder: renames a file into it from a folder whose lock it holds. The kernel takes the locks of
    /// both folders before it finds out that this is not allowed.
    fn renamer() {
        let Some(mut silent) = silent_file() else { return };
        let shm = program_socket().parent().unwrap().with_file_name("shm");
        let theirs = shm.join("theirs");
        std::fs::create_dir(&theirs).unwrap();
        std::fs::write(theirs.join("file"), "").unwrap();
        silent.list(&std::fs::File::open(&theirs).unwrap());
        until_it_waits(move || drop(std::fs::rename(theirs.join("file"), shm.join("ginnel/file"))));
        stay();
    }
}

#[test]
fn a_user_who_holds_the_lock_of_the_daemons_own_folder_delays_new_files_only() {
    let more = "[segment.more]\nsize = \"8M\"\nmembers = [\"host\"]\n";
    let mut daemon = Daemon::start_new(CONFIG);
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
    std::fs::set_permissions(daemon.dir.path().join("shm"), all).unwrap();
    let gone = json!({ "op": "segment-create", "name": "gone", "size": "8M", "members": ["host"] });
    daemon.admin(gone).unwrap();
    let Some(holder) = start_holder(&daemon, renamer) else { return };
    // At a start, for what is there and for what is new.
    daemon.write_config("", &format!("{CONFIG}{more}"));
    daemon.restart();
    serves(&mut daemon);
    let says = "a program holds the lock of its folder";
    let refused = daemon.client().attach("more", "a").err().unwrap();
    assert!(refused.text.contains(says), "{refused:?}");
    // At run time. The one who asks waits; nobody else does.
    let mut asking = daemon.client();
    let late = json!({ "op": "segment-create", "name": "late", "size": "8M", "members": ["host"] });
    asking.send(Kind::ADMIN, late.to_string().as_bytes());
    serves(&mut daemon);
    daemon.admin(json!({ "op": "vm-add", "name": "vm", "home": "8M" })).unwrap();
    let refused = daemon.client().attach("home-vm", "a").err().unwrap();
    assert!(refused.text.contains(says), "{refused:?}");
    let remove = json!({ "op": "segment-remove", "name": "gone" });
    let refused = daemon.admin(remove.clone()).unwrap_err();
    assert!(refused.text.contains("cannot be removed yet"), "{refused:?}");
    serves(&mut daemon);
    // A daemon can be killed meanwhile.
    daemon.restart();
    serves(&mut daemon);
    drop(holder);
    wait_for("the segment", || daemon.client().attach("more", "a").ok());
    wait_for("the removal", || daemon.admin(remove.clone()).ok());
    wait_for("another segment", || daemon.admin(late.clone()).ok());
    daemon.attach("late", "a");
    wait_for("the home", || daemon.client().attach("home-vm", "a").ok());
}

kit::program! {
    /// Holds the lock of `shm_dir`: removes a file there whose lock it holds.
    fn remover() {
        let Some(mut silent) = silent_file() else { return };
        let name = program_socket().parent().unwrap().with_file_name("shm").join("theirs");
        let file = std::fs::File::create(&name).unwrap();
        silent.write_to(&file);
        until_it_waits(move || drop(std::fs::remove_file(name)));
        stay();
    }
}

#[test]
fn a_user_who_holds_the_lock_of_the_folder_above_delays_the_first_start_only() {
    let mut daemon = Daemon::prepare("", CONFIG);
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
    std::fs::set_permissions(daemon.dir.path().join("shm"), all).unwrap();
    let Some(holder) = start_holder(&daemon, remover) else { return };
    daemon.start();
    let says = "a program holds the lock of the folder above it";
    let refused = daemon.client().attach("web", "a").err().unwrap();
    assert!(refused.text.contains(says), "{refused:?}");
    drop(holder);
    wait_for("the segment", || daemon.client().attach("web", "a").ok());
    // Now the folder exists.
    let said = daemon.log().matches(says).count();
    let Some(holder) = start_holder(&daemon, remover) else { return };
    daemon.restart();
    serves(&mut daemon);
    daemon
        .admin(json!({ "op": "segment-create", "name": "late", "size": "8M", "members": ["host"] }))
        .unwrap();
    daemon.attach("late", "a");
    daemon.admin(json!({ "op": "segment-remove", "name": "late", "force": true })).unwrap();
    assert_eq!(daemon.log().matches(says).count(), said);
    drop(holder);
}
