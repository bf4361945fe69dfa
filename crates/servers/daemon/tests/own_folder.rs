//! The daemon's own folder for the files of segments: what others put in its place, two daemons with one `shm_dir`, and files that an
//! older daemon has made in the folder above.

use ginnel_layout::wire::ErrorCode;
use ginnel_shmem::SharedMemory;
use kit::daemon::*;
use kit::hold::become_user;
use kit::wait::wait_for;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;

kit::test_that_skips_are_seen!();

const WEB: &str = "[segment.web]\nsize = \"8M\"\nmembers = [\"host\"]\n";
const NOBODY: u32 = 65534;

/// So many wait for the lock of a folder that the kernel gives it to them in turn.
const THREADS: usize = 12;

const KINDS: [&str; 4] = ["file", "link", "FIFO", "folder"];

kit::program! {
    /// Takes the name in `TEST_PATH` with a thing of the kind in `TEST_KIND`, as an ordinary user.
    fn taker() {
        become_user(NOBODY);
        let path = PathBuf::from(std::env::var_os("TEST_PATH").unwrap());
        match std::env::var("TEST_KIND").unwrap().as_str() {
            "file" => fs::write(path, "mine").unwrap(),
            "link" => symlink("/etc/passwd", path).unwrap(),
            "FIFO" => mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap(),
            "folder" => fs::create_dir_all(path.join("full")).unwrap(),
            other => panic!("{other}"),
        }
    }
}

/// Lets another user take a name.
fn taken_by_another(path: &Path, kind: &str) {
    let mut command = kit::program::command(taker);
    command.env("TEST_PATH", path).env("TEST_KIND", kind);
    assert!(command.status().unwrap().success(), "{kind} at {}", path.display());
    assert_eq!(fs::symlink_metadata(path).unwrap().uid(), NOBODY);
}

/// Returns a daemon, not started, whose `shm_dir` every user may write, as in `/dev/shm`.
fn open_to_all(config: &str) -> Daemon {
    let daemon = Daemon::prepare("", config);
    fs::set_permissions(daemon.dir.path(), Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(daemon.dir.path().join("shm"), Permissions::from_mode(0o1777)).unwrap();
    daemon
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn segment(daemon: &Daemon) -> Value {
    daemon.inspect()["segments"][0].clone()
}

/// Kills the daemon and changes its journal to that of an older version, which made the file in the folder above.
fn make_old(daemon: &mut Daemon, segment: &str) -> PathBuf {
    daemon.kill();
    let old = daemon.dir.path().join("shm").join(format!("ginnel-{segment}"));
    fs::rename(daemon.shm(segment), &old).unwrap();
    let journal = daemon.dir.path().join("state/journal");
    let lines = fs::read_to_string(&journal).unwrap();
    let lines = lines.lines().filter_map(|line| line.split_once(' ')).map(|(_, json)| {
        let json = json.replace(",\"own_folder\":true", "");
        format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes()))
    });
    fs::write(&journal, lines.collect::<String>()).unwrap();
    old
}

#[test]
fn nobody_can_take_the_name_of_a_file() {
    kit::require!(is_root(), "only root can act as several users");
    for kind in KINDS {
        // The name that it would have had in an earlier version.
        let mut daemon = open_to_all(WEB);
        taken_by_another(&daemon.dir.path().join("shm/ginnel-web"), kind);
        daemon.start();
        daemon.attach("web", "a");
    }
    // The folder itself: nobody else can write or list it.
    let mut daemon = open_to_all(WEB);
    daemon.start();
    let folder = fs::metadata(daemon.shm("")).unwrap();
    assert_eq!((folder.uid(), folder.mode() & 0o7777), (0, 0o711));
    for name in ["late", ".lock"] {
        let mut command = kit::program::command(taker);
        command.env("TEST_PATH", daemon.shm(name)).env("TEST_KIND", "file");
        assert!(!command.output().unwrap().status.success(), "{name} can be taken");
    }
}

#[test]
fn root_moves_away_what_is_in_the_place_of_its_folder() {
    kit::require!(is_root(), "only root can move what others have");
    for kind in KINDS {
        let mut daemon = open_to_all(WEB);
        taken_by_another(&daemon.dir.path().join("shm/ginnel"), kind);
        daemon.start();
        daemon.attach("web", "a");
        let moved = fs::read_dir(daemon.dir.path().join("shm")).unwrap().flatten();
        let moved =
            moved.filter(|entry| entry.file_name().to_string_lossy().starts_with("ginnel.of-user-65534."));
        assert_eq!(moved.count(), 1, "{kind}");
        assert!(daemon.log().contains(&format!("of user {NOBODY}, where the daemon's own folder should be")));
    }
}

kit::program! {
    /// Takes the name in `TEST_PATH` as soon as it is free, as an ordinary user, in the way that `TEST_KIND` says, until the input ends.
    fn squatter() {
        become_user(NOBODY);
        let path = PathBuf::from(std::env::var_os("TEST_PATH").unwrap());
        let kind = std::env::var("TEST_KIND").unwrap();
        for _ in 0..THREADS {
            let (path, kind) = (path.clone(), kind.clone());
            std::thread::spawn(move || loop {
                match kind.as_str() {
                    "link" => drop(symlink("/etc/passwd", &path)),
                    _ => drop(fs::create_dir(&path)),
                }
                if kind == "folder that comes and goes" {
                    let _ = fs::remove_dir(&path);
                }
            });
        }
        let _ = std::io::stdin().read_line(&mut String::new());
    }
}

#[test]
fn nobody_keeps_the_folder_away_by_taking_its_name_again_and_again() {
    kit::require!(is_root(), "only root can move what others have");
    for kind in ["link", "folder", "folder that comes and goes"] {
        let mut daemon = open_to_all(WEB);
        let folder = daemon.dir.path().join("shm/ginnel");
        let mut command = kit::program::command(squatter);
        command.env("TEST_PATH", &folder).env("TEST_KIND", kind).stdin(Stdio::piped());
        let mut squatter = command.spawn().unwrap();
        wait_for("the squatter", || folder.symlink_metadata().ok());
        daemon.start();
        daemon.attach("web", "a");
        drop(squatter.stdin.take());
        squatter.wait().unwrap();
        let names = fs::read_dir(daemon.dir.path().join("shm")).unwrap().flatten();
        let names: Vec<_> = names.map(|entry| entry.file_name().into_string().unwrap()).collect();
        let others = names.iter().filter(|name| *name != "ginnel").count();
        assert!(others <= 1, "{kind}: {names:?}");
        let owner = fs::symlink_metadata(&folder).unwrap();
        assert_eq!((owner.uid(), owner.mode() & 0o7777), (0, 0o711), "{kind}");
    }
}

/// What root's own programs have put there may be of use to somebody, so a person must decide.
#[test]
fn a_segment_is_out_of_service_while_something_is_in_the_place_of_its_folder() {
    type Put = fn(&Path);
    let things: [(Put, &str); 3] = [
        (|path| fs::write(path, "").unwrap(), "is a file of user"),
        (|path| symlink("/etc", path).unwrap(), "is a symbolic link of user"),
        (
            |path| {
                fs::create_dir(path).unwrap();
                fs::set_permissions(path, Permissions::from_mode(0o1777)).unwrap();
            },
            "others may write in",
        ),
    ];
    for (put, says) in things {
        let mut daemon = open_to_all(WEB);
        let folder = daemon.dir.path().join("shm/ginnel");
        put(&folder);
        let checked = String::from_utf8(daemon.output(&["--check"]).stderr).unwrap();
        assert!(checked.contains(says) && checked.contains("; "), "{checked}");
        daemon.start();
        let refused = daemon.client().attach("web", "a").err().unwrap();
        assert_eq!(refused.code, ErrorCode::BROKEN.0);
        assert!(
            refused.text.contains(says) && refused.text.contains(folder.to_str().unwrap()),
            "{}",
            refused.text
        );
        fs::remove_file(&folder).or_else(|_| fs::remove_dir(&folder)).unwrap();
        // The daemon tries again by itself.
        wait_for("the segment", || daemon.client().attach("web", "a").ok());
    }
}

#[test]
fn two_daemons_cannot_have_one_folder() {
    let mut first = Daemon::start_new(WEB);
    let mut second = Daemon::prepare("", "");
    let config = fs::read_to_string(second.config()).unwrap();
    let shm = |daemon: &Daemon| daemon.dir.path().join("shm").display().to_string();
    fs::write(second.config(), config.replace(&shm(&second), &shm(&first))).unwrap();
    let output = second.output(&[]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(said.contains(&format!("another ginneld (process {}) serves", first.pid())), "{said}");
    first.attach("web", "a");
    first.kill();
    second.start();
}

#[test]
fn a_file_of_an_older_daemon_stays_where_it_is() {
    let mut daemon = Daemon::start_new(WEB);
    let own = daemon.attach("web", "own");
    own.memory.store_release_u64(1 << 20, 7);
    let inode = fs::metadata(daemon.shm("web")).unwrap().ino();
    let old = make_old(&mut daemon, "web");
    daemon.start();
    for _ in 0..2 {
        assert_eq!(segment(&daemon)["path"], old.to_str().unwrap());
        let again = daemon.attach("web", "again");
        assert_eq!(again.memory.load_acquire_u64(1 << 20), 7);
        // It comes back once more, so it must not detach.
        let back = daemon.client().attach_as(own.back).unwrap();
        assert_eq!(back.wire.epoch, own.wire.epoch);
        back.hang_up();
        assert_eq!(fs::metadata(&old).unwrap().ino(), inode);
        assert!(!daemon.shm("web").exists());
        daemon.restart();
    }
}

#[test]
fn a_segment_moves_when_its_old_file_is_gone_or_not_the_daemons() {
    let mut daemon = Daemon::start_new(WEB);
    let old = make_old(&mut daemon, "web");
    fs::remove_file(&old).unwrap();
    daemon.start();
    assert_eq!(segment(&daemon)["path"], daemon.shm("web").to_str().unwrap());
    daemon.attach("web", "a");
    // The journal says so from now on: a file at the old place is nobody's concern.
    fs::write(&old, "").unwrap();
    daemon.restart();
    daemon.attach("web", "a");
    daemon.kill();
    fs::remove_file(&old).unwrap();

    for put in
        [|path: &Path| fs::create_dir(path).unwrap(), |path: &Path| symlink("/etc/passwd", path).unwrap()]
    {
        let mut daemon = Daemon::start_new(WEB);
        let old = make_old(&mut daemon, "web");
        fs::remove_file(&old).unwrap();
        put(&old);
        daemon.start();
        daemon.attach("web", "a");
        assert!(daemon.shm("web").exists());
    }
}

#[test]
fn a_segment_that_is_made_again_is_in_the_own_folder() {
    let mut daemon = Daemon::start_new("");
    let create =
        || serde_json::json!({"op": "segment-create", "name": "late", "size": 4 << 20, "members": ["host"]});
    daemon.admin(create()).unwrap();
    let old = make_old(&mut daemon, "late");
    daemon.start();
    assert_eq!(segment(&daemon)["path"], old.to_str().unwrap());
    daemon.admin(serde_json::json!({"op": "segment-remove", "name": "late"})).unwrap();
    wait_for("its end", || (!old.exists()).then_some(()));
    daemon.admin(create()).unwrap();
    assert_eq!(segment(&daemon)["path"], daemon.shm("late").to_str().unwrap());
}
