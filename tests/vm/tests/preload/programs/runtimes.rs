//! Servers and clients in Python, JavaScript and Java that check all bytes that come back. They are those of
//! `tests/programs/sockets`, which uses them too.

use crate::stage::{FILES, PYTHON, Play, ensure_changed};
use anyhow::{Result, ensure};
use std::fs;
use std::process::Command;

const ASYNCIO: &str = include_str!("../../../../programs/sockets/unmodified/echo.py");
const NODE: &str = include_str!("../../../../programs/sockets/unmodified/echo.js");
const JAVA: &str = include_str!("../../../../programs/sockets/unmodified/Echo.java");

/// Runs `program`, which takes "serve" or "talk" with an address and a port, and `more`. This many connections change over.
fn echo(play: &mut Play<'_, '_>, program: &str, more: &str, name: &str, connections: usize) -> Result<()> {
    let (host, port) = (play.host(), play.port());
    play.serve(port, &format!("{program} serve {host} {port} {more}"))?;
    play.client(&format!("{program} talk {host} {port} {more}"))?;
    play.end()?;
    ensure_changed(&play.of_clients()?, name, connections)?;
    ensure_changed(&play.of_server()?, name, connections)
}

pub fn asyncio(play: &mut Play<'_, '_>) -> Result<()> {
    fs::write(play.files().join("echo.py"), ASYNCIO)?;
    echo(play, &format!("{PYTHON} echo.py"), "30", "python3", 30)
}

pub fn node(play: &mut Play<'_, '_>) -> Result<()> {
    fs::write(play.files().join("echo.js"), NODE)?;
    echo(play, "node echo.js", "", "node", 4)
}

pub fn java(play: &mut Play<'_, '_>) -> Result<()> {
    let source = play.files().join("Echo.java");
    if !source.exists() {
        fs::write(&source, JAVA)?;
        // Compiling in an emulated VM would take long.
        let made = Command::new("/usr/bin/javac").arg("-d").arg(play.files()).arg(&source).output()?;
        ensure!(made.status.success(), "{made:?}");
    }
    let java =
        format!("java -Xshare:auto -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xmx128m -cp {FILES} Echo");
    echo(play, &java, "", "java", 8)
}
