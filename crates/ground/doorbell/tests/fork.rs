//! A child can ring too, although it does not inherit its parent's context for asynchronous I/O. This is a program of its own
//! because it forks and must have only one thread.
#![allow(unsafe_code)] // fork(2).

use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::AsFd;

fn main() {
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    ginnel_doorbell::ring(event.as_fd());
    // SAFETY: The process has one thread, so the child may do what the parent may.
    let child = unsafe { libc::fork() };
    if child == 0 {
        for _ in 0..1000 {
            ginnel_doorbell::ring(event.as_fd());
        }
        // The child must not have fallen back to a plain write without notice.
        std::process::exit(i32::from(!ginnel_doorbell::is_safe()));
    }
    let mut status = 0;
    // SAFETY: The kernel writes one word to a word that outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    ginnel_doorbell::ring(event.as_fd());
    let mut count = [0; 8];
    rustix::io::read(&event, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1002);
    println!("test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
}
