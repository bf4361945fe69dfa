//! OpenSSH and rsync: servers that execute themselves, fork, and drop privileges while they have a connection.

use super::bytes;
use crate::stage::{FILES, Play, changed};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long the test tries again until a connection has changed over.
const PATIENCE: Duration = Duration::from_secs(120);

/// Writes files of many sizes.
fn fill(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    for (number, len) in (0..30).map(|i| i * 300).chain([1 << 20]).enumerate() {
        fs::write(folder.join(format!("file-{number}")), &bytes(len + 1000)[number..])?;
    }
    Ok(())
}

fn read(folder: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        files.push((entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path())?));
    }
    files.sort();
    Ok(files)
}

/// Copies files there and back. rsync compares checksums of everything that it receives.
fn there_and_back(play: &mut Play<'_, '_>, options: &str, there: &str) -> Result<()> {
    let (here, back) = (play.files().join("here"), play.files().join("back"));
    play.client(&format!("rsync -a --whole-file --ignore-times {options} here/ {there}"))?;
    let _ = fs::remove_dir_all(&back);
    play.client(&format!("rsync -a --whole-file --ignore-times {options} {there} back/"))?;
    ensure!(read(&here)? == read(&back)?, "not what was sent comes back");
    Ok(())
}

pub fn ssh(play: &mut Play<'_, '_>) -> Result<()> {
    let files = play.files().to_owned();
    for key in ["host", "user"].map(|key| files.join(key)).iter().filter(|key| !key.exists()) {
        let made =
            Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(key).status()?;
        ensure!(made.success(), "ssh-keygen: {made}");
    }
    let (host, port) = (play.host(), play.port());
    let configuration = format!(
        "ListenAddress {host}:{port}\nHostKey {FILES}/host\nAuthorizedKeysFile {FILES}/user.pub\nStrictModes no\n\
         UsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nPidFile none\n"
    );
    fs::write(files.join("sshd_config"), configuration)?;
    // The distribution's server confines itself in this folder.
    play.on_server("mkdir -p /run/sshd")?;
    play.serve(port, &format!("/usr/sbin/sshd -D -e -f {FILES}/sshd_config"))?;
    let options = format!(
        "-F none -p {port} -i {FILES}/user -o IdentitiesOnly=yes -o StrictHostKeyChecking=no \
         -o UserKnownHostsFile=/tmp/known"
    );
    fs::write(files.join("data"), bytes(2 << 20))?;
    let sum = Command::new("sha256sum").arg(files.join("data")).output()?.stdout;
    let sum = String::from_utf8(sum)?.split(' ').next().context("no sum")?.to_owned();
    // Whether a connection changes over before everything is sent depends on the machine.
    let end = Instant::now() + PATIENCE;
    loop {
        let out = play.client(&format!("ssh {options} {host} sha256sum < data"))?.stdout;
        ensure!(out.starts_with(&sum), "{out}");
        let (clients, servers) = (play.of_clients()?, play.of_server()?);
        if !changed(&clients, "ssh").is_empty() && !changed(&servers, "sshd").is_empty() {
            break;
        }
        ensure!(Instant::now() < end, "none has changed over: {clients:#?} {servers:#?}");
    }
    fill(&files.join("here"))?;
    there_and_back(play, &format!("-e 'ssh {options}'"), &format!("{host}:/tmp/there/"))?;
    play.end()
}

pub fn rsync(play: &mut Play<'_, '_>) -> Result<()> {
    let files = play.files().to_owned();
    fill(&files.join("here"))?;
    let (host, port) = (play.host(), play.port());
    let configuration = "use chroot = no\nuid = 0\ngid = 0\nlog file = /tmp/rsyncd.log\n\
                         [there]\npath = /tmp/daemon\nread only = no\n";
    fs::write(files.join("rsyncd.conf"), configuration)?;
    play.on_server("mkdir -p /tmp/daemon")?;
    play.serve(
        port,
        &format!("rsync --daemon --no-detach --address={host} --port={port} --config={FILES}/rsyncd.conf"),
    )?;
    let there = format!("rsync://{host}:{port}/there/");
    // rsync forks soon after the first bytes; from then on one process sends and another one receives. A connection that has
    // not changed over by then stays on TCP, so how many do depends on the machine.
    for _ in 0..2 {
        there_and_back(play, "", &there)?;
    }
    play.end()?;
    let (clients, servers) = (play.of_clients()?, play.of_server()?);
    println!(
        "{}: {} of {} of rsync's connections have changed over",
        play.mode,
        changed(&servers, "rsync").len(),
        servers.len()
    );
    ensure!(
        clients.len() >= 4 && servers.len() >= 4,
        "the library has not seen them all: {clients:#?} {servers:#?}"
    );
    Ok(())
}
