//! Segments, VMs, status, and output for other programs.

use kit::process::signal;
use kit::world::World;
use rustix::process::Signal;
use std::process::Stdio;

#[test]
fn segments_are_created_and_deleted() {
    let world = World::new();
    let said = world.good("segment create db --size 17M --members host,vm-a --mode 0600 --allow-users 0");
    assert!(
        said.out.contains("segment db: 18 MiB, rounded up") && said.out.contains("/shm/ginnel/db"),
        "{said:?}"
    );
    let said = world.good("segment create old --size 5M --members host --readers vm-a --memory bar");
    assert!(said.out.contains("segment old: 8 MiB, rounded up"), "{said:?}");
    let list = world.good("segment list").out;
    assert!(
        list.lines().any(|l| l.starts_with("old ") && l.contains(" bar ") && l.contains(" vm-a ")),
        "{list}"
    );
    let args = world.good("qemu-args vm-a").out;
    let old = args.lines().find(|l| l.contains("id=ginnel-old,")).unwrap();
    assert!(
        old.ends_with(",readonly=on") && args.contains("-device ivshmem-plain,memdev=ginnel-old"),
        "{args}"
    );
    assert!(list.contains("web") && list.contains("configuration"), "{list}");
    assert!(
        list.lines().any(|l| l.starts_with("db ") && l.contains("host,vm-a") && l.contains("command")),
        "{list}"
    );
    let json = world.good("segment list --json").json();
    assert_eq!(
        json.as_array().unwrap().iter().filter(|s| s["name"] == "db" && s["size"] == 18 << 20).count(),
        1
    );

    let said = world.expect(1, "segment create db --size 4M --members host");
    assert!(
        said.err.starts_with("ginnel: segment not created: ") && said.err.contains("is there already"),
        "{said:?}"
    );
    assert_eq!(said.err.lines().count(), 1, "{said:?}");
    world.expect(1, "segment create x --size 4M --members nobody");
    world.expect(1, "segment remove web");
    world.expect(2, "segment create x --size huge --members host");
    world.good("segment remove db");
    let said = world.expect(1, "segment remove db");
    assert!(said.err.contains("no segment db"), "{said:?}");
}

#[test]
fn a_vm_is_declared_and_its_devices_are_printed() {
    let world = World::new();
    let said = world.good("vm add vm-b --home 16M");
    assert!(said.out.starts_with("VM vm-b: member 2;"), "{said:?}");
    let args = world.good("qemu-args vm-b --iommu --memory 2G");
    let at = world.path().display();
    let expected = [
        "-M q35,kernel-irqchip=split".to_owned(),
        "-device intel-iommu,intremap=on".into(),
        "-m 2G,maxmem=3088M".into(),
        format!("-chardev socket,id=ginnel-control,path={at}/run/vm-b.sock"),
        "-device pcie-root-port,id=ginnel-port-1,chassis=200,slot=1".into(),
        "-device ivshmem-doorbell,chardev=ginnel-control,vectors=32,bus=ginnel-port-1".into(),
        format!(
            "-object memory-backend-file,id=ginnel-home-vm-b,share=on,mem-path={at}/shm/ginnel/home-vm-b,size=16777216,dump=off"
        ),
        "-device pcie-root-port,id=ginnel-port-2,chassis=200,slot=2".into(),
        "-device virtio-pmem-pci,memdev=ginnel-home-vm-b,bus=ginnel-port-2".into(),
    ];
    assert_eq!(args.out.lines().collect::<Vec<_>>(), expected);
    assert!(args.err.contains("intel_iommu=on") && args.err.contains("maxcpus"), "{args:?}");
    assert!(args.err.contains("2 PCIe root ports") && args.err.contains("--machine pc"), "{args:?}");
    assert!(!world.good("qemu-args vm-b --machine pc").out.contains("root-port"));
    let refused = world.expect(1, "qemu-args vm-b --machine pc --iommu");
    assert!(refused.err.contains("only a q35 machine has"), "{refused:?}");
    assert!(world.good("qemu-args vm-b -q").err.is_empty());
    let hint = world.good("qemu-args vm-b").err;
    assert!(hint.contains("at least SIZE + 16M"), "{hint}");
    world.expect(2, "qemu-args vm-b --memory 2048");
    let check = |line: &str| {
        let output = world.command("qemu-args vm-b --check").arg(line).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(check(&args.out), (Some(0), String::new()));
    let (status, err) = check(&args.out.replace("maxmem=3088M", "maxmem=2050M"));
    assert_eq!(status, Some(1));
    assert!(err.contains("maxmem of 2050M is too small") && err.lines().count() == 1, "{err}");
    let xml = world.good("libvirt-xml vm-b").out;
    assert!(xml.contains(&format!("<server path='{at}/run/vm-b.sock'/>")), "{xml}");
    std::fs::remove_file(world.path().join("shm/ginnel/home-vm-b")).unwrap();
    let said = world.expect(1, "qemu-args vm-b");
    assert!(said.err.contains("segment home-vm-b") && said.out.is_empty(), "{said:?}");
    let said = world.expect(1, "qemu-args vm-x");
    assert!(said.err.contains("\"vm-x\"") && said.err.contains("vm-a, vm-b"), "{said:?}");
    world.good("vm remove vm-b");
    world.expect(1, "qemu-args vm-b");
}

#[test]
fn status_shows_members_endpoints_and_listeners() {
    let world = World::new();
    let server = world.server("ping --serve web/ping");
    let page = world.good("status").out;
    for part in ["this is member host", "vm-a  not running", "ginnel-ping", "web/ping", "message"] {
        assert!(page.contains(part), "{part:?} is missing in\n{page}");
    }
    let json = world.good("status --json").json();
    assert_eq!(json["endpoints"][0]["pid"], server.child.id());
    assert_eq!(json["daemon"]["role"], "host");
}

#[test]
fn status_shows_no_connection_if_none_has_changed_over() {
    let world = World::new();
    let said = world.good("sockets");
    assert!(said.out.is_empty() && said.err.contains("no TCP connection"), "{said:?}");
    assert_eq!(world.good("sockets --json web").json(), serde_json::json!([]));
    assert!(!world.good("status").out.contains("TCP connections"));
}

#[test]
fn without_a_daemon_the_error_names_the_fix() {
    let world = World::new();
    for line in [
        "status",
        "sockets",
        "segment list",
        "ping web/x",
        "perf web/x",
        "cp a b:",
        "cp --serve",
        "qemu-args a",
    ] {
        let output = world.command(line).env("GINNEL_SOCKET", world.path().join("nothing")).output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{line}: {err}");
        assert!(
            err.contains("no ginnel daemon at ") && err.contains("ginneld host") && err.lines().count() == 1,
            "{err}"
        );
    }
}

#[test]
fn completions_and_manual_pages_are_generated() {
    let world = World::new();
    for shell in ["bash", "zsh", "fish"] {
        assert!(world.good(&format!("completions {shell}")).out.contains("qemu-args"), "{shell}");
    }
    world.good("man pages/man1");
    for page in [
        "ginnel.1",
        "ginnel-cp.1",
        "ginnel-perf.1",
        "ginnel-run.1",
        "ginnel-segment-create.1",
        "ginnel-sockets.1",
    ] {
        let text = std::fs::read_to_string(world.files().join("pages/man1").join(page)).unwrap();
        assert!(text.contains(".SH"), "{page}");
    }
}

#[test]
fn a_closed_output_pipe_is_not_a_failure() {
    let world = World::new();
    for line in ["status", "segment list", "completions bash", "--help"] {
        let mut child = world.command(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        signal(&child, Signal::STOP);
        drop(child.stdout.take());
        signal(&child, Signal::CONT);
        let output = child.wait_with_output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && err.is_empty(), "{line}: {} {err}", output.status);
    }
}
