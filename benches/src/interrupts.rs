//! Whether programs in VMs can sleep until a doorbell wakes them.

use anyhow::{Context, Result};
use ginnel_status::Inspect;
use vmtest::TestBed;
use vmtest::installation::Installation;

/// Returns why programs in these VMs cannot sleep, or `None` if they can.
///
/// In a VM without interrupts all programs poll, whatever mode they ask for. What is measured there says nothing about
/// doorbells. Call this when the VMs' daemons serve, because the host's daemon does not know it earlier.
pub fn missing(bed: &TestBed, ginnel: &Installation<'_>, vms: &[&str]) -> Result<Option<String>> {
    missing_in(&bed.host(&ginnel.on_host("ginnel status --json")?)?.ok()?.stdout, vms)
}

/// Does the same with the output of `ginnel status --json` on the host.
fn missing_in(status: &str, vms: &[&str]) -> Result<Option<String>> {
    let status: Inspect = serde_json::from_str(status).context("`ginnel status --json` prints no status")?;
    let mut polling = Vec::new();
    for &vm in vms {
        let member = status.members.iter().find(|member| member.name == vm);
        let interrupts = member.with_context(|| format!("the status has no member {vm}"))?.interrupts;
        if !interrupts.with_context(|| format!("no daemon of VM {vm} has ever had a session"))? {
            polling.push(vm);
        }
    }
    Ok((!polling.is_empty()).then(|| format!("VMs without interrupts poll: {}", polling.join(", "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = r#"{"members": [{"number": 0, "name": "host", "interrupts": true},
        {"number": 1, "name": "a", "interrupts": true}, {"number": 2, "name": "b", "interrupts": false},
        {"number": 3, "name": "c", "interrupts": null}, {"number": 4, "name": "d", "interrupts": false}]}"#;

    #[test]
    fn vms_that_receive_interrupts_lack_nothing() {
        assert_eq!(missing_in(STATUS, &["a"]).unwrap(), None);
        assert_eq!(missing_in(STATUS, &["host", "a"]).unwrap(), None);
    }

    #[test]
    fn vms_that_poll_are_named() {
        let of = |vms: &[&str]| missing_in(STATUS, vms).unwrap();
        assert_eq!(of(&["a", "b"]).as_deref(), Some("VMs without interrupts poll: b"));
        assert_eq!(of(&["d", "a", "b"]).as_deref(), Some("VMs without interrupts poll: d, b"));
    }

    #[test]
    fn what_the_status_does_not_say_is_an_error() {
        for (vm, wanted) in [("c", "no daemon of VM c"), ("e", "no member e")] {
            let error = missing_in(STATUS, &["a", vm]).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        missing_in("polling", &["a"]).unwrap_err();
    }
}
