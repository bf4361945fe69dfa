//! Images that exist, and images that do not.

mod server;

use server::Server;
use std::path::Path;
use std::process::Command;

const BYTES: u64 = 1 << 20;

/// Starts a volume that must fail to start, and returns its error message.
fn refused(folder: &Path, flags: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_ginnel-volume"))
        .args(["w", "--socket"])
        .arg(folder.join("w.sock"))
        .args(flags)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

#[test]
fn an_image_that_is_not_there_is_made_only_if_that_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    let path = image.to_str().unwrap();
    let said = refused(folder.path(), &["--path", path, "--size", "1M"]);
    assert!(said.contains("No such file") && said.contains("--create"), "{said}");
    let said = refused(folder.path(), &["--path", path, "--create"]);
    assert!(said.contains("it has no size"), "{said}");
    let said = refused(folder.path(), &["--path", path, "--size", "1M", "--read-only", "--create"]);
    assert!(said.contains("read-only"), "{said}");
    assert!(!image.exists());
    // The image's folder does not exist, as if its file system was not mounted.
    let nowhere = folder.path().join("srv/image");
    let said = refused(folder.path(), &["--path", nowhere.to_str().unwrap(), "--size", "1M", "--create"]);
    assert!(said.contains("cannot be created: No such file"), "{said}");
    let device = "/dev/ginnel-no-such-device";
    let said = refused(folder.path(), &["--path", device, "--size", "1M", "--create"]);
    assert!(said.contains("volumes create no files there"), "{said}");
    assert!(!Path::new(device).exists());
}

#[test]
fn a_created_image_has_its_size_and_is_private() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let server = Server::start(0, "--path IMAGE.new --size 1M --create");
    let made = std::fs::metadata(server.image().with_file_name("image.new")).unwrap();
    assert_eq!((made.len(), made.blocks(), made.permissions().mode() & 0o777), (BYTES, 0, 0o600));
    server.connect().write(BYTES - 4096, &[1; 4096]).unwrap();
}

#[test]
fn an_image_that_another_has_does_not_grow() {
    let server = Server::start(BYTES, "--path IMAGE");
    let folder = tempfile::tempdir().unwrap();
    let image = server.image();
    let said = refused(folder.path(), &["--path", image.to_str().unwrap(), "--size", "2M"]);
    assert!(said.contains("is in use"), "{said}");
    assert_eq!(image.metadata().unwrap().len(), BYTES);
}

#[test]
fn direct_io_works_without_a_reported_alignment() {
    // tmpfs supports O_DIRECT since Linux 6.6, but does not report the alignment.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let image = folder.path().join("image");
    std::fs::write(&image, vec![7; BYTES as usize]).unwrap();
    let server = Server::start(0, &format!("--path {} --direct on", image.display()));
    assert!(server.control(r#"{"op":"stat"}"#).contains(r#""direct":true"#));
    let mut bytes = [0; 512];
    server.connect().read(BYTES - 512, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 512]);
}
