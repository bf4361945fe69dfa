//! Tests on trees of files that look like what Linux 6.1 shows. Real devices are tested in VMs (`tests/vm/tests/dax.rs`).

use super::super::memory_device::tests::{header, segment as plain_segment};
use super::super::memory_device::{MemoryDevices, Missing};
use super::super::pci::tests::Tree;
use super::*;
use ginnel_layout::relay::{Access, MappingKind};
use ginnel_layout::segment::SegmentHeader;
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use std::os::unix::fs::{PermissionsExt, symlink};

const SIZE: u64 = 16 << 20;

fn segment(uuid: u8) -> relay::Segment {
    relay::Segment { kind: MappingKind::DAX, page: dax::LARGE_PAGE, ..plain_segment(uuid, SIZE) }
}

fn block(uuid: u8) -> InfoBlock {
    InfoBlock::new([uuid; 16], SIZE, dax::LARGE_PAGE)
}

/// Returns a uuid in the form in which sysfs shows it.
fn uuid_text(uuid: u8) -> String {
    let byte = format!("{uuid:02x}");
    let part = |n| byte.repeat(n);
    format!("{}-{}-{}-{}-{}\n", part(4), part(2), part(2), part(2), part(6))
}

/// A virtio-pmem device in a tree, at some stage of its way through the drivers.
struct Device<'t> {
    tree: &'t Tree,
    n: u32,
    pci: PathBuf,
}

impl<'t> Device<'t> {
    fn new(tree: &'t Tree, n: u32) -> Self {
        let pci = tree.path().join(format!("devices/pci0000:00/0000:00:0{n}.0"));
        let device = Self { tree, n, pci };
        let virtio = device.virtio();
        fs::create_dir_all(&virtio).unwrap();
        fs::write(virtio.join("device"), "0x001b\n").unwrap();
        device.list("virtio", &virtio);
        device
    }

    fn virtio(&self) -> PathBuf {
        self.pci.join(format!("virtio{}", self.n))
    }

    fn region(&self) -> PathBuf {
        self.virtio().join(format!("ndbus{0}/region{0}", self.n))
    }

    /// Adds a path to the list of a bus.
    fn list(&self, bus: &str, path: &Path) {
        let folder = self.tree.path().join(format!("bus/{bus}/devices"));
        fs::create_dir_all(&folder).unwrap();
        symlink(path, folder.join(path.file_name().unwrap())).unwrap();
    }

    fn bind(&self, path: &Path, bus: &str, driver: &str) {
        let folder = self.tree.path().join(format!("bus/{bus}/drivers/{driver}"));
        fs::create_dir_all(&folder).unwrap();
        symlink(folder, path.join("driver")).unwrap();
    }

    /// Adds a region and a namespace, as `virtio_pmem` makes them.
    fn with_region(self, len: u64, start: u64) -> Self {
        self.bind(&self.virtio(), "virtio", "virtio_pmem");
        let namespace = self.region().join(format!("namespace{}.0", self.n));
        fs::create_dir_all(&namespace).unwrap();
        // Seeds are always there, without a uuid.
        fs::create_dir_all(self.seed()).unwrap();
        for (file, text) in [("uuid", "\n"), ("mode", "none\n"), ("namespace", "\n")] {
            fs::write(self.seed().join(file), text).unwrap();
        }
        fs::write(self.region().join("read_only"), "0\n").unwrap();
        fs::write(self.region().join("dax_seed"), format!("dax{}.0\n", self.n)).unwrap();
        fs::write(self.region().join("namespace_seed"), "\n").unwrap();
        fs::write(self.region().join("size"), format!("{len}\n")).unwrap();
        fs::write(self.region().join("resource"), format!("{start:#x}\n")).unwrap();
        let bus = self.virtio().join(format!("ndbus{}", self.n));
        fs::write(bus.join("wait_probe"), "1\n").unwrap();
        self.list("nd", &bus);
        self
    }

    /// Adds the instance for an info block that `nd_pmem` or an earlier daemon has found.
    fn with_block(self, uuid: u8) -> Self {
        let made = self.made();
        fs::create_dir_all(&made).unwrap();
        fs::write(made.join("uuid"), uuid_text(uuid)).unwrap();
        fs::write(made.join("mode"), "ram\n").unwrap();
        fs::write(made.join("namespace"), format!("namespace{}.0\n", self.n)).unwrap();
        fs::write(made.join("resource"), format!("{:#x}\n", START + RESERVED)).unwrap();
        self
    }

    /// Shows the seed as the kernel does when `dax_pmem` has accepted it, with this many bytes in front and of data.
    fn with_willing_seed(self, front: u64, len: u64) -> Self {
        self.nd_driver("dax_pmem");
        fs::write(self.seed().join("resource"), format!("{:#x}\n", START + front)).unwrap();
        fs::write(self.seed().join("size"), format!("{len}\n")).unwrap();
        self
    }

    fn seed(&self) -> PathBuf {
        self.region().join(format!("dax{}.0", self.n))
    }

    /// Adds a block device, because `nd_pmem` has found no info block; `block` can be read there.
    fn with_block_device(self, block: InfoBlock) -> Self {
        self.nd_driver("nd_pmem");
        let name = format!("pmem{}", self.n);
        let namespace = self.region().join(format!("namespace{}.0", self.n));
        fs::create_dir_all(namespace.join("block").join(&name)).unwrap();
        self.node(&name).write_all_at(block.as_bytes(), dax::AT).unwrap();
        self
    }

    /// Adds a DAX device that `dax_pmem` has made as the info block describes, and that this driver has.
    fn with_dax(self, driver: Option<&str>, page: u32, header: SegmentHeader) -> Self {
        self.bind(&self.made(), "nd", "dax_pmem");
        let name = format!("dax{}.0", self.n);
        let dax = self.made().join(&name);
        fs::create_dir_all(&dax).unwrap();
        fs::write(dax.join("size"), format!("{}\n", SIZE - RESERVED)).unwrap();
        fs::write(dax.join("align"), format!("{page}\n")).unwrap();
        if let Some(driver) = driver {
            self.bind(&dax, "dax", driver);
        }
        self.list("dax", &dax);
        self.node(&name).write_all_at(header.as_bytes(), 0).unwrap();
        self
    }

    /// Returns the instance that was made from the info block, on its bus.
    fn made(&self) -> PathBuf {
        self.region().join(format!("dax{}.1", self.n))
    }

    fn node(&self, name: &str) -> File {
        let dev = self.tree.path().join("dev");
        fs::create_dir_all(&dev).unwrap();
        let node = File::create(dev.join(name)).unwrap();
        node.set_len(SIZE).unwrap();
        node
    }

    fn nd_driver(&self, driver: &str) {
        fs::create_dir_all(self.tree.path().join("bus/nd/drivers").join(driver)).unwrap();
    }
}

const START: u64 = 0x1_0000_0000;

/// Returns a device without any problem.
fn whole(tree: &Tree, n: u32, uuid: u8) -> Device<'_> {
    let device = Device::new(tree, n).with_region(SIZE, START).with_block(uuid);
    device.with_dax(Some("device_dax"), dax::LARGE_PAGE, header(uuid))
}

fn scan(tree: &Tree, segments: &[relay::Segment]) -> MemoryDevices {
    MemoryDevices::scan(&tree.kernel(), segments).unwrap()
}

fn missing(tree: &Tree, segment: &relay::Segment) -> Missing {
    scan(tree, &[*segment]).find(segment).err().expect("it is not there")
}

fn trouble(tree: &Tree, segment: &relay::Segment) -> Trouble {
    match missing(tree, segment) {
        Missing::NoDax(trouble) => trouble,
        other => panic!("{other}"),
    }
}

#[test]
fn a_segment_is_found_by_the_uuid_of_its_info_block() {
    let tree = Tree::new();
    let _one = whole(&tree, 1, 6);
    let _two = whole(&tree, 2, 5);
    let segments = [segment(5), segment(6)];
    let devices = scan(&tree, &segments);
    let device = devices.find(&segments[0]).map_err(|e| e.to_string()).unwrap();
    let node = tree.path().join("dev/dax2.0").display().to_string();
    assert_eq!((device.kind, &device.place, device.offset), (MappingKind::DAX, &node, 0));
    assert_eq!((device.page, device.protection), (dax::LARGE_PAGE, Protection::ReadWrite));
    assert!(device.is_there());
    let memory = Mapping::of_file(&device.memory, 0, 2 << 20, Protection::ReadWrite).unwrap();
    assert_eq!(memory.load_relaxed_u64(0), ginnel_layout::segment::MAGIC);
}

#[test]
fn a_reader_gets_a_file_that_can_only_be_mapped_for_reading() {
    let tree = Tree::new();
    let _one = whole(&tree, 1, 5);
    let segment = relay::Segment { access: Access::READ_ONLY, ..segment(5) };
    let devices = scan(&tree, &[segment]);
    let device = devices.find(&segment).map_err(|e| e.to_string()).unwrap();
    assert_eq!(device.protection, Protection::Read);
    assert!(Mapping::of_file(&device.memory, 0, 2 << 20, Protection::Read).is_ok());
    assert!(Mapping::of_file(&device.memory, 0, 2 << 20, Protection::ReadWrite).is_err());
}

#[test]
fn two_devices_of_one_uuid_are_both_refused() {
    let tree = Tree::new();
    let _one = whole(&tree, 1, 5);
    let _two = whole(&tree, 2, 5);
    assert!(matches!(missing(&tree, &segment(5)), Missing::Ambiguous(places) if places.len() == 2));
    // A segment that comes as two kinds of device is refused, too.
    let tree = Tree::new();
    let _one = whole(&tree, 1, 5);
    super::super::memory_device::tests::add(&tree, "0000:00:05.0", SIZE, header(5));
    assert!(matches!(missing(&tree, &segment(5)), Missing::Ambiguous(places) if places.len() == 2));
}

#[test]
fn a_bar_is_used_if_there_is_no_dax_device() {
    let tree = Tree::new();
    super::super::memory_device::tests::add(&tree, "0000:00:05.0", SIZE, header(5));
    let devices = scan(&tree, &[segment(5)]);
    let device = devices.find(&segment(5)).map_err(|e| e.to_string()).unwrap();
    assert_eq!(device.kind, MappingKind::BAR);
}

#[test]
fn a_device_that_is_too_short_is_refused() {
    let tree = Tree::new();
    let _one = whole(&tree, 1, 5);
    let longer = relay::Segment { size: 2 * SIZE, ..segment(5) };
    assert!(matches!(missing(&tree, &longer), Missing::Short { has: SIZE, .. }));
}

#[test]
fn a_vm_without_such_a_device_is_told_what_to_add() {
    let tree = Tree::new();
    let text = trouble(&tree, &segment(5)).to_string();
    assert!(text.contains("no virtio-pmem device") && text.contains("maxmem"), "{text}");
    // A device of another segment does not count.
    let _other = whole(&tree, 1, 6);
    assert_eq!(trouble(&tree, &segment(5)), Trouble::NoDevice);
}

#[test]
fn a_missing_driver_is_named_at_each_stage() {
    let module = |tree: &Tree| match trouble(tree, &segment(5)) {
        Trouble::NoDriver { module, why, place } => {
            assert!(why.contains(module) && why.contains("false"), "{why}");
            assert!(place.contains("0000:00:01.0") || place.contains("dax1.0"), "{place}");
            module
        }
        other => panic!("{other}"),
    };
    let tree = Tree::new();
    let _device = Device::new(&tree, 1);
    assert_eq!(module(&tree), "virtio_pmem");
    let text = trouble(&tree, &segment(5)).to_string();
    assert!(text.contains("modprobe virtio_pmem") && text.contains("/bin/false virtio_pmem"), "{text}");

    let tree = Tree::new();
    let _device = Device::new(&tree, 1).with_region(SIZE, START);
    assert_eq!(module(&tree), "dax_pmem");

    let tree = Tree::new();
    let _device = Device::new(&tree, 1).with_region(SIZE, START).with_block(5);
    assert_eq!(module(&tree), "dax_pmem");

    let tree = Tree::new();
    let device = Device::new(&tree, 1).with_region(SIZE, START).with_block(5);
    let _device = device.with_dax(None, dax::LARGE_PAGE, header(5));
    assert_eq!(module(&tree), "device_dax");
}

#[test]
fn modules_are_loaded_in_order_if_there_is_a_use_for_them() {
    let tree = Tree::new();
    let log = tree.path().join("loaded");
    let script = tree.path().join("modprobe");
    fs::write(&script, format!("#!/bin/sh\necho $1 >> {}\n", log.display())).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let kernel = Kernel { modprobe: script, ..tree.kernel() };
    assert_eq!(kernel.bring_up(&[segment(5)]).unwrap(), Failures::default());
    assert!(!log.exists(), "there is no device that needs them");
    let _device = Device::new(&tree, 1).with_region(SIZE, START);
    assert_eq!(kernel.bring_up(&[segment(5)]).unwrap(), Failures::default());
    assert_eq!(fs::read_to_string(&log).unwrap(), "dax_pmem\ndevice_dax\n");
}

#[test]
fn a_damaged_info_block_is_distinguished_from_a_repaired_one() {
    let tree = Tree::new();
    let device = Device::new(&tree, 1).with_region(SIZE, START).with_block_device(InfoBlock::new_zeroed());
    device.nd_driver("dax_pmem");
    let text = trouble(&tree, &segment(5)).to_string();
    assert!(text.contains("pmem1") && text.contains("0000:00:01.0") && text.contains("damaged"), "{text}");
    let unbind = tree.path().join("bus/nd/drivers/nd_pmem/unbind");
    assert!(!unbind.exists(), "it would become the same again");
    // A device of another size is an ordinary disk.
    let other = relay::Segment { size: 2 * SIZE, ..segment(5) };
    assert_eq!(trouble(&tree, &other), Trouble::NoDevice);

    let node = File::options().write(true).open(tree.path().join("dev/pmem1")).unwrap();
    for (block, repaired) in [(block(6), false), (block(5), true)] {
        node.write_all_at(block.as_bytes(), dax::AT).unwrap();
        let _ = scan(&tree, &[segment(5)]);
        assert_eq!(unbind.exists(), repaired);
    }
    let asked = |file| fs::read_to_string(tree.path().join("bus/nd/drivers/nd_pmem").join(file)).unwrap();
    assert_eq!((asked("unbind"), asked("bind")), ("namespace1.0".into(), "namespace1.0".into()));
    drop(device);
}

#[test]
fn the_error_says_what_became_of_the_device() {
    let with_driver = |driver| {
        let tree = Tree::new();
        let device = Device::new(&tree, 1).with_region(SIZE, START).with_block(5);
        drop(device.with_dax(Some(driver), dax::LARGE_PAGE, header(5)));
        trouble(&tree, &segment(5)).to_string()
    };
    assert!(with_driver("kmem").contains("system RAM"), "{}", with_driver("kmem"));
    assert!(with_driver("fsdev_dax").contains("bound to the driver fsdev_dax"));

    let tree = Tree::new();
    let device = Device::new(&tree, 1).with_region(SIZE, START + 0x10_0000);
    device.nd_driver("dax_pmem");
    let text = trouble(&tree, &segment(5)).to_string();
    assert!(text.contains("0x100100000") && text.contains("multiple of 2 MiB"), "{text}");

    let tree = Tree::new();
    let device = Device::new(&tree, 1).with_region(SIZE, START);
    device.nd_driver("dax_pmem");
    let text = trouble(&tree, &segment(5)).to_string();
    assert!(text.contains("has not accepted the DAX info block") && text.contains("resource"), "{text}");
}

#[test]
fn a_device_with_the_header_of_another_segment_is_refused() {
    for other in [header(6), SegmentHeader::new_zeroed()] {
        let tree = Tree::new();
        let device = Device::new(&tree, 1).with_region(SIZE, START).with_block(5);
        let _device = device.with_dax(Some("device_dax"), dax::LARGE_PAGE, other);
        let text = trouble(&tree, &segment(5)).to_string();
        assert!(text.contains("no header of a segment"), "{text}");
    }
    let tree = Tree::new();
    let _device = whole(&tree, 1, 5);
    fs::remove_file(tree.path().join("dev/dax1.0")).unwrap();
    let text = trouble(&tree, &segment(5)).to_string();
    assert!(text.contains("cannot open") && text.contains("dev/dax1.0"), "{text}");
}

#[test]
fn invalid_entries_in_sysfs_do_not_hide_others() {
    let tree = Tree::new();
    let broken = whole(&tree, 1, 6);
    fs::write(broken.made().join("dax1.0/size"), "many\n").unwrap();
    let _whole = whole(&tree, 2, 5);
    assert!(scan(&tree, &[segment(5)]).find(&segment(5)).is_ok());
    fs::write(broken.made().join("uuid"), "nonsense\n").unwrap();
    fs::remove_file(broken.region().join("size")).unwrap();
    assert!(scan(&tree, &[segment(5), segment(6)]).find(&segment(5)).is_ok());
}

fn read(path: PathBuf) -> String {
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn a_device_is_made_with_the_settings_of_the_host() {
    let tree = Tree::new();
    let device = Device::new(&tree, 1).with_region(SIZE, START).with_willing_seed(RESERVED, SIZE - RESERVED);
    let small = relay::Segment { page: dax::SMALL_PAGE, ..segment(5) };
    assert_eq!(tree.kernel().bring_up(&[small]).unwrap().claims, BTreeMap::new());
    let seed = |file| read(device.seed().join(file));
    assert_eq!((seed("mode"), seed("align"), seed("uuid")), ("ram\n".into(), "4096\n".into(), uuid_text(5)));
    assert_eq!(seed("namespace"), "namespace1.0\n");
    assert_eq!(read(tree.path().join(claim::DRIVER).join("bind")), "dax1.0");
    assert!(!tree.path().join(claim::DRIVER).join("unbind").exists());
    assert_eq!(read(device.region().join("read_only")), "0\n", "as before");
    assert!(!tree.path().join(SELF_PROBING).exists(), "nothing may probe by itself");
}

#[test]
fn a_region_of_another_size_is_not_touched() {
    let tree = Tree::new();
    let device =
        Device::new(&tree, 1).with_region(2 * SIZE, START).with_willing_seed(RESERVED, 2 * SIZE - RESERVED);
    assert_eq!(tree.kernel().bring_up(&[segment(5)]).unwrap().claims, BTreeMap::new());
    assert_eq!(read(device.seed().join("mode")), "none\n");
    assert!(!tree.path().join(claim::DRIVER).join("bind").exists());
}

#[test]
fn a_device_with_misplaced_data_is_released() {
    for (front, len) in
        [(2 * RESERVED, SIZE - 2 * RESERVED), (RESERVED, SIZE - 2 * RESERVED), (0x2000, SIZE - 0x2000)]
    {
        let tree = Tree::new();
        let device = Device::new(&tree, 1).with_region(SIZE, START).with_willing_seed(front, len);
        let text = trouble(&tree, &segment(5)).to_string();
        assert!(text.contains(&format!("{len} bytes of data begin at {front}")), "{text}");
        assert_eq!(read(tree.path().join(claim::DRIVER).join("unbind")), "dax1.0");
        assert_eq!(read(device.seed().join("namespace")), "\n");
        assert_eq!(read(device.region().join("read_only")), "0\n");
    }
}

#[test]
fn an_interrupted_attempt_is_cleaned_up() {
    let tree = Tree::new();
    let device = Device::new(&tree, 1).with_region(SIZE, START).with_block(5);
    let device = device.with_willing_seed(RESERVED, SIZE - RESERVED);
    tree.kernel().bring_up(&[segment(5)]).unwrap();
    assert_eq!(read(device.made().join("namespace")), "\n");
    assert_eq!(read(device.seed().join("namespace")), "namespace1.0\n");
}

#[test]
fn a_device_that_the_kernel_made_by_itself_is_checked() {
    let tree = Tree::new();
    let device = whole(&tree, 1, 5);
    assert!(!tree.kernel().probes_by_itself());
    device.nd_driver("nd_pmem");
    assert!(tree.kernel().probes_by_itself());
    assert!(scan(&tree, &[segment(5)]).find(&segment(5)).is_ok());

    fs::write(device.made().join("mode"), "pmem\n").unwrap();
    let text = trouble(&tree, &segment(5)).to_string();
    assert!(text.contains("page structures") && text.contains("nd_pmem"), "{text}");

    fs::write(device.made().join("mode"), "ram\n").unwrap();
    fs::write(device.made().join("resource"), format!("{:#x}\n", START + 2 * RESERVED)).unwrap();
    let text = trouble(&tree, &segment(5)).to_string();
    assert!(text.contains("begins 4194304 bytes behind"), "{text}");
}

#[test]
fn the_error_names_a_segment_that_is_too_small() {
    let tree = Tree::new();
    let small = relay::Segment { size: 8 << 20, ..segment(5) };
    let device = Device::new(&tree, 1).with_region(8 << 20, START);
    device.nd_driver("dax_pmem");
    let text = trouble(&tree, &small).to_string();
    assert!(text.contains("less than 16 MiB"), "{text}");
}
