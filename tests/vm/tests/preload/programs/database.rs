//! PostgreSQL, which forks a process for each connection, with pgbench and psql.

use crate::stage::{FILES, Play};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::chown;
use std::process::Command;

/// Debian's folder for the programs of PostgreSQL.
const FOLDER: &str = "/usr/lib/postgresql/15/bin";
pub const POSTGRES: &str = "/usr/lib/postgresql/15/bin/postgres";
/// An unprivileged user, because PostgreSQL refuses to run as root.
const NOBODY: u32 = 65534;

fn as_nobody() -> String {
    format!("setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups --")
}

pub fn postgresql(play: &mut Play<'_, '_>) -> Result<()> {
    let files = play.files().to_owned();
    if !files.join("data.tar").exists() {
        // The host makes the database, because it is faster.
        let folder = tempfile::tempdir()?;
        chown(folder.path(), Some(NOBODY), None)?;
        let data = folder.path().join("data");
        let script = format!(
            "{} {FOLDER}/initdb -D {data} -N -A trust -U postgres --wal-segsize=1 && tar -C {} -cf {} data",
            as_nobody(),
            folder.path().display(),
            files.join("data.tar").display(),
            data = data.display(),
        );
        let made = Command::new("sh").args(["-c", &script]).current_dir("/").output()?;
        ensure!(made.status.success(), "{made:?}");
    }
    play.on_server(&format!("rm -rf /tmp/data && tar -C /tmp -xf {FILES}/data.tar"))?;

    let (host, port) = (play.host(), play.port());
    let settings = format!(
        "-c listen_addresses={host} -c unix_socket_directories= -c fsync=off -c shared_buffers=32MB -c autovacuum=off"
    );
    // Allow connections from the other VM.
    play.on_server("echo 'host all all all trust' >> /tmp/data/pg_hba.conf")?;
    play.serve(port, &format!("{} {POSTGRES} -D /tmp/data -p {port} {settings}", as_nobody()))?;
    let whom = format!("-h {host} -p {port} -U postgres");
    play.client(&format!("{FOLDER}/pgbench {whom} -i -s 1 -q postgres"))?;
    let pgbench = format!("{FOLDER}/pgbench {whom} -n -c 4 -j 2 -T 2 postgres");
    let out = play.client_until_changed(&pgbench, "pgbench", 4, "postgres")?.stdout;
    let done = out.lines().find_map(|line| line.strip_prefix("number of transactions actually processed: "));
    let done = done.with_context(|| out.clone())?;
    ensure!(out.contains("number of failed transactions: 0 "), "{out}");
    // Each transaction has added to an account, and has noted the amount.
    let psql = format!("{FOLDER}/psql {whom} -X -A -t -v ON_ERROR_STOP=1");
    let sums = play.client(&format!(
        "{psql} -c 'select (select count(*) from pgbench_history) >= {done}, \
         (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history)' postgres"
    ))?;
    ensure!(sums.stdout.trim() == "t|t", "{done}: {}", sums.stdout);

    // Many rows go from the server to the client, and back.
    let rows = "select i, repeat(chr(97 + i % 26), i % 200) from generate_series(1, 5000) i";
    play.client(&format!("{psql} -c '\\copy ({rows}) to rows' postgres"))?;
    let row = |i: usize| format!("{i}\t{}\n", char::from(b'a' + (i % 26) as u8).to_string().repeat(i % 200));
    let expected: String = (1..=5_000).map(row).collect();
    ensure!(fs::read_to_string(files.join("rows"))? == expected, "rows are wrong");
    play.client(&format!(
        "{psql} -c 'create table copied (i int, t text)' -c '\\copy copied from rows' postgres"
    ))?;
    let different = format!("select count(*) from (({rows}) except table copied) other");
    let different = play.client(&format!("{psql} -c '{different}' postgres"))?.stdout;
    ensure!(different.trim() == "0", "{different}");
    play.end()
}
