//! Builds the guest agent as one static program, and puts it where the library can embed it.
//!
//! Cargo builds the library of a dependency but not its programs, and tests that use this crate need the agent. It uses only the
//! standard library, so one call of the compiler makes it. So it always exists, always has the version of the harness, and brings no
//! library into the guest.

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
