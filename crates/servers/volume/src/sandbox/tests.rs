mod doors;

use super::*;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Output};

kit::test_that_skips_are_seen!();

/// Runs a program (see `kit::program!`), which reads this setting.
fn child<F: Fn()>(program: F, setting: &str) -> Output {
    // The child cannot remove this folder: it is inside the sandbox.
    let folder = tempfile::tempdir().unwrap();
    kit::program::command(program)
        .env("GINNEL_TEST_SANDBOX", setting)
        .env("TMPDIR", folder.path())
        .output()
        .unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

kit::program! {
    fn child_in_the_sandbox() {
        let setting = std::env::var("GINNEL_TEST_SANDBOX").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let (socket, path) = (folder.path().join("v.sock"), folder.path().join("image"));
        File::create(&socket).unwrap();
        let mut image = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        let hole = doors::Hole::new();
        if setting == "landlock" {
            assert!(landlock().unwrap());
            println!("refused: {}", std::fs::remove_file(&socket).unwrap_err());
            return;
        }
        let held = enter(SandboxMode::Require, Role::Volume, "web").unwrap();
        assert_eq!(held.word(), "landlock+seccomp");
        match setting.as_str() {
            "serve" => {
                // The image, threads and clocks work as before.
                image.set_len(4096).unwrap();
                let mut byte = [1];
                image.read_exact(&mut byte).unwrap();
                std::thread::spawn(|| std::thread::sleep(std::time::Duration::from_millis(1))).join().unwrap();
                // No other file can be opened.
                for path in ["/etc/passwd", "/proc/self/maps", path.to_str().unwrap()] {
                    let error = File::open(path).unwrap_err();
                    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "{path}");
                }
                println!("served");
            }
            "socket" => drop(std::net::UdpSocket::bind("127.0.0.1:0")),
            "program" => drop(Command::new("/bin/true").exec()),
            "ring" => hole.try_all(),
            "remove" => drop(std::fs::remove_file(&socket)),
            "panic" => panic!("told"),
            other => match other.strip_prefix("door ") {
                Some(door) => doors::try_door(door),
                None => unreachable!("{other}"),
            },
        }
    }
}

kit::program! {
    fn child_holder() {
        let setting = std::env::var("GINNEL_TEST_SANDBOX").unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let held = enter(SandboxMode::Require, Role::Holder, "web").unwrap();
        assert_eq!(held.word(), "landlock+seccomp");
        match setting.as_str() {
            "hold" => {
                // A large block of memory, and messages with a descriptor.
                let bytes = vec![1; 10 << 20];
                let sent = ginnel_fdpass::send(ours.as_fd(), &bytes[..100], &[&file], ginnel_fdpass::SendFlags::empty());
                assert_eq!(sent, Ok(100));
                let got = ginnel_fdpass::receive(theirs.as_fd(), &mut [0; 100], 1, ginnel_fdpass::RecvFlags::empty());
                assert_eq!(got.unwrap().fds.len(), 1);
                println!("held");
            }
            "map" => drop(ginnel_shmem::Mapping::of_file(&file, 0, 4096, ginnel_shmem::Protection::ReadWrite)),
            "write" => drop(std::os::unix::fs::FileExt::write_all_at(&file, &[1], 0)),
            "remove" => drop(std::fs::remove_file(std::env::temp_dir().join("v.sock"))),
            "thread" => drop(std::thread::spawn(|| ())),
            "socket" => drop(std::net::UdpSocket::bind("127.0.0.1:0")),
            other => unreachable!("{other}"),
        }
    }
}

#[test]
fn a_holder_cannot_even_map_what_it_holds() {
    let output = child(child_holder, "hold");
    assert!(output.status.success() && text(&output).contains("held"), "{}", text(&output));
    for what in ["map", "write", "remove", "thread", "socket"] {
        let output = child(child_holder, what);
        // The C library blocks all signals while it starts a thread, so nobody prints the line then.
        let signal = output.status.code().map(|code| code - 128).or(output.status.signal());
        assert_eq!(signal, Some(libc::SIGSYS), "{what}: {}", text(&output));
    }
}

#[test]
fn the_volume_works_and_can_open_no_other_file() {
    let output = child(child_in_the_sandbox, "serve");
    assert!(output.status.success() && text(&output).contains("served"), "{}", text(&output));
}

#[test]
fn a_forbidden_call_ends_it_with_one_clear_line() {
    for (what, call) in [("socket", libc::SYS_socket), ("program", libc::SYS_execve)] {
        let output = child(child_in_the_sandbox, what);
        assert_eq!(output.status.code(), Some(128 + libc::SIGSYS), "{what}: {}", text(&output));
        let stderr = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<_> = stderr.lines().filter(|l| l.contains("sandbox")).collect();
        assert_eq!(lines.len(), 1, "{stderr}");
        assert!(
            lines[0].starts_with("ginnel-volume web: ended by its own sandbox at system call"),
            "{stderr}"
        );
        assert!(lines[0].contains(&format!("system call {call},")), "{stderr}");
    }
}

/// Not even beside its own sockets, where other volumes have theirs.
#[test]
fn no_name_can_be_removed() {
    let output = child(child_in_the_sandbox, "landlock");
    assert!(text(&output).contains("refused: Permission denied"), "{}", text(&output));
    let output = child(child_in_the_sandbox, "remove");
    assert_eq!(output.status.code(), Some(128 + libc::SIGSYS), "{}", text(&output));
}

#[test]
fn a_panic_is_told() {
    let output = child(child_in_the_sandbox, "panic");
    assert_eq!(output.status.code(), Some(101), "{}", text(&output));
    assert!(text(&output).contains("told"));
}

kit::program! {
    fn child_of_another_user() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let assume =
            |user, group| Identity::find(&Account::Number(user), Some(&Account::Number(group)))?.assume();
        assume(65534, 65533).unwrap();
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        for line in [
            "Uid:\t65534\t65534\t65534",
            "Gid:\t65533\t65533\t65533",
            "CapEff:\t0000000000000000",
            "CapPrm:\t0000000000000000",
        ] {
            assert!(status.contains(line), "{line} in\n{status}");
        }
        assert!(assume(0, 0).is_err(), "there is no way back");
        // Open files stay open.
        image.as_file().set_len(4096).unwrap();
        println!("became");
    }
}

#[test]
fn root_becomes_an_ordinary_user_for_good() {
    kit::require!(rustix::process::geteuid().is_root(), "only root can become somebody else");
    let output = child(child_of_another_user, "become");
    assert!(text(&output).contains("became"), "{}", text(&output));
}

#[test]
fn accounts_that_are_not_there_are_named() {
    let nobody = Account::Name("no-such-account-here".into());
    let error = Identity::find(&nobody, None).unwrap_err().to_string();
    assert!(error.contains("no-such-account-here") && error.contains("create the user"), "{error}");
    let error = Identity::find(&Account::Number(65534), Some(&nobody)).unwrap_err().to_string();
    assert!(error.contains("create the group"), "{error}");
    let error = Identity::find(&Account::Number(4_000_000_000), None).unwrap_err().to_string();
    assert!(error.contains("write `group` too"), "{error}");
}

#[test]
fn a_missing_sandbox_is_reported() {
    assert_eq!(enter(SandboxMode::Off, Role::Volume, "web").unwrap().word(), "none");
}
