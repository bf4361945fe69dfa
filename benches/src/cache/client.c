/* Measures GETs of an unmodified client: HOST PORT COUNT. Prints the figures as JSON, in microseconds. */
#include <libmemcached/memcached.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	int count = atoi(argv[3]);
	memcached_st *client = memcached_create(NULL);
	char value[100];
	double *times = malloc(count * sizeof *times);

	if (!client || !times || memcached_server_add(client, argv[1], atoi(argv[2])))
		return 1;
	memcached_behavior_set(client, MEMCACHED_BEHAVIOR_TCP_NODELAY, 1);
	memset(value, 'v', sizeof value);
	if (memcached_set(client, "key", 3, value, sizeof value, 0, 0))
		return 1;
	for (int i = -count / 10; i < count; i++) {
		size_t length;
		uint32_t flags;
		memcached_return_t error;
		double begun = now();
		char *found = memcached_get(client, "key", 3, &length, &flags, &error);
		double taken = now() - begun;

		if (!found || length != sizeof value)
			return 1;
		free(found);
		if (i >= 0)
			times[i] = taken;
	}
	qsort(times, count, sizeof *times, compare);
	printf("{\"median\": %f, \"p99\": %f, \"rate\": 0, \"cpu\": 0}\n", times[count / 2], times[count * 99 / 100]);
	return 0;
}
