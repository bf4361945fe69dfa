//! OpenSSH: a server that executes itself, forks, drops its privileges and confines itself, all with one connection.

use kit::wait::retry;
use kit::world::World;
use programs::stage::{MODES, Stage, changed, free_port};
use std::fs::{self, File};
use std::process::Command;

#[test]
fn ssh() {
    kit::require_programs!(&["sshd", "ssh", "ssh-keygen"]);
    kit::require!(
        rustix::process::geteuid().is_root(),
        "the distribution's sshd needs root, and its folder /run/sshd"
    );
    for mode in MODES {
        // By default ssh stays on TCP, so that users can still log in if something is wrong.
        let world = World::configured("size = '64M'", "[sockets]\nexclude = []\n");
        let mut stage = Stage::in_world(mode, world);
        let folder = stage.world.files();
        let at = folder.display().to_string();
        for key in ["host", "user"] {
            let made = Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                .arg(folder.join(key))
                .status()
                .unwrap();
            assert!(made.success());
        }
        // The folder in which the distribution's server confines itself.
        fs::create_dir_all("/run/sshd").unwrap();
        let port = free_port();
        fs::write(
            folder.join("sshd_config"),
            format!(
                "ListenAddress 127.0.0.1:{port}\nHostKey {at}/host\nAuthorizedKeysFile {at}/user.pub\nStrictModes no\n\
                 UsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nPidFile none\n"
            ),
        )
        .unwrap();
        stage.serve(port, &["/usr/sbin/sshd", "-D", "-e", "-f", &format!("{at}/sshd_config")]);
        let port = port.to_string();
        let options = [
            "ssh",
            "-F",
            "none",
            "-p",
            &port,
            "-i",
            &format!("{at}/user"),
            "-o",
            "IdentitiesOnly=yes",
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            &format!("UserKnownHostsFile={at}/known"),
            "127.0.0.1",
        ];
        let data = folder.join("data");
        fs::write(
            &data,
            (0..4_000_000_u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect::<Vec<_>>(),
        )
        .unwrap();
        let sum = Command::new("sha256sum").stdin(File::open(&data).unwrap()).output().unwrap().stdout;
        let program = [&options[..], &["sha256sum"]].concat();
        // How far a connection gets before everything is sent depends on the machine.
        retry(|| {
            let (status, out, err) = stage.client_with(&program, File::open(&data).unwrap().into());
            assert!(status && out.as_bytes() == sum, "{mode}: {out} {err} {}", stage.log());
            let connections = stage.all_connections();
            if ["ssh", "sshd"].iter().all(|name| !changed(&connections, name).is_empty()) {
                return Ok(());
            }
            Err(format!("{mode}: none has changed over: {connections:#?}"))
        });
        stage.end();
    }
}
