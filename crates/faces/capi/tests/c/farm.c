/*
 * Tests the farm functions of ginnel.h: farm SCENARIO, or farm work ADDRESS HOW for a worker. Exits with 0 if the scenario
 * succeeds.
 */
#define _GNU_SOURCE
#include <ginnel.h>

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define LENGTH(array) (sizeof(array) / sizeof *(array))
#define WATCHDOG 60
#define ADDRESS "test/farm"

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            fprintf(stderr, "%s:%d: not so: %s (%s)\n", __FILE__, __LINE__, #condition,      \
                    ginnel_last_error());                                                    \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)
#define OK(call) check_status(__LINE__, #call, 0, (call))
#define FAILS(status, call) check_status(__LINE__, #call, (status), (call))

static void check_status(int line, const char *call, int status, ssize_t result)
{
    if (result != status) {
        fprintf(stderr, "%s:%d: %s: %zd instead of %d (last error: %s)\n", __FILE__, line, call, result, status,
                ginnel_last_error());
        exit(1);
    }
}

/* The workers: each adds up the bytes of its piece, and misbehaves in its own way. */

static const char *how;
static unsigned pieces_seen;

/* An event in any of these processes is a file with its name, in a folder of the test. */
#define FOLDER "FARM_FOLDER"

static char *file_of(const char *what, char *path, size_t room)
{
    snprintf(path, room, "%s/%s", getenv(FOLDER), what);
    return path;
}

static void happens(const char *what)
{
    char path[200];
    FILE *file = fopen(file_of(what, path, sizeof path), "w");
    CHECK(file != NULL && fclose(file) == 0);
}

static void wait_until(const char *what)
{
    char path[200];
    file_of(what, path, sizeof path);
    for (int i = 0; access(path, F_OK) != 0; i++) {
        CHECK(i < WATCHDOG * 1000);
        usleep(1000);
    }
}

static ssize_t work(void *context, const ginnel_farm_task *task, void *result, size_t room)
{
    const unsigned char *bytes = task->data;
    unsigned long sum = 0;
    CHECK(context == &pieces_seen && strcmp(task->job, "sum") == 0 && (size_t)task->data % 8 == 0);
    CHECK(room >= sizeof sum);
    pieces_seen++;
    if (strcmp(how, "die") == 0 && pieces_seen == 3) {
        happens("death");
        raise(SIGKILL);
    }
    if (strcmp(how, "lie") == 0) {
        happens("lie");
        return 1;
    }
    /* Without this, this worker might process all pieces before the others get theirs. */
    if (strcmp(how, "wait") == 0 && pieces_seen == 1) {
        wait_until("death");
        wait_until("lie");
    }
    if (strcmp(how, "boast") == 0)
        return (ssize_t)room + 1;
    if (strcmp(how, "refuse") == 0) {
        strcpy(result, "not in the mood");
        return -1;
    }
    for (size_t i = 0; i < task->length; i++)
        sum += bytes[i];
    memcpy(result, &sum, sizeof sum);
    return sizeof sum;
}

static int worker(const char *address)
{
    ginnel_farm_worker_options options = {0};
    ginnel_farm_worker *worker;
    uint64_t pieces, bytes;
    int served;
    options.size = sizeof options;
    options.patience_ns = WATCHDOG * SECOND;
    OK(ginnel_farm_connect(address, &options, &worker));
    served = ginnel_farm_serve(worker, work, &pieces_seen);
    CHECK(served == (strcmp(how, "lie") == 0 ? GINNEL_ERR_CLOSED : GINNEL_OK));
    OK(ginnel_farm_worker_get_done(worker, &pieces, &bytes));
    OK(ginnel_farm_worker_get_done(worker, NULL, NULL));
    CHECK(pieces <= pieces_seen && bytes >= pieces);
    OK(ginnel_farm_worker_close(worker));
    FAILS(GINNEL_ERR_FREED, ginnel_farm_serve(worker, work, &pieces_seen));
    FAILS(GINNEL_ERR_FREED, ginnel_farm_worker_close(worker));
    return 0;
}

/* The input, and the sum of its bytes. */

static unsigned char input[3000001];
static unsigned long expected, sum;
static unsigned folded;
static int refusal;

static void make_input(void)
{
    for (size_t i = 0; i < sizeof input; i++) {
        input[i] = (unsigned char)(i * 31 + i / 251);
        expected += input[i];
    }
}

static int fill(void *context, uint64_t offset, void *room, size_t length)
{
    CHECK(context == input && offset + length <= sizeof input);
    memcpy(room, input + offset, length);
    return 0;
}

static int fold(void *context, const ginnel_farm_piece *piece, const void *result, size_t length)
{
    unsigned long part;
    CHECK(context == input && piece->length > 0 && piece->tries > 0);
    if (length != sizeof part)
        return 1;
    memcpy(&part, result, sizeof part);
    sum += part;
    folded++;
    return refusal;
}

/* Pieces of 1, 2, 3 ... bytes, from the end to the start. */
static uint64_t left;
static size_t last;

static int cut(void *context, uint64_t *offset, size_t *length)
{
    CHECK(context == input);
    if (left == 0)
        return 0;
    last = last + 200 < left ? last + 200 : left;
    left -= last;
    *offset = left;
    *length = last;
    return 1;
}

static ginnel_farm_job job(void)
{
    ginnel_farm_job job = {0};
    job.size = sizeof job;
    job.name = "sum";
    job.bytes = sizeof input;
    job.piece = 10000;
    job.fill = fill;
    job.fold = fold;
    job.context = input;
    sum = 0;
    folded = 0;
    return job;
}

static char *program;

static ginnel_farm *farm_of(const char *const *ways, size_t count)
{
    ginnel_farm_options options = {0};
    ginnel_farm *farm;
    options.size = sizeof options;
    options.piece = 100000;
    options.patience_ns = 1 * SECOND;
    options.tries = 3;
    OK(ginnel_farm_open(&options, &farm));
    OK(ginnel_farm_listen(farm, ADDRESS));
    for (size_t i = 0; i < count; i++) {
        const char *const argv[] = {program, "work", ADDRESS, ways[i], NULL};
        OK(ginnel_farm_spawn(farm, argv));
    }
    OK(ginnel_farm_wait_for_workers(farm, count, WATCHDOG * SECOND));
    return farm;
}

static ginnel_farm_report report_of(ginnel_farm *farm)
{
    ginnel_farm_report report = {0};
    report.size = sizeof report;
    OK(ginnel_farm_get_report(farm, &report));
    return report;
}

/* The same workers run two jobs, with equal and with unequal pieces. */
static void run(void)
{
    const char *const ways[] = {"well", "well", "well"};
    ginnel_farm *farm = farm_of(ways, LENGTH(ways));
    ginnel_farm_job one = job();
    OK(ginnel_farm_run(farm, &one));
    ginnel_farm_report report = report_of(farm);
    CHECK(sum == expected && folded == 301 && report.pieces == 301 && report.bytes == sizeof input);
    CHECK(report.workers == 3 && report.deaths == 0 && report.reassigned == 0 && report.time_ns > 0);
    uint64_t pieces = 0;
    for (size_t i = 0; i < report.workers; i++) {
        ginnel_farm_worker_report worker = {0};
        worker.size = sizeof worker;
        OK(ginnel_farm_get_worker(farm, i, &worker));
        CHECK(worker.departure == GINNEL_FARM_STAYED && strncmp(worker.name, "host:", 5) == 0);
        pieces += worker.pieces;
    }
    CHECK(pieces == 301);
    ginnel_farm_job two = job();
    two.next = cut;
    left = sizeof input;
    OK(ginnel_farm_run(farm, &two));
    CHECK(sum == expected && report_of(farm).bytes == sizeof input);
    ginnel_farm_close(farm);
}

/* An event loop in which one worker dies and another returns nonsense. */
static void loop(void)
{
    const char *const ways[] = {"die", "wait", "lie"};
    char folder[] = "/tmp/farm.XXXXXX", path[200];
    CHECK(mkdtemp(folder) != NULL && setenv(FOLDER, folder, 1) == 0);
    ginnel_farm *farm = farm_of(ways, LENGTH(ways));
    ginnel_farm_job one = job();
    int step;
    OK(ginnel_farm_start(farm, &one));
    while ((step = ginnel_farm_step(farm)) != GINNEL_FARM_DONE) {
        CHECK(step > 0);
        if (step == GINNEL_FARM_WAITING) {
            struct pollfd fd = {0};
            fd.fd = ginnel_farm_fd(farm);
            fd.events = POLLIN;
            CHECK(fd.fd >= 0 && poll(&fd, 1, WATCHDOG * 1000) == 1);
        }
    }
    ginnel_farm_report report = report_of(farm);
    CHECK(sum == expected && folded == 301 && report.pieces == 301 && report.workers == 3);
    unsigned dismissed = 0, died = 0;
    for (size_t i = 0; i < 3; i++) {
        ginnel_farm_worker_report worker = {0};
        worker.size = sizeof worker;
        OK(ginnel_farm_get_worker(farm, i, &worker));
        dismissed += worker.departure == GINNEL_FARM_DISMISSED;
        died += worker.departure == GINNEL_FARM_DIED;
    }
    CHECK(dismissed == 1 && died == 1 && report.deaths == 1 && report.reassigned >= 2);
    CHECK(unlink(file_of("death", path, sizeof path)) == 0 && unlink(file_of("lie", path, sizeof path)) == 0);
    CHECK(rmdir(folder) == 0);
    FAILS(GINNEL_ERR_INVALID, ginnel_farm_step(farm));
    ginnel_farm_close(farm);
}

static void fails_with(const char *way, int status)
{
    ginnel_farm *farm = farm_of(&way, 1);
    ginnel_farm_job one = job();
    FAILS(status, ginnel_farm_run(farm, &one));
    CHECK(report_of(farm).workers == 1);
    ginnel_farm_close(farm);
}

static int fill_badly(void *context, uint64_t offset, void *room, size_t length)
{
    (void)room;
    CHECK(context == input && length == 10000);
    return offset > 50000 ? 7 : 0;
}

/* Each failure has a status of its own. */
static void mistakes(void)
{
    fails_with("refuse", GINNEL_ERR_PIECE);
    CHECK(strstr(ginnel_last_error(), "not in the mood") != NULL);
    fails_with("boast", GINNEL_ERR_PIECE);
    fails_with("lie", GINNEL_ERR_NO_WORKER);

    const char *const ways[] = {"well"};
    ginnel_farm *farm = farm_of(ways, 1);
    ginnel_farm_job bad = job();
    bad.fill = fill_badly;
    FAILS(GINNEL_ERR_CALLBACK, ginnel_farm_run(farm, &bad));
    CHECK(strstr(ginnel_last_error(), "fill() has returned 7") != NULL);
    refusal = 2;
    bad = job();
    FAILS(GINNEL_ERR_CALLBACK, ginnel_farm_run(farm, &bad));
    refusal = 0;
    bad = job();
    bad.piece = (size_t)ginnel_farm_longest_piece(farm) + 1;
    FAILS(GINNEL_ERR_TOO_LONG, ginnel_farm_run(farm, &bad));
    bad = job();
    bad.fold = NULL;
    FAILS(GINNEL_ERR_NULL, ginnel_farm_run(farm, &bad));
    bad = job();
    bad.name = NULL;
    FAILS(GINNEL_ERR_NULL, ginnel_farm_start(farm, &bad));
    FAILS(GINNEL_ERR_NULL, ginnel_farm_start(NULL, &bad));

    /* Only one job at a time; and after all these failures, and after a cancelled job, the next one succeeds. */
    ginnel_farm_job one = job();
    OK(ginnel_farm_start(farm, &one));
    FAILS(GINNEL_ERR_INVALID, ginnel_farm_start(farm, &one));
    FAILS(GINNEL_ERR_INVALID, ginnel_farm_listen(farm, ADDRESS));
    FAILS(GINNEL_ERR_INVALID, (int)ginnel_farm_longest_piece(farm));
    CHECK(ginnel_farm_step(farm) > 0);
    OK(ginnel_farm_stop(farm));
    OK(ginnel_farm_stop(farm));
    FAILS(GINNEL_ERR_INVALID, ginnel_farm_fd(farm));
    one = job();
    OK(ginnel_farm_run(farm, &one));
    CHECK(sum == expected && report_of(farm).pieces == 301);
    ginnel_farm_worker_report worker = {0};
    worker.size = sizeof worker;
    FAILS(GINNEL_ERR_INVALID, ginnel_farm_get_worker(farm, 1, &worker));

    const char *const nobody[] = {"/no/such/program", NULL}, *const nothing[] = {NULL};
    FAILS(GINNEL_ERR_SYSTEM, ginnel_farm_spawn(farm, nobody));
    FAILS(GINNEL_ERR_INVALID, ginnel_farm_spawn(farm, nothing));
    FAILS(GINNEL_ERR_NULL, ginnel_farm_spawn(farm, NULL));
    FAILS(GINNEL_ERR_IN_USE, ginnel_farm_listen(farm, ADDRESS));
    FAILS(GINNEL_ERR_TIMED_OUT, ginnel_farm_wait_for_workers(farm, 2, 0));
    OK(ginnel_farm_close(farm));
    FAILS(GINNEL_ERR_FREED, ginnel_farm_listen(farm, ADDRESS));
    FAILS(GINNEL_ERR_FREED, ginnel_farm_close(farm));
    OK(ginnel_farm_close(NULL));
    OK(ginnel_farm_worker_close(NULL));

    ginnel_farm_worker *none;
    FAILS(GINNEL_ERR_REFUSED, ginnel_farm_connect("test/nobody", NULL, &none));
    FAILS(GINNEL_ERR_NAME, ginnel_farm_connect("nowhere", NULL, &none));
    CHECK(none == NULL);
    FAILS(GINNEL_ERR_NULL, ginnel_farm_serve(NULL, work, NULL));
}

int main(int argc, char **argv)
{
    program = argv[0];
    alarm(WATCHDOG);
    if (argc == 4 && strcmp(argv[1], "work") == 0) {
        how = argv[3];
        return worker(argv[2]);
    }
    CHECK(argc == 2);
    make_input();
    if (strcmp(argv[1], "run") == 0)
        run();
    else if (strcmp(argv[1], "loop") == 0)
        loop();
    else if (strcmp(argv[1], "mistakes") == 0)
        mistakes();
    else
        CHECK(!"a scenario");
    return 0;
}
