//! `ginnel cp` with a real server.

use kit::build;
use kit::process::signal;
use kit::random::Random;
use kit::wait::wait_until;
use kit::world::{Server, World};
use rustix::process::Signal;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, SystemTime};

/// Returns bytes that do not repeat within several blocks.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Random::new(seed).fill(&mut bytes);
    bytes
}

/// Makes a folder with every kind of file that is copied.
fn tree(at: &Path) {
    fs::create_dir_all(at.join("sub/empty folder")).unwrap();
    fs::write(at.join("empty"), "").unwrap();
    fs::write(at.join("short"), "short").unwrap();
    fs::write(at.join("sub/long"), noise(3_000_001, 1)).unwrap();
    fs::write(at.join("sub/n\u{e4}me with\nline"), "x").unwrap();
    fs::write(at.join(OsStr::from_bytes(b"no text \xff")), "y").unwrap();
    symlink("short", at.join("link")).unwrap();
    symlink("/nowhere/at all", at.join("sub/dangling")).unwrap();
    for (name, mode) in [("short", 0o640), ("sub/long", 0o755), ("sub", 0o750), ("empty", 0o400)] {
        fs::set_permissions(at.join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let time = SystemTime::UNIX_EPOCH + Duration::new(981_173_106, 789_000_001);
    for name in ["short", "sub/long", "sub"] {
        File::open(at.join(name)).unwrap().set_modified(time).unwrap();
    }
}

/// Describes everything that a copy preserves of a tree: path, kind, mode, time, and content or link target.
fn contents(at: &Path) -> Vec<(String, u32, i64, i64, Vec<u8>)> {
    let mut all = Vec::new();
    let mut left = vec![at.to_owned()];
    while let Some(path) = left.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        let bytes = if meta.is_symlink() {
            fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
        } else if meta.is_dir() {
            left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            Vec::new()
        } else {
            fs::read(&path).unwrap()
        };
        let name = format!("{:?}", path.strip_prefix(at).unwrap());
        all.push((name, meta.mode(), meta.mtime(), meta.mtime_nsec(), bytes));
    }
    all.sort();
    all
}

fn names(at: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(at).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Starts a world with a server of `files/far`, and a folder `files/near`.
fn far(options: &str) -> (World, Server) {
    let world = World::new();
    for folder in ["near", "far"] {
        fs::create_dir(world.files().join(folder)).unwrap();
    }
    let server = world.server(&format!("cp --serve --segment web --root far {options}"));
    (world, server)
}

#[test]
fn a_tree_is_copied_unchanged() {
    let (world, server) = far("--write");
    assert!(server.first.contains("for reading and writing as cp@host in web"), "{}", server.first);
    let files = world.files();
    tree(&files.join("near/tree"));
    let original = contents(&files.join("near/tree"));

    // Into a folder under its own name, and under another name.
    world.good("cp -r near/tree host:");
    assert_eq!(contents(&files.join("far/tree")), original);
    world.good("cp -r near/tree host:/other");
    assert_eq!(contents(&files.join("far/other")), original);
    // Back again, over the existing files.
    for _ in 0..2 {
        world.good("cp -r host:tree near/back");
        world.good("cp -r host:tree/. near/back");
        assert_eq!(contents(&files.join("near/back/sub")), contents(&files.join("near/tree/sub")));
        fs::remove_dir_all(files.join("near/back/tree")).unwrap_or_default();
    }
    // From one remote place to another.
    world.good("cp -r host:tree host:between");
    assert_eq!(contents(&files.join("far/between")), original);
    let json = world.good("cp --json -r host:tree host:between2").json();
    assert_eq!((&json["files"], &json["refused"], &json["bytes"]), (&7.into(), &0.into(), &3_000_008.into()));
    // No other files are left behind.
    let all = [contents(&files.join("far")), contents(&files.join("near"))].concat();
    assert!(!all.iter().any(|entry| entry.0.contains("ginnel-part")), "{all:?}");
}

#[test]
fn several_sources_need_a_folder_as_target() {
    let (world, _server) = far("--write");
    let files = world.files();
    fs::write(files.join("near/a"), "a").unwrap();
    fs::write(files.join("near/b"), "b").unwrap();
    world.good("cp near/a near/b host:");
    assert_eq!(names(&files.join("far")), ["a", "b"]);
    world.good("cp host:a host:b near");
    let said = world.expect(1, "cp near/a near/b host:c");
    assert!(said.err.contains("the target must be a folder"), "{said:?}");
    world.expect(1, "cp near/a host:c/");
    world.expect(1, "cp near/a host:c/d");
    world.good("cp near/a host:c");
    assert_eq!(fs::read(files.join("far/c")).unwrap(), b"a");
}

#[test]
fn files_that_cannot_be_copied_are_named_and_the_rest_is_copied() {
    let (world, _server) = far("--write");
    let files = world.files();
    fs::create_dir(files.join("near/d")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(files.join("near/d/pipe")).status().unwrap();
    assert!(made.success());
    fs::write(files.join("near/d/good"), "good").unwrap();
    let said = world.expect(1, "cp -r near/d near/missing host:");
    assert!(said.err.contains("near/d/pipe: is a named pipe"), "{said:?}");
    assert!(said.err.contains("near/missing: No such file"), "{said:?}");
    assert_eq!(names(&files.join("far/d")), ["good"]);
    let said = world.expect(1, "cp near/d host:e");
    assert!(said.err.contains("--recursive"), "{said:?}");
    // The same in the other direction.
    fs::rename(files.join("near/d/pipe"), files.join("far/d/pipe")).unwrap();
    let said = world.expect(1, "cp -r --json host:d host:nothing near/got");
    assert!(said.err.contains("target must be a folder"), "{said:?}");
    let said = world.expect(1, "cp -r --json host:d near/got");
    assert!(said.err.contains("d/pipe: is a named pipe") && said.json()["refused"] == 1, "{said:?}");
    assert_eq!(names(&files.join("near/got")), ["good"]);
    // A file of the kernel that claims to be empty.
    world.good("cp /proc/version host:");
    assert_eq!(fs::read(files.join("far/version")).unwrap(), fs::read("/proc/version").unwrap());
}

#[test]
fn nothing_outside_the_root_is_reached() {
    let (world, _server) = far("--write");
    let files = world.files();
    fs::write(files.join("secret"), "secret").unwrap();
    fs::write(files.join("near/new"), "new").unwrap();
    symlink(files.join("secret"), files.join("far/absolute")).unwrap();
    symlink("../secret", files.join("far/up")).unwrap();
    symlink(files.join("near"), files.join("far/folder")).unwrap();
    for line in [
        "cp host:../secret near/x",
        "cp host:/../secret near/x",
        "cp host:absolute near/x",
        "cp host:up near/x",
        "cp near/new host:../x",
        "cp near/new host:folder/x",
    ] {
        let said = world.expect(1, line);
        assert_eq!(said.err.lines().count(), 1, "{line}: {said:?}");
    }
    assert_eq!(names(&files), ["far", "near", "secret"]);
    assert_eq!(names(&files.join("near")), ["new"]);
    // A link at the place of the target is replaced, not followed.
    world.good("cp near/new host:up");
    assert_eq!(fs::read(files.join("secret")).unwrap(), b"secret");
    assert_eq!(fs::read(files.join("far/up")).unwrap(), b"new");
    // Links at the place of a folder of the tree are not followed either.
    fs::create_dir_all(files.join("near/t/folder")).unwrap();
    fs::write(files.join("near/t/folder/y"), "y").unwrap();
    let said = world.expect(1, "cp -r near/t/. host:");
    assert!(said.err.contains("folder"), "{said:?}");
    assert!(!files.join("near/y").exists());
}

#[test]
fn a_server_is_read_only_by_default() {
    let (world, server) = far("");
    assert!(server.first.contains("for reading as"), "{}", server.first);
    fs::write(world.files().join("near/a"), "a").unwrap();
    fs::write(world.files().join("far/b"), "b").unwrap();
    let said = world.expect(1, "cp near/a host:");
    assert!(said.err.contains("ginnel cp --serve --write"), "{said:?}");
    world.good("cp host:b near");
    assert_eq!(names(&world.files().join("far")), ["b"]);
}

#[test]
fn bad_command_lines_are_usage_errors() {
    let world = World::new();
    for line in [
        "cp",
        "cp a",
        "cp a b",
        "cp a b c",
        "cp a: b c",
        "cp --serve a",
        "cp --write a b:",
        "cp x y:z --segment a --segment b",
        "cp a :b",
    ] {
        world.expect(2, line);
    }
    let said = world.expect(1, "cp Cargo.toml vm-a:");
    assert!(said.err.contains("vm-a serves no copies; start `ginnel cp --serve` there"), "{said:?}");
    let said = world.expect(1, "cp --segment web Cargo.toml host:");
    assert!(said.err.contains("host: serves no copies in segment web; start `ginnel cp"), "{said:?}");
    let said = world.expect(1, "cp Cargo.toml vm-x:");
    assert!(said.err.contains("shares no segment"), "{said:?}");
    let said = world.expect(1, "cp --serve");
    assert!(
        said.err.contains("name those to serve with --segment: ") && said.err.contains("web"),
        "{said:?}"
    );
}

/// Waits for the hidden part of a file to have this length.
fn wait_for_part(folder: &Path, name: &str, len: u64) {
    let part = folder.join(format!(".{name}.ginnel-part"));
    wait_until("a part of the file", || fs::metadata(&part).is_ok_and(|meta| meta.len() >= len));
}

#[test]
fn a_killed_receiver_leaves_nothing_visible_and_the_next_copy_continues() {
    let (world, mut server) = far("--write");
    let files = world.files();
    let bytes = noise(200 << 20, 2);
    fs::write(files.join("near/big"), &bytes).unwrap();
    let mut copy = world.command("cp near/big host:").stderr(Stdio::piped()).spawn().unwrap();
    wait_for_part(&files.join("far"), "big", 4 << 20);
    signal(&copy, Signal::STOP);
    server.end();
    assert_eq!(names(&files.join("far")), [".big.ginnel-part"]);
    signal(&copy, Signal::CONT);
    assert_eq!(copy.wait().unwrap().code(), Some(1));
    let mut err = String::new();
    std::io::Read::read_to_string(copy.stderr.as_mut().unwrap(), &mut err).unwrap();
    assert!(err.contains("host: the peer has died"), "{err}");

    let _server = world.server("cp --serve --segment web --root far --write");
    let json = world.good("cp --json near/big host:").json();
    let (resumed, moved) = (json["resumed"].as_u64().unwrap(), json["bytes"].as_u64().unwrap());
    assert!(resumed >= 4 << 20 && resumed + moved == bytes.len() as u64, "{json}");
    assert_eq!(names(&files.join("far")), ["big"]);
    assert!(fs::read(files.join("far/big")).unwrap() == bytes);
    // All of it is there already, but under its final name, so it is copied again.
    assert_eq!(world.good("cp --json near/big host:").json()["resumed"], 0);
}

#[test]
fn a_part_of_something_else_is_not_continued() {
    let (world, _server) = far("--write");
    let files = world.files();
    let bytes = noise(3 << 20, 3);
    fs::write(files.join("near/big"), &bytes).unwrap();
    for (options, resumed) in [("", 0), ("--no-resume", 0), ("--resume", 2 << 20)] {
        let mut part = noise(2 << 20, 3);
        part[1 << 20] ^= u8::from(options.is_empty());
        for folder in ["far", "near/back"] {
            fs::create_dir_all(files.join(folder)).unwrap();
            fs::write(files.join(folder).join(".big.ginnel-part"), &part).unwrap();
        }
        let json = world.good(&format!("cp --json {options} near/big host:")).json();
        assert_eq!(json["resumed"], resumed, "to: {options}");
        let json = world.good(&format!("cp --json {options} host:big near/back")).json();
        assert_eq!(json["resumed"], resumed, "back: {options}");
        for folder in ["far", "near/back"] {
            assert!(fs::read(files.join(folder).join("big")).unwrap() == bytes, "{options} {folder}");
            assert_eq!(names(&files.join(folder)), ["big"]);
            fs::remove_file(files.join(folder).join("big")).unwrap_or_default();
        }
    }
}

#[test]
fn an_interrupted_client_leaves_nothing_visible() {
    let (world, _server) = far("--write");
    let files = world.files();
    fs::write(files.join("far/big"), noise(200 << 20, 4)).unwrap();
    let mut copy = world.command("cp host:big near").stderr(Stdio::piped()).spawn().unwrap();
    wait_for_part(&files.join("near"), "big", 2 << 20);
    signal(&copy, Signal::INT);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&copy.wait().unwrap()), Some(2));
    assert_eq!(names(&files.join("near")), [".big.ginnel-part"]);
    // The server still serves.
    let json = world.good("cp --json host:big near").json();
    assert!(json["resumed"].as_u64().unwrap() >= 2 << 20, "{json}");
    assert_eq!(names(&files.join("near")), ["big"]);
}

#[test]
fn direct_writing_gives_the_same_files() {
    // On a disk if there is one, because a tmpfs may not support direct I/O.
    for folder in [Some(Path::new(env!("CARGO_TARGET_TMPDIR"))), None] {
        let (world, mut server) = far("--write");
        let target = folder.map(|folder| tempfile::tempdir_in(folder).unwrap());
        let at = target.as_ref().map_or_else(|| world.files().join("far"), |dir| dir.path().to_owned());
        server.end();
        let _server = world.server(&format!("cp --serve --segment web --write --root {}", at.display()));
        for len in [0, 5, 1 << 20, (9 << 20) + 4097] {
            let bytes = noise(len, len as u64);
            fs::write(world.files().join("near/x"), &bytes).unwrap();
            world.good("cp --direct near/x host:");
            assert!(fs::read(at.join("x")).unwrap() == bytes, "{len} bytes in {}", at.display());
        }
        // An existing part may end at any position.
        let bytes = noise(9 << 20, 9);
        fs::write(world.files().join("near/y"), &bytes).unwrap();
        fs::write(at.join(".y.ginnel-part"), &bytes[..(3 << 20) + 12345]).unwrap();
        let json = world.good("cp --json --direct near/y host:").json();
        assert_eq!(json["resumed"], (3 << 20) + 12288);
        assert!(fs::read(at.join("y")).unwrap() == bytes);
    }
}

#[test]
fn a_copy_does_not_notice_that_the_daemon_is_killed() {
    let (mut world, _server) = far("--write");
    let files = world.files();
    let bytes = noise(200 << 20, 5);
    fs::write(files.join("near/big"), &bytes).unwrap();
    let copy = world.command("cp --json near/big host:").stdout(Stdio::piped()).spawn().unwrap();
    wait_for_part(&files.join("far"), "big", 1 << 20);
    world.replace_daemon();
    let output = copy.wait_with_output().unwrap();
    assert!(output.status.success());
    assert!(fs::read(files.join("far/big")).unwrap() == bytes);
    // The new daemon knows the server.
    world.good("cp host:big near/back");
    assert!(fs::read(files.join("near/back")).unwrap() == bytes);
}

#[test]
fn a_small_segment_is_sufficient() {
    let world = World::new();
    for folder in ["near", "far"] {
        fs::create_dir(world.files().join(folder)).unwrap();
    }
    // The arena of this segment has less than 2 MiB.
    let _server = world.server("cp --serve --segment shared --root far --write");
    let bytes = noise(5 << 20, 6);
    fs::write(world.files().join("near/x"), &bytes).unwrap();
    world.good("cp near/x host:");
    world.good("cp host:x near/y");
    assert!(fs::read(world.files().join("near/y")).unwrap() == bytes);
}

#[test]
fn a_full_disk_is_named_and_leaves_nothing() {
    let (world, mut server) = far("--write");
    server.end();
    fs::write(world.files().join("near/x"), noise(900 << 10, 7)).unwrap();
    // A limit on the size of files simulates a full disk.
    let line = format!(
        "trap '' XFSZ; ulimit -f 500; exec {} cp --serve --segment web --root far --write",
        build::program("ginnel").display()
    );
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", &line]).env("GINNEL_SOCKET", world.socket()).current_dir(world.files());
    let _server = Server::start(shell);
    let said = world.expect(1, "cp near/x host:");
    assert!(said.err.contains("writing x: File too large") && said.err.lines().count() == 1, "{said:?}");
    assert_eq!(names(&world.files().join("far")), [""; 0]);
}

#[test]
fn many_clients_are_served_at_once() {
    let (world, _server) = far("--write");
    let files = world.files();
    thread::scope(|scope| {
        for n in 0..6u64 {
            let (world, files) = (&world, &files);
            scope.spawn(move || {
                let bytes = noise(2_000_000 + n as usize, n);
                fs::write(files.join(format!("near/{n}")), &bytes).unwrap();
                world.good(&format!("cp near/{n} host:"));
                world.good(&format!("cp host:{n} near/back-{n}"));
                assert!(fs::read(files.join(format!("near/back-{n}"))).unwrap() == bytes, "{n}");
            });
        }
    });
    assert_eq!(names(&files.join("far")).len(), 6);
}
