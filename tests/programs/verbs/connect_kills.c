/*
 * Makes connections with librdmacm, of which one side dies while they are being made: at a random instruction of rdma_connect or
 * rdma_accept. That side, the victim, first executes the call in single steps for a connection that is used and ended, to count the
 * instructions. It dies during the second connection. The other side survives, and each of its identifiers gets an event for the end.
 *
 * Usage: connect_kills survivor|victim connect|accept PORT SEED
 *
 * With "connect", the victim connects and the survivor listens at the port. With "accept", it is the other way round: the survivor
 * connects to the port in each line of its standard input. A survivor prints a line each time that all its connections have ended,
 * and "good" at the end of its input.
 */
#define _GNU_SOURCE
#include "ends.h"
#include "steps.h"
#include <arpa/inet.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

/* Maximum number of seconds without an event. A process that steps through a call on a busy machine takes long for one. */
#define STALL 300

static struct rdma_event_channel *channel;
static struct sockaddr_in address = {.sin_family = AF_INET};
static int is_survivor, connects;
/* Number of connections of this side that have not ended. */
static int open_ids;

/* A connection, on which each side sends one message. */
struct side {
	struct ibv_mr *mr;
	char bytes[2][64];
};

static void prepare(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = {
		.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1}, .qp_type = IBV_QPT_RC};
	struct side *side = calloc(1, sizeof *side);
	CHECK(side && rdma_create_qp(id, NULL, &init) == 0);
	side->mr = rdma_reg_msgs(id, side->bytes, sizeof side->bytes);
	CHECK(side->mr && rdma_post_recv(id, NULL, side->bytes[1], 64, side->mr) == 0);
	id->context = side;
	open_ids++;
}

static void end_side(struct rdma_cm_id *id)
{
	struct side *side = id->context;
	rdma_destroy_qp(id);
	CHECK(rdma_dereg_mr(side->mr) == 0);
	free(side);
	CHECK(rdma_destroy_id(id) == 0);
	open_ids--;
}

/* Sends a message. The other side may have died meanwhile. */
static void greet(struct rdma_cm_id *id)
{
	struct side *side = id->context;
	snprintf(side->bytes[0], 64, "hello");
	CHECK(rdma_post_send(id, NULL, side->bytes[0], 64, side->mr, IBV_SEND_SIGNALED) == 0);
	struct ibv_wc wc;
	CHECK(rdma_get_send_comp(id, &wc) == 1);
	CHECK(wc.status == IBV_WC_SUCCESS || is_survivor);
}

static void expect_greeting(struct rdma_cm_id *id)
{
	struct side *side = id->context;
	struct ibv_wc wc;
	CHECK(rdma_get_recv_comp(id, &wc) == 1);
	CHECK(wc.status == IBV_WC_SUCCESS ? !strcmp(side->bytes[1], "hello") : is_survivor);
}

static void connect_to(void)
{
	struct rdma_cm_id *id;
	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000) == 0);
	open_ids++;
}

static void connect_resolved(struct rdma_cm_id *id)
{
	open_ids--;
	prepare(id);
	struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1, .retry_count = 7};
	int result;
	if (!is_survivor)
		STEPPED(result = rdma_connect(id, &param));
	else
		result = rdma_connect(id, &param);
	CHECK(result == 0 || is_survivor);
	if (result)
		end_side(id);
}

static void accept_request(struct rdma_cm_id *id)
{
	prepare(id);
	struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1};
	int result;
	if (!is_survivor)
		STEPPED(result = rdma_accept(id, &param));
	else
		result = rdma_accept(id, &param);
	/* The connecting side may be dead. */
	CHECK(result == 0 || is_survivor);
	if (result)
		end_side(id);
}

/* Handles one event. Both sides greet each other, and then the connecting side disconnects. */
static void step_event(void)
{
	struct rdma_cm_event *event;
	CHECK(rdma_get_cm_event(channel, &event) == 0);
	struct rdma_cm_id *id = event->id;
	enum rdma_cm_event_type what = event->event;
	int is_mine = id->context != NULL;
	CHECK(rdma_ack_cm_event(event) == 0);
	alarm(STALL);
	switch (what) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		CHECK(rdma_resolve_route(id, 2000) == 0);
		break;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		connect_resolved(id);
		break;
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		accept_request(id);
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
		greet(id);
		expect_greeting(id);
		if (connects == is_survivor)
			break;
		CHECK(rdma_disconnect(id) == 0 || is_survivor);
		break;
	default:
		/* The connection was disconnected, or it was never established. */
		CHECK(what == RDMA_CM_EVENT_DISCONNECTED || is_survivor);
		CHECK(is_mine);
		rdma_disconnect(id);
		end_side(id);
	}
}

static void listen_at(struct rdma_cm_id **listener)
{
	CHECK(rdma_create_id(channel, listener, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(*listener, (struct sockaddr *)&address) == 0);
	CHECK(rdma_listen(*listener, 8) == 0);
	puts("listening");
	fflush(stdout);
}

/* Handles each line of the input: connects to that port if this is the connecting side, waits until all connections have ended, and
 * prints a line. */
static void survive(void)
{
	struct pollfd fds[2] = {{.fd = channel->fd, .events = POLLIN}, {.fd = 0, .events = POLLIN}};
	for (int asked = 0;;) {
		/* Also accepts what has been requested up to now. */
		if (asked && !open_ids && poll(fds, 1, 0) == 0) {
			puts("over");
			fflush(stdout);
			asked = 0;
		}
		alarm(asked ? STALL : 0);
		CHECK(poll(fds, asked ? 1 : 2, -1) > 0);
		if (fds[0].revents) {
			step_event();
		} else {
			char line[8];
			if (!fgets(line, sizeof line, stdin))
				return;
			asked = 1;
			address.sin_port = htons(atoi(line));
			if (!connects)
				connect_to();
		}
	}
}

int main(int count, char **arguments)
{
	CHECK(count == 5);
	is_survivor = !strcmp(arguments[1], "survivor");
	connects = !strcmp(arguments[2], "connect");
	address.sin_port = htons(atoi(arguments[3]));
	inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
	random_state = strtoul(arguments[4], NULL, 10);
	prepare_steps();
	channel = rdma_create_event_channel();
	CHECK(channel);
	struct rdma_cm_id *listener = NULL;
	if (connects == is_survivor)
		listen_at(&listener);
	if (is_survivor) {
		setvbuf(stdin, NULL, _IONBF, 0);
		survive();
		CHECK(open_ids == 0);
		if (listener)
			CHECK(rdma_destroy_id(listener) == 0);
		puts("good");
		return 0;
	}
	/* The victim dies during the second connection. */
	for (;;) {
		if (connects && !open_ids)
			connect_to();
		step_event();
	}
}
