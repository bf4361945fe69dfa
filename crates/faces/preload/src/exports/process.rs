//! `fork`, `exec` and related functions.

use crate::calls::exec::Environment;
use crate::carrying::passing;
use crate::process::owner;
use crate::process::section::Scratch;
use crate::served::giving_back;
use crate::state::reasons;
use crate::state::socket::{Socket, Stage};
use crate::state::sockets::SOCKETS;
use crate::system::errno::Kept;
use crate::system::{confined, kernel, real};
use libc::{c_char, c_int, c_long, c_ulong};
use std::sync::atomic::{AtomicBool, Ordering};

/// Makes this process the owner of the tables, and asks the C library to tell of forks.
pub(super) fn load() {
    static IS_LOADED: AtomicBool = AtomicBool::new(false);
    if !IS_LOADED.swap(true, Ordering::Relaxed) {
        // SAFETY: the handlers are functions of this library, and they call nothing that is forbidden in a fork's child.
        unsafe { libc::pthread_atfork(Some(before), None, Some(in_child)) };
        owner::own_tables();
    }
}

/// Ends the process without the handlers of `exit`, among them this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _exit(status: c_int) -> ! {
    crate::carrying::closing::at_exit();
    loop {
        // SAFETY: the call takes a number, and does not return.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}

/// Does the same; the name is that of standard C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _Exit(status: c_int) -> ! {
    // SAFETY: the rules are the same.
    unsafe { _exit(status) }
}

/// Prepares for a fork. `fork` calls this function in the parent before it makes the child.
extern "C" fn before() {
    crate::state::family::before_fork();
}

/// Repairs the state of a new child, which has one thread and copies of the tables. `fork` calls this function in the child.
extern "C" fn in_child() {
    owner::own_tables();
    crate::process::thread::in_child();
    crate::daemon::session::in_child();
    crate::state::family::in_child();
    crate::state::inherited::in_child();
    crate::waiting::points::in_child();
    crate::state::early::in_child();
    crate::state::sockets::in_child();
    crate::epoll::in_child();
    crate::served::in_child();
}

/// Makes a process that has memory and descriptors of its own, by a call for which the C library does not call these handlers.
pub(super) fn birth(call: impl FnOnce() -> c_long) -> c_long {
    if !owner::owns_tables() {
        return call();
    }
    before();
    let child = call();
    match child {
        0 => in_child(),
        _ => forked(child as libc::pid_t),
    }
    child
}

/// Repairs the state of a new child that does not return from the call of its parent.
pub(super) fn born() {
    in_child();
}

/// Leaves all connections to the kernel for good, because another process is about to share either the memory of this one or its
/// descriptors. The tables would be wrong in one of them.
#[cold]
pub(super) fn leave_connections() {
    if !owner::owns_tables() || !crate::process::settings::is_on() {
        return;
    }
    let _errno = Kept::new();
    crate::process::settings::turn_off();
    let mut joined: Scratch<Vec<(&'static Socket, c_int)>> = Scratch::new(Vec::new);
    for fd in SOCKETS.used(0, u32::MAX) {
        let Some(socket) = SOCKETS.get(fd) else { continue };
        crate::daemon::session::stays(socket, reasons::SHARED);
        if socket.is_joined() && !joined.iter().any(|(other, _)| std::ptr::eq(*other, socket)) {
            joined.change(|joined| joined.push((socket, fd)));
        }
    }
    passing::pass_on(&joined, reasons::SHARED);
    for (socket, _) in joined.iter() {
        if socket.is_back.load(Ordering::Relaxed) {
            socket.set_stage(Stage::Stays);
        }
    }
}

/// Records the child's number in the parent, because the child may be killed before it can record that itself.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fork() -> libc::pid_t {
    load();
    // Not in the handler, in which the C library's allocator may be locked already. So the parent keeps the answers if the C library forks
    // by itself.
    if owner::owns_tables() {
        giving_back::share(|_| true);
    }
    // SAFETY: `fork` takes no argument.
    let child = unsafe { real::fork() };
    if child != 0 {
        forked(child);
    }
    child
}

fn forked(child: libc::pid_t) {
    let _errno = Kept::new();
    crate::state::family::forked((child > 0).then_some(child));
}

/// Records that this process is about to execute another program. From then on, those of its connections that the kernel closes
/// belong to its relatives alone.
fn executing() {
    if owner::owns_tables() {
        let _errno = Kept::new();
        for fd in SOCKETS.used(0, u32::MAX) {
            if let Some(socket) = SOCKETS.get(fd) {
                crate::state::family::execute(fd, socket);
            }
        }
    }
}

/// Records that this process, which is a child of `vfork`, has a connection of its parent, and that the program that it executes has
/// it too. While that program runs, the connection does not change over.
pub(super) fn also_has(socket: &'static Socket) {
    // SAFETY: `getpid` cannot fail.
    crate::state::family::also_has(socket, Some(unsafe { libc::getpid() }));
}

type Strings = *const *const c_char;

/// Gives back the answers that the program to be executed is to receive. The program does not get a connection where that is impossible.
fn share_with_program(is_child: bool) {
    let is_left = |fd: c_int| match is_child {
        // The child may have copied the descriptor.
        true => kernel::cookie(fd).is_some_and(|cookie| {
            (0..passing::COPIES).any(|fd| kernel::is_left_on_exec(fd) && kernel::cookie(fd) == Some(cookie))
        }),
        false => kernel::is_left_on_exec(fd),
    };
    for fd in giving_back::share(is_left) {
        kernel::close_on_exec(fd);
    }
}

/// Executes another program. The environment tells that program what it needs to know about the connections that it inherits.
unsafe fn execute(environment: Strings, call: impl FnOnce(Strings) -> c_int) -> c_int {
    let is_child = !owner::owns_tables();
    {
        let _errno = Kept::new();
        if is_child {
            passing::inherited_natively().iter().copied().for_each(also_has);
        }
        passing::before_exec(is_child);
        ginnel_shmem::leave_ignored();
        share_with_program(is_child);
    }
    executing();
    // A child of `vfork` has the tables and the memory of its parent, so it leaves both unchanged.
    let with = Scratch::new(|| match owner::owns_tables() {
        // SAFETY: the environment is null, or an array of strings that ends with null: it is the program's, or the C library's
        // own.
        true => unsafe { Environment::with_connections(environment) },
        false => None,
    });
    call(with.as_ref().map_or(environment, Environment::as_ptr))
}

fn environment() -> Strings {
    unsafe extern "C" {
        static environ: Strings;
    }
    // SAFETY: `environ` is a variable of the C library.
    unsafe { environ }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execve(
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: the program passes a path, and arguments and an environment that end with null.
    unsafe { execute(environment, |environment| real::execve(path, arguments, environment)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execv(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the program passes a path, and arguments that end with null, as the C library's environment does.
    unsafe { execute(environment(), |environment| real::execve(path, arguments, environment)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execvp(file: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the program passes a file's name, and arguments that end with null, as the C library's environment does.
    unsafe { execute(environment(), |environment| real::execvpe(file, arguments, environment)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execvpe(
    file: *const c_char,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: the program passes a file's name, and arguments and an environment that end with null.
    unsafe { execute(environment, |environment| real::execvpe(file, arguments, environment)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the program passes arguments and an environment that end with null. The kernel checks the descriptor.
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
    // SAFETY: the program passes a path, and arguments and an environment that end with null. The kernel checks the
    // descriptor.
    unsafe { execute(environment, |environment| real::execveat(folder, path, arguments, environment, flags)) }
}

/// Does what `execle` does. `words` are those that follow the path: the arguments, null, and the environment.
#[cfg(target_arch = "x86_64")]
unsafe extern "C-unwind" fn execle_words(path: *const c_char, words: Strings) -> c_int {
    let mut end = words;
    // SAFETY: the program ends its arguments with null and passes an environment after that.
    let environment = unsafe {
        while !(*end).is_null() {
            end = end.add(1);
        }
        (*end.add(1)).cast::<*const c_char>()
    };
    // SAFETY: the program passes a path. Its words are arguments that end with null, and the environment behind them does so
    // too.
    unsafe { execve(path, words, environment) }
}

/// Defines a function that takes a path and any number of further words. It puts the words that arrive in registers in front of
/// those on the stack (psABI, 3.2.3), and calls `$function` with the path and the address of the first word. It neither
/// allocates memory nor copies the words on the stack, so a child of `vfork` may call it.
#[cfg(target_arch = "x86_64")]
macro_rules! path_and_words {
    ($name:ident, $function:ident) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $name() {
            std::arch::naked_asm!(
                ".cfi_startproc",
                // The last word that arrives in a register takes the place of the return address. The return address lies below all
                // words until the call returns.
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

/// Moves the connection back to TCP before it records the action, because this library does not see the action when it
/// happens. Returns an error number, as the C library's function does: EAGAIN if the connection has not returned to TCP in time.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_spawn_file_actions_adddup2(
    actions: *mut libc::posix_spawn_file_actions_t,
    from: c_int,
    to: c_int,
) -> c_int {
    if let Some(call) = crate::exports::io::connection(from) {
        let socket = call.what();
        let is_given_back = giving_back::give_back(socket);
        crate::daemon::session::stays(socket, reasons::PASSED);
        if !is_given_back || socket.is_joined() && !passing::pass_on(&[(socket, from)], reasons::PASSED) {
            return libc::EAGAIN;
        }
    }
    // SAFETY: the program obeys the rules of the function.
    unsafe { real::posix_spawn_file_actions_adddup2(actions, from, to) }
}

/// Executes a program in a new process. The C library does that without functions that this library sees. `call` returns the number
/// of the process, if there is one.
fn spawn<R>(call: impl FnOnce() -> (R, Option<libc::pid_t>)) -> R {
    if !owner::owns_tables() {
        return call().0;
    }
    giving_back::share(kernel::is_left_on_exec);
    let sockets = passing::inherited_natively();
    sockets.iter().for_each(|socket| crate::state::family::also_has(socket, None));
    let (result, child) = call();
    let _errno = Kept::new();
    sockets.iter().for_each(|socket| crate::state::family::named(socket, child));
    result
}

macro_rules! spawns {
    ($($name:ident),*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            process: *mut libc::pid_t,
            file: *const c_char,
            actions: *const libc::posix_spawn_file_actions_t,
            attributes: *const libc::posix_spawnattr_t,
            arguments: Strings,
            environment: Strings,
        ) -> c_int {
            spawn(|| {
                let mut child = 0;
                let number = &raw mut child;
                // SAFETY: the program obeys the rules of the function.
                let error = unsafe { real::$name(number, file, actions, attributes, arguments, environment) };
                if error == 0 && !process.is_null() {
                    // SAFETY: the program passes an address for the number.
                    unsafe { process.write(child) };
                }
                (error, (error == 0).then_some(child))
            })
        }
    )*};
}

spawns!(posix_spawn, posix_spawnp);

/// The command may use the connections until the call returns.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn system(command: *const c_char) -> c_int {
    // SAFETY: the program obeys the rules of the function.
    spawn(|| (unsafe { real::system(command) }, None))
}

/// Nothing tells how long the command may use the connections.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn popen(command: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    if owner::owns_tables() {
        giving_back::share(kernel::is_left_on_exec);
        passing::inherited_natively()
            .iter()
            .for_each(|socket| crate::daemon::session::stays(socket, reasons::PASSED));
    }
    // SAFETY: the program obeys the rules of the function.
    unsafe { real::popen(command, mode) }
}

/// Runs a call with which the program may confine itself. `confines` says whether the call asks for that.
pub fn confining(confines: bool, call: impl FnOnce() -> c_long) -> c_long {
    if !confines || confined::is_confined() {
        return call();
    }
    confined::set(true);
    let result = call();
    confined::set(result >= 0);
    result
}

/// The C function has variable arguments. In the calling convention of this machine they lie where those of this function lie.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn prctl(
    option: c_int,
    a: c_ulong,
    b: c_ulong,
    c: c_ulong,
    d: c_ulong,
) -> c_int {
    // SAFETY: the program obeys the rules of the function.
    let call = || unsafe { real::prctl(option, a, b, c, d) }.into();
    confining(option == libc::PR_SET_SECCOMP, call) as c_int
}
