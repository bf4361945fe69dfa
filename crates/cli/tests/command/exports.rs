//! Calls by unusual names and ways, from a C program: bytes that went past the library would be lost.

use std::path::Path;
use std::process::Command;

use crate::stage::{Stage, have};

/// Runs a part of the program, compiled in each of these ways.
fn run(part: &str, ways: &[&[&str]]) {
    if !cfg!(target_arch = "x86_64") {
        println!("SKIPPED these functions are for x86-64");
        return;
    }
    if !have(&["cc"]) {
        return;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/command/exports.c");
    for way in ways {
        let stage = Stage::new("eager").settling();
        let program = stage.world.files().join("exports");
        let compiled = Command::new("cc")
            .args(*way)
            .arg("-pthread")
            .arg("-o")
            .arg(&program)
            .arg(&source)
            .status()
            .unwrap();
        assert!(compiled.success());
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
fn trap_4_a_file_action_of_posix_spawn_does_not_pass_a_connection_on() {
    run("spawned", &[PLAIN]);
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
fn a_program_may_handle_its_own_faults() {
    run("faulting", &[PLAIN]);
}
