/*
 * Registers memory that no other program uses, and watches for a while whether it changes. Each new run of the program gets the pages
 * that other programs have just freed, so it notices a program that still writes to them.
 *
 * Exits with 5 if memory has changed.
 *
 * Usage: bystander DEVICE MIB MILLISECONDS
 */
#include "ends.h"
#include <time.h>

static uint64_t now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000ull + now.tv_nsec / 1000000;
}

int main(int count, char **arguments)
{
	static struct end end;
	CHECK(count == 4);
	open_end(&end, arguments[1], 1, 0, 1, 1, strtoul(arguments[2], NULL, 10) << 20);
	uint64_t seed = mix(getpid()), words = end.size / sizeof seed, *memory = (uint64_t *)end.bytes;
	for (uint64_t i = 0; i < words; i++)
		memory[i] = mix(seed + i);
	register_end(&end);
	for (uint64_t until = now_ms() + strtoul(arguments[3], NULL, 10); now_ms() < until; usleep(20000)) {
		for (uint64_t i = 0; i < words; i++) {
			if (memory[i] != mix(seed + i)) {
				fprintf(stderr, "word %lu of %lu has changed to %#lx\n", i, words, memory[i]);
				return 5;
			}
		}
	}
	CHECK(!ibv_dereg_mr(end.mr));
	return 0;
}
