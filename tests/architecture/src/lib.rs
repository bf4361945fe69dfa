//! A test that each crate of the workspace depends only on crates that it may depend on (docs/architecture.md).
#![cfg(test)]

use std::collections::BTreeMap;
use std::process::Command;

/// The crates of this workspace, each with the crates of this workspace that it may depend on.
const ALLOWED: &[(&str, &[&str])] = &[
    ("ginnel-config", &[]),
    ("ginnel-layout", &[]),
    ("ginnel-doorbell", &[]),
    ("ginnel-fdpass", &[]),
    ("ginnel-shmem", &[]),
    ("ginnel-status", &[]),
    ("ginnel-ring", &["ginnel-layout", "ginnel-shmem"]),
    ("ginnel-sync", &["ginnel-layout", "ginnel-shmem", "ginnel-ring"]),
    ("ginnel-virtqueue", &["ginnel-layout", "ginnel-shmem"]),
    (
        "ginnel",
        &["ginnel-doorbell", "ginnel-fdpass", "ginnel-layout", "ginnel-shmem", "ginnel-ring", "ginnel-sync"],
    ),
    (
        "ginnel-daemon",
        &[
            "ginnel-config",
            "ginnel-doorbell",
            "ginnel-fdpass",
            "ginnel-layout",
            "ginnel-shmem",
            "ginnel-ring",
            "ginnel-status",
            "ginnel-sync",
            "ginnel-tcp",
        ],
    ),
    ("ginnel-farm", &["ginnel", "ginnel-layout"]),
    ("ginnel-cache-store", &["ginnel-layout", "ginnel-shmem"]),
    ("ginnel-cache-client", &["ginnel", "ginnel-cache-store"]),
    ("ginnel-cache-protocol", &[]),
    (
        "ginnel-cache",
        &[
            "ginnel",
            "ginnel-cache-protocol",
            "ginnel-cache-store",
            "ginnel-config",
            "ginnel-layout",
            "ginnel-shmem",
        ],
    ),
    ("ginnel-volume-control", &["ginnel-config"]),
    ("ginnel-capi", &["ginnel", "ginnel-cache-client", "ginnel-farm", "ginnel-status"]),
    (
        "ginnel-cli",
        &[
            "ginnel",
            "ginnel-cache-client",
            "ginnel-config",
            "ginnel-farm",
            "ginnel-layout",
            "ginnel-report",
            "ginnel-status",
            "ginnel-verbs",
            "ginnel-volume-control",
        ],
    ),
    (
        "ginnel-volume-bench",
        &["ginnel-config", "ginnel-fdpass", "ginnel-layout", "ginnel-shmem", "ginnel-virtqueue"],
    ),
    ("ginnel-report", &[]),
    ("ginnel-tcp", &[]),
    ("ginnel-verbs-abi", &[]),
    ("ginnel-verbs", &["ginnel", "ginnel-layout", "ginnel-shmem", "ginnel-status"]),
    ("ginnel-verbs-capi", &["ginnel", "ginnel-layout", "ginnel-shmem", "ginnel-verbs", "ginnel-verbs-abi"]),
    (
        "ginnel-preload",
        &[
            "ginnel",
            "ginnel-cache-protocol",
            "ginnel-cache-store",
            "ginnel-layout",
            "ginnel-report",
            "ginnel-ring",
            "ginnel-shmem",
            "ginnel-tcp",
        ],
    ),
    ("architecture", &[]),
    ("kit", &[]),
    (
        "vmtest",
        &[
            "ginnel",
            "ginnel-cache-client",
            "ginnel-farm",
            "ginnel-layout",
            "ginnel-report",
            "ginnel-shmem",
            "ginnel-tcp",
        ],
    ),
    (
        "ginnel-volume",
        &[
            "ginnel-config",
            "ginnel-fdpass",
            "ginnel-layout",
            "ginnel-shmem",
            "ginnel-virtqueue",
            "ginnel-volume-control",
        ],
    ),
    (
        "ginnel-bench",
        &[
            "ginnel",
            "ginnel-cache-client",
            "ginnel-cache-store",
            "ginnel-farm",
            "ginnel-fdpass",
            "ginnel-layout",
            "ginnel-shmem",
            "ginnel-volume-bench",
            "vmtest",
        ],
    ),
];

#[test]
fn dependencies_point_down_only() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let packages = metadata["packages"].as_array().expect("a list of packages");
    for package in packages {
        let name = package["name"].as_str().expect("a name");
        let may = allowed.get(name).unwrap_or_else(|| panic!("{name} is not in the list of this test"));
        for dependency in package["dependencies"].as_array().expect("a list") {
            let on = dependency["name"].as_str().expect("a name");
            // Tests may depend on any crate, so only normal dependencies are checked.
            if dependency["kind"].is_null() && allowed.contains_key(on) {
                assert!(may.contains(&on), "{name} must not depend on {on}");
            }
        }
    }
    assert_eq!(packages.len(), ALLOWED.len(), "the list of this test names a crate that does not exist");
}
