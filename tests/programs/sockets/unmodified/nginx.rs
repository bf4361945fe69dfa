//! nginx with curl and wrk.

use kit::wait::retry;
use programs::stage::{Stage, changed, free_port};
use std::fs;

#[test]
fn nginx() {
    kit::require_programs!(&["nginx", "curl", "wrk"]);
    for (mode, sendfile) in [("auto", "on"), ("auto", "off"), ("eager", "on")] {
        let mut stage = Stage::new(mode);
        let folder = stage.world.files();
        let at = folder.display().to_string();
        let port = free_port();
        let user = if rustix::process::geteuid().is_root() { "user root;" } else { "" };
        let configuration = format!(
            "{user} daemon off; worker_processes 1; pid {at}/pid; error_log {at}/error; events {{}} http {{ access_log off; \
             client_body_temp_path {at}/a; proxy_temp_path {at}/b; fastcgi_temp_path {at}/c; uwsgi_temp_path {at}/d; \
             scgi_temp_path {at}/e; sendfile {sendfile}; tcp_nopush on; server {{ listen 127.0.0.1:{port}; root {at}; }} }}"
        );
        fs::write(folder.join("nginx.conf"), configuration).unwrap();
        let bytes: Vec<u8> = (0..16_u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        fs::write(folder.join("large"), &bytes).unwrap();
        stage.serve(
            port,
            &["nginx", "-p", &at, "-c", &format!("{at}/nginx.conf"), "-e", &format!("{at}/error")],
        );
        let url = format!("http://127.0.0.1:{port}/large");
        // Three requests over one connection.
        let out = ["one", "two", "three"].map(|name| format!("{at}/{name}"));
        let curl = [&["curl", "-sS", "--limit-rate", "24M"][..], &["-o", &out[0], &url, "-o", &out[1], &url]];
        let curl = [curl.concat(), vec!["-o", &out[2], &url]].concat();
        // A receiver that does not run, for example on a busy machine, lets its connection go back to TCP for a while;
        // so run it again then.
        retry(|| {
            stage.client(&curl);
            for file in &out {
                assert!(fs::read(file).unwrap() == bytes, "{file} is not what nginx was to send");
            }
            let connections = stage.all_connections();
            let received = changed(&connections, "curl").iter().map(|curl| curl.shared_received).max();
            if received.is_some_and(|received| received > 1 << 20) {
                return Ok(());
            }
            Err(format!("{mode}, sendfile {sendfile}: {connections:#?}"))
        });
        // Requests pages over several connections, each of which stays open for the next request.
        fs::write(folder.join("small"), &bytes[..700]).unwrap();
        let url = format!("http://127.0.0.1:{port}/small");
        let out = stage.client_until_changed(&["wrk", "-t", "2", "-c", "10", "-d", "1s", &url], 10, "nginx");
        assert!(
            out.contains("requests in") && !out.contains("Socket errors") && !out.contains("Non-2xx"),
            "{mode}, sendfile {sendfile}: {out}"
        );
        stage.end();
    }
}
