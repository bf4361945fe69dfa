//! `ginnel mpi-env`.

use crate::libraries::{DEVICE_FILES, PRELOAD, VERBS};
use crate::output;
use anyhow::{Context, Result, anyhow, bail};
use ginnel::Daemon;
use std::ffi::OsString;

/// Prints the environment in which MPI programs use a segment, as commands for a shell.
///
/// Use it in the shell that starts MPI programs: `eval "$(ginnel mpi-env SEGMENT)"`. MPICH, Open MPI, and other
/// programs that use UCX or libfabric then find Ginnel's libibverbs and librdmacm, and use the segment's device for
/// messages to other machines. Both MPIs pass the environment on to the machines on which they start programs; Ginnel
/// must be installed at the same path on each of them.
///
/// The segment needs `verbs = true`, and its members are the machines on which the programs run.
#[derive(clap::Args)]
pub struct Args {
    /// The segment to use.
    #[arg(value_name = "SEGMENT")]
    segment: String,
    /// Let UCX use all RDMA devices of each machine: every segment with `verbs = true`, and the machine's adapters. It
    /// then reaches each other rank by the fastest device that both machines have.
    #[arg(long)]
    all_devices: bool,
}

/// The name and value of an environment variable.
type Variable = (&'static str, String);

/// The variable that makes Open MPI pass others on, as its option `-x` does.
const PASSED_ON: &str = "OMPI_MCA_mca_base_env_list";

pub fn run(args: Args) -> Result<()> {
    let text = Daemon::connect()?.inspect().context("asking the daemon for its status")?;
    let inspect = crate::inspect::parse(&text)?;
    let is_device = |segment: &ginnel_status::Segment| segment.verbs && segment.name == args.segment;
    if !inspect.segments.iter().any(is_device) {
        bail!(
            "there is no segment {} with `verbs = true` here; `ginnel verbs` lists such segments",
            args.segment
        );
    }
    let mut variables = libraries()?;
    variables.extend(settings(&args.segment, args.all_devices));
    let names: Vec<_> = variables.iter().map(|(name, _)| *name).filter(|name| !is_open_mpis(name)).collect();
    variables.push((PASSED_ON, names.join(";")));
    variables.iter().try_for_each(|(name, value)| output::line(export(name, value)))
}

/// Returns whether a variable is Open MPI's own. Open MPI passes those on by itself.
fn is_open_mpis(name: &str) -> bool {
    name.starts_with("OMPI_")
}

/// Returns the variables of the dynamic loader, and that of the daemon's socket if it is set.
fn libraries() -> Result<Vec<Variable>> {
    let folder = VERBS.find()?;
    let told = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let mut variables = vec![
        (VERBS.variable, VERBS.first(&folder, told(VERBS.variable))?),
        (PRELOAD.variable, PRELOAD.first(&folder.join(DEVICE_FILES), told(PRELOAD.variable))?),
    ];
    variables.extend(told("GINNEL_SOCKET").map(|socket| ("GINNEL_SOCKET", socket)));
    variables.into_iter().map(|(name, value)| Ok((name, text(name, value)?))).collect()
}

fn text(name: &str, value: OsString) -> Result<String> {
    value.into_string().map_err(|value| anyhow!("{name} would be {}, which is not UTF-8", value.display()))
}

/// Returns the settings for the MPIs and their libraries.
fn settings(segment: &str, all_devices: bool) -> Vec<Variable> {
    let device = format!("ginnel_{segment}");
    // With `all_devices`, each machine may have other devices; UCX_TLS excludes those that are not for RDMA.
    let devices = if all_devices { "all".into() } else { format!("{device}:1") };
    let mut settings = vec![
        // Within a machine, UCX uses the machine's own shared memory.
        ("UCX_TLS", "self,sm,rc_v".into()),
        ("UCX_NET_DEVICES", devices),
        // Huge pages cannot be moved into a segment.
        ("UCX_IB_ALLOC", "thp,md,mmap,heap".into()),
        // By default a rank has 4,095 receives of 8 KiB each, which is 34 MB of the segment, and messages use them in
        // turn. With 64 receives, a message of 1 KiB took a third of the time that it took with 512.
        ("UCX_RC_VERBS_RX_QUEUE_LEN", "64".into()),
        ("UCX_UD_VERBS_RX_QUEUE_LEN", "512".into()),
        // UCX's default makes Open MPI use another protocol for messages up to 128 KiB, with which 64 KiB took 37 us;
        // with this setting they take 6 us.
        ("UCX_RNDV_THRESH", "8192".into()),
        // A rank that cannot reach another one ends with an error message. By default UCX drops its state for that
        // rank, and the program waits for ever.
        ("UCX_RC_VERBS_FAILURE", "fatal".into()),
        // By default Open MPI uses UCX only where it finds an adapter whose driver it knows.
        ("OMPI_MCA_pml", "ucx".into()),
        ("OMPI_MCA_osc", "ucx,sm".into()),
        // For OpenSHMEM.
        ("OMPI_MCA_spml", "ucx".into()),
        // These components would warn about a device that they do not know.
        ("OMPI_MCA_btl", "^openib,uct".into()),
        // For programs that use libfabric, such as an MPICH that was built with ch4:ofi.
        ("FI_PROVIDER", "verbs;ofi_rxm".into()),
    ];
    if !all_devices {
        settings.push(("FI_VERBS_DEVICE_NAME", device));
    }
    settings
}

/// Returns the command of a POSIX shell that sets and exports a variable.
fn export(name: &str, value: &str) -> String {
    format!("export {name}='{}'", value.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_what_is_meant() {
        for value in ["", "a b;$HOME", "it's", r#"\"`"#] {
            let script = format!("{}; printf %s \"$X\"", export("X", value));
            let said = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!(String::from_utf8(said.stdout).unwrap(), value);
        }
    }
}
