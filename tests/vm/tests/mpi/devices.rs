//! Jobs whose ranks cannot all reach each other through segments.

use crate::{PATIENCE, endpoints, programs, sent, source};
use anyhow::{Result, ensure};
use kit::skip::missing;
use vmtest::TestBed;
use vmtest::installation::Plan;
use vmtest::mpi::{Cluster, FILES};

/// The modules with which a VM gets an RDMA device of its kernel over its network.
const MODULES: [&str; 4] = ["virtio_net", "crc32_generic", "ib_uverbs", "rdma_rxe"];

/// There are three VMs and no segment that all of them have: `b` shares one with each of the others. The others reach each
/// other by RDMA devices of their kernels, as they would reach another host by real devices.
#[test]
fn a_job_takes_segments_to_neighbours_and_real_devices_to_others() -> Result<()> {
    let missing = missing(&[&programs()[..], &["rdma"]].concat());
    kit::require!(missing.is_none(), "{missing:?} is not installed: `scripts/setup test` installs it");
    let bed = TestBed::new("mpi-devices")?;
    let plan = Plan::new(&bed).vm("a").vm("b").vm("c");
    let plan = plan.segment("ab", 256, &["host", "a", "b"]).with_verbs();
    let ginnel = plan.segment("bc", 256, &["host", "b", "c"]).with_verbs().start()?;
    let cluster = Cluster::new(&bed, ginnel, &["a", "b", "c"], |name, vm| match name {
        "b" => vm,
        _ => MODULES.iter().fold(vm, |vm, module| vm.module(module)),
    })?;
    for name in ["a", "c"] {
        cluster.vm(name)?.run("chroot /host rdma link add rxe0 type rxe netdev eth0")?.ok()?;
    }
    let program = cluster.compile("mpicc.mpich", &source("checks"))?;
    let packets = |vm: &str| -> Result<u64> {
        let file = "/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts";
        Ok(cluster.vm(vm)?.run(&format!("cat {file}"))?.ok()?.stdout.trim().parse()?)
    };
    let before = [packets("a")?, packets("c")?];
    // By default, UCX 1.13 chooses rxe's IPv4 address, and then drops all datagrams that arrive at it.
    let mpirun = "env UCX_IB_GID_INDEX=0 mpirun.mpich -hosts a,b,c -n 3";
    // VM b has no device other than the segments, so everything that reached c from b was sent over bc. VM a, where the proof
    // is made, sees only ab.
    let lines = format!(
        "eval \"$(ginnel mpi-env ab --all-devices)\"\nexec {mpirun} {program} 'ginnel verbs --json >{FILES}/proof'"
    );
    let said = cluster.run(&lines, PATIENCE)?;
    ensure!(said.contains("all data are right: 3 ranks"), "{said}");
    let proof = std::fs::read_to_string(cluster.files().join("proof"))?;
    let bytes: Vec<_> = endpoints(&proof)?.iter().map(sent).collect();
    ensure!(bytes.len() == 2 && bytes.iter().all(|bytes| *bytes > 1_000_000), "{proof}");
    // A packet of rxe has at most 1024 bytes here; the ring of the checks has sent megabytes from c to a.
    let sent = [packets("a")? - before[0], packets("c")? - before[1]];
    println!("over segment ab: {bytes:?} bytes; by the kernels' devices: {sent:?} packets");
    ensure!(sent.iter().all(|packets| *packets > 1000), "{sent:?} packets by the kernels' devices: {said}");
    Ok(())
}
