//! C and C++ programs that include only `ginnel.h`. They must compile without a warning, and are run against a real daemon.

mod names;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    output
}

/// The library and the daemon, built in the cargo profile of this test, and the programs of `tests/c`.
struct Built {
    /// The folder of cargo's profile.
    programs: PathBuf,
    /// The folder of the C library.
    library: PathBuf,
    /// The folder of the compiled programs.
    compiled: TempDir,
}

/// All packages together determine the features of their dependencies, and test dependencies count only if a test is built. Building a
/// package without them would rebuild most other packages.
const TOGETHER: [&str; 5] = ["--workspace", "--exclude", "vmtest", "--test", "header"];

fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| {
        // target/PROFILE/deps/this
        let programs = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().to_owned();
        let target = programs.parent().unwrap();
        let name = programs.file_name().unwrap().to_str().unwrap();
        let profile = if name == "debug" { "dev" } else { name };
        run(Command::new(env!("CARGO"))
            .args([
                "build",
                "--quiet",
                "--locked",
                "--bin",
                "ginneld",
                "--bin",
                "ginnel-cache",
                "--profile",
                profile,
            ])
            .args(TOGETHER)
            .env("CARGO_TARGET_DIR", target));
        run(make(target, profile).arg("all"));
        let built =
            Built { library: programs.join("capi"), programs, compiled: tempfile::tempdir().unwrap() };
        built.compile("cc", "c11", "conversation.c", &["-D_POSIX_C_SOURCE=200809L"]);
        built.compile("cc", "c11", "memory.c", &["-D_POSIX_C_SOURCE=200809L"]);
        built.compile("cc", "c11", "farm.c", &["-D_POSIX_C_SOURCE=200809L"]);
        built.compile("cc", "c11", "cache.c", &["-D_POSIX_C_SOURCE=200809L"]);
        built.compile("c++", "c++17", "conversation.cpp", &[]);
        built
    })
}

fn make(target: &Path, profile: &str) -> Command {
    let mut make = Command::new("make");
    make.args(["--no-print-directory", "-C"]).arg(here()).arg(format!("PROFILE={profile}"));
    make.arg(format!("PACKAGES={} --lib", TOGETHER.join(" ")));
    // This must not be a sub-make of the `make` that may run this test.
    make.env("CARGO_TARGET_DIR", target).env_remove("MAKEFLAGS");
    make
}

impl Built {
    /// Compiles a file of `tests/c`, or a file that is given with its whole path.
    fn compile(&self, compiler: &str, standard: &str, source: &str, more: &[&str]) -> PathBuf {
        let source = here().join("tests/c").join(source);
        let extension = source.extension().unwrap().to_str().unwrap();
        let program = self.compiled.path().join(extension).join(source.file_stem().unwrap());
        fs::create_dir_all(program.parent().unwrap()).unwrap();
        run(Command::new(compiler)
            .args([&format!("-std={standard}"), "-O2", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"])
            .args(["-Wpedantic", "-Wshadow", "-Wconversion", "-Wno-sign-conversion"])
            .args(more)
            .arg("-I")
            .arg(here().join("include"))
            .arg("-o")
            .arg(&program)
            .arg(&source)
            .arg("-L")
            .arg(&self.library)
            .arg("-lginnel")
            .arg(format!("-Wl,-rpath,{}", self.library.display())));
        program
    }

    fn program(&self, path: &str) -> PathBuf {
        self.compiled.path().join(path)
    }
}

/// A daemon with the segments `test`, of which only the host is a member, and `news`, which the host may only read.
struct World {
    folder: TempDir,
    daemon: Child,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let config = folder.path().join("ginneld.toml");
        let at = folder.path().display();
        let text = format!(
            "[daemon]\nruntime_dir = '{at}/run'\nstate_dir = '{at}/state'\nshm_dir = '{at}/shm'\n\
             [limits]\nblock_bytes_per_endpoint = '20M'\n\
             [segment.test]\nsize = '16M'\nmembers = ['host']\n\
             [vm.writer]\n[segment.news]\nsize = '4M'\nmembers = ['writer']\nreaders = ['host']\n"
        );
        for part in ["run", "state", "shm"] {
            fs::create_dir(folder.path().join(part)).unwrap();
        }
        fs::write(&config, text).unwrap();
        let log = fs::File::create(folder.path().join("log")).unwrap();
        let daemon = Command::new(built().programs.join("ginneld"))
            .args(["host", "--stop-keeper", "--config"])
            .arg(&config)
            .stderr(log.try_clone().unwrap())
            .stdout(log)
            .spawn()
            .unwrap();
        let mut world = Self { folder, daemon };
        let watchdog = Instant::now() + Duration::from_secs(20);
        while ginnel::Daemon::connect_to(&world.socket()).is_err() {
            let ended = world.daemon.try_wait().unwrap();
            assert!(ended.is_none() && Instant::now() < watchdog, "ginneld {ended:?}: {}", world.log());
            sleep(Duration::from_millis(10));
        }
        world
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("run/ginnel.sock")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("GINNEL_SOCKET", self.socket());
        command
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("ginneld said:\n{}", self.log());
        }
        // SIGTERM, so that the daemon ends its keeper too.
        let _ = Command::new("kill").arg(self.daemon.id().to_string()).status();
        let watchdog = Instant::now() + Duration::from_secs(10);
        while matches!(self.daemon.try_wait(), Ok(None)) {
            if Instant::now() >= watchdog {
                let _ = self.daemon.kill();
                let _ = self.daemon.wait();
            }
            sleep(Duration::from_millis(5));
        }
    }
}

fn scenario(name: &str) {
    let world = World::new();
    run(world.command(&built().program("c/conversation")).arg(name));
}

#[test]
fn messages_of_all_sizes_are_echoed() {
    scenario("messages");
}

#[test]
fn messages_are_written_and_read_in_place() {
    scenario("in_place");
}

#[test]
fn streams_run_in_both_directions_at_once() {
    scenario("streams");
}

#[test]
fn nonblocking_channels_work_with_poll() {
    scenario("nonblocking");
}

#[test]
fn one_thread_serves_many_channels() {
    scenario("ready");
}

#[test]
fn timeouts_end_waits() {
    scenario("timeouts");
}

#[test]
fn an_endpoint_and_its_channel_are_handed_over() {
    scenario("handover");
}

#[test]
fn an_abort_discards_data_that_was_not_received() {
    scenario("abort");
}

#[test]
fn a_half_closed_channel_still_receives() {
    scenario("half_close");
}

#[test]
fn the_death_of_a_peer_is_reported() {
    scenario("death");
}

#[test]
fn mistakes_are_reported_with_a_reason() {
    scenario("mistakes");
}

#[test]
fn readers_cannot_open_channels() {
    scenario("read_only");
}

#[test]
fn properties_can_be_queried() {
    scenario("facts");
}

#[test]
fn cxx_programs_work() {
    let world = World::new();
    run(&mut world.command(&built().program("cpp/conversation")));
}

#[test]
fn each_failure_of_a_block_or_lock_has_its_own_status() {
    let world = World::new();
    run(&mut world.command(&built().program("c/memory")));
}

/// The server of the cache `test/c`. The programs wait for it.
struct CacheServer(Child);

impl CacheServer {
    fn new(world: &World) -> Self {
        let mut command = Command::new(built().programs.join("ginnel-cache"));
        command.args(["--segment", "test", "--name", "c", "--memory", "8M", "--log", "warn", "--socket"]);
        Self(command.arg(world.socket()).spawn().unwrap())
    }
}

impl Drop for CacheServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn cache_items_are_read_in_memory_and_changed_by_the_server() {
    let world = World::new();
    let _server = CacheServer::new(&world);
    run(&mut world.command(&built().program("c/cache")));
}

#[test]
fn the_cache_example_counts_words() {
    let (world, folder) = (World::new(), examples());
    let _server = CacheServer::new(&world);
    let count = |words: [&str; 3]| {
        let mut command = world.command(&folder.path().join("cache_words"));
        String::from_utf8(run(command.arg("test/c").args(words)).stdout).unwrap()
    };
    assert_eq!(count(["a", "b", "a"]), "a 2\nb 1\na 2\n");
    assert_eq!(count(["b", "c", "a"]), "b 2\nc 1\na 3\n");
}

fn farm(scenario: &str) {
    let world = World::new();
    run(world.command(&built().program("c/farm")).arg(scenario));
}

#[test]
fn a_farm_runs_jobs_with_equal_and_unequal_pieces() {
    farm("run");
}

#[test]
fn a_farm_in_an_event_loop_survives_a_dead_and_a_lying_worker() {
    farm("loop");
}

#[test]
fn mistakes_with_a_farm_are_reported_with_a_reason() {
    farm("mistakes");
}

fn examples() -> &'static TempDir {
    static EXAMPLES: OnceLock<TempDir> = OnceLock::new();
    EXAMPLES.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let built = built();
        let target = built.programs.parent().unwrap();
        let profile = if built.programs.ends_with("debug") { "dev" } else { "release" };
        run(make(target, profile).arg("examples").arg(format!("EXAMPLES={}", folder.path().display())));
        folder
    })
}

#[test]
fn the_block_examples_transfer_files_of_any_size() {
    let (world, folder) = (World::new(), examples());
    let (from, to) = (world.folder.path().join("from"), world.folder.path().join("to"));
    for (n, (len, block)) in
        [(0, "4M"), (1, "4M"), (4_000_000, "100000"), (30_000_001, "4M")].into_iter().enumerate()
    {
        let bytes: Vec<u8> = (0..len).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        fs::write(&from, &bytes).unwrap();
        let block = if block == "4M" { "4194304" } else { block };
        let program = |name: &str| world.command(&folder.path().join(name));
        let start = |receives: bool| {
            let mut command = program(if receives { "block_reader" } else { "block_writer" });
            command.args(["test", "file"]).arg(if receives { &to } else { &from });
            if !receives {
                command.arg(block);
            }
            command.spawn().unwrap()
        };
        // The two programs may start in either order.
        let (mut first, mut second) = (start(n % 2 == 0), start(n % 2 == 1));
        assert!(first.wait().unwrap().success() && second.wait().unwrap().success(), "{len} bytes");
        assert!(fs::read(&to).unwrap() == bytes, "{len} bytes");
    }
}

#[test]
fn the_farm_example_counts_correctly() {
    let (world, folder) = (World::new(), examples());
    let counted = run(world.command(&folder.path().join("farm_count")).args(["test/count", "3", "9"]));
    let said = String::from_utf8(counted.stdout).unwrap();
    let bytes = 9 << 20;
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines[0], format!("{} letters", bytes - bytes / 27));
    assert!((2..=4).contains(&lines.len()) && lines[1].starts_with("host:"), "{said}");
}

#[test]
fn the_echo_examples_talk_to_each_other() {
    let (world, folder) = (World::new(), examples());

    let mut server = world.command(&folder.path().join("echo_server")).arg("test/echo").spawn().unwrap();
    let watchdog = Instant::now() + Duration::from_secs(20);
    let said = loop {
        // Until the server listens, the client is refused and prints an error.
        let client =
            world.command(&folder.path().join("echo_client")).args(["test/echo", "grüezi"]).output().unwrap();
        let error = String::from_utf8_lossy(&client.stderr).into_owned();
        if client.status.success() {
            break String::from_utf8(client.stdout).unwrap();
        }
        assert!(error.starts_with("echo_client: ") && Instant::now() < watchdog, "{error}");
        sleep(Duration::from_millis(10));
    };
    server.kill().unwrap();
    server.wait().unwrap();
    assert_eq!(said, "grüezi\n");
}

#[test]
fn every_public_name_links_and_nothing_else_is_exported() {
    let built = built();
    let (functions, errors) = names::public();

    let mut source = String::from("#include <ginnel.h>\n#include <string.h>\n");
    source.push_str("typedef void function(void);\nfunction *const functions[] = {\n");
    for name in &functions {
        source.push_str(&format!("    (function *)&{name},\n"));
    }
    source.push_str("};\nstatic const int errors[] = {\n");
    for (name, _) in &errors {
        source.push_str(&format!("    {name},\n"));
    }
    source.push_str(
        "};\nint main(void)\n{\n    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)\n        \
         if (strcmp(ginnel_strerror(errors[i]), ginnel_strerror(1)) == 0)\n            return 1;\n    \
         return functions[0] == 0;\n}\n",
    );
    let path = built.compiled.path().join("names.c");
    fs::write(&path, &source).unwrap();
    run(&mut Command::new(built.compile("cc", "c11", path.to_str().unwrap(), &[])));

    let library = built.library.join("libginnel.so");
    let listed =
        run(Command::new("nm").args(["-D", "--defined-only", "--with-symbol-versions"]).arg(library));
    let listed = String::from_utf8(listed.stdout).unwrap();
    let mut exported: Vec<_> = listed.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    let mut wanted: Vec<_> = functions.iter().map(|name| format!("{name}@@GINNEL_0.1")).collect();
    wanted.push("GINNEL_0.1".into());
    exported.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(exported, wanted);
}

#[test]
fn the_installed_library_can_be_found_and_used() {
    let built = built();
    let root = tempfile::tempdir().unwrap();
    let at = |path: &str| root.path().join(path);
    let target = built.programs.parent().unwrap();
    let profile = if built.programs.ends_with("debug") { "dev" } else { "release" };
    let mut install = make(target, profile);
    run(install.args(["install", "PREFIX=/usr", &format!("DESTDIR={}", root.path().display())]));
    for link in ["usr/lib/libginnel.so", "usr/lib/libginnel.so.0"] {
        assert!(fs::symlink_metadata(at(link)).unwrap().is_symlink() && at(link).exists(), "{link}");
    }
    let page = fs::read_to_string(at("usr/share/man/man3/ginnel_message_send.3")).unwrap();
    assert_eq!(page, ".so man3/ginnel_message.3\n");
    assert!(at("usr/share/man/man7/ginnel.7").exists());

    let flags = run(Command::new("pkg-config")
        .args(["--cflags", "--libs", "ginnel"])
        .env("PKG_CONFIG_PATH", at("usr/lib/pkgconfig"))
        .env("PKG_CONFIG_SYSROOT_DIR", root.path())
        .env("PKG_CONFIG_ALLOW_SYSTEM_CFLAGS", "1")
        .env("PKG_CONFIG_ALLOW_SYSTEM_LIBS", "1"));
    let flags = String::from_utf8(flags.stdout).unwrap();
    let program = at("client");
    run(Command::new("cc")
        .arg(here().join("examples/echo_client.c"))
        .arg("-o")
        .arg(&program)
        .args(flags.split_whitespace()));
    // There is no daemon, so it prints an error; this shows that it runs, with the installed library.
    let said = Command::new(&program)
        .env("LD_LIBRARY_PATH", at("usr/lib"))
        .env("GINNEL_SOCKET", at("none.sock"))
        .output()
        .unwrap();
    let said = String::from_utf8(said.stderr).unwrap();
    assert!(said.starts_with("echo_client: no ginnel daemon at"), "{said}");
}
