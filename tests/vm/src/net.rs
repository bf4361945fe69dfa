//! The network of a test bed: a namespace with a bridge, and one tap for each VM.
//!
//! The namespace has no name, and its devices exist only in it, so everything disappears with the last process inside.

use crate::image::which;
use crate::process::Launcher;
use anyhow::{Context, Result, ensure};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::process::Command;

const BRIDGE: &str = "bridge";
const PREFIX: u8 = 24;

/// The address of the bridge, at which guests reach the host.
pub const HOST: Ipv4Addr = Ipv4Addr::new(10, 213, 0, 1);

pub(crate) struct Network {
    /// The namespace, for threads that want to enter it.
    pub namespace: OwnedFd,
}

/// The place of one VM in the network.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub index: u8,
}

impl Network {
    /// Moves the launcher's thread, and so all processes that it starts from now on, to a network of their own.
    pub fn new(launcher: &Launcher) -> Result<Network> {
        which("ip", "iproute2")?;
        ensure!(
            rustix::process::geteuid().is_root(),
            "a VM with a network needs a namespace, a bridge and taps: run as root"
        );
        let namespace = launcher.leave_network()?;
        ip(launcher, "link set lo up")?;
        ip(launcher, &format!("link add {BRIDGE} type bridge"))?;
        ip(launcher, &format!("address add {HOST}/{PREFIX} dev {BRIDGE}"))?;
        ip(launcher, &format!("link set {BRIDGE} up"))?;
        Ok(Network { namespace })
    }

    /// Makes a VM's tap, unless an earlier boot of this VM has made it.
    pub fn attach(&self, launcher: &Launcher, place: Place) -> Result<()> {
        let tap = place.tap();
        if ip(launcher, &format!("link show {tap}")).is_ok() {
            return Ok(());
        }
        ip(launcher, &format!("tuntap add dev {tap} mode tap"))?;
        ip(launcher, &format!("link set {tap} master {BRIDGE} up"))
    }
}

impl Place {
    pub fn address(self) -> Ipv4Addr {
        Ipv4Addr::new(10, 213, 0, 10 + self.index)
    }

    /// Returns the address with its prefix length, as the guest sets it.
    pub fn with_prefix(self) -> String {
        format!("{}/{PREFIX}", self.address())
    }

    /// Returns QEMU's arguments for the network card.
    pub fn qemu_args(self) -> [String; 4] {
        let (tap, last) = (self.tap(), self.index);
        [
            "-netdev".into(),
            format!("tap,id=net,ifname={tap},script=no,downscript=no,vhost=off"),
            "-device".into(),
            format!("virtio-net-pci,netdev=net,mac=52:54:00:67:6c:{last:02x},romfile="),
        ]
    }

    fn tap(self) -> String {
        format!("tap{}", self.index)
    }
}

fn ip(launcher: &Launcher, args: &str) -> Result<()> {
    let words: Vec<String> = args.split(' ').map(str::to_owned).collect();
    let output = launcher
        .call(move || Command::new("ip").args(words).output())?
        .context("cannot run ip; install iproute2")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`ip {args}` failed: {}", errors.trim());
    Ok(())
}
