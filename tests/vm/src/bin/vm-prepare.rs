//! Prepares what VM tests need, so that the first test does not spend the time, and prints what it found.

use anyhow::Result;
use vmtest::{Kernel, TestBed, prepare_image};

fn main() -> Result<()> {
    let kernel = Kernel::find()?;
    println!("kernel   {} ({})", kernel.release, kernel.image.display());
    println!("modules  {}", kernel.modules.display());
    println!("image    {}", prepare_image(&kernel)?.display());
    let bed = TestBed::new("prepare")?;
    println!("qemu     {}", bed.qemu().display());
    println!("accel    {}", bed.accel()?);
    Ok(())
}
