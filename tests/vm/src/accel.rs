//! Chooses the acceleration of the VMs: KVM if a stock guest really boots with it, otherwise TCG.

use crate::cache;
use crate::kernel::Kernel;
use anyhow::{Context, Result, bail};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::time::Duration;
use std::{fmt, fs};

/// The boot timeout of the probe. A guest that boots at all with KVM needs far less.
pub(crate) const PROBE: Duration = Duration::from_secs(10);

/// How QEMU runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// KVM: the processor's virtualisation.
    Kvm,
    /// TCG: emulation by QEMU. The guest runs the same kernel, but slowly.
    Tcg,
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg",
        })
    }
}

impl Accel {
    /// Returns what `GINNEL_ACCEL` (`kvm`, `tcg` or `auto`) says. With `auto` it returns the stored result for this kernel,
    /// QEMU and boot of the host, or else runs `probe` and stores its result.
    ///
    /// It is not enough that `/dev/kvm` can be opened: under some hypervisors a guest then hangs.
    pub(crate) fn choose(kernel: &Kernel, qemu: &Path, probe: impl FnOnce() -> Result<()>) -> Result<Accel> {
        match std::env::var("GINNEL_ACCEL").as_deref() {
            Ok("kvm") => return Ok(Accel::Kvm),
            Ok("tcg") => return Ok(Accel::Tcg),
            Ok("auto" | "") | Err(_) => {}
            Ok(other) => bail!("GINNEL_ACCEL is '{other}'; it may be kvm, tcg or auto"),
        }
        if fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
            return Ok(Accel::Tcg);
        }
        let mut hasher = DefaultHasher::new();
        let host_boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").context("no boot id")?;
        (&kernel.image, &kernel.release, qemu, host_boot).hash(&mut hasher);
        let known = cache::dir()?.join(format!("accel-{:016x}", hasher.finish()));
        match fs::read_to_string(&known).as_deref().map(str::trim) {
            Ok("kvm") => return Ok(Accel::Kvm),
            Ok("tcg") => return Ok(Accel::Tcg),
            _ => {}
        }
        let accel = match probe() {
            Ok(()) => Accel::Kvm,
            Err(why) => {
                eprintln!("no KVM, as a guest does not boot with it: {why}");
                Accel::Tcg
            }
        };
        fs::write(&known, format!("{accel}\n"))
            .with_context(|| format!("cannot write {}", known.display()))?;
        Ok(accel)
    }

    /// Returns QEMU's arguments for this acceleration.
    pub(crate) fn qemu_args(self) -> [&'static str; 4] {
        match self {
            // QEMU 7.2 offers AMD guests a register of Intel's that newer host kernels then refuse to set.
            Accel::Kvm if is_amd() => ["-accel", "kvm", "-cpu", "host,arch-capabilities=off"],
            Accel::Kvm => ["-accel", "kvm", "-cpu", "host"],
            // Without the "enhanced" and the "fast short" string instructions: otherwise libraries and the kernel would copy
            // with them, and TCG emulates them byte by byte, at a sixth of the speed of ordinary loads and stores.
            Accel::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max,erms=off,fsrm=off"],
        }
    }
}

fn is_amd() -> bool {
    fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("AuthenticAMD"))
}
