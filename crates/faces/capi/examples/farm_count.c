/*
 * Counts the letters of made-up text with a farm of processes:
 *
 *   farm_count SEGMENT/NAME [WORKERS [MIB]]     the manager; it starts WORKERS processes of this program
 *   farm_count --work SEGMENT/NAME              a worker; more can be started on the host or in VMs
 *
 * Prints the count, and the work of each worker.
 */
#include <ginnel.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SECOND 1000000000ULL

static void check(int status)
{
    if (status < 0) {
        fprintf(stderr, "farm_count: %s\n", ginnel_last_error());
        exit(1);
    }
}

/* A worker's function: counts the letters in a piece. */
static ssize_t count_letters(void *context, const ginnel_farm_task *task, void *result, size_t room)
{
    const unsigned char *text = task->data;
    uint64_t letters = 0;
    (void)context;
    (void)room; /* There is always room for one number. */
    for (size_t i = 0; i < task->length; i++)
        letters += text[i] >= 'a' && text[i] <= 'z';
    memcpy(result, &letters, sizeof letters);
    return sizeof letters;
}

static int work(const char *address)
{
    ginnel_farm_worker_options options = {.size = sizeof options, .patience_ns = 10 * SECOND};
    ginnel_farm_worker *worker;
    check(ginnel_farm_connect(address, &options, &worker));
    check(ginnel_farm_serve(worker, count_letters, NULL));
    ginnel_farm_worker_close(worker);
    return 0;
}

/* The manager's function for input, which repeats the alphabet and a line feed. */
static int make_text(void *context, uint64_t offset, void *room, size_t length)
{
    char *text = room;
    (void)context;
    for (size_t i = 0; i < length; i++) {
        unsigned letter = (unsigned)((offset + i) % 27);
        text[i] = (char)(letter < 26 ? 'a' + letter : '\n');
    }
    return 0;
}

/* The manager's function for results: adds a worker's count to the sum. */
static int add(void *context, const ginnel_farm_piece *piece, const void *result, size_t length)
{
    uint64_t letters, *sum = context;
    if (length != sizeof letters)
        return 1; /* nonsense */
    memcpy(&letters, result, sizeof letters);
    if (letters > piece->length)
        return 1;
    *sum += letters;
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--work") == 0)
        return work(argv[2]);
    if (argc < 2 || argc > 4) {
        fprintf(stderr, "usage: farm_count SEGMENT/NAME [WORKERS [MIB]]\n       farm_count --work SEGMENT/NAME\n");
        return 2;
    }
    size_t workers = argc > 2 ? strtoul(argv[2], NULL, 10) : 2;
    uint64_t sum = 0;

    ginnel_farm *farm;
    check(ginnel_farm_open(NULL, &farm));
    check(ginnel_farm_listen(farm, argv[1]));
    const char *const command[] = {argv[0], "--work", argv[1], NULL};
    for (size_t i = 0; i < workers; i++)
        check(ginnel_farm_spawn(farm, command));

    ginnel_farm_job job = {
        .size = sizeof job,
        .name = "count-letters",
        .bytes = (argc > 3 ? strtoull(argv[3], NULL, 10) : 64) << 20,
        .fill = make_text,
        .fold = add,
        .context = &sum,
    };
    check(ginnel_farm_run(farm, &job));
    printf("%" PRIu64 " letters\n", sum);

    ginnel_farm_report report = {.size = sizeof report};
    check(ginnel_farm_get_report(farm, &report));
    for (size_t i = 0; i < report.workers; i++) {
        ginnel_farm_worker_report worker = {.size = sizeof worker};
        check(ginnel_farm_get_worker(farm, i, &worker));
        printf("%s: %" PRIu64 " pieces, %" PRIu64 " bytes\n", worker.name, worker.pieces, worker.bytes);
    }
    ginnel_farm_close(farm);
    return 0;
}
