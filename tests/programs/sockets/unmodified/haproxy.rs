//! HAProxy between curl and nginx. It moves the bytes of answers through a pipe, by `splice`.

use kit::wait::retry;
use programs::stage::{MODES, Stage, changed, free_port};
use std::fs;

#[test]
fn haproxy() {
    kit::require_programs!(&["haproxy", "nginx", "curl"]);
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let folder = stage.world.files();
        let at = folder.display().to_string();
        let (origin, proxy) = (free_port(), free_port());
        let user = if rustix::process::geteuid().is_root() { "user root;" } else { "" };
        let configuration = format!(
            "{user} daemon off; worker_processes 1; pid {at}/pid; error_log {at}/error; events {{}} http {{ access_log off; \
             client_body_temp_path {at}/a; proxy_temp_path {at}/b; fastcgi_temp_path {at}/c; uwsgi_temp_path {at}/d; \
             scgi_temp_path {at}/e; server {{ listen 127.0.0.1:{origin}; root {at}; }} }}"
        );
        fs::write(folder.join("nginx.conf"), configuration).unwrap();
        let configuration = format!(
            "global\n maxpipes 64\ndefaults\n mode http\n timeout connect 60s\n timeout client 60s\n timeout server 60s\n \
             option splice-request\n option splice-response\nlisten web\n bind 127.0.0.1:{proxy}\n \
             server nginx 127.0.0.1:{origin}\n"
        );
        fs::write(folder.join("haproxy.cfg"), configuration).unwrap();
        let bytes: Vec<u8> = (0..8_u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        fs::write(folder.join("large"), &bytes).unwrap();
        fs::write(folder.join("small"), &bytes[..100]).unwrap();
        let nginx = ["nginx", "-p", &at, "-c", &format!("{at}/nginx.conf"), "-e", &format!("{at}/error")];
        stage.serve(origin, &nginx);
        stage.serve(proxy, &["haproxy", "-db", "-f", &format!("{at}/haproxy.cfg")]);
        let url = |name: &str| format!("http://127.0.0.1:{proxy}/{name}");
        let out = ["one", "two", "three", "four"].map(|name| format!("{at}/{name}"));
        // The connections change over between the small answers, if they change over at all, and then carry large ones.
        let mut curl = vec!["curl".to_owned(), "-sS".into(), "--rate".into(), "20/s".into()];
        for name in ["small", "small", "large", "large"].iter().zip(&out) {
            curl.extend(["-o".into(), name.1.clone(), url(name.0)]);
        }
        let curl: Vec<_> = curl.iter().map(String::as_str).collect();
        for _ in 0..8 {
            stage.client(&curl);
            for file in &out[2..] {
                assert!(fs::read(file).unwrap() == bytes, "{mode}: {file} is not what nginx was to send");
            }
        }
        // How much goes through rings depends on the machine: a receiver that does not run lets its connection go back to TCP.
        retry(|| {
            stage.client(&curl);
            let connections = stage.all_connections();
            let haproxy = changed(&connections, "haproxy");
            let (received, sent): (Vec<_>, Vec<_>) =
                haproxy.iter().map(|record| (record.shared_received, record.shared_sent)).unzip();
            let is_much = |counts: Vec<u64>| counts.iter().sum::<u64>() > 8 << 20;
            if is_much(received) && is_much(sent) {
                return Ok(());
            }
            Err(format!("{mode}: {connections:#?}"))
        });
        stage.end();
    }
}
