//! The libraries as programs see them: they have every name and version of the real ones, and programs that do not know of them start
//! and end as with the real ones.

#[path = "../table.rs"]
mod table;

use kit::skip::missing;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use table::What;
use tempfile::TempDir;

kit::test_that_skips_are_seen!();

const FILES: [&str; 2] = ["libibverbs.so.1", "librdmacm.so.1"];

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    output
}

/// Returns the folder with this crate's libraries, built with the profile of this test.
fn built() -> PathBuf {
    kit::build::libraries("crates/faces/verbs-capi", "verbs")
}

/// Returns the path of a library of the system.
fn system(file: &str) -> Option<PathBuf> {
    ["/usr/lib/x86_64-linux-gnu", "/usr/lib64"]
        .map(|folder| Path::new(folder).join(file))
        .into_iter()
        .find(|path| path.exists())
}

/// Returns the exports of a library: names with versions, as `readelf` prints them, with `@@` before a default version.
fn exports(library: &Path) -> BTreeSet<String> {
    let output = run(Command::new("readelf").args(["--wide", "--dyn-syms"]).arg(library));
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .filter_map(|line| {
            let fields: Vec<_> = line.split_ascii_whitespace().collect();
            let [_, _, _, kind, _, _, section, name] = fields[..] else { return None };
            // A version node is an absolute object.
            let wanted = ["FUNC", "OBJECT"].contains(&kind) && !["UND", "ABS"].contains(&section);
            (wanted && name.contains('@')).then(|| name.to_owned())
        })
        .collect()
}

/// Returns the names with `@@` replaced by `@`.
fn plain(names: &BTreeSet<String>) -> BTreeSet<String> {
    names.iter().map(|name| name.replace("@@", "@")).collect()
}

#[test]
fn every_name_of_the_systems_libraries_is_exported() {
    for file in FILES {
        let Some(system) = system(file) else {
            kit::skip!("no {file} in the system");
            continue;
        };
        let (ours, theirs) = (exports(&built().join(file)), exports(&system));
        assert!(theirs.len() > 60, "{theirs:?}");
        let missing: Vec<_> = plain(&theirs).difference(&plain(&ours)).cloned().collect();
        assert!(missing.is_empty(), "{file} of the system has more than {}: {missing:?}", here().display());
        // The linker and dlsym use the default version for a name without a version, so the default must be the same.
        let public = |names: &BTreeSet<String>| -> BTreeSet<String> {
            names.iter().filter(|name| name.contains("@@") && !name.contains("PRIVATE")).cloned().collect()
        };
        let missing: Vec<_> = public(&theirs).difference(&public(&ours)).cloned().collect();
        assert!(missing.is_empty(), "not the default: {missing:?}");
    }
}

#[test]
fn the_exports_are_those_of_the_tables() {
    for (file, map) in FILES.into_iter().zip(["libibverbs.map", "librdmacm.map"]) {
        let lines = table::parse(&fs::read_to_string(here().join(map)).unwrap());
        let table: BTreeSet<_> = lines.iter().map(|line| format!("{}@{}", line.name, line.node)).collect();
        assert_eq!(table.len(), lines.len(), "a name stands twice in a node");
        let own = |name: &String| name.starts_with("ginnel_");
        let exported: BTreeSet<_> =
            plain(&exports(&built().join(file))).into_iter().filter(|name| !own(name)).collect();
        assert_eq!(table, exported);
        assert!(lines.iter().all(|line| line.what != What::Object || line.missing == "void"));
        let output = run(Command::new("readelf").args(["--wide", "--dynamic"]).arg(built().join(file)));
        let dynamic = String::from_utf8(output.stdout).unwrap();
        assert!(dynamic.contains(&format!("soname: [{file}]")), "{dynamic}");
    }
}

/// Returns a command that runs a program of the system with this crate's libraries, or without them.
fn program(words: &[&str], ours: bool) -> Command {
    let mut command = Command::new("timeout");
    command.arg("20").args(words).env_remove("LD_LIBRARY_PATH").env_remove("LD_PRELOAD");
    if ours {
        command.env("LD_LIBRARY_PATH", built());
    }
    command
}

fn told(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    format!("{}\n{out}\n{err}", output.status)
}

fn is_installed(program: &str) -> bool {
    let there = missing(&[program]).is_none();
    if !there {
        kit::skip!("no {program}: `scripts/setup test` installs it");
    }
    there
}

#[test]
fn programs_start_and_end_as_with_the_systems_libraries() {
    for words in [
        &["ibv_devices"][..],
        &["ibv_devinfo"],
        // While the real library creates its list, it calls ibv_fork_init, and so this crate's function.
        &["env", "RDMAV_FORK_SAFE=1", "ibv_devices"],
        &["ibv_rc_pingpong"],
        &["ibv_asyncwatch"],
        &["ib_write_lat", "--version"],
        &["ib_write_lat", "--help"],
        &["ib_write_lat"],
        &["ib_send_bw"],
        &["rping", "-c", "-a", "127.0.0.1"],
        &["rping", "-s"],
        &["ucmatose"],
        &["udaddy"],
    ] {
        if !is_installed(words[0]) {
            continue;
        }
        let with = program(words, true).output().unwrap();
        let without = program(words, false).output().unwrap();
        assert_eq!(told(&with), told(&without), "{words:?}");
        assert_ne!(with.status.code(), Some(127), "{words:?}: {}", told(&with));
        // Preloaded before the libraries of the system, they are the only ones.
        let preload = FILES.map(|file| built().join(file).display().to_string()).join(":");
        let preloaded = program(words, false).env("LD_PRELOAD", preload).output().unwrap();
        assert_eq!(told(&preloaded), told(&without), "{words:?}, preloaded");
    }
}

#[test]
fn programs_run_without_a_real_library() {
    let (empty, ourselves) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for file in FILES {
        // A copy of our library must not be taken for the real one, wherever it is installed.
        fs::copy(built().join(file), ourselves.path().join(file)).unwrap();
    }
    for words in [&["ibv_devices"][..], &["ib_write_lat"], &["rping", "-s"]] {
        if !is_installed(words[0]) {
            continue;
        }
        for folder in [&empty, &ourselves] {
            let output = program(words, true).env("GINNEL_VERBS_REAL", folder.path()).output().unwrap();
            let code = output.status.code().unwrap_or(0);
            assert!((1..124).contains(&code) || code == 255, "{words:?}: {}", told(&output));
        }
    }
}

fn compile(folder: &TempDir, to: &str, words: &[&str]) -> PathBuf {
    let to = folder.path().join(to);
    run(Command::new("cc")
        .args(["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(&to)
        .args(words)
        .current_dir(here().join("tests/c")));
    to
}

#[test]
fn calls_are_forwarded_with_all_arguments() {
    let folder = tempfile::tempdir().unwrap();
    for file in FILES {
        let flags = ["-shared", "-fPIC", "-Wl,--version-script,real.map", "-fno-builtin"];
        compile(&folder, file, &[&flags[..], &[&format!("-Wl,-soname,{file}"), "real.c"]].concat());
    }
    let calls = compile(&folder, "calls", &["calls.c", "-ldl"]);
    run(program(&[calls.to_str().unwrap(), built().to_str().unwrap()], true)
        .env("GINNEL_VERBS_REAL", folder.path()));
}

#[test]
fn strings_are_those_of_the_systems_library() {
    let header = Path::new("/usr/include/infiniband/verbs.h");
    kit::require!(header.exists(), "no libibverbs-dev: `scripts/setup test` installs it");
    let folder = tempfile::tempdir().unwrap();
    let words = compile(&folder, "words", &["words.c", "-libverbs"]);
    let words = [words.to_str().unwrap()];
    assert_eq!(told(&run(&mut program(&words, true))), told(&run(&mut program(&words, false))));
}

/// A device of the system with a driver that knows it: files that look like those of a device, and a device node that accepts all
/// writes.
const ADAPTER: &str = r#"
    mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 || exit 77
    mkdir /dev/infiniband && mknod -m 666 /dev/infiniband/uverbs0 c 1 3 || exit 77
    verbs=$SYSFS_PATH/class/infiniband_verbs device=$SYSFS_PATH/class/infiniband/mlx5_0
    mkdir -p "$verbs/uverbs0" "$device/device" "$device/ports/1"
    echo 6 >"$verbs/abi_version"
    echo mlx5_0 >"$verbs/uverbs0/ibdev"
    echo 1 >"$verbs/uverbs0/abi_version"
    echo 1:3 >"$verbs/uverbs0/dev"
    echo '1: CA' >"$device/node_type"
    echo 0001:0002:0003:0004 >"$device/node_guid"
    echo pci:v000015B3d00001017sv000015B3sd00000006bc02sc00i00 >"$device/device/modalias"
    # ib_write_lat is linked with the driver, so that comes first; the others have it from the real library.
    for program in ibv_devices ibv_devinfo ib_write_lat; do
        "$@" $program
        echo "$program: $?"
    done
"#;

#[test]
fn devices_of_the_system_are_listed_and_opened() {
    let missing = missing(&["ibv_devices", "ib_write_lat"]);
    kit::require!(missing.is_none(), "no {}: `scripts/setup test` installs it", missing.unwrap());
    let folder = tempfile::tempdir().unwrap();
    let look = |library_path: &str| {
        Command::new("unshare")
            .args(["--mount", "sh", "-c", ADAPTER, "sh", "env"])
            .arg(format!("LD_LIBRARY_PATH={library_path}"))
            .env("SYSFS_PATH", folder.path())
            .env("IBV_SHOW_WARNINGS", "1")
            .output()
            .unwrap()
    };
    let without = look("");
    kit::require!(without.status.success(), "only root can have a /dev of its own: {}", told(&without));
    assert!(told(&without).contains("0001000200030004"), "{}", told(&without));
    assert_eq!(told(&look(built().to_str().unwrap())), told(&without));
}
