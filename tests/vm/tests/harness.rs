//! The harness itself: what it promises to the tests that stand on it.

use anyhow::Result;
use vmtest::Bed;

#[test]
fn a_guest_runs_a_command() -> Result<()> {
    let bed = Bed::new("one")?;
    let begun = std::time::Instant::now();
    let a = bed.vm("a").boot()?;
    eprintln!("booted in {:?}", begun.elapsed());
    let out = a.run("uname -r; lsmod; cat /proc/meminfo | head -3; cat /proc/uptime; df; ps; env")?.ok()?;
    eprintln!("{}", out.stdout);
    eprintln!("{:?}", a.console());
    Ok(())
}
