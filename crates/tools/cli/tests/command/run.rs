//! Programs that are run with the preload library. For most of these tests it does not matter which library is loaded.

use ginnel_report::{Event, Record, Report};
use kit::build;
use kit::process::signal;
use kit::wait::wait_until;
use kit::world::World;
use rustix::process::Signal;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Returns a shared library that this process has loaded, so that any program can load it.
fn library(name: &str) -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    paths.map(PathBuf::from).find(|path| path.file_name().is_some_and(|file| file == name)).unwrap()
}

fn ginnel() -> Command {
    // A background process, such as a test may be, ignores some signals, and its children would inherit that.
    let mut command = Command::new("env");
    command
        .arg("--default-signal")
        .arg(build::program("ginnel"))
        .arg("run")
        .env("GINNEL_PRELOAD", library("libc.so.6"))
        .stdin(Stdio::null());
    for variable in ["LD_PRELOAD", "GINNEL_SOCKETS", "GINNEL_SOCKETS_REPORT"] {
        command.env_remove(variable);
    }
    command
}

fn said(output: &Output) -> (Option<i32>, &str, &str) {
    let text = |bytes| std::str::from_utf8(bytes).unwrap();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn the_program_gets_its_arguments_and_the_library() {
    let other = library("libgcc_s.so.1");
    let expected = format!("eager {}:{} -x --report\n", library("libc.so.6").display(), other.display());
    for report in [None, Some("--report")] {
        let output = ginnel()
            .args(report)
            .args([
                "--mode",
                "eager",
                "sh",
                "-c",
                "echo $GINNEL_SOCKETS $LD_PRELOAD $1 $2",
                "sh",
                "-x",
                "--report",
            ])
            .env("LD_PRELOAD", &other)
            .output()
            .unwrap();
        let (status, out, err) = said(&output);
        assert_eq!((status, out), (Some(0), &*expected), "{err}");
        assert_eq!(err.contains("no process has loaded the library"), report.is_some(), "{err}");
    }
    let mut command = ginnel();
    command.env("GINNEL_SOCKET", "/nowhere").args(["--", "sh", "-c", "echo $GINNEL_SOCKETS"]);
    let output = command.output().unwrap();
    let (status, out, err) = said(&output);
    assert_eq!((status, out), (Some(0), "auto\n"));
    assert!(err.contains("no daemon can be reached at /nowhere") && err.lines().count() == 1, "{err}");
    let output =
        ginnel().env("GINNEL_SOCKETS", "off").args(["sh", "-c", "echo $GINNEL_SOCKETS"]).output().unwrap();
    assert_eq!(said(&output), (Some(0), "off\n", ""));
    for line in [&["--repotr", "true"][..], &["--mode", "fast", "true"], &[]] {
        assert_eq!(ginnel().args(line).output().unwrap().status.code(), Some(2), "{line:?}");
    }
}

#[test]
fn the_exit_status_is_that_of_the_program_or_names_the_failure() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    fs::write(&text, "").unwrap();
    for report in [None, Some("--report")] {
        let run = |program: &[&str]| ginnel().args(report).args(program).output().unwrap();
        assert_eq!(run(&["sh", "-c", "exit 7"]).status.code(), Some(7));
        for (program, expected, word) in [
            ("no-such-program", 127, "no folder of the PATH has it"),
            ("/no/such/program", 127, "No such file"),
            (text.to_str().unwrap(), 126, "ermission denied"),
        ] {
            let output = run(&[program]);
            let (status, out, err) = said(&output);
            assert_eq!((status, out), (Some(expected), ""), "{err}");
            assert!(err.contains(program) && err.contains(word) && err.lines().count() == 1, "{err}");
        }
    }
    let output = ginnel().args(["--report=/no/such/folder/file", "true"]).output().unwrap();
    let (status, _, err) = said(&output);
    assert!(status == Some(125) && err.contains("/no/such/folder/file"), "{err}");
}

#[test]
fn a_missing_library_is_named() {
    let output = ginnel().env("GINNEL_PRELOAD", "/no/such/library").arg("true").output().unwrap();
    let (status, _, err) = said(&output);
    assert!(status == Some(125) && err.contains("GINNEL_PRELOAD names /no/such/library"), "{err}");

    // The command in a folder without the library beside it.
    let command = build::program("ginnel");
    let folder = tempfile::tempdir_in(command.parent().unwrap()).unwrap();
    let alone = folder.path().join("bin/ginnel");
    fs::create_dir(folder.path().join("bin")).unwrap();
    fs::hard_link(command, &alone).unwrap();
    let run = || {
        Command::new(&alone)
            .args(["run", "sh", "-c", "echo $LD_PRELOAD"])
            .env_remove("LD_PRELOAD")
            .env("GINNEL_SOCKETS", "off")
            .output()
            .unwrap()
    };
    let output = run();
    let (status, _, err) = said(&output);
    assert_eq!((status, err.lines().count()), (Some(125), 1), "{err}");
    for place in ["bin/libginnel_preload.so", "lib/ginnel/libginnel-preload.so", "GINNEL_PRELOAD"] {
        assert!(err.contains(place), "{err}");
    }
    // Now the library is where an installation has it.
    let installed = folder.path().join("lib/ginnel/libginnel-preload.so");
    fs::create_dir_all(installed.parent().unwrap()).unwrap();
    fs::copy(library("libgcc_s.so.1"), &installed).unwrap();
    let output = run();
    let found = format!("{}\n", installed.canonicalize().unwrap().display());
    assert_eq!(said(&output), (Some(0), &*found, ""));
}

/// A static x86-64 executable that exits with status 3.
fn linked_statically() -> Vec<u8> {
    // mov edi, 3; mov eax, 60 (exit); syscall
    let code = [0xbf, 3, 0, 0, 0, 0xb8, 60, 0, 0, 0, 0x0f, 5];
    let (base, front) = (0x40_0000_u64, 64 + 56);
    let mut file = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 62, 0, 1, 0, 0, 0];
    for word in [base + front, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 64, 0, 0, 0, 0, 0]);
    // PT_LOAD, readable and executable.
    file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    let size = front + code.len() as u64;
    for word in [0, base, base, size, size, 4096] {
        file.extend(word.to_le_bytes());
    }
    file.extend(code);
    file
}

#[test]
fn a_program_that_cannot_load_the_library_runs_with_a_warning() {
    kit::require!(cfg!(target_arch = "x86_64"), "the program is for x86-64");
    let folder = tempfile::tempdir().unwrap();
    let [program, script] = ["program", "script"].map(|name| folder.path().join(name));
    fs::write(&program, linked_statically()).unwrap();
    fs::write(&script, format!("#!{}\n", program.display())).unwrap();
    for path in [&program, &script] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    for (path, who) in [
        (&program, format!("{} is", program.display())),
        (&script, format!("{}, which runs {}, is", program.display(), script.display())),
    ] {
        let output = ginnel().arg(path).output().unwrap();
        let (status, _, err) = said(&output);
        let warning = format!(
            "ginnel: warning: {who} statically linked, so no library can be loaded: its connections stay on TCP\n"
        );
        assert_eq!((status, err), (Some(3), &*warning));
        assert_eq!(said(&ginnel().arg("--mode=off").arg(path).output().unwrap()), (Some(3), "", ""));
    }
}

#[test]
fn the_report_is_printed_and_saved_as_requested() {
    let folder = tempfile::tempdir().unwrap();
    let line = |pid: u32| {
        format!(
            r#"{{"event":"ended","pid":{pid},"program":"p","connection":1,"sent_after_us":5,"received_after_us":6,"shared_sent":4096}}"#
        )
    };
    let begin = r#"{"event":"process","pid":1,"program":"p"}"#;
    let script = format!(
        "cd /; echo $GINNEL_SOCKETS_REPORT; for line in '{begin}' '{}' '{}'; do echo $line >>$GINNEL_SOCKETS_REPORT; done; exit 4",
        line(1),
        line(2)
    );
    let sums = "ginnel: 1 program, 2 connections: 2 changed over to shared memory, 0 in one direction only, 0 on TCP; \
                sent 8 KiB over shared memory and 0 B over TCP, received 0 B and 0 B";
    let file = folder.path().join("report");
    fs::write(&file, "old\n").unwrap();
    let output =
        ginnel().args(["--report=report", "sh", "-c", &script]).current_dir(folder.path()).output().unwrap();
    let (status, out, err) = said(&output);
    assert_eq!((status, out), (Some(4), &*format!("{}\n", file.display())), "{err}");
    assert_eq!(err.lines().last(), Some(sums), "{err}");
    assert_eq!(fs::read_to_string(&file).unwrap(), format!("{begin}\n{}\n{}\n", line(1), line(2)));

    let output =
        ginnel().args(["--report", "sh", "-c", &script]).env("TMPDIR", folder.path()).output().unwrap();
    let (status, out, err) = said(&output);
    assert_eq!((status, err.lines().last()), (Some(4), Some(sums)), "{err}");
    let temporary = Path::new(out.trim_end());
    assert!(temporary.starts_with(folder.path()) && !temporary.exists(), "{out}");
}

#[test]
fn signals_reach_the_program_and_its_exit_status_is_returned() {
    for report in [None, Some("--report")] {
        for (name, number) in [
            ("TERM", Signal::TERM),
            ("INT", Signal::INT),
            ("HUP", Signal::HUP),
            ("QUIT", Signal::QUIT),
            ("USR1", Signal::USR1),
        ] {
            let script = format!("trap 'echo got; exit 9' {name}; echo ready; while :; do sleep 0.01; done");
            let mut child = ginnel()
                .args(report)
                .args(["sh", "-c", &script])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut out = BufReader::new(child.stdout.take().unwrap());
            let mut line = String::new();
            out.read_line(&mut line).unwrap();
            assert_eq!(line, "ready\n");
            signal(&child, number);
            let mut rest = String::new();
            out.read_to_string(&mut rest).unwrap();
            assert_eq!((&*rest, child.wait().unwrap().code()), ("got\n", Some(9)), "{name}");
        }
        for (name, number) in [("KILL", 9), ("TERM", 15), ("USR2", 12)] {
            let output =
                ginnel().args(report).args(["sh", "-c", &format!("kill -{name} $$")]).output().unwrap();
            assert_eq!(output.status.signal(), Some(number), "{:?}", said(&output));
            let shown = String::from_utf8_lossy(&output.stderr).contains("no process has loaded");
            assert_eq!(shown, report.is_some());
        }
    }
}

/// The variable that tells [`program_with_a_connection`] which file ends it.
const END: &str = "GINNEL_TEST_END";

kit::program! {
    /// A program with both ends of a connection, over which messages go back and forth until a file exists
    /// or its folder is removed.
    fn program_with_a_connection() {
        let end = PathBuf::from(std::env::var_os(END).unwrap());
        let folder = end.parent().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut connector = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut acceptor = listener.accept().unwrap().0;
        let echo = std::thread::spawn(move || {
            let mut piece = [0; MESSAGE];
            while acceptor.read_exact(&mut piece).is_ok() {
                acceptor.write_all(&piece).unwrap();
            }
        });
        let mut sent = 0_u64;
        while sent < 100 || (folder.exists() && !end.exists()) {
            let piece: [u8; MESSAGE] = std::array::from_fn(|at| (sent as usize + at) as u8);
            connector.write_all(&piece).unwrap();
            let mut answer = [0; MESSAGE];
            connector.read_exact(&mut answer).unwrap();
            assert_eq!(answer, piece, "message {sent}");
            sent += 1;
        }
        drop(connector);
        echo.join().unwrap();
        // The test may write this file, because the report of this process goes to another one.
        fs::write(end, sent.to_string()).unwrap();
    }
}

const MESSAGE: usize = 1000;

/// Starts that program with the real library. Returns the file that ends it and the file with its report.
fn with_a_connection(folder: &Path) -> (Command, PathBuf, PathBuf) {
    let (end, file) = (folder.join("end"), folder.join("report"));
    let mut command = ginnel();
    command
        .env("GINNEL_PRELOAD", build::library("libginnel_preload.so"))
        .env("GINNEL_SOCKET", folder.join("nothing"))
        .env(END, &end)
        .arg(format!("--report={}", file.display()))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    kit::program::run_by(&mut command, program_with_a_connection);
    (command, end, file)
}

fn report(file: &Path) -> Report {
    Report::read(BufReader::new(fs::File::open(file).unwrap())).unwrap()
}

#[test]
fn the_report_says_why_a_connection_stays() {
    let folder = tempfile::tempdir().unwrap();
    let (mut command, end, file) = with_a_connection(folder.path());
    fs::write(&end, "").unwrap();
    // Otherwise the connection may end before it is worth a report.
    let output = command.env("GINNEL_SOCKETS", "eager").output().unwrap();
    let (status, _, err) = said(&output);
    assert_eq!(status, Some(0), "{err}");
    let report = report(&file);
    assert_eq!((report.processes.len(), report.connections.len(), report.unreadable), (1, 2, 0), "{err}");
    let bytes = 100 * MESSAGE as u64;
    for connection in &report.connections {
        assert_eq!(connection.event, Event::Stays);
        assert_eq!((connection.tcp_sent, connection.tcp_received), (bytes, bytes), "{connection:?}");
        assert_eq!(connection.reason, "there is no daemon");
    }
    assert!(err.contains("1 program, 2 connections: 0 changed over to shared memory"), "{err}");
}

/// Both ends of a connection are in one process, with a real daemon.
fn changes_over_and_is_shown(mode: &str) {
    let world = World::new();
    let (mut command, end, file) = with_a_connection(&world.files());
    let child = command.env("GINNEL_SOCKET", world.socket()).env("GINNEL_SOCKETS", mode).spawn().unwrap();
    let is_over = |record: &Record<'_>| record.sent_after_us.is_some() && record.received_after_us.is_some();
    wait_until("the change of both ends", || {
        file.exists() && report(&file).connections.iter().filter(|record| is_over(record)).count() == 2
    });
    let shown = world.good("sockets web").out;
    assert_eq!(shown.lines().count(), 2, "{shown}");
    assert!(world.good("status").out.contains("TCP connections over shared memory: 1 "));
    fs::write(&end, "").unwrap();
    let output = child.wait_with_output().unwrap();
    let (status, _, err) = said(&output);
    assert_eq!(status, Some(0), "{err}");
    let bytes = MESSAGE as u64 * fs::read_to_string(&end).unwrap().parse::<u64>().unwrap();
    let report = report(&file);
    assert_eq!((report.connections.len(), report.unreadable), (2, 0), "{err}");
    for connection in &report.connections {
        assert!(is_over(connection) && connection.event == Event::Ended, "{connection:?}");
        let sums = [
            connection.tcp_sent + connection.shared_sent,
            connection.tcp_received + connection.shared_received,
        ];
        assert_eq!(sums, [bytes; 2], "{connection:?}");
        assert!(connection.shared_sent > 0 && connection.segment == "web", "{connection:?}");
    }
    assert!(err.contains("2 connections: 2 changed over to shared memory"), "{err}");
}

#[test]
fn a_connection_changes_over_and_is_shown() {
    changes_over_and_is_shown("auto");
}

#[test]
fn a_connection_changes_over_as_soon_as_it_can() {
    changes_over_and_is_shown("eager");
}
