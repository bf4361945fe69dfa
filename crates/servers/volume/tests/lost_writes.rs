//! Writes that were acknowledged and then could not be written back: from then on, no request reports that data are
//! durable.

mod server;

use ginnel_volume_bench::{Client, Options, Request, Status};
use kit::wait::WATCHDOG;
use server::{Server, status};
use std::time::Instant;

kit::test_that_skips_are_seen!();

const BYTES: u64 = 32 << 20;
const BLOCK: u32 = 64 << 10;

/// Connects with two queues, each of which has a worker thread of its own.
fn connect(server: &Server) -> Client {
    Client::connect(Options { queues: 2, ..server.options() }).unwrap()
}

/// Submits the same request on both queues at once.
fn on_both(client: &mut Client, request: Request) -> [Status; 2] {
    let mut statuses = [None; 2];
    for queue in client.queues() {
        let slot = queue.claim().unwrap();
        queue.submit(slot, request).unwrap();
        queue.publish().unwrap();
    }
    let until = Instant::now() + WATCHDOG;
    while statuses.contains(&None) {
        assert!(Instant::now() < until, "no answer: {statuses:?}");
        for (queue, status) in client.queues().iter_mut().zip(&mut statuses) {
            if let Some(done) = queue.poll().unwrap() {
                *status = Some(done.status);
                queue.release(done.slot);
            }
        }
        std::thread::yield_now();
    }
    statuses.map(Option::unwrap)
}

fn on(client: &mut Client, queue: usize, request: Request) -> Status {
    let queue = client.queue(queue);
    let slot = queue.claim().unwrap();
    queue.submit(slot, request).unwrap();
    queue.publish().unwrap();
    let until = Instant::now() + WATCHDOG;
    loop {
        if let Some(done) = queue.poll().unwrap() {
            queue.release(done.slot);
            return done.status;
        }
        assert!(Instant::now() < until, "no answer");
        std::thread::yield_now();
    }
}

fn has_lost(server: &Server) -> bool {
    let answer = server.control(r#"{"op":"stat"}"#);
    let stat: serde_json::Value = serde_json::from_str(&answer).unwrap();
    stat["stat"]["disks"][0]["lost_writes"].as_bool().unwrap()
}

fn reset(server: &Server) -> String {
    server.control(r#"{"op":"reset-errors"}"#)
}

/// Starts a volume on a disk that claims 32 MiB and has room for four: a loop device over a sparse file in a small file
/// system. The volume's process keeps both alive, so they vanish with it. Only root can do this.
fn on_a_disk_that_fails(flags: &str) -> Server {
    let make = "mkdir DIR/small && mount -t tmpfs -o size=4m none DIR/small && truncate -s 32M DIR/small/file \
                && loop=$(losetup --find --show DIR/small/file) && exec 9<>$loop && losetup -d $loop \
                && ln -s $loop DIR/image.disk && exec \"$@\"";
    let wrapper = ["unshare", "--mount", "sh", "-c", make, "sh"];
    Server::start_under(&wrapper, 0, &format!("--path IMAGE.disk --queues 2 --threads 2 {flags}"))
}

#[test]
fn a_loss_is_reported_on_every_queue_until_it_is_reset() {
    let mut server = Server::start(BYTES, "--path IMAGE --backend volatile --queues 2 --threads 2");
    let mut client = connect(&server);
    std::fs::write(server.faults(), "writeback 4096 4096 5\n").unwrap();
    for at in [0, 4096, 8192] {
        client.write(at, &[1; 4096]).unwrap();
    }
    assert!(!has_lost(&server));
    assert_eq!(on(&mut client, 0, Request::flush()), Status::IoError);
    // The disk works again and no longer reports the error.
    std::fs::write(server.faults(), "").unwrap();
    assert!(has_lost(&server));
    for _ in 0..2 {
        assert_eq!(on_both(&mut client, Request::flush()), [Status::IoError; 2]);
    }
    // Reads still succeed, and so do writes that need not be durable.
    client.write(4096, &[2; 4096]).unwrap();
    client.read(4096, &mut [0; 4096]).unwrap();
    // If the driver turns the cache off, each write must be durable, so it fails.
    client.set_write_cache(false).unwrap_err();
    assert_eq!(status(client.write(4096, &[2; 4096])), Status::IoError);
    client.set_write_cache(true).unwrap();
    // The next process of the volume must know about the loss.
    server.kill();
    server.restart();
    client.reconnect_within(WATCHDOG).unwrap();
    assert!(has_lost(&server));
    assert_eq!(on(&mut client, 1, Request::flush()), Status::IoError);
    assert_eq!(reset(&server).trim(), r#"{"reset":true}"#);
    assert_eq!(reset(&server).trim(), r#"{"reset":false}"#);
    assert!(!has_lost(&server));
    client.write(4096, &[3; 4096]).unwrap();
    assert_eq!(on_both(&mut client, Request::flush()), [Status::Ok; 2]);
    server.kill();
    server.restart();
    client.reconnect_within(WATCHDOG).unwrap();
    let mut back = [0; 4096];
    client.read(4096, &mut back).unwrap();
    assert_eq!((back, has_lost(&server)), ([3; 4096], false));
    assert_eq!(server.count("acknowledged writes are lost"), 2, "once in each process: {}", server.log());
}

#[test]
fn a_write_through_that_loses_what_others_wrote_says_so() {
    kit::require!(rustix::process::geteuid().is_root(), "only root can make a loop device");
    let server = Server::start(BYTES, "--path IMAGE --backend volatile --queues 2 --threads 2");
    let mut client = connect(&server);
    std::fs::write(server.faults(), "writeback 0 4096 5\n").unwrap();
    client.set_write_cache(false).unwrap();
    assert_eq!(status(client.write(0, &[1; 4096])), Status::IoError);
    client.set_write_cache(true).unwrap();
    assert_eq!(on_both(&mut client, Request::flush()), [Status::IoError; 2]);
}

#[test]
fn a_flush_that_has_failed_never_succeeds_later() {
    let server = Server::start(BYTES, "--path IMAGE --backend volatile --queues 2 --threads 2");
    let mut client = connect(&server);
    std::fs::write(server.faults(), "flush 0 0 5\n").unwrap();
    assert_eq!(on(&mut client, 1, Request::flush()), Status::IoError);
    let refused = reset(&server);
    assert!(refused.contains("the disk still fails: Input/output error"), "{refused}");
    std::fs::write(server.faults(), "").unwrap();
    assert_eq!(on_both(&mut client, Request::flush()), [Status::IoError; 2]);
    assert_eq!(reset(&server).trim(), r#"{"reset":true}"#);
    assert_eq!(on_both(&mut client, Request::flush()), [Status::Ok; 2]);
}

#[test]
fn linux_loses_what_is_in_its_page_cache() {
    kit::require!(rustix::process::geteuid().is_root(), "only root can make a loop device");
    let server = on_a_disk_that_fails("--direct off");
    let mut client = connect(&server);
    let first = vec![1; BLOCK as usize];
    client.write(0, &first).unwrap();
    assert_eq!(on_both(&mut client, Request::flush()), [Status::Ok; 2]);
    // The page cache accepts all of these writes, but the file system has no room for most of them.
    for at in (u64::from(BLOCK)..BYTES).step_by(BLOCK as usize) {
        client.write(at, &vec![2; BLOCK as usize]).unwrap();
    }
    // Both queues flush at once. The kernel reports the error only once, and forgets it after that.
    assert_eq!(on_both(&mut client, Request::flush()), [Status::IoError; 2]);
    assert!(has_lost(&server));
    for _ in 0..3 {
        assert_eq!(on_both(&mut client, Request::flush()), [Status::IoError; 2]);
    }
    let mut back = vec![0; BLOCK as usize];
    client.read(0, &mut back).unwrap();
    assert_eq!(back, first, "what was durable is there");
    assert_eq!(reset(&server).trim(), r#"{"reset":true}"#);
    client.write(0, &first).unwrap();
    assert_eq!(on_both(&mut client, Request::flush()), [Status::Ok; 2]);
}

#[test]
fn a_durable_write_takes_the_report_and_the_flush_hears_of_it() {
    kit::require!(rustix::process::geteuid().is_root(), "only root can make a loop device");
    let server = on_a_disk_that_fails("--direct off");
    let mut client = connect(&server);
    client.set_write_cache(false).unwrap();
    let write = |at| status(client.write(at, &vec![2; BLOCK as usize]));
    let failed = (0..BYTES).step_by(BLOCK as usize).map(write).find(|&status| status != Status::Ok);
    assert_eq!(failed, Some(Status::IoError));
    client.set_write_cache(true).unwrap();
    assert_eq!(on_both(&mut client, Request::flush()), [Status::IoError; 2]);
}

#[test]
fn a_cache_that_is_turned_off_tells_of_losses_too() {
    kit::require!(rustix::process::geteuid().is_root(), "only root can make a loop device");
    let server = on_a_disk_that_fails("--direct off");
    let mut client = connect(&server);
    for at in (0..BYTES).step_by(BLOCK as usize) {
        client.write(at, &vec![2; BLOCK as usize]).unwrap();
    }
    client.set_write_cache(false).unwrap_err();
    client.set_write_cache(true).unwrap();
    for _ in 0..2 {
        assert_eq!(on_both(&mut client, Request::flush()), [Status::IoError; 2]);
    }
}

#[test]
fn past_the_page_cache_a_write_that_fails_is_all_that_is_lost() {
    kit::require!(rustix::process::geteuid().is_root(), "only root can make a loop device");
    let server = on_a_disk_that_fails("--direct on");
    let mut client = connect(&server);
    let mut failed = 0;
    for at in (0..BYTES).step_by(BLOCK as usize) {
        failed += u64::from(status(client.write(at, &vec![3; BLOCK as usize])) == Status::IoError);
    }
    assert!(failed > BYTES / u64::from(BLOCK) / 2, "{failed} writes failed");
    assert_eq!(on_both(&mut client, Request::flush()), [Status::Ok; 2]);
    assert!(!has_lost(&server));
}

#[test]
fn an_image_that_has_lost_something_does_not_go_with_its_vm() {
    kit::require!(rustix::process::geteuid().is_root(), "only root can make a loop device");
    use ginnel_volume::lock::{LockError, Use, look};
    let server = on_a_disk_that_fails("--direct off");
    let mut client = connect(&server);
    let device = server.image().with_file_name("image.disk");
    let is_locked = || {
        let file = std::fs::File::options().read(true).write(true).open(&device).unwrap();
        matches!(look(&file, &device, Use::Write), Err(LockError::InUse { .. }))
    };
    client.write(0, &vec![1; BLOCK as usize]).unwrap();
    client.start_log().unwrap();
    for at in (0..BYTES).step_by(BLOCK as usize) {
        client.write(at, &vec![2; BLOCK as usize]).unwrap();
    }
    // As at the end of a migration: the page cache cannot be written back.
    client.pause().unwrap();
    server.wait_for_line("its image stays locked", 1);
    assert!(is_locked());
    assert!(has_lost(&server));
}
