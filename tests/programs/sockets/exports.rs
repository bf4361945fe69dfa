//! Unusual functions and ways of calling them, from a C program. If the library did not follow one, bytes would be
//! lost.

use programs::stage::Stage;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// Runs a part of the program, compiled in each of these ways.
fn run(part: &str, ways: &[&[&str]]) {
    kit::require!(cfg!(target_arch = "x86_64"), "these functions are for x86-64");
    kit::require_programs!(&["cc"]);
    for way in ways {
        let stage = Stage::new("eager").settling();
        let files = [("exports.c", include_str!("exports.c"))];
        let program = stage.compile("exports", &files, &[way, &["-pthread"][..]].concat());
        stage.client(&[program.to_str().unwrap(), part]);
        let connections = stage.end();
        let changed = |one: &&ginnel_report::Record<'_>| one.shared_sent > 0;
        assert!(connections.iter().filter(changed).count() >= 2, "{part} {way:?}: {connections:#?}");
    }
}

const PLAIN: &[&str] = &["-O1"];
const FORTIFIED: &[&str] = &["-O2", "-D_FORTIFY_SOURCE=2"];

#[test]
fn trap_8_bytes_of_dprintf_are_in_the_stream() {
    run("formatted", &[PLAIN, FORTIFIED]);
    run("lists", &[PLAIN, FORTIFIED]);
}

#[test]
fn trap_9_other_names_of_the_same_functions_are_followed() {
    run("aliases", &[PLAIN]);
}

#[test]
fn traps_10_and_11_system_calls_by_number_are_followed() {
    run("system_calls", &[PLAIN]);
}

#[test]
fn trap_9_asynchronous_io_is_refused() {
    run("asynchronous", &[PLAIN]);
}

#[test]
fn trap_20_a_program_that_confines_itself_is_not_killed() {
    run("confined", &[PLAIN]);
}

#[test]
fn trap_4_a_file_action_of_posix_spawn_passes_a_connection_on() {
    run("spawned", &[PLAIN]);
}

#[test]
fn trap_9_programs_that_are_executed_by_any_function_get_their_connections() {
    run("executed", &[PLAIN]);
}

#[test]
fn a_sleeping_thread_does_not_touch_another_file_with_its_reused_descriptor() {
    run("replaced", &[PLAIN]);
}

#[test]
fn concurrent_calls_do_not_mix_up_files_when_a_descriptor_is_reused() {
    run("races", &[PLAIN]);
}

#[test]
fn a_thread_that_sleeps_in_a_closed_connection_gets_no_data_of_later_ones() {
    run("reused", &[PLAIN]);
}

#[test]
fn trap_3_a_child_that_shares_its_parents_memory_closes_no_connection_of_the_parent() {
    run("vforked", &[PLAIN]);
    run("cloned", &[PLAIN]);
}

#[test]
fn traps_6_and_7_streams_of_the_c_library_read_write_and_close_connections() {
    run("streams", &[PLAIN, FORTIFIED]);
}

#[test]
fn trap_16_a_handler_may_jump_out_of_any_call() {
    run("jumps", &[PLAIN]);
}

#[test]
fn trap_18_the_data_path_does_not_allocate_and_an_allocator_may_be_the_programs() {
    run("allocates", &[PLAIN]);
}

#[test]
fn trap_19_a_program_may_exit_while_other_threads_send() {
    run("exits", &[PLAIN; 5]);
}

#[test]
fn a_setuid_program_stays_on_tcp() {
    kit::require_programs!(&["cc"]);
    kit::require!(rustix::process::geteuid().is_root(), "only root makes programs with the rights of others");
    let stage = Stage::new("eager");
    // Not in the stage's folder, because such permissions may not be effective there.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let program = folder.path().join("exports");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("sockets/exports.c");
    let compiled = Command::new("cc").arg("-pthread").arg("-o").arg(&program).arg(&source).status().unwrap();
    assert!(compiled.success());
    std::os::unix::fs::chown(&program, Some(65534), None).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let said = stage.client(&[program.to_str().unwrap(), "privileged"]);
    kit::require!(
        !said.contains("no rights"),
        "programs in {} do not get the rights of their owners",
        folder.path().display()
    );
    let connections = stage.end();
    assert!(connections.iter().all(|connection| connection.program != "exports"), "{connections:#?}");
}

#[test]
fn a_program_may_handle_its_own_faults() {
    run("faulting", &[PLAIN]);
}

/// Prefixes of the C library's functions that move bytes of descriptors, copy or close them, or create processes that
/// inherit them.
const WORDS: [&str; 39] = [
    "accept",
    "aio_",
    "bind",
    "clone",
    "close",
    "connect",
    "copy_file_range",
    "daemon",
    "dprintf",
    "dup",
    "epoll",
    "exec",
    "fcntl",
    "fdopen",
    "fork",
    "freopen",
    "getpeername",
    "getsockname",
    "getsockopt",
    "ioctl",
    "lio_",
    "listen",
    "pidfd_getfd",
    "poll",
    "posix_spawn",
    "ppoll",
    "pread",
    "pselect",
    "pwrite",
    "read",
    "recv",
    "select",
    "send",
    "setsockopt",
    "shutdown",
    "socket",
    "splice",
    "syscall",
    "write",
];

/// Functions that the library need not follow, by prefix.
const OTHERS: [(&str, &[&str]); 6] = [
    (
        "no sockets",
        &[
            "aio_cancel",
            "aio_error",
            "aio_fsync",
            "aio_init",
            "aio_return",
            "aio_suspend",
            "bind_textdomain_codeset",
            "bindtextdomain",
            "closedir",
            "closelog",
            "copy_file_range",
            "duplocale",
            "fdopendir",
            "readahead",
            "readdir",
            "readlink",
        ],
    ),
    ("an offset, which no stream has: an error of the kernel's", &["pread", "preadv", "pwrite", "pwritev"]),
    ("the kernel's to answer", &["bind", "bindresvport", "getpeername", "getsockname", "socketpair"]),
    ("another program, or handlers that fork runs", &["daemon", "forkpty", "posix_spawn"]),
    (
        "the C library's own",
        &["close_nocancel", "pread64_nocancel", "read_nocancel", "write_nocancel", "sendmmsg"],
    ),
    ("a descriptor of another process", &["pidfd_getfd"]),
];

#[test]
fn every_function_of_the_c_library_that_uses_descriptors_is_known() {
    kit::require_programs!(&["nm"]);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let libc = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .find(|path| path.ends_with("/libc.so.6"));
    kit::require!(libc.is_some(), "this is not glibc");
    let libc = libc.unwrap();
    let symbols = |of: &Path| {
        let out = Command::new("nm").args(["-D", "--defined-only"]).arg(of).output().unwrap();
        assert!(out.status.success(), "{out:?}");
        let text = String::from_utf8(out.stdout).unwrap();
        let name = |line: &str| Some(line.split_whitespace().nth(2)?.split('@').next()?.to_owned());
        text.lines().filter_map(name).collect::<std::collections::BTreeSet<String>>()
    };
    let ours = symbols(&kit::build::library("libginnel_preload.so"));
    let plain = |name: &str| {
        let name = name.trim_start_matches('_');
        name.strip_prefix("libc_")
            .or(name.strip_prefix("IO_"))
            .unwrap_or(name)
            .trim_end_matches("_chk")
            .to_owned()
    };
    let is_other = |name: &str| {
        let name = plain(name);
        let begins = |other: &&str| {
            name.strip_prefix(*other).is_some_and(|rest| {
                ["", "64", "_r", "64_r", "64v2", "v64", "v2", "v64v2", "at", "p"].contains(&rest)
                    || rest.starts_with("attr_")
                    || rest.starts_with("_file_actions_")
            })
        };
        OTHERS.iter().any(|(_, names)| names.iter().any(begins))
    };
    let unknown: Vec<_> = symbols(Path::new(libc))
        .into_iter()
        .filter(|name| {
            WORDS.iter().any(|word| plain(name).starts_with(word)) && !ours.contains(name) && !is_other(name)
        })
        .collect();
    assert!(unknown.is_empty(), "to be followed, or to be listed in OTHERS: {unknown:?}");
}
