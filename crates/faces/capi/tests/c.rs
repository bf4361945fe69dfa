//! C and C++ programs that include only `ginnel.h`. They must compile without a warning, and are run against a real daemon.

mod names;

use kit::daemon::Daemon;
use kit::process::Process;
use kit::wait::wait_for;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use tempfile::TempDir;

/// The folder of this package in the repository.
const HERE: &str = "crates/faces/capi";

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    output
}

/// The library, built in the cargo profile of this test, and the programs of `tests/c`.
struct Built {
    /// The folder of the C library.
    library: PathBuf,
    /// The folder of the compiled programs.
    compiled: TempDir,
}

fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| {
        let library = kit::build::libraries(HERE, "capi");
        let built = Built { library, compiled: tempfile::tempdir().unwrap() };
        built.compile("cc", "c11", "conversation.c", &["-D_POSIX_C_SOURCE=200809L"]);
        built.compile("cc", "c11", "memory.c", &["-D_POSIX_C_SOURCE=200809L"]);
        built.compile("cc", "c11", "farm.c", &["-D_POSIX_C_SOURCE=200809L"]);
        built.compile("cc", "c11", "cache.c", &["-D_POSIX_C_SOURCE=200809L"]);
        built.compile("c++", "c++17", "conversation.cpp", &[]);
        built
    })
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
struct World(Daemon);

impl World {
    fn new() -> Self {
        let config = "[limits]\nblock_bytes_per_endpoint = '20M'\n\
                      [segment.test]\nsize = '16M'\nmembers = ['host']\n\
                      [vm.writer]\n[segment.news]\nsize = '4M'\nmembers = ['writer']\nreaders = ['host']\n";
        Self(Daemon::start_new(config))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.dir.path().join(name)
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("GINNEL_SOCKET", self.0.socket());
        command
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
fn a_listener_can_be_freed_while_a_thread_waits_for_a_connection() {
    scenario("shared");
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

/// Starts the server of the cache `test/c`. The programs wait for it.
fn cache_server(world: &World) -> Process {
    let mut command = Command::new(kit::build::program("ginnel-cache"));
    command.args(["--segment", "test", "--name", "c", "--memory", "8M", "--log", "warn", "--socket"]);
    Process(command.arg(world.0.socket()).spawn().unwrap())
}

#[test]
fn cache_items_are_read_in_memory_and_changed_by_the_server() {
    let world = World::new();
    let _server = cache_server(&world);
    run(&mut world.command(&built().program("c/cache")));
}

#[test]
fn the_cache_example_counts_words() {
    let (world, folder) = (World::new(), examples());
    let _server = cache_server(&world);
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
        built(); // Otherwise this would make the libraries while others use them.
        run(kit::build::make(HERE).arg("examples").arg(format!("EXAMPLES={}", folder.path().display())));
        folder
    })
}

#[test]
fn the_block_examples_transfer_files_of_any_size() {
    let (world, folder) = (World::new(), examples());
    let (from, to) = (world.file("from"), world.file("to"));
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

    let server = world.command(&folder.path().join("echo_server")).arg("test/echo").spawn().unwrap();
    let _server = Process(server);
    let said = wait_for("an answer", || {
        // Until the server listens, the client is refused and prints an error.
        let client =
            world.command(&folder.path().join("echo_client")).args(["test/echo", "grüezi"]).output().unwrap();
        let error = String::from_utf8_lossy(&client.stderr).into_owned();
        assert!(client.status.success() || error.starts_with("echo_client: "), "{error}");
        client.status.success().then(|| String::from_utf8(client.stdout).unwrap())
    });
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
    built();
    let root = tempfile::tempdir().unwrap();
    let at = |path: &str| root.path().join(path);
    run(kit::build::make(HERE).args([
        "install",
        "PREFIX=/usr",
        &format!("DESTDIR={}", root.path().display()),
    ]));
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
