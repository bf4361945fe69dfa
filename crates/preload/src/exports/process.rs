//! fork, exec, and what follows.

use std::sync::atomic::{AtomicI32, Ordering};

use libc::{c_char, c_int, c_long, c_ulong};

use crate::confined;
use crate::errno::Kept;
use crate::exec::Environment;
use crate::passing;
use crate::real;
use crate::table::SOCKETS;

/// The process whose tables these are.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Whether the tables are this process's: not in a child of `vfork`, which has its parent's memory.
pub fn owns_tables() -> bool {
    // SAFETY: it cannot fail.
    let process = unsafe { libc::getpid() };
    match OWNER.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: the handler is a function of this library, and calls nothing that is forbidden in a fork's child.
            unsafe { libc::pthread_atfork(Some(before), None, Some(in_child)) };
            OWNER.store(process, Ordering::Relaxed);
            true
        }
        owner => owner == process,
    }
}

/// `fork` calls it in the parent, before.
extern "C" fn before() {
    crate::family::before_fork();
}

/// `fork` calls it in the child, which has one thread and copies of the tables.
extern "C" fn in_child() {
    // SAFETY: it cannot fail.
    OWNER.store(unsafe { libc::getpid() }, Ordering::Relaxed);
    super::births::in_child();
    crate::lock::forget_tid();
    crate::family::in_child();
    crate::passing::in_child();
    crate::doorbell::in_child();
    crate::table::in_child();
    crate::cache::in_child();
}

/// Says who the child is: it may be killed before it can say so itself.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fork() -> libc::pid_t {
    owns_tables();
    // SAFETY: it takes nothing.
    let child = unsafe { real::fork() };
    if child != 0 {
        let _errno = Kept::new();
        crate::family::forked((child > 0).then_some(child));
    }
    child
}

/// This process is about to execute another program. Its relatives then have those of its connections alone that the kernel closes.
fn executing() {
    if owns_tables() {
        let _errno = Kept::new();
        for fd in SOCKETS.used(0, u32::MAX) {
            if let Some(socket) = SOCKETS.get(fd) {
                crate::family::execute(fd, socket);
            }
        }
    }
}

type Strings = *const *const c_char;

/// Executes another program, with what it has to know of the connections that it gets.
unsafe fn execute(environment: Strings, call: impl FnOnce(Strings) -> c_int) -> c_int {
    let is_child = !owns_tables();
    {
        let _errno = Kept::new();
        passing::before_exec(is_child);
    }
    executing();
    // A child of `vfork` has its parent's tables, and its memory.
    // SAFETY: the program keeps the rules of the functions below.
    let with = if owns_tables() { unsafe { Environment::with_connections(environment) } } else { None };
    call(with.as_ref().map_or(environment, Environment::as_ptr))
}

fn environment() -> Strings {
    unsafe extern "C" {
        static environ: Strings;
    }
    // SAFETY: the C library's.
    unsafe { environ }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execve(
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: here and below: the program keeps the rules of the function that it calls.
    unsafe { execute(environment, |environment| real::execve(path, arguments, environment)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execv(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: as above.
    unsafe { execute(environment(), |environment| real::execve(path, arguments, environment)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execvp(file: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: as above.
    unsafe { execute(environment(), |environment| real::execvpe(file, arguments, environment)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execvpe(
    file: *const c_char,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: as above.
    unsafe { execute(environment, |environment| real::execvpe(file, arguments, environment)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: as above.
    unsafe { execute(environment, |environment| real::fexecve(fd, arguments, environment)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execveat(
    folder: c_int,
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
    flags: c_int,
) -> c_int {
    // SAFETY: as above.
    unsafe { execute(environment, |environment| real::execveat(folder, path, arguments, environment, flags)) }
}

/// `execle`, with the words that follow the path: the arguments, null, and the environment.
#[cfg(target_arch = "x86_64")]
unsafe extern "C-unwind" fn execle_words(path: *const c_char, words: Strings) -> c_int {
    let mut end = words;
    // SAFETY: the program ends its arguments with null, and gives an environment after that.
    let environment = unsafe {
        while !(*end).is_null() {
            end = end.add(1);
        }
        (*end.add(1)).cast::<*const c_char>()
    };
    // SAFETY: as above.
    unsafe { execve(path, words, environment) }
}

/// A function that takes a path and any number of further words: has those that come in registers precede those that come on the stack
/// (psABI, 3.2.3), and calls `$function` with the path and the address of the first. Nothing is allocated, and nothing copied: a child of
/// `vfork` may call it.
#[cfg(target_arch = "x86_64")]
macro_rules! path_and_words {
    ($name:ident, $function:ident) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $name() {
            std::arch::naked_asm!(
                ".cfi_startproc",
                // The last word that comes in a register takes the place of the return address, which lies below all words meanwhile.
                "mov rax, [rsp]",
                ".cfi_register rip, rax",
                "mov [rsp], r9",
                "push r8",
                ".cfi_adjust_cfa_offset 8",
                "push rcx",
                ".cfi_adjust_cfa_offset 8",
                "push rdx",
                ".cfi_adjust_cfa_offset 8",
                "push rsi",
                ".cfi_adjust_cfa_offset 8",
                "push rax",
                ".cfi_adjust_cfa_offset 8",
                ".cfi_offset rip, -48",
                "lea rsi, [rsp + 8]",
                "call {function}",
                "mov rcx, [rsp]",
                ".cfi_register rip, rcx",
                "add rsp, 40",
                ".cfi_adjust_cfa_offset -40",
                "mov [rsp], rcx",
                ".cfi_offset rip, -8",
                "ret",
                ".cfi_endproc",
                function = sym $function,
            )
        }
    };
}

#[cfg(target_arch = "x86_64")]
path_and_words!(execl, execv);
#[cfg(target_arch = "x86_64")]
path_and_words!(execlp, execvp);
#[cfg(target_arch = "x86_64")]
path_and_words!(execle, execle_words);

/// What is said here happens where this library does not see it, so the connection goes back to TCP now. Returns the error, as the C
/// library's function does: EAGAIN if the connection has not gone back in time.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_spawn_file_actions_adddup2(
    actions: *mut libc::posix_spawn_file_actions_t,
    from: c_int,
    to: c_int,
) -> c_int {
    if let Some(call) = super::io::connection(from) {
        let socket = call.what();
        crate::meet::stays(socket, passing::PASSED);
        if socket.is_joined() && !passing::pass_on(&[(socket, from)], passing::PASSED) {
            return libc::EAGAIN;
        }
    }
    // SAFETY: the program keeps the rules.
    unsafe { real::posix_spawn_file_actions_adddup2(actions, from, to) }
}

/// Runs a call by which the program may confine itself.
pub fn confining(confines: bool, call: impl FnOnce() -> c_long) -> c_long {
    if !confines || confined::is_confined() {
        return call();
    }
    confined::set(true);
    let result = call();
    confined::set(result >= 0);
    result
}

/// The C function takes any arguments; on this machine's calling convention, further ones are where they would be.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn prctl(
    option: c_int,
    a: c_ulong,
    b: c_ulong,
    c: c_ulong,
    d: c_ulong,
) -> c_int {
    // SAFETY: the program keeps the rules.
    let call = || unsafe { real::prctl(option, a, b, c, d) }.into();
    confining(option == libc::PR_SET_SECCOMP, call) as c_int
}
