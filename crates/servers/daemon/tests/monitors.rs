//! Whose control socket (QMP) the daemon takes for that of a VM's QEMU.

use ginnel_daemon::packet;
use kit::daemon::qemu::Qemu;
use kit::daemon::*;
use kit::process::Process;
use kit::wait::wait_for;
use serde_json::json;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};

kit::test_that_skips_are_seen!();

kit::program! {
    /// Listens as another QEMU does at its control socket, until standard input ends.
    fn other_qemu() {
        let _listener = UnixListener::bind(std::env::var_os("TEST_SOCKET").unwrap()).unwrap();
        println!("listens");
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
    }
}

fn start_other_qemu(socket: &std::path::Path) -> Process {
    let mut command = kit::program::command(other_qemu);
    command.env("TEST_SOCKET", socket).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut other = Process(command.spawn().unwrap());
    BufReader::new(other.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    other
}

/// Starts the daemon in a process namespace of its own, from which this program is not visible. Returns false if that is impossible.
fn start_in_namespace(daemon: &mut Daemon) -> bool {
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        command
    };
    if !unshare().arg("true").output().is_ok_and(|output| output.status.success()) {
        kit::skip!("no process namespace can be made here (unshare)");
        return false;
    }
    let ginneld = daemon.command();
    let mut command = unshare();
    command.arg(ginneld.get_program()).args(ginneld.get_args());
    daemon.start_by(command);
    true
}

fn ready(daemon: &Daemon, vm: &str) -> bool {
    let status = daemon.inspect();
    let members = status["members"].as_array().unwrap();
    members.iter().any(|member| member["name"] == vm && member["qmp_ready"] == true)
}

/// Returns the paths of the VMs' control sockets, which the configuration has.
fn declare(daemon: &Daemon) -> [PathBuf; 2] {
    let paths = ["a", "b"].map(|vm| daemon.dir.path().join(format!("{vm}.qmp")));
    let [a, b] = &paths;
    daemon.write_config("", &format!("[vm.a]\nqmp = {a:?}\n[vm.b]\nqmp = {b:?}\n"));
    paths
}

#[test]
fn where_processes_are_not_visible_that_of_another_vm_is_not_taken() {
    let mut daemon = Daemon::prepare("", "");
    let [a, b] = declare(&daemon);
    symlink(&b, &a).unwrap();
    let _other = start_other_qemu(&b);
    if !start_in_namespace(&mut daemon) {
        return;
    }
    let _a = Qemu::join(&daemon.run("a.sock"), 32);
    wait_for("a refusal", || daemon.log().contains(&format!("{} cannot be used", a.display())).then_some(()));
    assert!(
        daemon.log().contains("process namespace that is not visible from here, and"),
        "{}",
        daemon.log()
    );
    assert!(!ready(&daemon, "a"));
}

#[test]
fn where_processes_are_not_visible_its_own_is_taken() {
    let (near, far) = UnixStream::pair().unwrap();
    let tells = packet::have_same_peer(near.as_fd(), far.as_fd()).is_some();
    kit::require!(tells, "this kernel does not tell processes apart that are not visible");
    let mut daemon = Daemon::prepare("", "");
    let [a, _] = declare(&daemon);
    let listener = UnixListener::bind(&a).unwrap();
    if !start_in_namespace(&mut daemon) {
        return;
    }
    let _a = Qemu::join(&daemon.run("a.sock"), 32);
    let mut socket = listener.accept().unwrap().0;
    writeln!(socket, "{}\r", json!({ "QMP": { "version": {}, "capabilities": ["oob"] } })).unwrap();
    wait_for("the QMP connection", || ready(&daemon, "a").then_some(()));
}

#[test]
fn a_link_to_the_socket_of_another_vm_does_not_make_the_daemon_its_qemu() {
    let mut daemon = Daemon::prepare("", "");
    let [a, _] = declare(&daemon);
    symlink(daemon.run("b.sock"), &a).unwrap();
    daemon.start();
    let _a = Qemu::join(&daemon.run("a.sock"), 32);
    wait_for("a refusal", || daemon.log().contains(&format!("{} cannot be used", a.display())).then_some(()));
    let _b = Qemu::join(&daemon.run("b.sock"), 32);
    let log = daemon.log();
    assert_eq!(log.matches("VM joined").count(), 2, "{log}");
    assert!(!log.contains("VM gone") && !log.contains("refused"), "{log}");
}
