//! Processes that are stopped, and killed, at any of their instructions.
//!
//! One step with ptrace costs some 20 us, and an operation has thousands of instructions. So a first run goes step by step
//! and notes the way; those after it run up to a breakpoint in a debug register of the CPU, and step only where a place
//! cannot be told from others by its address. All are forks of one process, so addresses are the same in each.
#![allow(dead_code)] // Each test uses some of it.

use std::collections::{HashMap, HashSet};
use std::io;
use std::time::{Duration, Instant};

pub fn leave(status: i32) -> ! {
    // SAFETY: ends the process at once, without touching what it shares with its parent.
    unsafe { libc::_exit(status) }
}

/// Runs `body` in a process of its own. This process has one thread.
pub fn fork(body: impl FnOnce()) -> libc::pid_t {
    // SAFETY: one thread, so the child is a whole copy.
    match unsafe { libc::fork() } {
        0 => {
            // Nothing outlives a driver that was killed, or has failed.
            // SAFETY: takes a number.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
            leave(if ended.is_ok() { 0 } else { 1 })
        }
        pid if pid > 0 => pid,
        _ => panic!("fork: {}", io::Error::last_os_error()),
    }
}

/// Waits for a child's end, or for its stop.
pub fn reap(pid: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: a child of ours, and a valid pointer.
    let n = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(n, pid, "waitpid: {}", io::Error::last_os_error());
    status
}

/// Kills a child that has not been reaped.
pub fn kill(pid: libc::pid_t) {
    // SAFETY: a child of ours.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    assert!(libc::WIFSIGNALED(reap(pid)), "it had ended by itself");
}

/// In a child: from here on it goes as its parent wants.
pub fn start() {
    ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
    // SAFETY: stops ourselves, until the tracer has us go on.
    unsafe { libc::raise(libc::SIGSTOP) };
}

fn ptrace(request: libc::c_uint, pid: libc::pid_t, address: u64, data: u64) {
    // SAFETY: requests that take no memory of ours.
    let n = unsafe { libc::ptrace(request, pid, address, data) };
    assert_eq!(n, 0, "ptrace: {}", io::Error::last_os_error());
}

/// A child that stands before an instruction.
pub struct Stepper {
    pub pid: libc::pid_t,
    /// How it has ended, if it has.
    pub ended: Option<i32>,
}

impl Stepper {
    /// A child that calls [`start`].
    pub fn fork(body: impl FnOnce()) -> Self {
        let pid = fork(body);
        assert!(libc::WIFSTOPPED(reap(pid)), "the victim has not come so far");
        Self { pid, ended: None }
    }

    /// Goes on as `request` says. False if it has ended.
    fn go(&mut self, request: libc::c_uint) -> bool {
        ptrace(request, self.pid, 0, 0);
        let status = reap(self.pid);
        if !libc::WIFSTOPPED(status) {
            self.ended = Some(status);
            return false;
        }
        let signal = libc::WSTOPSIG(status);
        assert_eq!(signal, libc::SIGTRAP, "the victim was stopped by signal {signal}");
        true
    }

    /// One instruction. False if it was the last.
    pub fn step(&mut self) -> bool {
        self.go(libc::PTRACE_SINGLESTEP)
    }

    /// Until it enters or leaves a system call. False if it has ended.
    pub fn step_to_syscall(&mut self) -> bool {
        self.go(libc::PTRACE_SYSCALL)
    }

    /// Lets it run to its end, and says how that was.
    pub fn run(&mut self) -> i32 {
        while self.ended.is_none() {
            self.go(libc::PTRACE_CONT);
        }
        self.ended.unwrap_or_default()
    }

    /// True if it was still there to be killed.
    pub fn kill(&mut self) -> bool {
        let alive = self.ended.is_none();
        if alive {
            kill(self.pid);
            self.ended = Some(libc::SIGKILL);
        }
        alive
    }

    /// Address of the next instruction.
    #[cfg(target_arch = "x86_64")]
    pub fn at(&self) -> u64 {
        // SAFETY: all zeros is a valid value, which the call fills in.
        unsafe {
            let mut registers: libc::user_regs_struct = std::mem::zeroed();
            libc::ptrace(libc::PTRACE_GETREGS, self.pid, 0, &raw mut registers);
            registers.rip
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn at(&self) -> u64 {
        0
    }

    /// Whether the instruction at this address is a system call.
    #[cfg(target_arch = "x86_64")]
    pub fn is_syscall(&self, at: u64) -> bool {
        // SAFETY: reads a word of the victim, or fails.
        let code = unsafe { libc::ptrace(libc::PTRACE_PEEKTEXT, self.pid, at, 0) };
        code & 0xffff == 0x050f
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_syscall(&self, _: u64) -> bool {
        false
    }

    /// Runs until it has come to this address so many times. False if it has ended.
    #[cfg(target_arch = "x86_64")]
    fn run_to(&mut self, address: u64, times: usize) -> bool {
        let register = |n: usize| (std::mem::offset_of!(libc::user, u_debugreg) + 8 * n) as u64;
        ptrace(libc::PTRACE_POKEUSER, self.pid, register(0), address);
        ptrace(libc::PTRACE_POKEUSER, self.pid, register(7), 1);
        let there = (0..times).all(|_| self.go(libc::PTRACE_CONT));
        if there {
            ptrace(libc::PTRACE_POKEUSER, self.pid, register(7), 0);
        }
        there
    }

    /// Goes to where the `k`-th instruction of `way` was. False if it has ended: then it has gone another way.
    pub fn go_to(&mut self, way: &Way, k: usize) -> bool {
        let from = way.anchor(k);
        #[cfg(target_arch = "x86_64")]
        let from = match from {
            0 => 0,
            from if self.run_to(way.addresses[from], way.visits[from]) => from,
            _ => return false,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let from = from * 0;
        (from..k).all(|_| self.step())
    }
}

/// Stops that going somewhere may cost.
const COST: usize = 200;

/// The instructions of an operation.
pub struct Way {
    addresses: Vec<u64>,
    /// How often the address has come up so far, this time included.
    visits: Vec<usize>,
    /// Where something is seen by others: before or after a system call, or a change of what `look` has looked at.
    pub matters: Vec<usize>,
}

impl Way {
    /// Takes a victim from its start to its end, step by step. What `look` returns is what others see.
    pub fn of<T: PartialEq>(victim: &mut Stepper, look: impl Fn() -> T) -> Self {
        let (mut way, mut seen, mut before) = (Self::empty(), look(), HashMap::new());
        loop {
            let at = victim.at();
            let visits = before.entry(at).or_insert(0);
            *visits += 1;
            way.visits.push(*visits);
            way.addresses.push(at);
            let syscall = victim.is_syscall(at);
            let more = victim.step();
            let now = look();
            if syscall || now != seen {
                way.matters.extend([way.len() - 1, way.len()]);
                seen = now;
            }
            if !more {
                break;
            }
        }
        // After the last there is nobody to kill.
        way.matters.retain(|&k| k < way.addresses.len());
        way.matters.dedup();
        way
    }

    fn empty() -> Self {
        Self { addresses: Vec::new(), visits: Vec::new(), matters: vec![0] }
    }

    /// How many instructions.
    pub fn len(&self) -> usize {
        self.addresses.len()
    }

    /// The best place for a breakpoint on the way to `k`.
    fn anchor(&self, k: usize) -> usize {
        let near = k.saturating_sub(COST)..=k;
        near.min_by_key(|&from| if from == 0 { k } else { self.visits[from] + k - from }).unwrap_or(0)
    }

    /// Whether `k` can be reached at a fair price: not in the middle of a long loop.
    fn is_near(&self, k: usize) -> bool {
        let from = self.anchor(k);
        k - from + if from == 0 { 0 } else { self.visits[from] } <= COST
    }

    /// `count` instructions: those that matter, then others, spread over the whole way in steps of the golden ratio.
    pub fn choose(&self, count: usize) -> Vec<usize> {
        let mut chosen: Vec<usize> = self.matters.iter().copied().filter(|&k| self.is_near(k)).collect();
        let mut had: HashSet<usize> = chosen.iter().copied().collect();
        let mut k = 0;
        for _ in 0..self.len() * 2 {
            if chosen.len() >= count {
                break;
            }
            k = (k + self.len() * 1000 / 1618 + 1) % self.len();
            if self.is_near(k) && had.insert(k) {
                chosen.push(k);
            }
        }
        chosen
    }
}

/// What a test has killed.
#[derive(Default)]
pub struct Toll {
    /// How many.
    pub kills: usize,
    /// At which addresses.
    pub at: HashSet<u64>,
}

/// Waits without sleeping until `done` gives something.
pub fn until<T>(what: &str, watchdog: Duration, mut done: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + watchdog;
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < end, "waited in vain for {what}");
        std::thread::yield_now();
    }
}
