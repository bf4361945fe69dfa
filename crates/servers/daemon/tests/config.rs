//! Bad configuration: the daemon prints one line that says what is wrong, where, and how to fix it.

use ginnel_layout::ring::SideState;
use ginnel_layout::wire::{self, ErrorCode, Fds, Kind};
use kit::daemon::*;
use kit::wait::wait_for;
use serde_json::json;
use std::os::unix::fs::{MetadataExt, chown, symlink};
use zerocopy::IntoBytes;

kit::test_that_skips_are_seen!();

const HOST: &str = "members = [\"host\"]\n";

/// Checks that neither `--check` nor a start accepts the configuration, and that each prints one line that contains all of
/// `says`.
fn refused(daemon: &Daemon, says: &[&str]) {
    for args in [&["--check"][..], &[]] {
        let output = daemon.output(args);
        let text = String::from_utf8(output.stderr).unwrap();
        // A start logs other lines first; the last line is the error.
        let error = text.lines().last().unwrap_or_default();
        assert!(!output.status.success(), "{args:?} accepts it");
        assert!(error.starts_with("ginneld: "), "{text}");
        assert!(args.is_empty() || text.lines().count() == 1, "{text}");
        for word in says {
            assert!(error.contains(word), "{args:?}: no {word:?} in {error:?}");
        }
        assert!(error.contains("; "), "no fix: {error}");
    }
}

#[test]
fn mistakes_in_the_file_are_reported_with_their_place_and_a_fix() {
    let s = |rest: &str| format!("[segment.web]\n{HOST}{rest}\n");
    let cases: &[(&str, String, &[&str])] = &[
        ("", "[vm.a]\n[vm.a]\n".into(), &["ginneld.toml:7", "duplicate key", "a"]),
        (
            "",
            format!("{}{}", s("size = \"4M\""), s("size = \"4M\"")),
            &["ginneld.toml:9", "duplicate key", "web"],
        ),
        (
            "",
            format!("[vm.a]\nhome = \"4M\"\n[segment.home-a]\nsize = \"4M\"\n{HOST}"),
            &["vm.a", "home-a", "rename"],
        ),
        ("", s("size = 0"), &["segment.web", "size is 0", "write one"]),
        ("", s(""), &["segment.web", "`size` is missing"]),
        ("", s("size = \"4X\""), &["ginneld.toml:8", "4X", "K, M, G or T"]),
        ("", s("size = -1"), &["ginneld.toml:8", "never negative"]),
        ("", s("size = \"900T\""), &["too large", "at most 64T"]),
        ("", s("size = \"4M\"\ncolour = 1"), &["ginneld.toml:9", "colour", "expected one of", "allow_users"]),
        ("", "[vm.a]\nqmp = \"a.qmp\"\n".into(), &["vm.a.qmp", "not a full path", "/libvirt/qemu/VM.qmp"]),
        ("colour = 1\n", String::new(), &["ginneld.toml:5", "colour", "runtime_dir"]),
        ("", "[limits]\nbacklog = 0\n".into(), &["limits.backlog", "choose 1 to"]),
        ("", "[limits]\nmax_ring = \"5M\"\n".into(), &["limits.max_ring", "power of two"]),
        (
            "",
            "[limits]\ndefault_ring = \"8M\"\nmax_ring = \"4M\"\n".into(),
            &["default_ring 8M", "max_ring 4M"],
        ),
        ("vectors = 65\n", String::new(), &["daemon.vectors", "65", "2 to 64"]),
        ("log = \"loud\"\n", String::new(), &["daemon.log", "loud", "debug"]),
        ("socket_group = \"no-such-group\"\n", String::new(), &["daemon.socket_group", "no-such-group"]),
        ("socket_mode = \"0999\"\n", String::new(), &["ginneld.toml:5", "0999", "octal"]),
        ("", "[vm.host]\n".into(), &["vm.host", "host itself"]),
        ("", "[vm.ginnel]\n".into(), &["vm.ginnel", "daemon's own"]),
        ("", "[vm.\"a/b\"]\n".into(), &["a/b", "byte 0x2f", "another name"]),
        ("", "[vm.a]\nnumber = 0\n".into(), &["vm.a", "number 0"]),
        ("", "[vm.a]\nnumber = 3\n[vm.b]\nnumber = 3\n".into(), &["vm.b", "a has number 3"]),
        ("", "[vm.a]\nuser = \"no-such-user\"\n".into(), &["vm.a", "no-such-user", "create the user"]),
        ("", "[segment.web]\nsize = \"4M\"\nmembers = []\n".into(), &["segment.web", "no members"]),
        ("", "[segment.web]\nsize = \"4M\"\nmembers = [\"a\"]\n".into(), &["segment.web", "\"a\"", "[vm.a]"]),
        ("", "[segment.web]\nsize = \"4M\"\nmembers = [\"host\", \"host\"]\n".into(), &["twice"]),
        ("", s("size = \"4M\"\npage = \"64K\""), &["page 64K", "4K or 2M"]),
        ("", s("size = \"4M\"\nmemory = \"bar\"\npage = \"2M\""), &["page is 2M", "BAR", "memory = \"dax\""]),
        ("", s("size = \"4M\"\nmemory = \"cxl\""), &["ginneld.toml:9", "cxl", "`dax` or `bar`"]),
        ("", s("size = \"4M\"\nreaders = [\"host\"]"), &["host", "`members` and in `readers`", "leave it"]),
        ("", s("size = \"4M\"\nreaders = [\"a\"]"), &["reader \"a\"", "[vm.a]", "`readers`"]),
        ("", "[vm.a]\nhome = \"4M\"\nhome_memory = \"no\"\n".into(), &["ginneld.toml:8", "`dax` or `bar`"]),
        ("", s("size = \"4M\"\nbacking = \"disk\""), &["backing", "disk", "hugetlbfs"]),
    ];
    for (extra, config, says) in cases {
        refused(&Daemon::prepare(extra, config), says);
    }
}

/// Checks that `--check` does not accept the configuration, and that a start serves all other segments and says what is wrong
/// to each client that asks.
fn out_of_service(daemon: &mut Daemon, says: &[&str]) {
    let output = daemon.output(&["--check"]);
    let checked = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "--check accepts it");
    daemon.start();
    let status = daemon.inspect();
    let segments = status["segments"].as_array().unwrap();
    let why = segments.iter().find(|s| s["name"] == "web").unwrap()["broken_why"].as_str().unwrap();
    let refused = daemon.client().attach("web", "a").err().unwrap();
    assert_eq!(refused.code, ErrorCode::BROKEN.0, "{}", refused.text);
    for word in says {
        for text in [&checked, why, &refused.text, &daemon.log()] {
            assert!(text.contains(word), "no {word:?} in {text:?}");
        }
    }
    assert!(why.contains("; "), "no fix: {why}");
    daemon.attach("other", "a");
    daemon.kill();
}

const OTHER: &str = "[segment.other]\nsize = \"4M\"\nmembers = [\"host\"]\n";

#[test]
fn a_segment_that_cannot_be_made_does_not_stop_the_others() {
    let cases: &[(&str, &[&str])] = &[
        ("size = \"4M\"\nbacking = \"/proc\"", &["/proc is neither", "tmpfs"]),
        ("size = \"4M\"\nbacking = \"/no/such/folder\"", &["/no/such/folder", "create the folder"]),
        ("size = \"32T\"", &["segment.web", "no room for 32T", "free", "remount"]),
    ];
    for (spec, says) in cases {
        out_of_service(&mut Daemon::prepare("", &format!("[segment.web]\n{HOST}{spec}\n{OTHER}")), says);
    }
}

#[test]
fn a_segment_whose_file_name_is_taken_is_served_when_the_name_is_free() {
    let mut daemon = Daemon::prepare(
        "",
        &format!("[vm.a]\n[segment.web]\nsize = \"4M\"\nmembers = [\"host\", \"a\"]\n{OTHER}"),
    );
    std::fs::create_dir_all(daemon.shm("web")).unwrap();
    // The socket of a VM is treated in the same way.
    std::fs::create_dir_all(daemon.run("a.sock/x")).unwrap();
    daemon.start();
    let other = daemon.attach("other", "a");
    assert_eq!(daemon.client().attach("web", "a").err().unwrap().code, ErrorCode::BROKEN.0);
    // A restart loses nothing of the other segments either.
    daemon.restart();
    assert_eq!(daemon.client().attach_as(other.back).unwrap().wire.epoch, other.wire.epoch);
    std::fs::remove_dir(daemon.shm("web")).unwrap();
    std::fs::remove_dir_all(daemon.run("a.sock")).unwrap();
    wait_for("the segment", || daemon.client().attach("web", "a").ok());
    qemu::Qemu::join(&daemon.run("a.sock"), 32);
    assert_eq!(daemon.inspect()["segments"][1]["broken"], serde_json::json!(false));
}

#[test]
fn a_missing_configuration_file_is_reported() {
    let daemon = Daemon::prepare("", "");
    let config = daemon.config();
    std::fs::remove_file(&config).unwrap();
    refused(&daemon, &["ginneld.toml", "No such file", "--config"]);
    std::fs::create_dir(&config).unwrap();
    refused(&daemon, &["ginneld.toml", "directory", "--config"]);
}

#[test]
fn a_socket_path_that_is_too_long_is_refused() {
    let daemon = Daemon::prepare("", "");
    let long = daemon.dir.path().join("d".repeat(90));
    let text = std::fs::read_to_string(daemon.config()).unwrap();
    let runtime = format!("runtime_dir = \"{}\"", long.display());
    let text = text
        .lines()
        .map(|l| if l.starts_with("runtime_dir") { &runtime } else { l })
        .collect::<Vec<_>>()
        .join("\n");
    std::fs::write(daemon.config(), text).unwrap();
    refused(&daemon, &["daemon.runtime_dir", "107", "shorter"]);
    let daemon = Daemon::prepare("", &format!("[vm.{}]\n", "v".repeat(63)));
    // The folder's path is short enough for the daemon's socket, but not for the socket of this VM.
    let dir = daemon.dir.path().as_os_str().len();
    assert!(dir + "/run/ginnel.sock".len() < 107, "the test's folder is long itself");
    if dir + "/run/.sock".len() + 63 > 107 {
        refused(&daemon, &["vm.vvv", "107", "shorter"]);
    }
}

#[test]
fn segment_files_of_others_are_not_used() {
    let config = format!("[segment.web]\nsize = \"4M\"\n{HOST}{OTHER}");
    let mut daemon = Daemon::prepare("", &config);
    let file = daemon.shm("web");
    std::fs::create_dir(file.parent().unwrap()).unwrap();
    std::fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    out_of_service(
        &mut daemon,
        &["segment.web", "has 1M bytes, the configuration says 4M", "remove the file"],
    );
    std::fs::remove_file(&file).unwrap();
    symlink("/dev/null", &file).unwrap();
    out_of_service(&mut daemon, &["segment.web", "symbolic link", "remove it"]);
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    out_of_service(&mut daemon, &["segment.web", "cannot be opened", "remove it"]);
    std::fs::remove_dir(&file).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &file, rustix::fs::Mode::RUSR).unwrap();
    out_of_service(&mut daemon, &["segment.web", "not a regular file", "remove it"]);
    std::fs::remove_file(&file).unwrap();
    if rustix::process::geteuid().is_root() {
        std::fs::File::create(&file).unwrap().set_len(4 << 20).unwrap();
        chown(&file, Some(65533), None).unwrap();
        out_of_service(
            &mut daemon,
            &["segment.web", "belongs to user 65533, not to 0", "find out who made it"],
        );
        std::fs::remove_file(&file).unwrap();
    } else {
        kit::skip!("only root can give files to others");
    }
}

#[test]
fn a_segment_in_use_cannot_change_its_size_or_lose_its_file() {
    let config = |size: &str| format!("[segment.web]\nsize = \"{size}\"\n{HOST}");
    let mut daemon = Daemon::start_new(&config("4M"));
    let a = daemon.attach("web", "a");
    daemon.kill();
    // The segment is known and in use: the daemon serves what it can, and says what is wrong.
    std::fs::remove_file(daemon.shm("web")).unwrap();
    daemon.start();
    assert!(daemon.log().contains("is missing, and programs or VMs use it"), "{}", daemon.log());
    assert!(!daemon.shm("web").exists());
    let mut client = daemon.client();
    let (back, fds) = client.ask::<wire::Attached>(Kind::ATTACH, a.back.as_bytes(), Kind::ATTACHED).unwrap();
    assert_eq!((back.fds.0, fds.len()), (Fds::EVENT, 1), "there is no memory to give");
    client.ask::<[u8; 0]>(Kind::DETACH, &[], Kind::OK).unwrap();
    // Nobody uses the segment any more, so it is made anew.
    wait_for("its end", || daemon.inspect()["endpoints"].as_array()?.is_empty().then_some(()));
    daemon.kill();
    daemon.write_config("", &config("8M"));
    daemon.start();
    assert_eq!(daemon.attach("web", "b").wire.segment_len, 8 << 20);
}

#[test]
fn what_nobody_can_mean_is_refused_unless_a_daemon_starts_with_it() {
    let mut daemon = Daemon::prepare("socket_mode = \"0777\"\n", "[vm.a]\non_hang = \"fence\"\n");
    let output = daemon.output(&["--check"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    for part in ["vm.a.on_hang", "write hang_after = SECONDS", "daemon.socket_mode", "write 0666"] {
        assert!(text.contains(part), "{part} is missing in {text}");
    }
    // VMs may need a daemon that starts with such a file, so it serves.
    daemon.start();
    assert!(daemon.log().contains("is obeyed nevertheless"));
    for request in [
        json!({"op": "vm-add", "name": "b", "on_hang": "fence"}),
        json!({"op": "segment-create", "name": "s", "size": "4M", "members": ["host"], "mode": "0666"}),
    ] {
        let refused = daemon.admin(request.clone()).unwrap_err();
        assert!(refused.text.contains("hang_after") || refused.text.contains("0660"), "{refused:?}");
    }
    let mut empty = Daemon::prepare("", "");
    let output = empty.output(&["--check"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("declares no VM and no segment"), "{text}");
    empty.start();
    assert!(empty.log().contains("declares no VM and no segment; the folders are"), "{}", empty.log());
}

#[test]
fn a_good_configuration_is_accepted_and_applied() {
    let config = "[vm.a]\nsocket_mode = \"0600\"\nhome = \"3M\"\n\
                  [segment.web]\nsize = \"5M\"\nmemory = \"bar\"\nmembers = [\"host\", \"a\"]\nmode = \"0640\"\nowner = 0\ngroup = \"daemon\"\n";
    let mut daemon = Daemon::prepare("socket_mode = \"0600\"\n", config);
    let output = daemon.output(&["--check"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    assert!(
        text.contains("segment web: size 5M is rounded up to 8M") && text.contains("good: 1 VMs, 2 segments"),
        "{text}"
    );
    assert!(!daemon.shm("web").exists(), "--check changes nothing");
    daemon.start();
    let file = std::fs::metadata(daemon.shm("web")).unwrap();
    assert_eq!((file.len(), file.mode() & 0o777, file.blocks() * 512), (8 << 20, 0o640, 8 << 20));
    if rustix::process::geteuid().is_root() {
        assert_eq!(file.gid(), 1);
    } else {
        kit::skip!("only root can give files to another group");
    }
    for socket in ["ginnel.sock", "a.sock"] {
        assert_eq!(std::fs::metadata(daemon.run(socket)).unwrap().mode() & 0o777, 0o600);
    }
    assert_eq!(std::fs::metadata(daemon.dir.path().join("state/journal")).unwrap().mode() & 0o777, 0o600);
    // The configuration is also accepted when the segment already exists.
    assert!(daemon.output(&["--check"]).status.success());
}

#[test]
fn members_and_segments_that_are_no_longer_declared_are_removed() {
    let mut daemon = Daemon::start_new(&format!(
        "[vm.a]\n[vm.b]\n[segment.web]\nsize = \"4M\"\n{HOST}[segment.old]\nsize = \"4M\"\n{HOST}"
    ));
    let look = |daemon: &Daemon| {
        let status = daemon.inspect();
        let names = |key: &str| -> Vec<String> {
            status[key].as_array().unwrap().iter().map(|m| format!("{}", m["name"])).collect()
        };
        (names("members"), names("segments"))
    };
    let number = |daemon: &Daemon, name: &str| {
        let status = daemon.inspect();
        status["members"].as_array().unwrap().iter().find(|m| m["name"] == name).unwrap()["number"]
            .as_u64()
            .unwrap()
    };
    let b = number(&daemon, "b");
    let mut old = daemon.attach("old", "x");
    let mut peer = daemon.attach("old", "y");
    old.listen("x").unwrap();
    let channel = peer.connect("x").unwrap();
    daemon.kill();
    daemon.write_config("", &format!("[vm.b]\n[vm.c]\n[segment.web]\nsize = \"4M\"\n{HOST}"));
    daemon.start();
    assert_eq!(look(&daemon).1, ["\"web\""]);
    assert!(!look(&daemon).0.contains(&"\"a\"".to_string()));
    assert_eq!(number(&daemon, "b"), b);
    assert_ne!(number(&daemon, "c"), 1, "a's number is remembered");
    assert_eq!(channel.peer_state(), (SideState::DEAD.0, SideState::DEAD.0), "its users are told");
    assert!(daemon.shm("old").exists(), "whose memory it is, is not for us to say");
    daemon.kill();
    daemon.write_config("", &format!("[vm.a]\nnumber = 9\n[vm.b]\n[segment.web]\nsize = \"4M\"\n{HOST}"));
    daemon.start();
    assert_eq!((number(&daemon, "a"), number(&daemon, "b")), (9, b));
}

#[test]
fn the_example_is_valid_and_states_the_defaults() {
    use ginnel_daemon::host::config::Config;
    let text = include_str!("../../../../packaging/ginneld.toml");
    let path = std::path::Path::new("ginneld.toml");
    let example = Config::parse(text, path).unwrap();
    assert_eq!((example.vms.len(), example.segments.len()), (2, 3));
    // QEMU makes this socket, and only root may make one in the daemon's folder.
    let runtime_dir = example.runtime_dir.to_str().unwrap();
    assert!(text.contains("qmp = \"/") && !text.contains(&format!("qmp = \"{runtime_dir}")), "{runtime_dir}");
    // The commented-out lines state the defaults, so uncommenting them changes nothing. Excepted are lines that name accounts,
    // which may not exist here, and lines of settings that have no default.
    let words = |line: &str| {
        line.split_once(" = ").is_some_and(|(key, _)| key.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
    };
    let uncommented: Vec<&str> = text
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            Some(rest)
                if words(rest)
                    && !["user", "group", "owner", "allow", "admin", "number", "qmp"]
                        .iter()
                        .any(|w| rest.contains(w)) =>
            {
                rest
            }
            _ => line,
        })
        .collect();
    assert!(uncommented.len() > 20);
    assert_eq!(Config::parse(&uncommented.join("\n"), path).unwrap(), example);
}

/// While programs or VMs may need the daemon, a mistake in its configuration has no effect on them.
#[test]
fn with_a_keeper_a_mistake_in_the_file_leaves_the_last_accepted_one_in_force() {
    const GOOD: &str = "[vm.a]\n[segment.web]\nsize = \"8M\"\nmembers = [\"host\", \"a\"]\n";
    let mut daemon = Daemon::start_new(GOOD);
    let mut a = daemon.attach("web", "a");
    a.listen("x").unwrap();
    let says = |daemon: &Daemon| daemon.inspect()["daemon"]["config_mistake"].clone();
    assert!(says(&daemon).is_null());
    // A syntax error, an unknown key, and a value that makes no sense.
    let broken = [format!("{GOOD}[oops\n"), "mistake = 1\n".into(), GOOD.replace("8M", "8 tons")];
    for (n, broken) in broken.iter().enumerate() {
        daemon.kill();
        daemon.write_config("", broken);
        daemon.start();
        let said = says(&daemon);
        assert!(said.as_str().is_some_and(|said| said.contains("ginneld.toml")), "{said}");
        let mut b = daemon.attach("web", "b");
        b.connect("x").unwrap();
        assert_eq!(daemon.log().matches("accepted last is in effect").count(), n + 1);
    }
    // The configuration that is in force is the one that was accepted last, not one with a mistake.
    daemon.kill();
    let more = format!("{GOOD}[segment.more]\nsize = \"8M\"\nmembers = [\"host\"]\n");
    daemon.write_config("", &more);
    daemon.start();
    assert!(says(&daemon).is_null());
    daemon.kill();
    daemon.write_config("", "mistake = 1\n");
    daemon.start();
    daemon.attach("more", "c");
}

/// An operator who has made room for a segment need not wait until the daemon tries by itself again.
#[test]
fn a_segment_out_of_service_is_tried_again_when_it_is_added_again() {
    let mut daemon = Daemon::prepare("", &format!("[segment.web]\nsize = \"4M\"\n{HOST}{OTHER}"));
    std::fs::create_dir_all(daemon.shm("web")).unwrap();
    daemon.start();
    let add = |size: &str| {
        let request =
            serde_json::json!({"op": "segment-create", "name": "web", "size": size, "members": ["host"]});
        daemon.admin(request)
    };
    let refused = add("4M").unwrap_err();
    assert!(refused.text.contains("ginnel/web"), "{}", refused.text);
    assert_eq!(add("8M").unwrap_err().code, ErrorCode::IN_USE.0);
    // The daemon has just tried, and would try again only in some seconds.
    let tried = daemon.log().matches("stays out of service").count();
    std::fs::remove_dir(daemon.shm("web")).unwrap();
    let added: serde_json::Value = serde_json::from_str(&add("4M").unwrap()).unwrap();
    assert_eq!(added["segment"]["size"], 4 << 20);
    daemon.attach("web", "a");
    assert_eq!(daemon.log().matches("stays out of service").count(), tried);
    assert_eq!(add("4M").unwrap_err().code, ErrorCode::IN_USE.0, "it is in service");
}
