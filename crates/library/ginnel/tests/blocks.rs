//! Blocks, used through the library: they are named, shared, granted and revoked, and outlive the daemon and their owner.

use ginnel::{AttachOptions, BlockOptions, Endpoint, Error, ErrorCode, Rights};
use kit::daemon::*;
use kit::wait::{WATCHDOG, wait_for};

const WEB: &str = "[segment.web]\nsize = \"8M\"\npage = \"4K\"\nmembers = [\"host\"]\n";

fn attach(daemon: &Daemon, name: &str) -> Endpoint {
    let options =
        AttachOptions { socket: daemon.socket(), name: Some(name.into()), ..AttachOptions::default() };
    Endpoint::attach_with("web", &options).unwrap()
}

fn used(daemon: &Daemon) -> u64 {
    daemon.inspect()["segments"][0]["used"].as_u64().unwrap()
}

#[test]
fn all_handles_of_a_block_share_its_memory() {
    let daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let mine = a.create_block("x", 10_000, &BlockOptions::default()).unwrap();
    let other = b.open_block("x", Rights::READ_WRITE).unwrap();
    let mut bytes = [1; 10_000];
    other.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 10_000]);
    mine.write(9_990, b"0123456789").unwrap();
    other.read(9_990, &mut bytes[..10]).unwrap();
    assert_eq!(&bytes[..10], b"0123456789");
    other.slice().unwrap().write(0, b"back");
    assert_eq!(mine.slice().unwrap().first(4).to_vec(), b"back");
    assert!(matches!(
        mine.write(9_991, b"0123456789"),
        Err(Error::OutOfBlock { at: 9_991, len: 10, size: 10_000 })
    ));
    assert!(matches!(mine.read(usize::MAX, &mut bytes), Err(Error::OutOfBlock { .. })));
    assert_eq!((mine.len(), other.len(), mine.number()), (10_000, 10_000, other.number()));
    // The name goes at once; the memory stays as long as somebody has the block open.
    a.unlink_block("x").unwrap();
    assert_eq!(b.open_block("x", Rights::READ).err().unwrap().code(), Some(ErrorCode::NOT_FOUND));
    mine.close().unwrap();
    other.write(0, b"still").unwrap();
    assert_eq!(used(&daemon), 12_288);
    drop(other);
    wait_for("the memory", || (used(&daemon) == 0).then_some(()));
}

#[test]
fn each_failure_has_an_error_of_its_own() {
    let daemon =
        Daemon::start_with("[limits]\nblock_bytes_per_endpoint = \"2M\"\nblocks_per_member = 4\n", WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let code = |result: Result<ginnel::Block, Error>| result.err().unwrap().code();
    let options = BlockOptions { others: Rights::READ, ..BlockOptions::default() };
    let x = a.create_block("x", 1 << 20, &options).unwrap();
    let create = |name, size| a.create_block(name, size, &options);
    assert_eq!(code(create("x", 1)), Some(ErrorCode::IN_USE));
    assert_eq!(code(create("y", 0)), Some(ErrorCode::INVALID));
    assert_eq!(code(create("y", 3 << 20)), Some(ErrorCode::QUOTA));
    assert_eq!(code(b.open_block("z", Rights::READ)), Some(ErrorCode::NOT_FOUND));
    assert_eq!(code(b.open_block("x", Rights::READ_WRITE)), Some(ErrorCode::DENIED));
    assert_eq!(b.unlink_block("x").unwrap_err().code(), Some(ErrorCode::DENIED));
    assert_eq!(a.unlink_block("z").unwrap_err().code(), Some(ErrorCode::NOT_FOUND));
    assert!(matches!(create(&"n".repeat(64), 1), Err(Error::Name { .. })));
    assert!(matches!(b.open_block("no/name", Rights::READ), Err(Error::Name { .. })));
    let read = b.open_block("x", Rights::READ).unwrap();
    assert!(matches!(read.write(0, b"x"), Err(Error::Denied { rights: Rights::READ })));
    assert_eq!(code(a.open_block("x", Rights::WRITE_EXCLUSIVE)), Some(ErrorCode::BUSY), "its own, too");
    drop(x);
    let alone = a.open_block("x", Rights::WRITE_EXCLUSIVE).unwrap();
    assert_eq!(code(a.open_block("x", Rights::READ_WRITE)), Some(ErrorCode::BUSY));
    // A caller that waits gets the block.
    let waiting = std::thread::spawn({
        let a = a.clone();
        move || a.open_block_within("x", Rights::WRITE_EXCLUSIVE, WATCHDOG).map(drop)
    });
    alone.close().unwrap();
    waiting.join().unwrap().unwrap();
    let daemon = Daemon::start_new(WEB);
    let a = attach(&daemon, "a");
    assert_eq!(code(a.create_block("y", 8 << 20, &options)), Some(ErrorCode::NO_MEMORY));
}

#[test]
fn revoked_rights_are_refused() {
    let daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let mine =
        a.create_block("x", 4096, &BlockOptions { others: Rights::NONE, ..BlockOptions::default() }).unwrap();
    mine.write(0, b"mine").unwrap();
    let whom = b.number().0;
    mine.grant(0, whom, Rights::READ_WRITE).unwrap();
    let other = b.open_block("x", Rights::READ_WRITE).unwrap();
    other.write(0, b"both").unwrap();
    mine.grant(0, whom, Rights::READ).unwrap();
    // No caller gets exclusive access before the other program has acknowledged the loss of its right.
    mine.close().unwrap();
    assert_eq!(a.open_block("x", Rights::WRITE_EXCLUSIVE).err().unwrap().code(), Some(ErrorCode::BUSY));
    let denied = wait_for("the loss of the right", || other.write(0, b"lost").err());
    assert!(matches!(denied, Error::Denied { rights: Rights::READ }));
    let alone = a.open_block_within("x", Rights::WRITE_EXCLUSIVE, WATCHDOG).unwrap();
    let mut bytes = [0; 4];
    alone.write(0, b"mine").unwrap();
    other.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"mine", "it may still read");
    alone.revoke(0, whom).unwrap();
    let denied = wait_for("the loss of the right", || other.read(0, &mut bytes).err());
    assert!(matches!(denied, Error::Denied { rights: Rights::NONE }));
    assert_eq!(b.open_block("x", Rights::READ).err().unwrap().code(), Some(ErrorCode::DENIED));
    assert_eq!(other.close().unwrap_err().code(), Some(ErrorCode::CLOSED), "it was closed when it was told");
}

#[test]
fn a_store_without_the_right_never_reaches_the_block() {
    let daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let mine = a.create_block("x", 3 * 4096, &BlockOptions::default()).unwrap();
    mine.write(4096, b"whole").unwrap();
    let other = b.open_block("x", Rights::READ).unwrap();
    other.guard_writes().unwrap();
    // This is like a program that writes without asking the library. Here the kernel writes for the program, and it refuses a
    // system call without a fault. Stores by the program itself are in the tests of the mapping.
    let zero = std::fs::File::open("/dev/zero").unwrap();
    assert!(other.slice().unwrap().skip(4096).read_from(std::os::fd::AsFd::as_fd(&zero)).is_err());
    let mut bytes = [0; 5];
    mine.read(4096, &mut bytes).unwrap();
    assert_eq!(&bytes, b"whole");
    other.read(4096, &mut bytes).unwrap();
    // A slice from before the right was taken away also writes without asking the library.
    let mine = (mine, a.open_block("x", Rights::READ_WRITE).unwrap()).0;
    let writer = b.open_block("x", Rights::READ_WRITE).unwrap();
    writer.guard_writes().unwrap();
    let slice = writer.slice().unwrap();
    mine.grant(0, b.number().0, Rights::READ).unwrap();
    wait_for("the loss of the right", || {
        b.process_events();
        (writer.rights() == Rights::READ).then_some(())
    });
    slice.write(4096, b"wrong");
    assert!(
        matches!(writer.read(4096, &mut bytes), Err(Error::Denied { rights: Rights::READ })),
        "told once"
    );
    writer.read(4096, &mut bytes).unwrap();
    assert_eq!(&bytes, b"whole");
    mine.read(4096, &mut bytes).unwrap();
    assert_eq!(&bytes, b"whole");
}

#[test]
fn blocks_outlive_the_daemon_and_persistent_ones_their_owner() {
    let mut daemon = Daemon::start_new(WEB);
    let (a, b) = (attach(&daemon, "a"), attach(&daemon, "b"));
    let keep = BlockOptions { persistent: true, ..BlockOptions::default() };
    let kept = a.create_block("kept", 5000, &keep).unwrap();
    let mut gone = a.create_block("gone", 5000, &BlockOptions::default()).unwrap();
    kept.write(0, b"kept").unwrap();
    daemon.kill();
    kept.write(1, b"E").unwrap();
    daemon.start();
    gone.resize(20_000).unwrap();
    assert_eq!((gone.len(), used(&daemon)), (20_000, 8192 + 20_480));
    gone.write(19_999, b"x").unwrap();
    let held = b.open_block("gone", Rights::READ).unwrap();
    assert_eq!(held.len(), 20_000);
    assert_eq!(gone.resize(1).unwrap_err().code(), Some(ErrorCode::BUSY));
    // The owner ends when the daemon has been restarted, but has not needed the daemon since.
    daemon.kill();
    drop((kept, gone));
    daemon.start();
    drop(a);
    let mut bytes = [0; 4];
    held.read(0, &mut bytes).unwrap();
    let code = wait_for("the name to disappear", || b.open_block("gone", Rights::READ).err());
    assert_eq!(code.code(), Some(ErrorCode::NOT_FOUND));
    assert_eq!(used(&daemon), 8192 + 20_480);
    drop(held);
    let again = b.open_block("kept", Rights::READ_WRITE).unwrap();
    again.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"kEpt");
    wait_for("the memory", || (used(&daemon) == 8192).then_some(()));
    b.unlink_block("kept").unwrap();
    again.close().unwrap();
    assert_eq!(used(&daemon), 0);
}
