//! A guest boots while another member of its segment writes the DAX info block: what the guest's kernel accepts.

use anyhow::{Context, Result, ensure};
use ginnel_layout::dax::{AT, InfoBlock};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use vmtest::installation::{Installation, Plan, program};
use vmtest::{TestBed, Vm, VmBuilder, wait_until};
use zerocopy::{FromZeros, IntoBytes};

const PROMPT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// Changes an info block into a wrong one.
type Attack = fn(&mut InfoBlock);

/// A member that writes one info block again and again as fast as it can, until it is dropped.
struct Attacker {
    file: Arc<File>,
    /// The block that the host's daemon has written.
    right: InfoBlock,
    wrong: Arc<Mutex<InfoBlock>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Attacker {
    fn start(ginnel: &Installation<'_>, segment: &str, wrong: Attack) -> Result<Self> {
        let file = Arc::new(File::options().read(true).write(true).open(ginnel.segment_file(segment))?);
        let mut right = InfoBlock::new_zeroed();
        file.read_exact_at(right.as_mut_bytes(), AT)?;
        let (block, stop) = (Arc::new(Mutex::new(right)), Arc::new(AtomicBool::new(false)));
        let mut attacker = Self { file, right, wrong: block, stop, thread: None };
        attacker.write(wrong)?;
        let (file, block, stop) = (attacker.file.clone(), attacker.wrong.clone(), attacker.stop.clone());
        attacker.thread = Some(std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let block = *block.lock().unwrap_or_else(PoisonError::into_inner);
                let _ = file.write_all_at(block.as_bytes(), AT);
            }
        }));
        Ok(attacker)
    }

    /// Makes the attacker write this block from now on, with the right checksum. Returns when the block is in the segment.
    fn write(&self, change: Attack) -> Result<()> {
        let mut block = self.right;
        change(&mut block);
        block.checksum = block.sum();
        *self.wrong.lock().unwrap_or_else(PoisonError::into_inner) = block;
        self.file.write_all_at(block.as_bytes(), AT)?;
        Ok(())
    }

    /// Returns the bytes of the segment that the attacker does not write.
    fn rest(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.file.metadata()?.len() as usize];
        self.file.read_exact_at(&mut bytes, 0)?;
        bytes.drain(AT as usize..AT as usize + size_of::<InfoBlock>());
        Ok(bytes)
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sets mode 2, and makes room for the page structures in front of the data.
fn keep_page_structures_here(block: &mut InfoBlock) {
    (block.mode, block.dataoff) = (2, 8 * MIB);
}

/// Describes a VM whose udev has loaded the drivers (except `nd_pmem`) before the guest's daemon runs.
fn vm(ginnel: &Installation<'_>, name: &str) -> Result<VmBuilder> {
    let vm = ginnel.vm(name)?.memory_mib(512).program(program("load")?);
    Ok(vm.module("virtio_pmem").module("dax_pmem").module("device_dax"))
}

fn plan(bed: &TestBed, mib: u64) -> Plan<'_> {
    let members = ["host", "a"];
    Plan::new(bed).vm("a").segment("shared", mib, &members).segment("untouched", 32, &members)
}

/// Returns where the kernel keeps the page structures of each of its DAX devices.
fn modes(vm: &Vm) -> Result<Vec<String>> {
    let list = "for d in /sys/bus/dax/devices/dax*; do [ ! -e $d ] || cat $d/../mode; done";
    Ok(vm.run(list)?.ok()?.stdout.lines().map(str::to_owned).collect())
}

/// Tries to attach a program in the VM to a segment. Returns the error of the guest's daemon if that fails.
fn attach(vm: &Vm, segment: &str) -> Result<Result<(), String>> {
    let tried = vm.run(&format!("timeout 2 load echo {segment} probe"))?;
    Ok(if tried.stdout.contains("listening") { Ok(()) } else { Err(tried.stderr) })
}

#[test]
fn no_info_block_makes_a_kernel_trust_its_neighbours() -> Result<()> {
    let attacks: [(&str, Attack); 10] = [
        ("mode 2 with room", keep_page_structures_here),
        ("mode 2", |block| block.mode = 2),
        ("data elsewhere", |block| block.dataoff = 4 * MIB),
        ("data in front of the header", |block| block.dataoff = 0x2000),
        ("more pages than there are", |block| block.npfns = u64::MAX / 2),
        ("a start behind the end", |block| block.start_pad = 0x4000_0000),
        ("an end before the start", |block| block.end_trunc = 0x4000_0000),
        ("a shorter end", |block| block.end_trunc = 2 << 20),
        ("small pages", |block| (block.align, block.page_struct_size) = (4096, 8)),
        ("another segment", |block| block.uuid = [7; 16]),
    ];
    let bed = TestBed::new("dax-boot")?;
    let ginnel = plan(&bed, 16).start()?;
    let attacker = Attacker::start(&ginnel, "shared", keep_page_structures_here)?;
    let before = attacker.rest()?;
    let vm = vm(&ginnel, "a")?.boot()?;
    let mut refusals = 0;
    for (what, attack) in attacks {
        attacker.write(attack)?;
        let daemon = ginnel.start_guest(&vm)?;
        // The host's daemon repairs the block, so the kernel sees the right one if the attacker's processor is late. In mode 1
        // the kernel ignores `npfns`.
        let answer = attach(&vm, "shared")?;
        println!("{what}: {}", answer.as_ref().err().map_or("attached", |text| text.trim()));
        let modes = modes(&vm)?;
        ensure!(modes.iter().all(|mode| mode == "ram"), "{what}: {modes:?}");
        match answer {
            Ok(()) => ensure!(modes.len() == 2, "{what}: {modes:?}"),
            Err(text) => {
                refusals += 1;
                ensure!(text.contains("has not accepted the DAX info block"), "{what}: {text}");
                ensure!(attacker.rest()? == before, "{what}: the kernel has written into the segment");
                ensure!(modes.len() == 1, "{what}: {modes:?}");
            }
        }
        ensure!(attach(&vm, "untouched")?.is_ok(), "{what}: the other segment suffers");
        daemon.kill_process(9)?;
        daemon.wait(PROMPT)?;
        if modes.len() == 2 {
            // Once the device exists it stays, whatever the block contains.
            vm.reboot_and_wait()?;
        }
    }
    ensure!(refusals > attacks.len() / 2, "{refusals} attacks were refused");

    // When the attacker stops, the segment appears without a restart of anything.
    attacker.write(keep_page_structures_here)?;
    let _daemon = ginnel.start_guest(&vm)?;
    let _ = attach(&vm, "shared")?;
    drop(attacker);
    wait_until("the segment to be usable", PROMPT, || Ok(attach(&vm, "shared")?.is_ok()))?;
    ensure!(modes(&vm)? == ["ram", "ram"]);
    let status = bed.host(&ginnel.on_host("ginnel status")?)?.ok()?.stdout;
    ensure!(!status.contains("demands trust"), "{status}");
    Ok(())
}

#[test]
fn a_kernel_that_reads_the_block_by_itself_is_reported() -> Result<()> {
    let bed = TestBed::new("dax-boot-trust")?;
    // In a section of 128 MiB that the segment shares with other memory, the kernel may have page structures already.
    let ginnel = plan(&bed, 256).start()?;
    let attacker = Attacker::start(&ginnel, "shared", keep_page_structures_here)?;
    let before = attacker.rest()?;
    let vm = vm(&ginnel, "a")?.module("nd_pmem").boot()?;
    // Holding back a module prevents this attack; here the module is loaded, so the attack must be reported.
    let mut changed = 0;
    wait_until("the kernel to write its page structures into the segment", PROMPT, || {
        changed = before.iter().zip(&attacker.rest()?).filter(|(before, after)| before != after).count();
        Ok(changed > 0)
    })?;
    println!("the kernel has changed {changed} bytes of the segment");
    ensure!(modes(&vm)?.iter().any(|mode| mode == "pmem"));

    let daemon = ginnel.start_guest(&vm)?;
    daemon.wait_for_line("the module nd_pmem is loaded", PROMPT)?;
    let text = attach(&vm, "shared")?.err().context("it can be used")?;
    ensure!(text.contains("keeps page structures"), "{text}");
    ensure!(attach(&vm, "untouched")?.is_ok());
    wait_until("the status to say it", PROMPT, || {
        let status = bed.host(&ginnel.on_host("ginnel status")?)?.ok()?.stdout;
        Ok(status.lines().any(|line| line.contains("untouched") && line.contains("demands trust at boot")))
    })
}
