//! Processes that can be stopped and killed at any of their instructions.
//!
//! One step with ptrace costs some 20 us, and an operation has thousands of instructions. Therefore a first run goes step by
//! step and records the trace. Later runs go to a breakpoint in a debug register of the CPU, and step only where the address
//! alone does not identify a place. All are forks of one process, so addresses are the same in each.
#![allow(unsafe_code)] // fork, ptrace, kill.

use std::collections::{HashMap, HashSet};
use std::io;

/// Ends the process at once: nothing is dropped or flushed, and no handler runs.
pub fn leave(status: i32) -> ! {
    // SAFETY: ends the process at once, without touching what it shares with its parent.
    unsafe { libc::_exit(status) }
}

/// Runs `body` in a process of its own. The calling process must have one thread.
pub fn fork(body: impl FnOnce()) -> libc::pid_t {
    // SAFETY: there is only one thread, so the child is a whole copy.
    match unsafe { libc::fork() } {
        0 => {
            // The child must not outlive a parent that was killed, or has failed.
            // SAFETY: the call takes a number.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
            leave(if ended.is_ok() { 0 } else { 1 })
        }
        pid if pid > 0 => pid,
        _ => panic!("fork: {}", io::Error::last_os_error()),
    }
}

/// Waits until a child ends or stops.
pub fn reap(pid: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: the child is ours, and the pointer is valid.
    let n = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(n, pid, "waitpid: {}", io::Error::last_os_error());
    status
}

/// Kills a child that has not been reaped.
pub fn kill(pid: libc::pid_t) {
    // SAFETY: the child is ours.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    assert!(libc::WIFSIGNALED(reap(pid)), "it had ended by itself");
}

/// Called in a child: from here on, the parent controls it.
pub fn start() {
    ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
    // SAFETY: this stops the process itself, until the tracer continues it.
    unsafe { libc::raise(libc::SIGSTOP) };
}

fn ptrace(request: libc::c_uint, pid: libc::pid_t, address: u64, data: u64) {
    // SAFETY: these requests take no memory of this process.
    let n = unsafe { libc::ptrace(request, pid, address, data) };
    assert_eq!(n, 0, "ptrace: {}", io::Error::last_os_error());
}

/// A child that is stopped before an instruction.
pub struct Stepper {
    /// The child, which nobody else may reap.
    pub pid: libc::pid_t,
    /// How the child has ended, if it has.
    pub ended: Option<i32>,
}

impl Stepper {
    /// Returns a child that calls [`start`].
    pub fn fork(body: impl FnOnce()) -> Self {
        let pid = fork(body);
        assert!(libc::WIFSTOPPED(reap(pid)), "the victim has not come so far");
        Self { pid, ended: None }
    }

    /// Continues as `request` says. Returns false if the child has ended.
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

    /// Executes one instruction. Returns false if it was the last.
    pub fn step(&mut self) -> bool {
        self.go(libc::PTRACE_SINGLESTEP)
    }

    /// Continues until the child enters or leaves a system call. Returns false if it has ended.
    pub fn step_to_syscall(&mut self) -> bool {
        self.go(libc::PTRACE_SYSCALL)
    }

    /// Lets the child run to its end, and returns how it ended.
    pub fn run(&mut self) -> i32 {
        while self.ended.is_none() {
            self.go(libc::PTRACE_CONT);
        }
        self.ended.unwrap_or_default()
    }

    /// Kills the child. Returns true if it was still there to be killed.
    pub fn kill(&mut self) -> bool {
        let alive = self.ended.is_none();
        if alive {
            kill(self.pid);
            self.ended = Some(libc::SIGKILL);
        }
        alive
    }

    /// Returns the address of the next instruction.
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

    /// Returns whether the instruction at this address is a system call.
    #[cfg(target_arch = "x86_64")]
    pub fn is_syscall(&self, at: u64) -> bool {
        // SAFETY: this reads a word of the victim, or fails.
        let code = unsafe { libc::ptrace(libc::PTRACE_PEEKTEXT, self.pid, at, 0) };
        code & 0xffff == 0x050f
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_syscall(&self, _: u64) -> bool {
        false
    }

    /// Runs until the child has come to this address `times` times. Returns false if it has ended.
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

    /// Goes to the place of the `k`-th instruction of the trace. Returns false if the child has ended: then it has taken
    /// another path.
    pub fn go_to(&mut self, trace: &Trace, k: usize) -> bool {
        let from = trace.anchor(k);
        #[cfg(target_arch = "x86_64")]
        let from = match from {
            0 => 0,
            from if self.run_to(trace.addresses[from], trace.visits[from]) => from,
            _ => return false,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let from = from * 0;
        (from..k).all(|_| self.step())
    }
}

/// Maximum number of stops on the way to an instruction.
const COST: usize = 200;

/// The trace of an operation: its instructions.
pub struct Trace {
    addresses: Vec<u64>,
    /// How often each address has come up so far, including this time.
    visits: Vec<usize>,
    /// Instructions at which others see something: before or after a system call, or a change of what `look` returns.
    pub matters: Vec<usize>,
}

impl Trace {
    /// Runs a victim from its start to its end, step by step. `look` returns what others see.
    pub fn of<T: PartialEq>(victim: &mut Stepper, look: impl Fn() -> T) -> Self {
        let (mut trace, mut seen, mut before) = (Self::empty(), look(), HashMap::new());
        loop {
            let at = victim.at();
            let visits = before.entry(at).or_insert(0);
            *visits += 1;
            trace.visits.push(*visits);
            trace.addresses.push(at);
            let syscall = victim.is_syscall(at);
            let more = victim.step();
            let now = look();
            if syscall || now != seen {
                trace.matters.extend([trace.instructions() - 1, trace.instructions()]);
                seen = now;
            }
            if !more {
                break;
            }
        }
        // After the last instruction there is no process to kill.
        trace.matters.retain(|&k| k < trace.addresses.len());
        trace.matters.dedup();
        trace
    }

    fn empty() -> Self {
        Self { addresses: Vec::new(), visits: Vec::new(), matters: vec![0] }
    }

    /// Returns the number of instructions.
    pub fn instructions(&self) -> usize {
        self.addresses.len()
    }

    /// Returns the best place for a breakpoint on the way to `k`.
    fn anchor(&self, k: usize) -> usize {
        let near = k.saturating_sub(COST)..=k;
        near.min_by_key(|&from| if from == 0 { k } else { self.visits[from] + k - from }).unwrap_or(0)
    }

    /// Returns whether `k` can be reached with an acceptable number of stops. In the middle of a long loop, it cannot.
    fn is_near(&self, k: usize) -> bool {
        let from = self.anchor(k);
        k - from + if from == 0 { 0 } else { self.visits[from] } <= COST
    }

    /// Selects `count` instructions: first those in `matters`, then others, spread over the whole trace in steps of the
    /// golden ratio.
    pub fn choose(&self, count: usize) -> Vec<usize> {
        let mut chosen: Vec<usize> = self.matters.iter().copied().filter(|&k| self.is_near(k)).collect();
        let mut had: HashSet<usize> = chosen.iter().copied().collect();
        let mut k = 0;
        for _ in 0..self.instructions() * 2 {
            if chosen.len() >= count {
                break;
            }
            k = (k + self.instructions() * 1000 / 1618 + 1) % self.instructions();
            if self.is_near(k) && had.insert(k) {
                chosen.push(k);
            }
        }
        chosen
    }
}

/// Statistics of the kills of a test.
#[derive(Default)]
pub struct KillCount {
    /// Number of kills.
    pub kills: usize,
    /// Addresses of the kills.
    pub at: HashSet<u64>,
}
