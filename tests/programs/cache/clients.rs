//! Unmodified memcached clients in several languages: the checks that they make hold for memcached and for a cache.

use super::served::CacheServer;
use kit::process::Process;
use kit::wait::wait_until;
use kit::world::World;
use programs::stage::{PYTHON, free_port};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

/// Returns the folder with the packages that npm and Maven have fetched, or records why there is none.
fn folder() -> Option<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/memcached-clients");
    let output = Command::new(script).output().unwrap();
    if !output.status.success() {
        kit::skip!("{}", String::from_utf8_lossy(&output.stderr));
        return None;
    }
    Some(String::from_utf8(output.stdout).unwrap().trim().to_owned())
}

/// Runs a client with memcached, and with a cache.
fn check(client: &Command) {
    kit::require_programs!(&["memcached"]);
    let run = |port: u16| {
        let mut command = Command::new(client.get_program());
        command.args(client.get_args());
        for (name, value) in client.get_envs() {
            command.env(name, value.unwrap_or_default());
        }
        wait_until("the server", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        let output = command.arg("127.0.0.1").arg(port.to_string()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("all right"), "{command:?}: {output:?}");
    };
    let of_memcached = free_port();
    let mut command = Command::new("memcached");
    command.args(["-u", "root", "-l", "127.0.0.1", "-p", &of_memcached.to_string()]);
    let memcached = Process(command.stdin(Stdio::null()).spawn().unwrap());
    run(of_memcached);
    drop(memcached);

    let world = World::new();
    let own = free_port();
    let _server = CacheServer::serving(&world, &format!("--listen 127.0.0.1:{own}"));
    run(own);
}

fn beside(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cache/clients").join(name)
}

#[test]
fn a_python_client_gets_the_same_as_from_memcached() {
    let import = Command::new(PYTHON).args(["-c", "import pymemcache"]).output();
    kit::require!(
        import.is_ok_and(|output| output.status.success()),
        "python3-pymemcache is not installed: `scripts/setup test` installs it"
    );
    let mut client = Command::new(PYTHON);
    client.arg(beside("client.py"));
    check(&client);
}

#[test]
fn a_javascript_client_gets_the_same_as_from_memcached() {
    let Some(folder) = folder() else { return };
    let mut client = Command::new("node");
    client.env("NODE_PATH", format!("{folder}/node_modules")).arg(beside("client.js"));
    check(&client);
}

#[test]
fn a_java_client_gets_the_same_as_from_memcached() {
    let Some(folder) = folder() else { return };
    let mut client = Command::new("java");
    client.args(["-cp", &format!("{folder}:{folder}/jars/*"), "Client"]);
    check(&client);
}
