//! SIGHUP: the daemon reads its configuration again, obeys what it can, and says what it cannot. It ends nobody's use of anything.

use ginnel_layout::relay::RelayKind;
use ginnel_layout::wire::ErrorCode;
use kit::daemon::qemu::Qemu;
use kit::daemon::*;
use kit::wait::{wait_for, wait_until};
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::thread::{Uid, set_thread_res_uid};
use serde_json::{Value, json};
use std::os::unix::fs::MetadataExt;
use std::process::Command;

kit::test_that_skips_are_seen!();

const WEB: &str = "[segment.web]\nsize = \"16M\"\nmembers = [\"host\"]\n";

/// Sends SIGHUP with this configuration, and returns what the daemon logs about it.
fn reload_with(daemon: &Daemon, extra: &str, config: &str) -> String {
    let before = daemon.log().len();
    daemon.write_config(extra, config);
    daemon.signal(Signal::HUP);
    wait_for("the daemon to have read its configuration", || {
        let said = daemon.log()[before..].to_owned();
        let ends = ["the configuration was read again", "nothing was reloaded"];
        ends.iter().any(|end| said.contains(end)).then_some(said)
    })
}

fn reload(daemon: &Daemon, config: &str) -> String {
    reload_with(daemon, "", config)
}

fn has(said: &str, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "{part:?} is missing in {said}");
    }
}

/// Returns the entry with this name.
fn named<'a>(status: &'a Value, list: &str, name: &str) -> Option<&'a Value> {
    status[list].as_array().unwrap().iter().find(|entry| entry["name"] == name)
}

#[test]
fn what_is_new_is_there_and_programs_stay() {
    let mut daemon = Daemon::start_new(WEB);
    let mut a = daemon.attach("web", "a");
    let file = std::fs::metadata(daemon.shm("web")).unwrap().ino();
    let config =
        format!("{WEB}[vm.a]\nhome = \"16M\"\n[segment.new]\nsize = \"16M\"\nmembers = [\"a\", \"host\"]\n");
    has(
        &reload(&daemon, &config),
        &["reloaded: vm.a", "reloaded: segment.new", "reloaded: segment.home-a", "reloaded=3"],
    );
    a.listen("still").unwrap();
    wait_for("the segment", || daemon.client().attach("new", "b").ok());
    wait_for("the home", || daemon.client().attach("home-a", "b").ok());
    let mut guest = Qemu::join(&daemon.run("a.sock"), 32).guest(1, true);
    assert_eq!(guest.segments().len(), 2);

    // A segment gets another member, while programs and the VM use it.
    let config = config.replacen("[\"host\"]", "[\"host\", \"a\"]", 1);
    has(&reload(&daemon, &config), &["reloaded: segment.web: a may use it", "reloaded=1"]);
    let segments = guest.segments();
    assert!(segments.iter().any(|segment| segment.name == name("web")), "{segments:?}");
    a.listen("again").unwrap();
    assert_eq!(std::fs::metadata(daemon.shm("web")).unwrap().ino(), file);
    let members = named(&daemon.inspect(), "segments", "web").unwrap()["members"].clone();

    // The next daemon finds everything as this one left it.
    daemon.restart();
    let mut a = daemon.client().attach_as(a.back).unwrap();
    a.listen("after").unwrap();
    assert_eq!(named(&daemon.inspect(), "segments", "web").unwrap()["members"], members);
    has(&reload(&daemon, &config), &["nothing has changed"]);
}

#[test]
fn a_new_member_rings_the_others_and_is_rung() {
    let two = "[vm.a]\n[vm.b]\n[segment.web]\nsize = \"16M\"\nmembers = [\"host\", \"a\"]\n";
    let daemon = Daemon::start_new(two);
    let (mut a, mut b) = (Qemu::join(&daemon.run("a.sock"), 32), Qemu::join(&daemon.run("b.sock"), 32));
    reload(&daemon, &two.replace("\"a\"]", "\"a\", \"b\"]"));
    let (of_a, of_b) = (a.id, b.id);
    b.doorbell(of_a, 0);
    a.doorbell(of_b, 0);
}

#[test]
fn settings_are_obeyed() {
    let config = |rest: &str| format!("{WEB}[vm.a]\n{rest}");
    let daemon = Daemon::start_new(&config(""));
    daemon.admin(json!({"op": "vm-add", "name": "r"})).unwrap();
    let said = reload(
        &daemon,
        &config(
            "hang_after = 7\n[vm.a.limits]\nendpoints_per_member = 9\n[limits]\nbacklog = 3\nlisteners_per_endpoint = 1\n[sockets]\nenabled = false\n",
        ),
    );
    has(
        &said,
        &["reloaded: limits", "reloaded: vm.a.limits", "reloaded: vm.a.hang_after", "reloaded: sockets"],
    );
    assert_eq!(daemon.inspect()["limits"]["backlog"], 3);
    let mut a = daemon.attach("web", "a");
    a.listen("one").unwrap();
    assert_eq!(a.listen("two").unwrap_err().code, ErrorCode::LIMIT.0);

    // Who may connect as a VM.
    let mode = || std::fs::metadata(daemon.run("a.sock")).map(|socket| socket.mode() & 0o777).unwrap_or(0);
    assert_eq!(mode(), 0o660);
    let qemu = Qemu::join(&daemon.run("a.sock"), 32);
    has(
        &reload(&daemon, &config("socket_mode = \"0600\"\n")),
        &["reloaded: vm.a.user, group and socket_mode"],
    );
    wait_until("the socket's mode", || mode() == 0o600);
    assert!(named(&daemon.inspect(), "members", "a").unwrap()["running"] != json!(false));
    drop(qemu);
    wait_for("the VM's end", || daemon.log().contains("VM gone").then_some(()));
    Qemu::join(&daemon.run("a.sock"), 32);
}

#[test]
fn a_user_is_allowed_and_is_not_any_more() {
    kit::require!(rustix::process::geteuid().is_root(), "only root can be another user");
    let config = |users: &str| format!("{WEB}allow_users = {users}\n");
    let daemon = Daemon::start_new(&config("[]"));
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(daemon.dir.path(), all).unwrap();
    let attach = || {
        std::thread::scope(|scope| {
            let attach = || {
                // The user of one thread, which is that of the connection.
                let nobody = Uid::from_raw(65534);
                set_thread_res_uid(nobody, nobody, nobody).unwrap();
                daemon.client().attach("web", "other")
            };
            scope.spawn(attach).join().unwrap()
        })
    };
    assert_eq!(attach().err().unwrap().code, ErrorCode::DENIED.0);
    has(&reload(&daemon, &config("[65534]")), &["reloaded: segment.web: who may attach"]);
    let mut other = attach().unwrap();
    has(&reload(&daemon, &config("[]")), &["programs that are attached stay"]);
    assert_eq!(attach().err().unwrap().code, ErrorCode::DENIED.0);
    other.listen("still").unwrap();
}

#[test]
fn what_is_in_use_stays_and_the_log_says_why() {
    let config = "[vm.a]\n[vm.b]\n[segment.web]\nsize = \"16M\"\nmembers = [\"host\", \"a\"]\n[segment.free]\nsize = \"16M\"\nmembers = [\"host\"]\n";
    let daemon = Daemon::start_new(config);
    daemon.admin(json!({"op": "segment-create", "name": "own", "size": "4M", "members": ["host"]})).unwrap();
    let mut a = daemon.attach("web", "a");
    let _qemu = Qemu::join(&daemon.run("a.sock"), 32);
    let gone = daemon.inspect();
    let stays = |changed: &str, extra: &str, parts: &[&str]| {
        let said = reload_with(&daemon, extra, changed);
        has(&said, parts);
        assert!(said.contains("reloaded=0"), "{said}");
        let now = daemon.inspect();
        for list in ["members", "segments"] {
            assert_eq!(now[list], gone[list], "{changed}");
        }
    };
    let without_a = config.replace("[vm.a]\n", "").replace(", \"a\"", "");
    stays(
        &without_a,
        "",
        &[
            "not reloaded: vm.a, which is to go: it runs (QEMU is process",
            "not reloaded: segment.web: a is to lose rights",
        ],
    );
    let without_web = config.replace("[segment.web]\nsize = \"16M\"\nmembers = [\"host\", \"a\"]\n", "");
    stays(&without_web, "", &["not reloaded: segment.web, which is to go: VM a runs"]);
    stays(&config.replacen("16M", "32M", 1), "", &["not reloaded: segment.web: its size is 16M"]);
    let mode =
        config.replace("members = [\"host\", \"a\"]\n", "members = [\"host\", \"a\"]\nmode = \"0600\"\n");
    stays(&mode, "", &["not reloaded: segment.web: its mode is another one"]);
    stays(config, "vectors = 16\n", &["not reloaded: daemon.vectors: 32 stay"]);
    stays(
        config,
        "socket_mode = \"0660\"\nlog_format = \"json\"\n",
        &["daemon.socket_mode", "daemon.log_format", "not_reloaded=2"],
    );
    let number = config.replace("[vm.b]\n", "[vm.b]\nnumber = 99\n");
    stays(&number, "", &["not reloaded: vm.b.number: it is 2"]);
    let again = format!("{config}[segment.own]\nsize = \"8M\"\nmembers = [\"host\"]\n");
    stays(&again, "", &["not reloaded: segment.own: it was declared at run time"]);
    let moved = config.to_owned() + "[limits]\nbacklog = 3\n";
    daemon.write_config("", &moved);
    let text = std::fs::read_to_string(daemon.config()).unwrap();
    let dir = daemon.dir.path().display();
    let text = text.replace(&format!("shm_dir = \"{dir}/shm\""), "shm_dir = \"/dev/shm\"");
    let before = daemon.log().len();
    std::fs::write(daemon.config(), text).unwrap();
    daemon.signal(Signal::HUP);
    wait_for("the daemon", || daemon.log()[before..].contains("was read again").then_some(()));
    has(&daemon.log()[before..], &["not reloaded: daemon.shm_dir: the daemon is in"]);
    assert_eq!(daemon.inspect()["limits"]["backlog"], 128, "everything depends on the folders");
    a.listen("still").unwrap();
}

#[test]
fn what_nobody_uses_goes() {
    let config = format!("{WEB}[vm.a]\n[segment.old]\nsize = \"16M\"\nmembers = [\"host\", \"a\"]\n");
    let mut daemon = Daemon::start_new(&config);
    let old = daemon.attach("old", "x");
    has(
        &reload(&daemon, WEB),
        &[
            "segment.old, which is to go: 1 programs are attached",
            "vm.a, which is to go: it is a member of segment old",
        ],
    );
    drop(old);
    wait_for("its end", || daemon.inspect()["endpoints"].as_array()?.is_empty().then_some(()));
    has(&reload(&daemon, WEB), &["reloaded: segment.old is not declared", "reloaded: vm.a is not declared"]);
    let status = daemon.inspect();
    assert!(named(&status, "segments", "old").is_none() && named(&status, "members", "a").is_none());
    assert!(!daemon.run("a.sock").exists());
    assert!(daemon.shm("old").exists(), "whose memory it is, is not for us to say");
    daemon.restart();
    assert!(named(&daemon.inspect(), "segments", "old").is_none());
}

#[test]
fn a_mistake_changes_nothing_and_is_shown_until_it_is_corrected() {
    let mut daemon = Daemon::start_new(WEB);
    let mut a = daemon.attach("web", "a");
    let mistake = |daemon: &Daemon| daemon.inspect()["daemon"]["config_mistake"].clone();
    let more = "[limits]\nbacklog = 3\n";
    has(
        &reload(&daemon, &format!("{WEB}{more}colour = 1\n")),
        &["ginneld.toml:11", "colour", "nothing was reloaded"],
    );
    assert!(mistake(&daemon).as_str().unwrap().contains("colour"));
    // What `--check` refuses is refused here.
    has(
        &reload(&daemon, &format!("{WEB}mode = \"0666\"\n{more}")),
        &["segment.web.mode", "write 0660", "nothing was reloaded"],
    );
    assert_eq!(daemon.inspect()["limits"]["backlog"], 128);
    std::fs::remove_file(daemon.config()).unwrap();
    let before = daemon.log().matches("nothing was reloaded").count();
    daemon.signal(Signal::HUP);
    wait_for("the complaint", || {
        (daemon.log().matches("nothing was reloaded").count() > before).then_some(())
    });
    has(&reload(&daemon, &format!("{WEB}{more}")), &["reloaded: limits"]);
    assert_eq!((mistake(&daemon), daemon.inspect()["limits"]["backlog"].clone()), (json!(null), json!(3)));
    a.listen("still").unwrap();
    // It is the accepted configuration from now on.
    let accepted = std::fs::read_to_string(daemon.dir.path().join("state/accepted.toml")).unwrap();
    assert!(accepted.contains("backlog = 3"), "{accepted}");
    daemon.restart();
    daemon.client().attach_as(a.back).unwrap();
}

#[test]
fn a_segment_out_of_service_is_declared_in_another_way() {
    let config = |size: &str| format!("{WEB}[segment.large]\nsize = \"{size}\"\nmembers = [\"host\"]\n");
    let daemon = Daemon::start_new(&config("32T"));
    assert_eq!(daemon.client().attach("large", "a").err().unwrap().code, ErrorCode::BROKEN.0);
    has(&reload(&daemon, &config("4M")), &["reloaded: segment.large, which is out of service"]);
    wait_for("the segment", || daemon.client().attach("large", "a").ok());
    // A new segment that cannot be made is out of service too, and the others are served.
    let more = format!("{}[segment.huge]\nsize = \"32T\"\nmembers = [\"host\"]\n", config("4M"));
    reload(&daemon, &more);
    wait_for("the reason", || {
        let status = daemon.inspect();
        let why = named(&status, "segments", "huge")?["broken_why"].as_str()?.to_owned();
        why.contains("no room for 32T").then_some(())
    });
    daemon.attach("web", "a");
}

#[test]
fn the_level_of_the_log_changes() {
    let mut daemon = Daemon::prepare("log = \"error\"\n", WEB);
    let mut command = Command::new("env");
    let own = daemon.command();
    command.args(["-u", "GINNEL_LOG"]).arg(own.get_program()).args(own.get_args());
    daemon.start_by(command);
    assert_eq!(daemon.log(), "");
    has(&reload_with(&daemon, "log = \"info\"\n", WEB), &["reloaded: daemon.log is info"]);
    // Every test sets the variable otherwise.
    let other = Daemon::start_new(WEB);
    has(
        &reload_with(&other, "log = \"warn\"\n", WEB),
        &["not reloaded: daemon.log: the variable GINNEL_LOG"],
    );
}

#[test]
fn many_signals_at_once_are_harmless() {
    let mut daemon = Daemon::start_new(WEB);
    let mut qemu = None;
    for round in 0..50 {
        let vm = if round % 2 == 0 { "[vm.a]\n" } else { "" };
        daemon.write_config("", &format!("{WEB}{vm}"));
        daemon.signal(Signal::HUP);
        if round == 24 {
            qemu = std::os::unix::net::UnixStream::connect(daemon.run("a.sock")).ok();
        }
        daemon.inspect();
    }
    drop(qemu);
    assert!(daemon.is_running());
    has(&reload(&daemon, &format!("{WEB}[vm.last]\n")), &["read again"]);
    wait_for("the last VM", || named(&daemon.inspect(), "members", "last").map(|_| ()));
}

/// The kernel sends SIGHUP to a program whose terminal has gone. Such a daemon has nobody any more who could end it.
#[test]
fn a_daemon_ends_with_its_terminal() {
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let path = ptsname(&terminal, Vec::new()).unwrap();
    let mut daemon = Daemon::prepare("", WEB);
    let (own, mut command) = (daemon.command(), Command::new("sh"));
    command.args(["-c", "exec \"$@\" 2>\"$0\""]).arg(path.to_str().unwrap());
    command.arg(own.get_program()).args(own.get_args());
    daemon.start_by(command);
    daemon.write_config("", &format!("{WEB}[vm.a]\n"));
    daemon.signal(Signal::HUP);
    wait_for("the VM", || named(&daemon.inspect(), "members", "a").map(|_| ()));
    drop(terminal);
    daemon.signal(Signal::HUP);
    assert!(daemon.ended().success());
}

/// The guest's daemon is told of a change of the segment's members like of a new segment.
#[test]
fn a_guest_learns_of_a_segment_at_once() {
    let config = format!("{WEB}[vm.a]\n");
    let daemon = Daemon::start_new(&config);
    let mut guest = Qemu::join(&daemon.run("a.sock"), 32).guest(1, true);
    assert!(guest.segments().is_empty());
    reload(&daemon, &config.replacen("\"host\"]", "\"host\"]\nreaders = [\"a\"]", 1));
    let body = guest.message(RelayKind::SEGMENTS, 0);
    assert!(!body.is_empty());
}

#[test]
fn a_reader_who_is_to_write_waits_for_a_restart() {
    let config = "[vm.a]\n[segment.web]\nsize = \"16M\"\nmembers = [\"host\"]\nreaders = [\"a\"]\n";
    let daemon = Daemon::start_new(config);
    let writes = "[vm.a]\n[segment.web]\nsize = \"16M\"\nmembers = [\"host\", \"a\"]\n";
    has(
        &reload(&daemon, writes),
        &["not reloaded: segment.web: a may write from now on; restart the daemon", "reloaded=0"],
    );
    let reads = "[vm.a]\n[segment.web]\nsize = \"16M\"\nmembers = [\"host\"]\n";
    has(&reload(&daemon, reads), &["not reloaded: segment.web: a is to lose rights", "reloaded=0"]);
}

#[test]
fn a_segment_that_was_taken_out_comes_back_empty() {
    let daemon = Daemon::start_new(WEB);
    let file = std::fs::metadata(daemon.shm("web")).unwrap().ino();
    reload(&daemon, "");
    has(&reload(&daemon, WEB), &["reloaded: segment.web", "reloaded=1"]);
    wait_for("the segment", || daemon.client().attach("web", "a").ok());
    assert_ne!(std::fs::metadata(daemon.shm("web")).unwrap().ino(), file);
    assert!(!daemon.log().contains("out of service"), "{}", daemon.log());
}
