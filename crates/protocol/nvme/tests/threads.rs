#[cfg(loom)]
fn main() {}

#[cfg(not(loom))]
fn main() {}
