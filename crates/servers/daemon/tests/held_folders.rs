//! A user of the machine holds the locks of the daemon's folders for ever: he may pass through them, and may list another folder of their
//! file system. A daemon must start nevertheless, or say what it waits for, and serve everybody meanwhile.

use ginnel_layout::wire::Kind;
use kit::daemon::holder::{serves, silent_file, start_holder, stay, until_it_waits};
use kit::daemon::qemu::Qemu;
use kit::daemon::*;
use kit::hold::SilentFile;
use kit::process::Process;
use kit::wait::{WATCHDOG, wait_for, wait_until};
use rustix::process::{Signal, kill_process};
use serde_json::json;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

kit::test_that_skips_are_seen!();

const CONFIG: &str = "
[segment.web]
size = \"8M\"
members = [\"host\"]
";
/// The kernel has one lock for all renames between folders of a file system, so only one test at a time can hold a folder.
static RENAMES: Mutex<()> = Mutex::new(());

fn one_at_a_time() -> MutexGuard<'static, ()> {
    RENAMES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a daemon says then.
const HELD: &str = "its folder does not answer: a program may hold its lock";
/// How soon a daemon says what it waits for.
const SOON: Duration = Duration::from_secs(5);

/// Returns a folder of the daemon that a program holds up.
fn folder(name: &str) -> PathBuf {
    program_socket().parent().unwrap().with_file_name(name)
}

/// Renames a file into this folder from one whose lock this program holds. The kernel takes the locks of both folders before it finds out
/// that this is not allowed.
fn hold(folder: &Path) {
    let Some(silent) = silent_file() else { return };
    let theirs = folder_of_all().join("theirs");
    fs::create_dir(&theirs).unwrap();
    fs::write(theirs.join("file"), "").unwrap();
    hold_by(silent, &theirs, folder);
}

fn hold_by(mut silent: SilentFile, theirs: &Path, folder: &Path) {
    silent.list(&File::open(theirs).unwrap());
    let (from, to) = (theirs.join("file"), folder.join("file"));
    until_it_waits(move || drop(fs::rename(from, to)));
    stay();
}

/// Returns a folder of the same file system in which all users may write.
fn folder_of_all() -> PathBuf {
    folder("shm")
}

/// Lets all users write in the folder of segments.
fn open_to_all(daemon: &Daemon) {
    fs::set_permissions(daemon.dir.path().join("shm"), Permissions::from_mode(0o1777)).unwrap();
}

kit::program! {
    fn holder_of_segments() {
        hold(&folder("shm/ginnel"));
    }
}

kit::program! {
    fn holder_of_sockets() {
        hold(&folder("run"));
    }
}

kit::program! {
    fn holder_of_state() {
        hold(&folder("state"));
    }
}

kit::program! {
    fn holder_of_monitors() {
        hold(&folder("shm/monitors"));
    }
}

kit::program! {
    /// Holds the folder of sockets by one of root's, in which its user may not write.
    fn holder_who_lists() {
        let Some(silent) = silent_file() else { return };
        let listed = folder("listed");
        let refused = fs::write(listed.join("new"), "").unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
        hold_by(silent, &listed, &folder("run"));
    }
}

kit::program! {
    /// Holds a folder of its own, and finds out whether it can also hold that of the journal.
    fn one_that_cannot_pass() {
        let Some(mut silent) = silent_file() else { return };
        let theirs = folder_of_all().join("theirs");
        fs::create_dir(&theirs).unwrap();
        fs::write(theirs.join("file"), "").unwrap();
        silent.list(&File::open(&theirs).unwrap());
        let state = folder("state");
        let refused = fs::rename(theirs.join("file"), state.join("file")).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
        let refused = fs::rename(state.join("file"), theirs.join("other")).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
        stay();
    }
}

#[test]
fn a_user_who_holds_the_lock_of_the_daemons_own_folder_delays_new_files_only() {
    let _one = one_at_a_time();
    let more = "[segment.more]\nsize = \"8M\"\nmembers = [\"host\"]\n";
    let mut daemon = Daemon::start_new(CONFIG);
    open_to_all(&daemon);
    let gone = json!({ "op": "segment-create", "name": "gone", "size": "8M", "members": ["host"] });
    daemon.admin(gone).unwrap();
    let Some(holder) = start_holder(&daemon, holder_of_segments) else { return };
    // At a start, for what is there and for what is new.
    daemon.write_config("", &format!("{CONFIG}{more}"));
    daemon.restart();
    serves(&mut daemon);
    let says = HELD;
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
        let name = folder_of_all().join("theirs");
        let file = File::create(&name).unwrap();
        silent.write_to(&file);
        until_it_waits(move || drop(fs::remove_file(name)));
        stay();
    }
}

#[test]
fn a_user_who_holds_the_lock_of_the_folder_above_delays_the_first_start_only() {
    let mut daemon = Daemon::prepare("", CONFIG);
    open_to_all(&daemon);
    let Some(holder) = start_holder(&daemon, remover) else { return };
    daemon.start();
    let says = "the folder above it does not answer";
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

/// Starts a daemon that perhaps makes no socket, and returns it when its log says this once more.
fn start_until(daemon: &Daemon, says: &str) -> Process {
    let (said, before) = (daemon.log().matches(says).count(), Instant::now());
    let log = File::options().append(true).open(daemon.dir.path().join("log")).unwrap();
    let child = Process(daemon.command().stderr(log).stdin(Stdio::null()).spawn().unwrap());
    wait_until("the daemon says it", || daemon.log().matches(says).count() > said);
    assert!(before.elapsed() < SOON + WATCHDOG / 8, "it says it late: {:?}", before.elapsed());
    child
}

#[test]
fn a_user_who_holds_the_lock_of_the_folder_of_sockets_keeps_nobody_waiting_for_good() {
    let _one = one_at_a_time();
    let mut daemon = Daemon::start_new(CONFIG);
    open_to_all(&daemon);
    let vm = |op: &str, name: &str| json!({ "op": op, "name": name });
    daemon.admin(vm("vm-add", "old")).unwrap();
    let Some(holder) = start_holder(&daemon, holder_of_sockets) else { return };
    // A daemon that runs serves as before, but has no new sockets.
    serves(&mut daemon);
    let refused = daemon.admin(vm("vm-add", "new")).unwrap_err();
    assert!(refused.text.contains(HELD), "{refused:?}");
    daemon.admin(vm("vm-remove", "old")).unwrap();
    serves(&mut daemon);
    // It ends when it is told to.
    let before = Instant::now();
    daemon.signal(Signal::TERM);
    assert!(daemon.ended().success());
    assert!(before.elapsed() < WATCHDOG / 4, "it ended late");
    // A new one says what it waits for, and can be killed meanwhile.
    let mut waiting = start_until(&daemon, HELD);
    waiting.0.kill().unwrap();
    waiting.0.wait().unwrap();
    let waiting = start_until(&daemon, HELD);
    drop(holder);
    wait_for("its socket", || ginnel_daemon::packet::connect_to(&daemon.socket()).ok());
    daemon.attach("web", "late");
    daemon.admin(vm("vm-add", "new")).unwrap();
    assert!(daemon.run("new.sock").exists());
    drop(waiting);
}

#[test]
fn a_user_who_may_only_list_a_folder_of_the_file_system_holds_that_of_sockets_too() {
    kit::require!(
        rustix::process::geteuid().is_root(),
        "only root has folders in which the holder may not write"
    );
    let _one = one_at_a_time();
    let mut daemon = Daemon::start_new(CONFIG);
    let listed = daemon.dir.path().join("listed");
    fs::create_dir(&listed).unwrap();
    fs::set_permissions(&listed, Permissions::from_mode(0o755)).unwrap();
    fs::write(listed.join("file"), "").unwrap();
    let Some(holder) = start_holder(&daemon, holder_who_lists) else { return };
    serves(&mut daemon);
    let vm = json!({ "op": "vm-add", "name": "new" });
    let refused = daemon.admin(vm.clone()).unwrap_err();
    assert!(refused.text.contains(HELD), "{refused:?}");
    serves(&mut daemon);
    drop(holder);
    wait_for("its socket", || daemon.admin(vm.clone()).ok());
    assert!(listed.join("file").exists() && !daemon.run("file").exists());
}

#[test]
fn a_keeper_that_dies_while_the_folder_of_sockets_is_held_is_replaced_when_it_is_free() {
    let _one = one_at_a_time();
    let mut daemon = Daemon::start_new(CONFIG);
    open_to_all(&daemon);
    let a = daemon.attach("web", "a");
    let Some(holder) = start_holder(&daemon, holder_of_sockets) else { return };
    kill_process(daemon.keeper(), Signal::KILL).unwrap();
    wait_until("the daemon says so", || daemon.log().contains("no keeper"));
    serves(&mut daemon);
    drop(holder);
    wait_until("another keeper", || daemon.log().contains("another keeper has taken"));
    // It has what the first one had.
    daemon.restart();
    daemon.client().attach_as(a.back).unwrap();
    assert!(!daemon.log().contains("are lost"), "{}", daemon.log());
}

#[test]
fn a_user_who_cannot_pass_through_the_folder_of_the_journal_cannot_hold_its_lock() {
    let _one = one_at_a_time();
    let mut daemon = Daemon::start_new(CONFIG);
    open_to_all(&daemon);
    let Some(_holder) = start_holder(&daemon, one_that_cannot_pass) else { return };
    // Without its mark, the journal is written anew.
    daemon.kill();
    fs::remove_file(daemon.run("journal.mark")).unwrap();
    daemon.start();
    serves(&mut daemon);
    assert!(!daemon.log().contains("chmod 0700"));
}

#[test]
fn a_daemon_whose_journal_lies_in_a_folder_of_all_says_that_it_is_held() {
    let _one = one_at_a_time();
    let mut daemon = Daemon::start_new(CONFIG);
    open_to_all(&daemon);
    fs::set_permissions(daemon.dir.path().join("state"), Permissions::from_mode(0o755)).unwrap();
    let Some(holder) = start_holder(&daemon, holder_of_state) else { return };
    serves(&mut daemon);
    daemon.kill();
    let mut refused = start_until(&daemon, HELD);
    wait_for("its end", || refused.0.try_wait().unwrap());
    assert!(daemon.log().contains("chmod 0700"), "it says how to prevent this");
    drop(holder);
    daemon.start();
    serves(&mut daemon);
}

#[test]
fn a_user_who_holds_the_lock_of_the_folder_of_qemus_control_socket_holds_up_nobody() {
    let _one = one_at_a_time();
    let mut daemon = Daemon::prepare("", "");
    let monitors = daemon.dir.path().join("shm/monitors");
    fs::create_dir(&monitors).unwrap();
    let (near, far) = (monitors.join("qmp"), monitors.join("renamed/qmp"));
    daemon.write_config("", &format!("[vm.a]\nqmp = {near:?}\n[vm.b]\nqmp = {far:?}\n{CONFIG}"));
    daemon.start();
    open_to_all(&daemon);
    let Some(_holder) = start_holder(&daemon, holder_of_monitors) else { return };
    let join = |daemon: &Daemon, vm: &str| {
        let qemu = Qemu::join(&daemon.run(&format!("{vm}.sock")), 32);
        let says = format!("control socket {}", if vm == "a" { near.display() } else { far.display() });
        wait_until("the daemon has looked for it", || daemon.log().contains(&says));
        qemu
    };
    let _a = join(&daemon, "a");
    serves(&mut daemon);
    // The folder of the socket may be missing, too: whoever may rename it may hold the one above.
    let _b = join(&daemon, "b");
    serves(&mut daemon);
    // Those that were held up are not waited for again, and the daemon can be killed meanwhile.
    daemon.restart();
    serves(&mut daemon);
}

#[test]
fn the_monitors_of_many_vms_hold_up_nobody_together() {
    /// If the daemon waited half a second for each, it would be away for longer than `serves` allows.
    const VMS: usize = 40;
    let _one = one_at_a_time();
    let mut daemon = Daemon::prepare("", "");
    let monitors = daemon.dir.path().join("shm/monitors");
    fs::create_dir(&monitors).unwrap();
    let vm = |n: usize| format!("[vm.v{n}]\nqmp = {:?}\n", monitors.join(format!("{n}.qmp")));
    let vms: String = (0..VMS).map(vm).collect();
    daemon.write_config("vectors = 2\n", &format!("{vms}{CONFIG}"));
    daemon.start();
    open_to_all(&daemon);
    let join = |n: usize| Qemu::join(&daemon.run(&format!("v{n}.sock")), 2);
    let _qemus: Vec<Qemu> = (0..VMS).map(join).collect();
    let Some(_holder) = start_holder(&daemon, holder_of_monitors) else { return };
    let before = Instant::now();
    daemon.restart();
    serves(&mut daemon);
    assert!(before.elapsed() < WATCHDOG / 4, "it serves late: {:?}", before.elapsed());
    wait_until("the daemon says so", || daemon.log().contains(HELD));
    serves(&mut daemon);
}
