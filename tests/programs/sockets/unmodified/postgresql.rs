//! PostgreSQL, which forks a process for each connection, with pgbench and psql.

use kit::wait::wait_until;
use programs::stage::{MODES, Stage, free_port};
use std::fs;
use std::os::unix::fs::chown;
use std::process::Command;

/// Debian's folder of PostgreSQL's programs.
const FOLDER: &str = "/usr/lib/postgresql/15/bin";
/// PostgreSQL refuses to run as root.
const NOBODY: u32 = 65534;

fn program(name: &str) -> String {
    format!("{FOLDER}/{name}")
}

#[test]
fn postgresql() {
    kit::require_programs!(&[&*program("postgres")]);
    let me = rustix::process::geteuid();
    let user = if me.is_root() { NOBODY } else { me.as_raw() };
    let ids = [format!("--reuid={user}"), format!("--regid={user}")];
    let as_user: &[&str] =
        if me.is_root() { &["setpriv", &ids[0], &ids[1], "--clear-groups", "--"] } else { &["env"] };
    for mode in MODES {
        let mut stage = Stage::for_user(mode, user);
        let folder = stage.world.files();
        let data = folder.join("data");
        fs::create_dir(&data).unwrap();
        chown(&data, Some(user), None).unwrap();
        let data = data.to_str().unwrap();
        let made = Command::new(as_user[0])
            .args(&as_user[1..])
            .args([&program("initdb"), "-D", data, "-N", "-A", "trust", "-U", "postgres"])
            .current_dir(&folder)
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");

        let port = free_port();
        let at = port.to_string();
        let [server, pgbench, psql] = ["postgres", "pgbench", "psql"].map(program);
        let settings = ["listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off"];
        let options =
            [&server, "-D", data, "-p", &at, "-c", settings[0], "-c", settings[1], "-c", settings[2]];
        stage.serve(port, &[as_user, &options].concat());
        // The server listens before it is ready.
        wait_until("that PostgreSQL is ready", || {
            let answer =
                Command::new(program("pg_isready")).args(["-q", "-h", "127.0.0.1", "-p", &at]).status();
            answer.unwrap().success()
        });
        let whom = ["-h", "127.0.0.1", "-p", &at, "-U", "postgres"];
        let pgbench = [&[&pgbench[..]], &whom[..]].concat();
        let query = |command: &str| {
            let options = ["-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", command, "postgres"];
            stage.client(&[&[&psql[..]], &whom[..], &options].concat())
        };

        stage.client(&[&pgbench[..], &["-i", "-s", "1", "-q", "postgres"]].concat());
        let options = ["-n", "-c", "4", "-j", "2", "-T", "2", "postgres"];
        let out = stage.client_until_changed(&[&pgbench[..], &options].concat(), 4, "postgres");
        let done =
            out.lines().find_map(|line| line.strip_prefix("number of transactions actually processed: "));
        let done = done.unwrap_or_else(|| panic!("{mode}: {out}"));
        assert!(out.contains("number of failed transactions: 0 "), "{mode}: {out}");
        // Each transaction has changed an account and has recorded the amount.
        let sums = query(&format!(
            "select (select count(*) from pgbench_history) >= {done}, \
             (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history)"
        ));
        assert_eq!(sums.trim(), "t|t", "{mode}: {done}");

        // Transfers megabytes from the server and back.
        let rows = "select i, repeat(chr(97 + i % 26), i % 200) from generate_series(1, 30000) i";
        query(&format!(r"\copy ({rows}) to rows"));
        let row =
            |i: usize| format!("{i}\t{}\n", char::from(b'a' + (i % 26) as u8).to_string().repeat(i % 200));
        let expected: String = (1..=30_000).map(row).collect();
        assert!(fs::read_to_string(folder.join("rows")).unwrap() == expected, "{mode}: rows are wrong");
        query("create table copied (i int, t text)");
        query(r"\copy copied from rows");
        let different = query(&format!("select count(*) from (({rows}) except table copied) other"));
        assert_eq!(different.trim(), "0", "{mode}");

        stage.end();
    }
}
