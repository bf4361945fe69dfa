//! The memory that threads and the kernel use all the time: stacks, and thread-local memory.

use crate::areas::{Area, Maps};
use rustix::fs::{Dir, Mode, OFlags, open, stat};
use rustix::thread::Pid;
use std::ffi::c_int;
use std::hint::black_box;
use std::io;
use std::ops::Range;

const PAGE: usize = 4096;
/// Maximum bytes of a stack that a call of this library uses.
const DEPTH: usize = 32 << 10;
/// An upper bound for the bytes that the C library keeps for a thread, counted from the end of its thread-local memory, and
/// therefore also from its list of robust locks.
const DESCRIPTOR: usize = 4096;

/// Information about the threads of this process at one moment.
#[derive(Debug)]
pub struct Threads {
    /// Whether the caller is the only thread. Then there are no others until it makes some.
    pub is_one: bool,
    /// Address ranges with the stacks and thread-local memory of all threads, as far as that can be known: of the first
    /// thread of the process, of the caller, and of the threads that the C library has made. The ranges may be a little
    /// larger.
    ///
    /// Stacks that a program has made itself for coroutines or signals are not known, except the one that the caller is on.
    pub stacks: Vec<Range<usize>>,
}

impl Threads {
    /// Inspects the threads of this process.
    pub fn look() -> io::Result<Self> {
        let threads = threads()?;
        let maps = Maps::open()?;
        let mut stacks = Vec::with_capacity(2 + threads.len());
        let here = black_box(&stacks) as *const _ as usize;
        stacks.push(here.saturating_sub(DEPTH) / PAGE * PAGE..here.saturating_add(2 * PAGE) / PAGE * PAGE);
        // The kernel has put these random bytes on the first stack.
        // SAFETY: the call takes no pointer.
        let random = unsafe { libc::getauxval(libc::AT_RANDOM) } as usize;
        stacks.extend(maps.area_at(random)?.map(|area| area.at));
        let process = rustix::process::getpid();
        let local = thread_local_bytes() + descriptor_before_list()?;
        for thread in &threads {
            let Some(list) = robust_list(*thread)? else { continue };
            let end = list.saturating_add(DESCRIPTOR).next_multiple_of(PAGE);
            // The C library puts its own data of a thread behind the thread's local memory, and that behind the stack; only
            // the first thread is different. All of it is in one mapping. Memory that begins at the end of that mapping
            // belongs to the program.
            stacks.push(match maps.area_at(list)? {
                Some(Area { at, .. }) if at.contains(&list) && *thread != process => {
                    at.start..end.min(at.end)
                }
                _ => list.saturating_sub(local)..end,
            });
        }
        Ok(Self { is_one: threads.len() == 1, stacks })
    }
}

fn threads() -> io::Result<Vec<Pid>> {
    // The links are the directory's own, its parent's, and one of each thread.
    if stat(c"/proc/self/task")?.st_nlink == 3 {
        return Ok(vec![rustix::thread::gettid()]);
    }
    let folder =
        open(c"/proc/self/task", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut threads = Vec::new();
    for entry in Dir::new(folder)? {
        let entry = entry?;
        let number = entry.file_name().to_str().ok().and_then(|name| name.parse().ok());
        threads.extend(number.and_then(Pid::from_raw));
    }
    Ok(threads)
}

/// Returns the address of a thread's list of robust locks, which is beside all other data that the C library keeps for the
/// thread. `None` for a thread that has ended, or that the C library has not made.
fn robust_list(thread: Pid) -> io::Result<Option<usize>> {
    let (mut head, mut len) = (0_usize, 0_usize);
    // SAFETY: the kernel stores a pointer and a length in these variables.
    let done = unsafe {
        let id = thread.as_raw_nonzero().get();
        libc::syscall(libc::SYS_get_robust_list, id, &raw mut head, &raw mut len)
    };
    if done != 0 {
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::ESRCH) { Ok(None) } else { Err(error) };
    }
    Ok((head != 0).then_some(head))
}

/// Returns how many bytes of the C library's data of a thread lie between its thread-local memory and its list of robust
/// locks. The number is the same for all threads.
fn descriptor_before_list() -> io::Result<usize> {
    // SAFETY: it has no arguments.
    let descriptor = unsafe { libc::pthread_self() } as usize;
    let list = robust_list(rustix::thread::gettid())?;
    // On this architecture, thread-local memory ends at the descriptor (ELF Handling For Thread-Local Storage, variant II).
    let distance =
        list.filter(|_| cfg!(target_arch = "x86_64")).and_then(|list| list.checked_sub(descriptor));
    Ok(distance.map_or(DESCRIPTOR, |distance| distance.min(DESCRIPTOR)))
}

/// Returns how many bytes of thread-local memory each thread has from its start.
fn thread_local_bytes() -> usize {
    unsafe extern "C" fn add(info: *mut libc::dl_phdr_info, _: usize, sum: *mut libc::c_void) -> c_int {
        // SAFETY: the pointers are the dynamic linker's own table of a library, and the sum below.
        unsafe {
            for n in 0..usize::from((*info).dlpi_phnum) {
                let header = (*info).dlpi_phdr.add(n).read();
                if header.p_type == libc::PT_TLS {
                    *sum.cast::<usize>() += header.p_memsz as usize + header.p_align as usize;
                }
            }
        }
        0
    }
    let mut sum = 0_usize;
    // SAFETY: the function gets the argument that it expects.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut sum).cast()) };
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::mpsc;
    use std::thread;

    thread_local! {
        static LOCAL: Cell<u64> = const { Cell::new(1) };
    }

    /// Returns addresses on this thread's stack, far away from each other, and of its thread-local memory.
    fn own() -> [usize; 4] {
        let far = [0_u8; 200 << 10];
        let near = 0_u8;
        // SAFETY: it has no arguments.
        let thread = unsafe { libc::pthread_self() } as usize;
        [
            black_box(&near) as *const _ as usize,
            black_box(&far).as_ptr() as usize + far.len() - 1,
            LOCAL.with(|local| std::ptr::from_ref(local) as usize),
            thread,
        ]
    }

    fn is_in(ranges: &[Range<usize>], address: usize) -> bool {
        ranges.iter().any(|range| range.contains(&address))
    }

    /// Returns the first address after this thread's stack, thread-local memory and descriptor.
    fn behind_own() -> usize {
        let mut attributes = std::mem::MaybeUninit::uninit();
        let (mut start, mut len) = (std::ptr::null_mut(), 0);
        // SAFETY: the first call fills the attributes, which the second reads and the third gives back.
        unsafe {
            assert_eq!(libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()), 0);
            assert_eq!(libc::pthread_attr_getstack(attributes.as_ptr(), &raw mut start, &raw mut len), 0);
            libc::pthread_attr_destroy(attributes.as_mut_ptr());
        }
        start as usize + len
    }

    /// Memory of the program may follow a stack. (If another stack follows, its guard page is between them, and is not part
    /// of either.)
    #[test]
    fn memory_after_a_stack_is_not_part_of_it() {
        let (sender, receiver) = mpsc::channel();
        let (end, wait) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            sender.send((own()[3], behind_own())).unwrap();
            let _ = wait.recv();
        });
        let (descriptor, behind) = receiver.recv().unwrap();
        let Threads { stacks, .. } = Threads::look().unwrap();
        assert!(is_in(&stacks, descriptor) && is_in(&stacks, behind - 1), "{behind:#x} in {stacks:x?}");
        assert!(!is_in(&stacks, behind), "{behind:#x} in {stacks:x?}");
        drop(end);
        thread.join().unwrap();
    }

    /// The first thread's stack is elsewhere, so memory before its thread-local memory does not count either.
    #[test]
    fn memory_before_thread_local_memory_is_not_part_of_it() {
        let process = rustix::process::getpid();
        let list = robust_list(process).unwrap().unwrap();
        let before = descriptor_before_list().unwrap();
        assert!(before > 0 && before < 2048, "{before}");
        let Threads { stacks, .. } = Threads::look().unwrap();
        let first = stacks.iter().find(|range| range.contains(&list)).unwrap();
        let local = list - before - first.start;
        assert_eq!(local, thread_local_bytes(), "{first:x?}");
    }

    #[test]
    fn stacks_and_local_memory_of_all_threads_are_known() {
        let (sender, receiver) = mpsc::channel();
        let threads: Vec<_> = (0..8)
            .map(|n| {
                let sender = sender.clone();
                let (end, wait) = mpsc::channel::<()>();
                let thread = thread::Builder::new().stack_size((1 + n) << 20).spawn(move || {
                    sender.send(own()).unwrap();
                    let _ = wait.recv();
                });
                (end, thread.unwrap())
            })
            .collect();
        let theirs: Vec<_> = receiver.iter().take(threads.len()).collect();
        let Threads { is_one, stacks: ranges } = Threads::look().unwrap();
        for address in theirs.into_iter().flatten().chain(own()) {
            assert!(is_in(&ranges, address), "{address:#x} in {ranges:x?}");
        }
        // SAFETY: `environ` is on the first stack when a program begins, and AT_EXECFN always is.
        let name = unsafe { libc::getauxval(libc::AT_EXECFN) } as usize;
        assert!(is_in(&ranges, name) && !is_one);
        // Large allocations are mappings, small ones are in the heap, and code is elsewhere.
        let large: Vec<_> = (0..20).map(|_| vec![1_u8; 1 << 20]).collect();
        let small: Vec<_> = (0..20).map(|_| vec![1_u8; 1 << 10]).collect();
        for vec in large.iter().chain(&small) {
            assert!(!is_in(&ranges, vec.as_ptr() as usize), "{:p} in {ranges:x?}", vec.as_ptr());
            assert!(!is_in(&ranges, vec.as_ptr() as usize + vec.len() - 1));
        }
        for (end, thread) in threads {
            drop(end);
            thread.join().unwrap();
        }
    }
}
