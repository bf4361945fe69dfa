//! DAX info blocks: the daemon writes them, checks them before a guest's kernel reads them, and repairs them. Also members that
//! may only read.

use ginnel_layout::dax::{self, InfoBlock};
use ginnel_layout::relay::{Access, MappingKind, RelayKind};
use ginnel_layout::segment::{MAGIC, RESERVED};
use ginnel_layout::wire::{self, ErrorCode, Kind};
use ginnel_shmem::SharedMemory;
use kit::daemon::qemu::*;
use kit::daemon::*;
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

const VECTORS: &str = "vectors = 4\n";
const CONFIG: &str = "
[vm.vm-a]
[vm.vm-b]
[segment.web]
size = \"18M\"
members = [\"host\", \"vm-a\"]
[segment.small]
size = \"16M\"
page = \"4K\"
members = [\"host\", \"vm-b\"]
[segment.plain]
size = \"5M\"
memory = \"bar\"
members = [\"host\", \"vm-a\"]
";

fn read(daemon: &Daemon, segment: &str) -> InfoBlock {
    let mut bytes = [0; size_of::<InfoBlock>()];
    File::open(daemon.shm(segment)).unwrap().read_exact_at(&mut bytes, dax::AT).unwrap();
    InfoBlock::read_from_bytes(&bytes).unwrap()
}

/// Damages the info block, as a member with power over its own kernel can do.
fn damage(daemon: &Daemon, segment: &str, change: impl Fn(&mut InfoBlock)) {
    let mut block = read(daemon, segment);
    change(&mut block);
    let file = File::options().write(true).open(daemon.shm(segment)).unwrap();
    file.write_all_at(block.as_bytes(), dax::AT).unwrap();
}

fn shown(daemon: &Daemon, segment: &str) -> Value {
    let status = daemon.inspect();
    status["segments"].as_array().unwrap().iter().find(|s| s["name"] == segment).unwrap().clone()
}

fn uuid(daemon: &Daemon, segment: &str) -> [u8; 16] {
    daemon.attach(segment, "who").wire.uuid
}

fn is_right(daemon: &Daemon, segment: &str, size: u64, page: u32) {
    assert_eq!(read(daemon, segment).check(uuid(daemon, segment), size, page), Ok(()));
}

#[test]
fn a_dax_segment_has_an_info_block_and_a_bar_segment_has_none() {
    let daemon = Daemon::start_with(VECTORS, CONFIG);
    is_right(&daemon, "web", 18 << 20, 2 << 20);
    is_right(&daemon, "small", 16 << 20, 4096);
    assert_eq!(read(&daemon, "plain"), InfoBlock::new_zeroed());
    let facts = |segment| {
        let shown = shown(&daemon, segment);
        (
            shown["memory"].clone(),
            shown["page"].clone(),
            shown["size"].clone(),
            shown["info_block_repairs"].clone(),
        )
    };
    assert_eq!(facts("web"), (json!("dax"), json!(2 << 20), json!(18 << 20), json!(0)));
    assert_eq!(facts("small"), (json!("dax"), json!(4096), json!(16 << 20), json!(0)));
    assert_eq!(facts("plain"), (json!("bar"), json!(4096), json!(8 << 20), json!(0)));
    let answer = daemon
        .admin(json!({"op": "segment-create", "name": "late", "size": 17 << 20, "members": ["vm-a"],
                      "readers": ["host"], "page": "4K"}))
        .unwrap();
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(answer["segment"]["readers"], json!(["host"]));
    assert_eq!((&answer["segment"]["memory"], &answer["segment"]["page"]), (&json!("dax"), &json!(4096)));
    is_right(&daemon, "late", 18 << 20, 4096);
    let refused = daemon
        .admin(json!({"op": "segment-create", "name": "x", "size": 4 << 20, "members": ["host"], "memory": "cxl"}))
        .unwrap_err();
    assert!(refused.text.contains("`dax` or `bar`"), "{refused:?}");
}

#[test]
fn a_header_that_a_member_destroys_is_written_again() {
    let daemon = Daemon::start_with(VECTORS, CONFIG);
    let destroy = |segment| {
        // Making RAM of the device does this, among other things.
        let file = File::options().write(true).open(daemon.shm(segment)).unwrap();
        file.write_all_at(&[0x5a; 100], RESERVED).unwrap();
    };
    for (segment, repaired) in [("web", 1), ("plain", 1), ("web", 2)] {
        destroy(segment);
        let shown = shown(&daemon, segment);
        assert_eq!((&shown["header_repairs"], &shown["info_block_repairs"]), (&json!(repaired), &json!(0)));
        let host = daemon.attach(segment, "who");
        assert_eq!(host.memory.load_acquire_u64(0), MAGIC);
        let mut uuid = [0; 16];
        host.memory.read(16, &mut uuid);
        assert_eq!(uuid, host.wire.uuid);
    }
    assert!(daemon.log().contains("its header was damaged and has been repaired"), "{}", daemon.log());
    destroy("web");
    Qemu::join(&daemon.run("vm-a.sock"), 4);
    assert_eq!(daemon.attach("web", "who").memory.load_acquire_u64(0), MAGIC, "before the VM starts");
}

type Change = fn(&mut InfoBlock);

#[test]
fn a_damaged_field_is_repaired_and_named_in_the_log() {
    let daemon = Daemon::start_with(VECTORS, CONFIG);
    let fields: [(&str, Change); 17] = [
        ("signature", |b| b.signature[0] ^= 1),
        ("uuid", |b| b.uuid[15] ^= 1),
        ("parent_uuid", |b| b.parent_uuid[7] = 1),
        ("flags", |b| b.flags = 1),
        ("version_major", |b| b.version_major = 2),
        ("version_minor", |b| b.version_minor = 0),
        ("dataoff", |b| b.dataoff = 8192),
        ("npfns", |b| b.npfns += 1),
        ("mode", |b| b.mode = 2),
        ("start_pad", |b| b.start_pad = 4096),
        ("end_trunc", |b| b.end_trunc = 4096),
        ("align", |b| b.align = 4096),
        ("page_size", |b| b.page_size = 0),
        ("page_struct_size", |b| b.page_struct_size = 56),
        ("padding", |b| b.padding[3993] = 1),
        ("checksum", |b| b.checksum ^= 1 << 63),
        // `ndctl destroy-namespace -f` does this.
        ("signature", |b| *b = InfoBlock::new_zeroed()),
    ];
    for (n, (field, change)) in fields.into_iter().enumerate() {
        damage(&daemon, "web", |block| {
            change(block);
            if n % 2 == 0 && field != "checksum" {
                block.checksum = block.sum(); // A skilled attacker makes the checksum fit.
            }
        });
        assert_eq!(shown(&daemon, "web")["info_block_repairs"], json!(n + 1), "{field}");
        is_right(&daemon, "web", 18 << 20, 2 << 20);
        let log = daemon.log();
        let said: Vec<&str> =
            log.lines().filter(|line| line.contains("DAX info block was damaged")).collect();
        assert_eq!(said.len(), n + 1);
        assert!(said[n].contains("WARN") && said[n].contains("web"), "{}", said[n]);
        assert!(said[n].contains(&format!("its {field} is ")), "{field}: {}", said[n]);
    }
    assert!(daemon.log().contains("its mode is 0x2 and should be 0x1"));
    // A segment without an info block needs no repair.
    damage(&daemon, "plain", |block| block.mode = 2);
    assert_eq!(shown(&daemon, "plain")["info_block_repairs"], json!(0));
    assert_eq!(read(&daemon, "plain").mode, 2);
}

#[test]
fn an_info_block_is_repaired_before_a_guests_kernel_reads_it() {
    let mut daemon = Daemon::start_with(VECTORS, CONFIG);
    let uuid = uuid(&daemon, "web");
    let spoil = |daemon: &Daemon| damage(daemon, "web", |block| (block.mode, block.checksum) = (2, 0));
    let is_right = |daemon: &Daemon| read(daemon, "web").check(uuid, 18 << 20, 2 << 20).is_ok();

    spoil(&daemon);
    daemon.restart();
    assert!(is_right(&daemon), "the daemon's start");

    // QEMU gets its answer after the repair, and makes the guest only then.
    spoil(&daemon);
    damage(&daemon, "small", |block| block.mode = 2);
    let qemu = Qemu::join(&daemon.run("vm-a.sock"), 4);
    assert!(is_right(&daemon), "the VM's start");
    assert_eq!(read(&daemon, "small").mode, 2, "not a segment of this VM");

    spoil(&daemon);
    let mut guest = qemu.guest(1, true);
    let segments = guest.segments();
    assert!(is_right(&daemon), "the first session");
    let told = |name: &str| segments.iter().find(|s| s.name.as_str() == name).copied().unwrap();
    assert_eq!((told("web").kind, told("web").page, told("web").size), (MappingKind::DAX, 2 << 20, 18 << 20));
    assert_eq!(
        (told("plain").kind, told("plain").page, told("plain").size),
        (MappingKind::BAR, 4096, 8 << 20)
    );
    assert_eq!(told("web").access, Access::READ_WRITE);

    spoil(&daemon);
    let mut guest = guest.restart(2, true);
    guest.segments();
    assert!(is_right(&daemon), "after a reboot");

    spoil(&daemon);
    assert!(shown(&daemon, "web")["info_block_repairs"].as_u64() >= Some(4), "qemu-args asks so");
    assert!(is_right(&daemon), "status");
}

#[test]
fn a_segment_in_use_keeps_its_memory_kind() {
    let mut daemon = Daemon::start_with(VECTORS, CONFIG);
    let qemu = Qemu::join(&daemon.run("vm-a.sock"), 4);
    daemon.kill();
    // Sizes that fit both kinds of memory, so that only the kind has changed.
    let swapped = CONFIG.replace("\"5M\"\nmemory = \"bar\"", "\"8M\"");
    assert_ne!(swapped, CONFIG);
    daemon.write_config(VECTORS, &swapped);
    daemon.start();
    // The test's own process counts as the QEMU, and it is alive.
    assert_eq!(shown(&daemon, "plain")["memory"], json!("bar"));
    assert_eq!(read(&daemon, "plain"), InfoBlock::new_zeroed());
    assert!(daemon.log().contains("`memory` and `page` stay as they are"), "{}", daemon.log());
    drop(qemu);
    let mut guest = Qemu::join(&daemon.run("vm-b.sock"), 4).guest(1, true);
    guest.segments();
}

#[test]
fn readers_can_read_but_not_write() {
    let config = "
[vm.vm-a]
[vm.vm-b]
[segment.news]
size = \"4M\"
members = [\"vm-a\"]
readers = [\"host\", \"vm-b\"]
";
    let mut daemon = Daemon::start_with(VECTORS, config);
    // `attach` checks what the descriptor allows.
    let mut host = daemon.attach("news", "reader");
    assert_eq!((host.wire.access, host.wire.kind), (Access::READ_ONLY, MappingKind::FILE));
    assert_eq!((host.wire.map_offset, host.memory.load_acquire_u64(0)), (RESERVED, MAGIC));
    let refused = host.listen("x").unwrap_err();
    assert_eq!(refused.code, ErrorCode::READ_ONLY.0);
    assert!(refused.text.contains("may only read segment news"), "{refused:?}");
    assert_eq!(host.connect("x").err().unwrap().code, ErrorCode::READ_ONLY.0);
    assert_eq!(shown(&daemon, "news")["members"], json!(["vm-a"]));
    assert_eq!(shown(&daemon, "news")["readers"], json!(["host", "vm-b"]));

    let mut writer = Qemu::join(&daemon.run("vm-a.sock"), 4).guest(1, true);
    assert_eq!(writer.segments()[0].access, Access::READ_WRITE);
    let mut reader = Qemu::join(&daemon.run("vm-b.sock"), 4).guest(2, true);
    assert_eq!(reader.segments()[0].access, Access::READ_ONLY);
    reader.open(5, 77);
    let attach = wire::Attach { segment: name("news"), name: name("p"), ..wire::Attach::new_zeroed() };
    assert_eq!(reader.attach(5, attach).unwrap().access, Access::READ_ONLY);
    assert_eq!(reader.connect(5, "x").unwrap_err().0, ErrorCode::READ_ONLY.0);
    let listen = wire::Listen { name: name("y"), kind: 1, backlog: 0, capacity: 0, input_capacity: 0 };
    let refused =
        reader.ask::<wire::Listening>(5, Kind::LISTEN, listen.as_bytes(), Kind::LISTENING).unwrap_err();
    assert_eq!(refused.0, ErrorCode::READ_ONLY.0);
    writer.send(RelayKind::CLOSE, 0, &[]);

    // All of this is in the journal, so the next daemon knows it.
    daemon.restart();
    let back = daemon.client().attach_as(host.back).unwrap();
    assert_eq!(back.wire.access, Access::READ_ONLY);
}

#[test]
fn a_writer_that_becomes_a_reader_loses_its_channels() {
    let config = |rights: &str| format!("[vm.vm-a]\n[segment.news]\nsize = \"4M\"\n{rights}");
    let mut daemon = Daemon::start_new(&config("members = [\"host\", \"vm-a\"]"));
    let mut host = daemon.attach("news", "writer");
    host.listen("x").unwrap();
    daemon.kill();
    daemon.write_config("", &config("members = [\"vm-a\"]\nreaders = [\"host\"]"));
    daemon.start();
    assert_eq!(daemon.client().attach_as(host.back).err().unwrap().code, ErrorCode::STALE.0);
    assert_eq!(daemon.attach("news", "reader").wire.access, Access::READ_ONLY);
}

#[test]
fn a_segment_in_use_keeps_a_size_that_is_too_small_for_a_vm() {
    let config = |members: &str| format!("[vm.vm-a]\n[segment.web]\nsize = \"4M\"\nmembers = [{members}]\n");
    let mut daemon = Daemon::start_with(VECTORS, &config("\"host\""));
    let host = daemon.attach("web", "who");
    daemon.kill();
    daemon.write_config(VECTORS, &config("\"host\", \"vm-a\""));
    daemon.start();
    assert_eq!(shown(&daemon, "web")["size"], json!(4 << 20));
    assert_eq!(shown(&daemon, "web")["broken"], json!(false));
    drop(host);
}
