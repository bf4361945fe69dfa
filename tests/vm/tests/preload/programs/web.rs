//! File servers in C and in Go, with curl and wrk.

use super::bytes;
use crate::stage::{FILES, PATIENCE, Play, changed};
use anyhow::{Result, ensure};
use std::fs;
use std::time::Instant;

/// Fetches two files over one connection, and returns whether their contents are right.
fn fetch(play: &mut Play<'_, '_>, at: &str) -> Result<()> {
    let url = format!("http://{at}/large");
    play.client(&format!("curl -sS -o one {url} -o two {url}"))?;
    let large = fs::read(play.files().join("large"))?;
    for file in ["one", "two"] {
        ensure!(fs::read(play.files().join(file))? == large, "{file} is not what was to be sent");
    }
    Ok(())
}

fn fill(play: &Play<'_, '_>) -> Result<()> {
    fs::write(play.files().join("large"), bytes(4 << 20))?;
    fs::write(play.files().join("small"), bytes(700))?;
    Ok(())
}

pub fn nginx(play: &mut Play<'_, '_>) -> Result<()> {
    fill(play)?;
    let port = play.port();
    let at = format!("{}:{port}", play.host());
    let temp: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|part| format!("{part}_temp_path /tmp/nginx-{part}; "))
        .concat();
    let configuration = format!(
        "user root; daemon off; worker_processes 1; pid /tmp/nginx-pid; error_log /tmp/nginx-error; events {{}}\n\
         http {{ access_log off; {temp} sendfile on; tcp_nopush on; server {{ listen {at}; root {FILES}; }} }}\n"
    );
    fs::write(play.files().join("nginx.conf"), configuration)?;
    play.serve(port, &format!("nginx -p {FILES} -c {FILES}/nginx.conf -e /tmp/nginx-error"))?;
    // If a receiver pauses while its ring is small (here it writes to a file of the host), its connection goes back to TCP for
    // a while; then the client runs again.
    let end = Instant::now() + PATIENCE;
    loop {
        fetch(play, &at)?;
        let connections = play.of_clients()?;
        let received = changed(&connections, "curl").iter().map(|curl| curl.shared_received).max();
        if received.is_some_and(|received| received > 1 << 20) {
            break;
        }
        ensure!(Instant::now() < end, "{connections:#?}");
    }
    // Several connections fetch pages, and each connection is used for more than one page.
    let wrk = format!("wrk -t 1 -c 10 -d 1s --timeout 30s http://{at}/small");
    let out = play.client_until_changed(&wrk, "wrk", 10, "nginx")?.stdout;
    let good = out.contains("requests in") && !out.contains("Socket errors") && !out.contains("Non-2xx");
    ensure!(good, "{out}");
    play.end()
}

/// Caddy is written in Go, and makes system calls without any library.
pub fn caddy(play: &mut Play<'_, '_>) -> Result<()> {
    fill(play)?;
    let port = play.port();
    let at = format!("{}:{port}", play.host());
    play.serve(port, &format!("caddy file-server --listen {at} --root {FILES}"))?;
    let said = play.said()?;
    ensure!(said.contains("is written in Go") && said.contains("stay on TCP"), "{said}");
    fetch(play, &at)?;
    play.end()?;
    // The client's report contains the connection, with the reason.
    let connections = play.of_clients()?;
    ensure!(connections.len() == 1, "{connections:#?}");
    let stays = connections[0].reason == "it ended before both its ends were reported";
    ensure!(stays && connections[0].shared_sent + connections[0].shared_received == 0, "{connections:#?}");
    Ok(())
}
