/*
 * Death at a random instruction of a call. The process executes the call once in single steps to count its instructions, and kills
 * itself at a random one of the next such call. Needs random_state of ends.h.
 */
#ifndef STEPS_H
#define STEPS_H

#include <signal.h>

static volatile uint64_t steps, fatal_step = UINT64_MAX, measured_steps;

static void step(int signal)
{
	(void)signal;
	if (steps++ >= fatal_step)
		kill(getpid(), SIGKILL);
}

static inline void prepare_steps(void)
{
	signal(SIGTRAP, step);
}

/* The CPU traps after each instruction while this flag is set. */
static inline void set_trap_flag(void)
{
	__asm__ volatile("sub $128, %%rsp; pushfq; orq $0x100, (%%rsp); popfq; add $128, %%rsp" ::: "memory", "cc");
}

static inline void clear_trap_flag(void)
{
	__asm__ volatile("sub $128, %%rsp; pushfq; andq $~0x100, (%%rsp); popfq; add $128, %%rsp" ::: "memory", "cc");
}

static inline void begin_steps(void)
{
	steps = 0;
	if (measured_steps)
		fatal_step = below(measured_steps);
}

static inline void end_steps(void)
{
	if (!measured_steps)
		measured_steps = steps;
}

#define STEPPED(call)              \
	do {                       \
		begin_steps();     \
		set_trap_flag();   \
		call;              \
		clear_trap_flag(); \
		end_steps();       \
	} while (0)

#endif
