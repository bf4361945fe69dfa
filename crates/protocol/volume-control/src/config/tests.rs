use super::*;

fn check(text: &str) -> Result<Config, Problem> {
    Spec::parse(text, Path::new("v.toml"))?.check("v", &VolumePaths::default(), "v.toml")
}

#[test]
fn a_file_is_all_that_it_takes() {
    let config = check("[[disk]]\npath = \"/images/v.img\"").unwrap();
    assert_eq!(config.socket, Path::new("/run/ginnel/volumes/v.sock"));
    assert_eq!(config.control, Path::new("/run/ginnel/volumes/v.ctl"));
    assert_eq!((config.queues, config.threads), (1, 1));
    assert_eq!((config.front_ends.mode, config.operators.mode), (Mode(0o660), Mode(0o600)));
    assert_eq!(config.disks[0].serial, "v");
    assert!(config.disks[0].write_cache && config.disks[0].discard);
    assert_eq!(config.disks[0].lock, Lock::Volume);
}

#[test]
fn every_key_is_read() {
    let config = check(
        r#"
        device = "scsi"
        vm = "a"
        socket = "/tmp/s"
        socket-mode = "0600"
        socket-user = "qemu"
        socket-group = 107
        control-mode = "0620"
        control-user = "ops"
        control-group = "adm"
        queues = 4
        queue-size = 256
        threads = 2
        cpus = [2, 3]
        wait = "poll"
        poll-for = "20us"
        packed = false
        segments = 64
        sandbox = "require"
        user = "ginnel-volume"
        log = "debug"
        log-format = "json"
        [limits]
        iops = 5000
        bandwidth = "100M"
        burst = "50ms"
        [[disk]]
        path = "/images/a"
        sector = 4096
        serial = "X1"
        lock = "vm"
        direct = "on"
        on-error = "hold"
        [[disk]]
        path = "/images/b"
        read-only = true
        iopoll = true
        [[disk]]
        backend = "ram"
        size = "64M"
        lock = false
        "#,
    )
    .unwrap();
    assert_eq!(config.control, Path::new("/tmp/s.ctl"));
    assert_eq!((config.device, config.wait, config.packed), (Device::Scsi, Wait::Poll, false));
    assert_eq!(config.front_ends.group, Some(Account::Number(107)));
    assert_eq!(
        (config.operators.mode, config.operators.group),
        (Mode(0o620), Some(Account::Name("adm".into())))
    );
    assert_eq!(config.limits.bandwidth, Bytes(100 << 20));
    let serials: Vec<_> = config.disks.iter().map(|d| (d.lun, d.serial.as_str())).collect();
    assert_eq!(serials, [(0, "X1"), (1, "v.1"), (2, "v.2")]);
    assert!(!config.disks[1].discard, "nothing to discard on a read-only disk");
    assert_eq!((config.disks[0].lock, config.disks[2].lock), (Lock::Vm, Lock::Off));
    assert_eq!((config.disks[0].on_error, config.disks[1].on_error), (OnError::Hold, OnError::Report));
}

#[test]
fn only_the_owner_is_an_operator_by_default() {
    let config = |text: &str| check(&format!("{text}\n[[disk]]\npath = \"/a\"")).unwrap();
    let qemu = config("socket-mode = \"0666\"\nsocket-user = \"qemu\"\nsocket-group = \"kvm\"");
    assert_eq!(qemu.operators, Permissions { mode: Mode(0o600), user: None, group: None });
    assert_eq!(config("control-group = \"adm\"").operators.mode, Mode(0o660));
    assert_eq!(config("control-group = \"adm\"\ncontrol-mode = \"0600\"").operators.mode, Mode(0o600));
}

#[test]
fn mistakes_are_named_with_place_and_fix() {
    for (text, part) in [
        ("", "there is none"),
        ("qeues = 2", "v.toml:1: unknown field `qeues`"),
        ("\n\ndevice = \"ide\"", "v.toml:3: unknown variant `ide`"),
        ("[[disk]]\npath = 5", "v.toml:2"),
        ("[[disk]]\npath = \"/a\"\non-error = \"stop\"", "unknown variant `stop`"),
        ("[[disk]]", "disk 0: path"),
        ("[[disk]]\nbackend = \"ram\"", "disk 0: size"),
        ("[[disk]]\nbackend = \"null\"\npath = \"/x\"", "has no image"),
        ("[[disk]]\nbackend = \"uring-cmd\"", "such as /dev/ng0n1"),
        ("[[disk]]\nbackend = \"uring-cmd\"\npath = \"/dev/ng0n1\"\ndirect = \"off\"", "disk 0: direct"),
        ("[[disk]]\nbackend = \"uring-cmd\"\npath = \"/dev/ng0n1\"\nlock = \"vm\"", "disk 0: lock"),
        ("[[disk]]\nbackend = \"vfio\"", "disk 0: pci"),
        ("[[disk]]\nbackend = \"vfio\"\npath = \"/dev/nvme0\"", "by its PCI address"),
        ("[[disk]]\nbackend = \"vfio\"\npci = \"0:1:0.0\"\noffset = 1000", "disk 0: offset"),
        ("[[disk]]\nbackend = \"vfio\"\npci = \"0:1:0.0\"\nlock = false", "disk 0: lock"),
        ("[[disk]]\nbackend = \"vfio\"\npci = \"0:1:0.0\"\ndirect = \"off\"", "disk 0: direct"),
        ("[[disk]]\nbackend = \"vfio\"\npci = \"0:1:0.0\"\niopoll = true", "disk 0: iopoll"),
        ("[[disk]]\npath = \"/a\"\npci = \"0:1:0.0\"", "disk 0: pci"),
        ("[[disk]]\npath = \"/a\"\noffset = \"1M\"", "disk 0: offset"),
        ("[[disk]]\npath = \"/a.qcow2\"", "qemu-img convert"),
        ("[[disk]]\npath = \"/a\"\nsector = 1024", "512 or 4096"),
        ("[[disk]]\npath = \"/a\"\nsize = 1000", "not a multiple"),
        ("[[disk]]\npath = \"/a\"\nserial = \"123456789012345678901\"", "longer than 20"),
        ("[[disk]]\npath = \"/a\"\n[[disk]]\npath = \"/b\"", "device = \"scsi\""),
        ("device = \"scsi\"\n[[disk]]\npath = \"/a\"\n[[disk]]\npath = \"/a\"", "disks 0 and 1"),
        ("device = \"nvme\"\n[[disk]]\npath = \"/a\"\n[[disk]]\npath = \"/b\"", "\"nvme\" has one disk"),
        ("queues = 0\n[[disk]]\npath = \"/a\"", "queues: 0 is not in 1 to 256"),
        ("queue-size = 100\n[[disk]]\npath = \"/a\"", "not a power of two"),
        ("threads = 2\n[[disk]]\npath = \"/a\"", "2 threads for 1 queues"),
        ("queues = 2\ncpus = [1]\nthreads = 2\n[[disk]]\npath = \"/a\"", "1 CPUs for 2 threads"),
        ("poll-for = \"5\"\n[[disk]]\npath = \"/a\"", "v.toml:1"),
        ("[limits]\nburst = \"2000s\"\n[[disk]]\npath = \"/a\"", "longer than a minute"),
        ("[[disk]]\npath = \"/a\"\ndirect = \"off\"\niopoll = true", "iopoll"),
        ("[[disk]]\npath = \"/a\"\nlock = \"yes\"", "v.toml:3: \"yes\" is not true, false or vm"),
        ("[[disk]]\npath = \"/a\"\nlock = 1", "expected true, false or \"vm\""),
    ] {
        let problem = check(text).unwrap_err().to_string();
        assert!(problem.contains(part), "{text:?}: {problem}");
        assert!(!problem.contains('\n'), "{problem}");
    }
    let long = format!("socket = \"/{}\"\n[[disk]]\npath = \"/a\"", "x".repeat(107));
    assert!(check(&long).unwrap_err().to_string().contains("takes 107; choose a shorter path"));
}

/// Checks a volume with one disk and these keys in front of it.
fn nvme(keys: &str) -> Result<Config, Problem> {
    check(&format!("device = \"nvme\"\n{keys}\n[[disk]]\npath = \"/a\""))
}

#[test]
fn an_nvme_volume_has_its_own_defaults() {
    let config = nvme("").unwrap();
    assert_eq!(config.attach_socket(), Path::new("/run/ginnel/volumes/v.sock.engine"));
    assert_eq!((config.queues, config.queue_size, config.segments, config.mdts()), (2, 1024, 129, 7));
    assert!(!config.packed && !config.are_doorbells_mapped(), "its threads may sleep");
    assert_eq!(config.disks[0].serial, "v");
    let polled =
        nvme("wait = \"poll\"\nqueues = 64\nqueue-size = 2\npacked = false\npin-memory = true").unwrap();
    assert!(polled.are_doorbells_mapped() && polled.pin_memory);
    let blk = check("wait = \"poll\"\n[[disk]]\npath = \"/a\"").unwrap();
    assert!(!blk.are_doorbells_mapped());
}

#[test]
fn a_transfer_of_the_largest_size_fits_into_the_segments() {
    for (segments, mdts) in [(3, 1), (4, 1), (5, 2), (128, 6), (129, 7), (1024, 9)] {
        let config = nvme(&format!("segments = {segments}")).unwrap();
        assert_eq!(config.mdts(), mdts, "{segments}");
        assert!((1 << mdts) < segments);
    }
}

#[test]
fn what_makes_no_sense_for_nvme_is_named() {
    for (keys, part) in [
        ("queues = 65", "queues: 65 is not in 1 to 64"),
        ("queues = 0", "queues: 0 is not in 1 to 64"),
        ("queue-size = 1", "queue-size: 1 is not in 2 to 1024"),
        ("queue-size = 2048", "queue-size: 2048 is not in 2 to 1024"),
        ("queue-size = 48", "not a power of two"),
        ("segments = 2", "segments: 2 is not in 3 to 1024"),
        ("packed = true", "packed: an nvme device has no virtqueues; remove it"),
        ("socket = \"/s\"\ncontrol = \"/s.engine\"", "control: the engine attaches at this path"),
    ] {
        let problem = nvme(keys).unwrap_err().to_string();
        assert!(problem.contains(part), "{keys:?}: {problem}");
    }
    let migrates =
        check("device = \"nvme\"\n[[disk]]\npath = \"/a\"\nlock = \"vm\"").unwrap_err().to_string();
    assert!(migrates.contains("disk 0: lock: \"vm\" is for a VM that migrates live"), "{migrates}");
    // The path of the engine's socket is the longest of all.
    let path = |bytes: usize| nvme(&format!("socket = \"/{}\"\ncontrol = \"/c\"", "x".repeat(bytes - 1)));
    assert!(path(100).is_ok());
    let long = path(101).unwrap_err().to_string();
    assert!(long.contains(".engine has 108 bytes") && long.contains("shorter path for QEMU's"), "{long}");
}

#[test]
fn volume_names_are_valid_file_names() {
    for bad in ["", "../a", "-a", ".a", "a/b", "a b", &"x".repeat(65)] {
        assert!(Spec::ram(4096).check(bad, &VolumePaths::default(), "flags").is_err(), "{bad:?}");
    }
    assert!(Spec::ram(4096).check("web.data_1-a", &VolumePaths::default(), "flags").is_ok());
}

#[test]
fn a_configuration_is_written_as_it_is_read() {
    let spec = Spec::ram(1 << 20);
    assert_eq!(Spec::parse(&toml::to_string(&spec).unwrap(), Path::new("x")).unwrap(), spec);
}

/// The sections of the manual, each with a text in which only the key `?` is wrong.
const TABLES: [(&str, &str); 3] =
    [("Volume", "\"?\" = 1"), ("[limits]", "[limits]\n\"?\" = 1"), ("[[disk]]", "[[disk]]\n\"?\" = 1")];

#[test]
fn the_manual_and_the_example_have_every_key_and_no_other() {
    use std::collections::BTreeSet;
    let manual = include_str!("../../../../../docs/man/ginnel-volume.8").replace("\\-", "-");
    let example: toml::Table = example().parse().unwrap();
    assert!(example.clone().try_into::<Spec>().is_ok());
    for (section, text) in TABLES {
        // serde's error for an unknown key names all keys.
        let error = toml::from_str::<Spec>(text).unwrap_err().message().to_owned();
        let (_, keys) = error.split_once("expected ").unwrap();
        let keys: BTreeSet<&str> = keys.split('`').skip(1).step_by(2).collect();
        let (_, entries) = manual.split_once(&format!(".SS {section}\n")).expect(section);
        let entries = entries.split("\n.S").next().unwrap().split(".TP\n").skip(1);
        let described: BTreeSet<&str> = entries.map(|e| e.split_whitespace().nth(1).unwrap()).collect();
        assert_eq!(described, keys, "{section}");
        let shown = match section.trim_matches(['[', ']']) {
            "Volume" => &example,
            table => match &example[table] {
                toml::Value::Array(tables) => tables[0].as_table().unwrap(),
                table => table.as_table().unwrap(),
            },
        };
        assert_eq!(shown.keys().map(String::as_str).collect::<BTreeSet<_>>(), keys, "{section}");
    }
}

/// Returns the example with the keys that are in comments.
fn example() -> String {
    let key =
        |line: &'static str| line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line);
    include_str!("../../../../../packaging/volume.toml")
        .lines()
        .map(|line| key(line).to_owned() + "\n")
        .collect()
}

#[test]
fn disks_on_one_device_lie_apart() {
    let check = |disks: &[&str]| {
        let disk = |keys: &&str| format!("[[disk]]\nbackend = \"vfio\"\npci = \"0000:01:00.0\"\n{keys}\n");
        let text = format!("device = \"scsi\"\n{}", disks.iter().map(disk).collect::<String>());
        let spec = Spec::parse(&text, Path::new("v.toml")).unwrap();
        spec.check("v", &VolumePaths::default(), "v.toml").map_err(|problem| problem.to_string())
    };
    for apart in [
        &["namespace = 1", "namespace = 2"][..],
        &["size = \"1G\"", "offset = \"1G\""],
        &["offset = \"2G\"", "size = \"1G\"", "offset = \"1G\"\nsize = \"1G\""],
    ] {
        check(apart).unwrap();
    }
    // None grows into another.
    let disks = check(&["offset = \"2G\"", "size = \"1G\"", "offset = \"1G\"\nsize = \"1G\""]).unwrap().disks;
    let ends: Vec<_> = disks.iter().map(|disk| disk.nvme.as_ref().unwrap().end).collect();
    assert_eq!(ends, [None, Some(1 << 30), Some(2 << 30)]);
    for together in [
        &["", ""][..],
        // The only namespace may be the first.
        &["", "namespace = 1"],
        &["size = \"1G\"", "offset = \"512M\"\nsize = \"1G\""],
        &["offset = \"1G\"", "offset = \"2G\"\nsize = \"1G\""],
        &["namespace = 2", "namespace = 1", "namespace = 2\noffset = \"1G\""],
    ] {
        let problem = check(together).unwrap_err();
        assert!(problem.contains("blocks of 0000:01:00.0 in common"), "{problem}");
    }
}
