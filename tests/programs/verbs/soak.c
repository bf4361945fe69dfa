/*
 * Sends this many messages to the other end, and receives as many: SENDs, and WRITEs with immediate data, of all lengths. Each
 * message must arrive once, in order and unchanged, and neither end may sleep for ever. An end polls and sleeps in turns.
 *
 * Exits with 1 if a check fails, with 3 if there is no progress for STALL seconds, with 4 if there is none because a call does not
 * return, and with 5 if memory that no other program uses has changed.
 *
 * Usage: soak DEVICE 0|1 own|shared any|solicited free|one COUNT STALL
 */
#define _GNU_SOURCE
#include "ends.h"
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

/* The number of sends and receives of a queue pair that have not completed, and the length of a message. */
#define WINDOW 64
#define RECEIVES 128
#define LONGEST 2048

static struct end end;
static int me, pairs, only_solicited, stall;
/* The number of sends that may be incomplete at the moment. With few, both ends sleep often. */
static unsigned window = WINDOW;

/* The call that is being executed, and the number of calls so far. */
enum call { NOTHING, POST_SEND, POST_RECEIVE, POLL_SENDS, POLL_RECEIVES, NOTIFY, SLEEP, GET_EVENT };
static volatile enum call in_call;
static volatile uint64_t calls;

static void enter(enum call call)
{
	in_call = call;
	calls++;
}

/* The properties of message k of a queue pair, which both ends know. */
struct plan {
	int is_write, is_inline, is_solicited, has_immediate;
	unsigned length;
	uint64_t number;
};

static struct plan plan(int from, int pair, uint64_t k)
{
	uint64_t number = (k * MOST_PAIRS + pair) * 2 + from, random = mix(number);
	static const unsigned most[] = {9, 33, 34, 66, 66, 257, 257, LONGEST + 1};
	struct plan plan = {.length = (random >> 16) % most[random & 7], .number = number};
	plan.is_write = random >> 3 & 1;
	plan.is_inline = plan.length <= 64 && random >> 4 & 1;
	plan.is_solicited = only_solicited || random >> 5 & 1;
	plan.has_immediate = plan.is_write || random >> 6 & 1;
	return plan;
}

/* The memory: buffers to send from and to receive into, and a part that the other end writes to. */
static char *send_buffer(int pair, uint64_t k)
{
	return end.bytes + (pair * WINDOW + k % WINDOW) * LONGEST;
}

static char *receive_buffer(uint64_t slot)
{
	return end.bytes + (MOST_PAIRS * WINDOW + slot) * LONGEST;
}

/* The other end is never ahead by more messages than there are receives, so no message overwrites one that has not been checked. */
static size_t write_offset(int pair, uint64_t k)
{
	return (MOST_PAIRS * (WINDOW + RECEIVES) + (size_t)pair * RECEIVES + k % RECEIVES) * LONGEST;
}

#define BYTES ((size_t)MOST_PAIRS * (WINDOW + 2 * RECEIVES) * LONGEST)

static void fill(char *bytes, const struct plan *plan)
{
	memset(bytes, plan->number * 31 >> 3, plan->length);
	if (plan->length >= 8)
		memcpy(bytes, &plan->number, 8);
	if (plan->length >= 16)
		memcpy(bytes + plan->length - 8, &plan->number, 8);
}

static int is_as_sent(const char *bytes, const struct plan *plan)
{
	static char wanted[LONGEST];
	fill(wanted, plan);
	return !memcmp(bytes, wanted, plan->length);
}

struct pair {
	uint64_t count;
	/* Messages that were posted, and those that have completed. */
	uint64_t posted, complete;
	/* Messages that were signaled. */
	uint64_t signaled[WINDOW];
	uint64_t first_signaled, last_signaled;
	unsigned unsignaled;
	/* Messages that were received. */
	uint64_t received;
	/* Receives of the queue pair's own receive queue: posted, and still to be posted. */
	uint64_t receives, free;
};

static struct pair all[MOST_PAIRS];
static uint64_t sleeps;
static char is_posted[RECEIVES * MOST_PAIRS];

static void post_sends(int i)
{
	struct pair *pair = &all[i];
	while (pair->posted < pair->count && pair->posted - pair->complete < window) {
		struct ibv_sge sges[4];
		struct ibv_send_wr wrs[4], *bad;
		unsigned n = 0, most = 1 + below(4);
		while (n < most && pair->posted < pair->count && pair->posted - pair->complete < window) {
			uint64_t k = pair->posted++;
			struct plan p = plan(me, i, k);
			char *bytes = send_buffer(i, k);
			fill(bytes, &p);
			sges[n] = (struct ibv_sge){(uintptr_t)bytes, p.length, end.mr->lkey};
			int is_signaled = ++pair->unsignaled > below(16) || pair->posted - pair->complete >= window || pair->posted == pair->count;
			wrs[n] = (struct ibv_send_wr){
				.wr_id = (uint64_t)i << 56 | k,
				.sg_list = &sges[n],
				.num_sge = p.length > 0,
				.opcode = p.is_write	    ? IBV_WR_RDMA_WRITE_WITH_IMM
					  : p.has_immediate ? IBV_WR_SEND_WITH_IMM
							    : IBV_WR_SEND,
				.send_flags = (is_signaled ? IBV_SEND_SIGNALED : 0) | (p.is_inline ? IBV_SEND_INLINE : 0) |
					      (p.is_solicited ? IBV_SEND_SOLICITED : 0),
				.imm_data = (uint32_t)p.number,
				.wr.rdma = {end.address + write_offset(i, k), end.key},
			};
			if (is_signaled) {
				pair->unsignaled = 0;
				pair->signaled[pair->last_signaled++ % WINDOW] = k;
			}
			if (n > 0)
				wrs[n - 1].next = &wrs[n];
			n++;
		}
		enter(POST_SEND);
		CHECK(!ibv_post_send(end.pairs[i], wrs, &bad));
		enter(NOTHING);
	}
}

static void post_receive(int i, uint64_t slot)
{
	struct ibv_sge sge = {(uintptr_t)receive_buffer(slot), LONGEST, end.mr->lkey};
	struct ibv_recv_wr wr = {.wr_id = slot, .sg_list = &sge, .num_sge = 1}, *bad;
	CHECK(!is_posted[slot]);
	is_posted[slot] = 1;
	enter(POST_RECEIVE);
	CHECK(end.srq ? !ibv_post_srq_recv(end.srq, &wr, &bad) : !ibv_post_recv(end.pairs[i], &wr, &bad));
	enter(NOTHING);
}

/* The number of receives that wait to be posted, for each queue pair. Those of the shared receive queue are counted at index 0. */
static uint64_t free_slots[MOST_PAIRS][RECEIVES];

static void free_slot(int i, uint64_t slot)
{
	i = end.srq ? 0 : i;
	is_posted[slot] = 0;
	free_slots[i][all[i].free++] = slot;
	/* From time to time, the other end has to wait for receives. */
	if (all[i].free == RECEIVES || below(24) == 0) {
		for (uint64_t n = 0; n < all[i].free; n++)
			post_receive(i, free_slots[i][n]);
		all[i].free = 0;
	}
}

static void has_sent(const struct ibv_wc *wc)
{
	CHECK(wc->status == IBV_WC_SUCCESS);
	struct pair *pair = &all[wc->wr_id >> 56];
	uint64_t k = wc->wr_id & ((1ul << 56) - 1);
	/* All signaled requests complete once, in order. */
	CHECK(pair->first_signaled < pair->last_signaled);
	CHECK(pair->signaled[pair->first_signaled++ % WINDOW] == k);
	pair->complete = k + 1;
}

static void has_received(const struct ibv_wc *wc)
{
	CHECK(wc->status == IBV_WC_SUCCESS);
	int i = 0;
	while (i < pairs && end.pairs[i]->qp_num != wc->qp_num)
		i++;
	CHECK(i < pairs);
	struct pair *pair = &all[i];
	CHECK(pair->received < pair->count && wc->wr_id < sizeof is_posted && is_posted[wc->wr_id]);
	uint64_t k = pair->received++;
	struct plan p = plan(!me, i, k);
	CHECK(wc->opcode == (p.is_write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV));
	CHECK(wc->byte_len == p.length && !(wc->wc_flags & IBV_WC_WITH_IMM) == !p.has_immediate);
	CHECK(!p.has_immediate || wc->imm_data == (uint32_t)p.number);
	CHECK(is_as_sent(p.is_write ? end.bytes + write_offset(i, k) : receive_buffer(wc->wr_id), &p));
	free_slot(i, wc->wr_id);
}

static int take(void)
{
	struct ibv_wc wcs[16];
	int most = 1 + below(16), found = 0, n;
	enter(POLL_SENDS);
	n = ibv_poll_cq(end.sends, most, wcs);
	enter(NOTHING);
	CHECK(n >= 0);
	for (int i = 0; i < n; i++)
		has_sent(&wcs[i]);
	found += n;
	enter(POLL_RECEIVES);
	n = ibv_poll_cq(end.receives, most, wcs);
	enter(NOTHING);
	CHECK(n >= 0);
	for (int i = 0; i < n; i++)
		has_received(&wcs[i]);
	return found + n;
}

static int has_received_all(void)
{
	for (int i = 0; i < pairs; i++)
		if (all[i].received < all[i].count)
			return 0;
	return 1;
}

static int is_over(void)
{
	if (!has_received_all())
		return 0;
	for (int i = 0; i < pairs; i++)
		if (all[i].complete < all[i].count)
			return 0;
	return 1;
}

/* Asks for a notification, and sleeps until it arrives. */
static void sleep_for_one(void)
{
	enter(NOTIFY);
	CHECK(!ibv_req_notify_cq(end.sends, 0) && !ibv_req_notify_cq(end.receives, only_solicited));
	enter(NOTHING);
	if (take()) {
		if (below(2))
			return;
		/* Takes what is there, while the earlier request for a notification stays in effect. */
		do {
			for (int i = 0; i < pairs; i++)
				post_sends(i);
		} while (take());
		if (has_received_all())
			return;
	}
	if (below(2)) {
		struct pollfd readable = {.fd = end.channel->fd, .events = POLLIN};
		enter(SLEEP);
		while (poll(&readable, 1, -1) < 0)
			CHECK(errno == EINTR);
	}
	struct ibv_cq *cq;
	void *context;
	enter(GET_EVENT);
	CHECK(!ibv_get_cq_event(end.channel, &cq, &context));
	ibv_ack_cq_events(cq, 1);
	enter(NOTHING);
	sleeps++;
}

/* Memory that is not registered, and shares no page with registered memory: static, and from the heap. */
static char untouched[65536], *also_untouched;

static void fill_untouched(void)
{
	also_untouched = malloc(sizeof untouched);
	CHECK(also_untouched);
	memset(untouched, 0x5a, sizeof untouched);
	memset(also_untouched, 0x5a, sizeof untouched);
}

static void check_untouched(void)
{
	for (size_t i = 0; i < sizeof untouched; i++)
		if (untouched[i] != 0x5a || also_untouched[i] != 0x5a)
			_exit(5);
}

static volatile int is_suspected;

static void stalled(int signal)
{
	static uint64_t before;
	if (!is_suspected) {
		/* Distinguishes a call that does not return from calls that have no effect. */
		is_suspected = 1;
		before = calls;
		alarm(1);
		return;
	}
	int is_stuck = calls == before && in_call != NOTHING && in_call != SLEEP && in_call != GET_EVENT;
	fprintf(stderr, "no progress for %d s; in call %d%s; %lu sleeps\n", stall, in_call, is_stuck ? ", stuck" : "", sleeps);
	for (int i = 0; i < pairs; i++)
		fprintf(stderr, "pair %d: posted %lu, complete %lu, received %lu, of %lu; %lu receives are not posted\n", i,
			all[i].posted, all[i].complete, all[i].received, all[i].count, all[i].free);
	(void)signal;
	check_untouched();
	_exit(is_stuck ? 4 : 3);
}

int main(int count, char **arguments)
{
	CHECK(count == 8);
	stall = atoi(arguments[7]);
	fill_untouched();
	atexit(check_untouched);
	signal(SIGALRM, stalled);
	alarm(stall);
	me = atoi(arguments[2]);
	int shared = !strcmp(arguments[3], "shared");
	only_solicited = !strcmp(arguments[4], "solicited");
	uint64_t messages = strtoul(arguments[6], NULL, 10);
	if (!strcmp(arguments[5], "one")) {
		/* A thread that polls takes CPU time from the other end. */
		cpu_set_t set;
		CHECK(!sched_getaffinity(0, sizeof set, &set));
		int cpu = 0;
		while (!CPU_ISSET(cpu, &set))
			cpu++;
		CPU_ZERO(&set);
		CPU_SET(cpu, &set);
		CHECK(!sched_setaffinity(0, sizeof set, &set));
	}
	random_state = messages * 2 + me;
	pairs = shared ? 3 : 1;
	open_end(&end, arguments[1], pairs, shared, WINDOW, RECEIVES, BYTES);
	register_end(&end);
	make_pairs(&end, WINDOW, RECEIVES);
	for (int i = 0; i < pairs; i++)
		all[i].count = messages / pairs;
	for (uint64_t slot = 0; slot < RECEIVES; slot++)
		post_receive(0, slot);
	CHECK(connect_end(&end, 20));

	alarm(stall);
	struct timespec begin, now;
	clock_gettime(CLOCK_MONOTONIC, &begin);
	/* The number of polls before a sleep, and of messages until this is chosen again. */
	unsigned patience = 0, left = 0, empty = 0;
	unsigned since_alarm = 0;
	while (!is_over()) {
		if (left == 0 || (window == 0 && has_received_all())) {
			static const unsigned patiences[] = {0, 10, 1000, -1u};
			patience = patiences[below(4)];
			static const unsigned windows[] = {1, 2, 16, WINDOW};
			/* From time to time, the second end only receives, so that only a message can wake it. */
			window = me == 1 && below(3) == 0 && !has_received_all() ? 0 : windows[below(4)];
			left = 1 << (4 + below(10));
		}
		for (int i = 0; i < pairs; i++)
			post_sends(i);
		unsigned found = take();
		since_alarm += found;
		if (since_alarm >= 1000) {
			since_alarm = is_suspected = 0;
			alarm(stall);
		}
		left -= found < left ? found : left;
		empty = found ? 0 : empty + 1;
		if (empty > patience) {
			empty = 0;
			sleep_for_one();
		}
	}
	alarm(0);
	clock_gettime(CLOCK_MONOTONIC, &now);
	double took = (now.tv_sec - begin.tv_sec) + 1e-9 * (now.tv_nsec - begin.tv_nsec);
	printf("good: %lu messages each way in %.1f s, %lu sleeps\n", messages / pairs * pairs, took, sleeps);
	fflush(stdout);
	wait_for_end();
	return 0;
}
