//! Many processes append to one file, and a writer allocates no memory.
#![allow(unsafe_code)] // An allocator that counts.

use ginnel_report::{Event, Record, Report, Role, TEXT};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs::OpenOptions;
use std::io::{BufReader, Write};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does all the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the contract of `alloc`, which is the same here.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`, which is the same here.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn record(pid: u32, connection: u64) -> Record<'static> {
    Record {
        event: Event::Ended,
        pid,
        program: "a program \"with\" \u{1f980}\n".into(),
        connection,
        local: Some("10.0.0.1:1".parse().unwrap()),
        remote: Some("[fd00::1]:2".parse().unwrap()),
        role: Some(Role::Connector),
        sent_after_us: Some(connection),
        shared_sent: u64::MAX,
        reason: "\u{1}".repeat(2 * TEXT).into(),
        ..Record::default()
    }
}

#[test]
fn nothing_is_allocated() {
    let record = record(1, 1);
    let before = ALLOCATIONS.get();
    let length = record.append(<[u8]>::len);
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert!(length > 6 * TEXT);
    drop(Box::new(length));
    assert_eq!(ALLOCATIONS.get() - before, 1, "the counter works");
}

#[test]
fn lines_of_many_writers_are_whole() {
    let path = &std::env::temp_dir().join(format!("ginnel-report-{}", std::process::id()));
    std::thread::scope(|scope| {
        for pid in 0..4 {
            scope.spawn(move || {
                // Each thread opens the file itself, as each process does.
                let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
                for connection in 0..500 {
                    record(pid, connection).append(|line| assert_eq!(file.write(line).unwrap(), line.len()));
                }
            });
        }
    });
    let report = Report::read(BufReader::new(std::fs::File::open(path).unwrap())).unwrap();
    std::fs::remove_file(path).unwrap();
    assert_eq!((report.connections.len(), report.unreadable), (2000, 0));
}
