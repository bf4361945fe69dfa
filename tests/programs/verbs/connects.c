/* Tests the ways in which a connection can begin and end. Both sides are in this process, and use events. Usage: connects PORT */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(is_good)                                                                       \
    do {                                                                                     \
        if (!(is_good)) {                                                                    \
            printf("line %d: %s (errno %d: %s)\n", __LINE__, #is_good, errno, strerror(errno)); \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

static struct rdma_event_channel *channel;
static struct sockaddr_in address = {.sin_family = AF_INET};

/* Returns the next event, which must be the given one. */
static struct rdma_cm_event *expect(enum rdma_cm_event_type wanted, int status)
{
    struct pollfd fd = {.fd = channel->fd, .events = POLLIN};
    CHECK(poll(&fd, 1, 20000) == 1);
    struct rdma_cm_event *event;
    CHECK(rdma_get_cm_event(channel, &event) == 0);
    if (event->event != wanted || event->status != status)
        printf("%s, %d\n", rdma_event_str(event->event), event->status);
    CHECK(event->event == wanted && event->status == status);
    return event;
}

static void pass(enum rdma_cm_event_type wanted)
{
    CHECK(rdma_ack_cm_event(expect(wanted, 0)) == 0);
}

static struct rdma_cm_id *made(void)
{
    struct rdma_cm_id *id;
    CHECK(rdma_create_id(channel, &id, &address, RDMA_PS_TCP) == 0);
    return id;
}

static struct rdma_cm_id *listening(void)
{
    struct rdma_cm_id *id = made();
    CHECK(rdma_bind_addr(id, (struct sockaddr *)&address) == 0);
    CHECK(rdma_listen(id, 5) == 0);
    CHECK(rdma_get_src_port(id) == address.sin_port);
    return id;
}

static void create_qp(struct rdma_cm_id *id)
{
    struct ibv_qp_init_attr init = {
        .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1}, .qp_type = IBV_QPT_RC};
    CHECK(rdma_create_qp(id, NULL, &init) == 0);
    CHECK(id->qp && id->send_cq && id->recv_cq && id->pd);
}

static struct rdma_cm_id *resolved(void)
{
    struct rdma_cm_id *id = made();
    CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000) == 0);
    pass(RDMA_CM_EVENT_ADDR_RESOLVED);
    CHECK(id->verbs && id->port_num == 1);
    CHECK(rdma_resolve_route(id, 2000) == 0);
    pass(RDMA_CM_EVENT_ROUTE_RESOLVED);
    create_qp(id);
    return id;
}

static void ask(struct rdma_cm_id *id)
{
    struct rdma_conn_param param = {
        .private_data = "hello", .private_data_len = 6, .responder_resources = 3, .initiator_depth = 2, .retry_count = 7};
    CHECK(rdma_connect(id, &param) == 0);
}

/* Returns the identifier of the next connection request. */
static struct rdma_cm_id *requested(struct rdma_cm_id *listener)
{
    struct rdma_cm_event *event = expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    struct rdma_cm_id *id = event->id;
    CHECK(event->listen_id == listener && id != listener && id->context == &address && id->verbs);
    CHECK(event->param.conn.private_data_len == 56 && !strcmp(event->param.conn.private_data, "hello"));
    CHECK(event->param.conn.responder_resources == 2 && event->param.conn.initiator_depth == 3);
    CHECK(id->route.addr.src_sin.sin_port == address.sin_port);
    CHECK(id->route.addr.dst_sin.sin_addr.s_addr == address.sin_addr.s_addr);
    CHECK(rdma_ack_cm_event(event) == 0);
    return id;
}

static void destroy(struct rdma_cm_id *id)
{
    if (id->qp)
        rdma_destroy_qp(id);
    CHECK(id->qp == NULL && id->send_cq == NULL);
    CHECK(rdma_destroy_id(id) == 0);
}

static void nobody_listens(void)
{
    struct rdma_cm_id *id = resolved();
    ask(id);
    CHECK(rdma_ack_cm_event(expect(RDMA_CM_EVENT_REJECTED, 8)) == 0);
    destroy(id);
}

static void addresses_are_taken(void)
{
    struct rdma_cm_id *listener = listening(), *second = made();
    int result = rdma_bind_addr(second, (struct sockaddr *)&address) || rdma_listen(second, 1);
    CHECK(result && errno == EADDRINUSE);
    CHECK(rdma_destroy_id(listener) == 0);
    /* The address is free again at once. */
    CHECK(rdma_listen(second, 1) == 0);
    destroy(second);
    struct sockaddr_in foreign = address;
    inet_pton(AF_INET, "192.0.2.99", &foreign.sin_addr);
    struct rdma_cm_id *id = made();
    CHECK(rdma_bind_addr(id, (struct sockaddr *)&foreign) == -1 && errno == EADDRNOTAVAIL);
    foreign.sin_family = AF_UNIX;
    CHECK(rdma_bind_addr(id, (struct sockaddr *)&foreign) == -1);
    /* The library may choose any port. */
    CHECK(rdma_listen(id, 1) == 0 && rdma_get_src_port(id) != 0);
    destroy(id);
}

/* Finds an address of this machine that is not a loopback address. Returns whether there is one. */
static int has_other_address(struct sockaddr_in *found)
{
    struct ifaddrs *list;
    int has = 0;
    CHECK(getifaddrs(&list) == 0);
    for (struct ifaddrs *at = list; at && !has; at = at->ifa_next) {
        has = at->ifa_addr && at->ifa_addr->sa_family == AF_INET && !(at->ifa_flags & IFF_LOOPBACK);
        if (has)
            memcpy(found, at->ifa_addr, sizeof *found);
    }
    freeifaddrs(list);
    return has;
}

/* The device belongs to addresses that are not loopback addresses, as with any adapter. */
static void bound_to_loopback(void)
{
    struct sockaddr_in other;
    int has_other = has_other_address(&other);
    struct rdma_cm_id *id = made();
    CHECK(rdma_bind_addr(id, (struct sockaddr *)&address) == 0);
    CHECK((id->verbs == NULL) == has_other);
    destroy(id);
    if (!has_other)
        return;
    id = made();
    CHECK(rdma_bind_addr(id, (struct sockaddr *)&other) == 0 && id->verbs);
    destroy(id);
}

static void refused(void)
{
    struct rdma_cm_id *listener = listening(), *client = resolved();
    ask(client);
    struct rdma_cm_id *server = requested(listener);
    CHECK(rdma_reject(server, "no", 3) == 0);
    CHECK(rdma_accept(server, NULL) == -1);
    struct rdma_cm_event *event = expect(RDMA_CM_EVENT_REJECTED, 28);
    CHECK(event->param.conn.private_data_len == 148 && !strcmp(event->param.conn.private_data, "no"));
    CHECK(rdma_ack_cm_event(event) == 0);
    destroy(server);
    destroy(client);
    /* The listener is destroyed before the program takes the request. */
    client = resolved();
    ask(client);
    struct pollfd fd = {.fd = channel->fd, .events = POLLIN};
    CHECK(poll(&fd, 1, 20000) == 1);
    CHECK(rdma_destroy_id(listener) == 0);
    CHECK(rdma_ack_cm_event(expect(RDMA_CM_EVENT_REJECTED, 28)) == 0);
    destroy(client);
}

/* Connects, and sends a message from the client to the server. Then one side, the client if by_client, disconnects or is
 * destroyed. */
static void established(int disconnects, int by_client)
{
    static char sent[64], received[64];
    struct rdma_cm_id *listener = listening(), *client = resolved();
    ask(client);
    struct rdma_cm_id *server = requested(listener);
    create_qp(server);
    struct ibv_mr *from = rdma_reg_msgs(client, sent, sizeof sent), *to = rdma_reg_msgs(server, received, sizeof received);
    CHECK(from && to);
    CHECK(rdma_post_recv(server, NULL, received, sizeof received, to) == 0);
    struct rdma_conn_param param = {.private_data = "welcome", .private_data_len = 8};
    CHECK(rdma_accept(server, &param) == 0);
    struct rdma_cm_event *event = expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    CHECK(event->id == client && event->param.conn.private_data_len == 196);
    CHECK(!strcmp(event->param.conn.private_data, "welcome"));
    CHECK(rdma_ack_cm_event(event) == 0);
    event = expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    CHECK(event->id == server);
    CHECK(rdma_ack_cm_event(event) == 0);
    strcpy(sent, "a message");
    CHECK(rdma_post_send(client, NULL, sent, sizeof sent, from, IBV_SEND_SIGNALED) == 0);
    struct ibv_wc wc;
    CHECK(rdma_get_send_comp(client, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
    CHECK(rdma_get_recv_comp(server, &wc) == 1 && wc.status == IBV_WC_SUCCESS && !strcmp(received, sent));
    CHECK(rdma_dereg_mr(from) == 0 && rdma_dereg_mr(to) == 0);
    struct rdma_cm_id *first = by_client ? client : server, *second = by_client ? server : client;
    if (disconnects) {
        CHECK(rdma_disconnect(first) == 0);
        pass(RDMA_CM_EVENT_DISCONNECTED);
        pass(RDMA_CM_EVENT_DISCONNECTED);
        CHECK(rdma_disconnect(second) == 0);
        destroy(first);
    } else {
        destroy(first);
        event = expect(RDMA_CM_EVENT_DISCONNECTED, 0);
        CHECK(event->id == second);
        CHECK(rdma_ack_cm_event(event) == 0);
    }
    destroy(second);
    destroy(listener);
}

/* The side that has requested the connection rejects the response. */
static void response_refused(void)
{
    struct rdma_cm_id *listener = listening(), *client = resolved();
    /* The client connects its queue pair itself. */
    struct ibv_qp *qp = client->qp;
    client->qp = NULL;
    struct rdma_conn_param param = {.private_data = "hello", .private_data_len = 6, .responder_resources = 3,
                                    .initiator_depth = 2, .qp_num = qp->qp_num};
    CHECK(rdma_connect(client, &param) == 0);
    struct rdma_cm_id *server = requested(listener);
    create_qp(server);
    CHECK(rdma_accept(server, NULL) == 0);
    struct rdma_cm_event *event = expect(RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    CHECK(event->param.conn.qp_num == server->qp->qp_num);
    CHECK(rdma_ack_cm_event(event) == 0);
    CHECK(rdma_reject(client, "no", 3) == 0);
    event = expect(RDMA_CM_EVENT_REJECTED, 28);
    CHECK(event->id == server && !strcmp(event->param.conn.private_data, "no"));
    CHECK(rdma_ack_cm_event(event) == 0);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    CHECK(ibv_query_qp(server->qp, &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == IBV_QPS_ERR);
    client->qp = qp;
    destroy(client);
    destroy(server);
    destroy(listener);
}

/* Requests beyond the backlog are refused. */
static void backlog(void)
{
    struct rdma_event_channel *usual = channel, *other = rdma_create_event_channel();
    CHECK(other);
    channel = other;
    struct rdma_cm_id *listener = made();
    channel = usual;
    CHECK(rdma_bind_addr(listener, (struct sockaddr *)&address) == 0 && rdma_listen(listener, 1) == 0);
    struct rdma_cm_id *first = resolved(), *second = resolved();
    ask(first);
    struct pollfd fd = {.fd = other->fd, .events = POLLIN};
    CHECK(poll(&fd, 1, 20000) == 1);
    ask(second);
    struct rdma_cm_event *event = expect(RDMA_CM_EVENT_REJECTED, 28);
    CHECK(event->id == second);
    CHECK(rdma_ack_cm_event(event) == 0);
    destroy(second);
    /* Once the first is taken, there is room again. */
    CHECK(rdma_get_cm_event(other, &event) == 0 && event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
    struct rdma_cm_id *server = event->id;
    CHECK(rdma_ack_cm_event(event) == 0);
    second = resolved();
    ask(second);
    CHECK(poll(&fd, 1, 20000) == 1);
    destroy(server);
    CHECK(rdma_ack_cm_event(expect(RDMA_CM_EVENT_REJECTED, 28)) == 0);
    destroy(listener);
    CHECK(rdma_ack_cm_event(expect(RDMA_CM_EVENT_REJECTED, 28)) == 0);
    destroy(first);
    destroy(second);
    rdma_destroy_event_channel(other);
}

static void migrated(void)
{
    struct rdma_cm_id *id = made();
    struct rdma_event_channel *other = rdma_create_event_channel();
    CHECK(other && rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000) == 0);
    CHECK(rdma_migrate_id(id, other) == 0 && id->channel == other);
    struct rdma_cm_event *event;
    CHECK(rdma_get_cm_event(other, &event) == 0 && event->event == RDMA_CM_EVENT_ADDR_RESOLVED);
    CHECK(rdma_ack_cm_event(event) == 0);
    /* No event is left in the first channel. */
    CHECK(fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0);
    CHECK(rdma_get_cm_event(channel, &event) == -1 && errno == EAGAIN);
    CHECK(fcntl(channel->fd, F_SETFL, 0) == 0);
    /* Without a channel, each call waits for its event. */
    CHECK(rdma_migrate_id(id, NULL) == 0);
    CHECK(rdma_resolve_route(id, 2000) == 0 && id->event->event == RDMA_CM_EVENT_ROUTE_RESOLVED);
    CHECK(rdma_connect(id, NULL) == -1 && errno == ECONNREFUSED);
    destroy(id);
    rdma_destroy_event_channel(other);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    address.sin_port = htons(atoi(argv[1]));
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    channel = rdma_create_event_channel();
    CHECK(channel);
    nobody_listens();
    addresses_are_taken();
    bound_to_loopback();
    refused();
    for (int i = 0; i < 4; i++)
        established(i & 1, i & 2);
    response_refused();
    backlog();
    migrated();
    int count = 0;
    struct ibv_context **devices = rdma_get_devices(&count);
    CHECK(devices && count == 1 && devices[0] && !devices[1]);
    rdma_free_devices(devices);
    rdma_destroy_event_channel(channel);
    printf("good\n");
    return 0;
}
