//! Unmodified programs over TCP and over shared memory: `make bench NAME=sockets`.

use anyhow::Result;
use ginnel_bench::report::Report;
use ginnel_bench::sockets;

fn main() -> Result<()> {
    let mut report = Report::default();
    sockets::sockets(&mut report)?;
    report.finish("sockets", false)
}
