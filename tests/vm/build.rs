//! Builds the guest agent as one static program and leaves it where the library can embed it.
//!
//! Cargo builds a dependency's library but not its programs, and whoever uses this crate from a test needs the agent.
//! It is std only, so one call of the compiler makes it: always there, always the version the harness was built with,
//! and with no library to carry into the guest.

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("vm-agent");
    let rustc = env::var_os("RUSTC").expect("cargo sets RUSTC");
    let target = env::var("TARGET").expect("cargo sets TARGET");
    println!("cargo::rerun-if-changed=src/agent");
    println!("cargo::rerun-if-changed=src/protocol.rs");
    let status = Command::new(rustc)
        .args(["--edition=2024", "--crate-name=vm_agent", "--crate-type=bin", "--cap-lints=allow"])
        .args(["-Copt-level=2", "-Cpanic=abort", "-Cstrip=symbols", "-Ctarget-feature=+crt-static"])
        .args(["--target", &target])
        .arg("-o")
        .arg(&out)
        .arg("src/agent/main.rs")
        .status()
        .expect("the compiler cannot be started");
    assert!(status.success(), "the guest agent did not compile (a static libc is needed: package libc6-dev)");
    println!("cargo::rustc-env=VM_AGENT={}", out.display());
}
