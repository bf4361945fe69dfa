//! The libraries as programs see them: every name and version of the real ones is there, and programs that know nothing of them
//! start and end as without them.

#[path = "../table.rs"]
mod table;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use table::What;
use tempfile::TempDir;

const FILES: [&str; 2] = ["libibverbs.so.1", "librdmacm.so.1"];

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Past the test runner's capture, so that it can be counted.
fn skipped(test: &str, reason: &str) {
    let line = format!("SKIPPED {test}: {reason}");
    assert!(std::env::var_os("GINNEL_NO_SKIP").is_none_or(|value| value != "1"), "{line} (GINNEL_NO_SKIP=1)");
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    output
}

/// The folder of our libraries, as cargo's profile of this test makes them.
fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        // target/PROFILE/deps/this
        let programs = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().to_owned();
        let name = programs.file_name().unwrap().to_str().unwrap();
        let profile = if name == "debug" { "dev" } else { name };
        run(Command::new("make")
            .args(["--no-print-directory", "-C"])
            .arg(here())
            .arg(format!("PROFILE={profile}"))
            // All packages have a say in the features of what they depend on: built alone, it would have most others built again.
            .arg("PACKAGES=--workspace --exclude vmtest --lib --test header")
            // Not as a part of the `make` that may run this test.
            .env_remove("MAKEFLAGS")
            .env("CARGO_TARGET_DIR", programs.parent().unwrap()));
        programs.join("verbs")
    })
}

/// The system's library.
fn system(file: &str) -> Option<PathBuf> {
    ["/usr/lib/x86_64-linux-gnu", "/usr/lib64"]
        .map(|folder| Path::new(folder).join(file))
        .into_iter()
        .find(|path| path.exists())
}

/// What a library exports: names with versions, as `readelf` writes them, with `@@` for those that a program without versions gets.
fn exports(library: &Path) -> BTreeSet<String> {
    let output = run(Command::new("readelf").args(["--wide", "--dyn-syms"]).arg(library));
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .filter_map(|line| {
            let fields: Vec<_> = line.split_ascii_whitespace().collect();
            let [_, _, _, kind, _, _, section, name] = fields[..] else { return None };
            // A node is an absolute object.
            let wanted = ["FUNC", "OBJECT"].contains(&kind) && !["UND", "ABS"].contains(&section);
            (wanted && name.contains('@')).then(|| name.to_owned())
        })
        .collect()
}

/// A version alone: `@@` as `@`.
fn plain(names: &BTreeSet<String>) -> BTreeSet<String> {
    names.iter().map(|name| name.replace("@@", "@")).collect()
}

#[test]
fn every_name_of_the_system_is_ours() {
    for file in FILES {
        let Some(system) = system(file) else {
            skipped("every_name_of_the_system_is_ours", &format!("no {file} in the system"));
            continue;
        };
        let (ours, theirs) = (exports(&built().join(file)), exports(&system));
        assert!(theirs.len() > 60, "{theirs:?}");
        let missing: Vec<_> = plain(&theirs).difference(&plain(&ours)).cloned().collect();
        assert!(missing.is_empty(), "{file} of the system has more than {}: {missing:?}", here().display());
        // What the linker, or dlsym, takes without a version is public, so it is the same one.
        let public = |names: &BTreeSet<String>| -> BTreeSet<String> {
            names.iter().filter(|name| name.contains("@@") && !name.contains("PRIVATE")).cloned().collect()
        };
        let missing: Vec<_> = public(&theirs).difference(&public(&ours)).cloned().collect();
        assert!(missing.is_empty(), "not the default: {missing:?}");
    }
}

#[test]
fn the_tables_are_what_is_exported() {
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

/// A program of the system with our libraries, or without.
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

fn is_installed(test: &str, program: &str) -> bool {
    let there = Path::new("/usr/bin").join(program).exists();
    if !there {
        skipped(test, &format!("no {program}: `scripts/setup test` installs it"));
    }
    there
}

#[test]
fn programs_start_and_end_as_without() {
    for words in [
        &["ibv_devices"][..],
        &["ibv_devinfo"],
        // The real library calls ibv_fork_init, and so us, while it makes its list.
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
        if !is_installed("programs_start_and_end_as_without", words[0]) {
            continue;
        }
        let with = program(words, true).output().unwrap();
        let without = program(words, false).output().unwrap();
        assert_eq!(told(&with), told(&without), "{words:?}");
        assert_ne!(with.status.code(), Some(127), "{words:?}: {}", told(&with));
        // Loaded first, in front of the system's, they are the only ones.
        let preload = FILES.map(|file| built().join(file).display().to_string()).join(":");
        let preloaded = program(words, false).env("LD_PRELOAD", preload).output().unwrap();
        assert_eq!(told(&preloaded), told(&without), "{words:?}, preloaded");
    }
}

#[test]
fn programs_live_without_a_real_library() {
    let (empty, ourselves) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for file in FILES {
        // A copy of ours is not a real one, wherever it lies.
        fs::copy(built().join(file), ourselves.path().join(file)).unwrap();
    }
    for words in [&["ibv_devices"][..], &["ib_write_lat"], &["rping", "-s"]] {
        if !is_installed("programs_live_without_a_real_library", words[0]) {
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
fn words_are_those_of_the_system() {
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        return skipped(
            "words_are_those_of_the_system",
            "no libibverbs-dev: `scripts/setup test` installs it",
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let words = compile(&folder, "words", &["words.c", "-libverbs"]);
    let words = [words.to_str().unwrap()];
    assert_eq!(told(&run(&mut program(&words, true))), told(&run(&mut program(&words, false))));
}

/// A device of the system, with a driver that knows it: files that look like one, and a device node that swallows everything.
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
    const TEST: &str = "devices_of_the_system_are_listed_and_opened";
    if !["ibv_devices", "ib_write_lat"].iter().all(|program| is_installed(TEST, program)) {
        return;
    }
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
    if !without.status.success() {
        // Nothing that could be installed, so this is no reason to fail.
        let _ = writeln!(std::io::stderr(), "SKIPPED {TEST}: needs root, for a /dev of its own");
        return;
    }
    assert!(told(&without).contains("0001000200030004"), "{}", told(&without));
    assert_eq!(told(&look(built().to_str().unwrap())), told(&without));
}
