//! A test that no dependency needs a newer Rust than the workspace promises. Cargo itself looks only at the toolchain that runs.

use std::process::Command;

/// A version of Rust, as it is written in a `Cargo.toml`: "1.88" or "1.88.0".
fn version(text: &str) -> Vec<u32> {
    let mut numbers: Vec<u32> = text.split('.').map(|number| number.parse().expect("a number")).collect();
    numbers.resize(3, 0);
    numbers
}

#[test]
fn no_dependency_needs_a_newer_rust() {
    // Only for this platform, because cargo has not downloaded what others need.
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--locked", "--offline", "--format-version", "1"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let promised = env!("CARGO_PKG_RUST_VERSION");
    let packages = metadata["packages"].as_array().expect("a list of packages");
    let mut stated = 0;
    for package in packages.iter().filter(|package| !package["source"].is_null()) {
        // Some packages state nothing; most of them are older than `rust-version` itself.
        let Some(needs) = package["rust_version"].as_str() else { continue };
        stated += 1;
        let name = package["name"].as_str().expect("a name");
        assert!(
            version(needs) <= version(promised),
            "{name} needs Rust {needs}, and Cargo.toml promises {promised}"
        );
    }
    assert!(stated > 50, "only {stated} dependencies state which Rust they need; is this the right list?");
}
