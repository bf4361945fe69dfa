/*
 * Ginnel: channels between virtual machines on one host, and between them and the host.
 *
 * Generated from crates/capi by scripts/header-check; change it there.
 * SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * A process attaches to a segment, which makes it an endpoint. Endpoints of one segment listen and
 * connect by name; what they get is a channel, of messages or of bytes, that lies in shared memory
 * and needs neither kernel nor daemon to be used. Or they share blocks of memory, guarded by locks. The
 * manual pages begin with ginnel(7).
 *
 * What holds for all functions:
 *
 * - Result. A function returns 0 or a number that is not negative, or a negative ginnel_status. Then
 *   ginnel_last_error() has the details, per thread. errno means nothing. The errors named at a function
 *   are those that a correct program can meet; mistakes in a call (-201 and below), GINNEL_ERR_SYSTEM and
 *   GINNEL_ERR_INTERNAL are possible everywhere.
 * - Handles are opaque, and nothing lies where they seem to point. They come from this library and are used
 *   until they are freed by the function that the type names (NULL is allowed there). From then on every
 *   function returns GINNEL_ERR_FREED for them, that one too, whatever has been made since.
 * - Pointers. Strings end with a zero and are UTF-8; the library keeps no pointer that it is given. Other
 *   pointers lead to what the function says. A NULL where something is needed is GINNEL_ERR_NULL.
 * - Structures begin with their size, which the caller sets in every case (to sizeof the structure), so
 *   that programs and libraries of different versions fit together. Options start as all zeros.
 * - Time is in nanoseconds; a negative timeout means for ever. Sizes are in bytes.
 * - Threads. Endpoints and listeners may be used by any number of threads at once. In a channel, one
 *   thread may send while another receives; more than one per direction need a lock of their own. A
 *   handle of a lock, a farm or a worker is for one thread at a time.
 * - Waiting is not interrupted by signals. Functions that do not say that they block do not.
 * - fork(2): parent and child are the same endpoint, which lives until both have ended or closed it. A handle
 *   that was open before is used in one of the two processes from then on. It belongs to the process that has
 *   opened it, as long as that lives: closing it in a child tells nobody, and a child cannot accept at such a
 *   listener. Then it belongs to its children.
 * - exec(3) ends an endpoint, unless it is held and the next program adopts it: see ginnel_hold().
 * - The first attach installs a handler for SIGBUS, so that a truncated segment is an error and not the
 *   end of the process. It passes on what does not lie in a segment.
 */


#ifndef GINNEL_H
#define GINNEL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* The version of this header; see ginnel_version(). */
#define GINNEL_VERSION "0.1.0"
#define GINNEL_VERSION_MAJOR 0
#define GINNEL_VERSION_MINOR 1

// What ginnel_mutex_lock(), ginnel_rwlock_wrlock() and ginnel_condvar_wait() return when the caller has the lock and its last
// owner has died in it: the data may be half-written. Repair them and call ginnel_mutex_consistent() or
// ginnel_rwlock_consistent() before unlocking; without that, the lock is GINNEL_ERR_NOT_RECOVERABLE for all.
#define GINNEL_OWNER_DIED 1

// What ginnel_once_begin() returns when the caller has to do it, and then to call ginnel_once_end().
#define GINNEL_ONCE_BEGIN 1

// The same, when somebody before has died in it or given it up, and so may have done some of it.
#define GINNEL_ONCE_AGAIN 2

// What a function returns: GINNEL_OK, or a negative number that says what went wrong. Numbers never change and never get
// another meaning; later versions may add some. They are grouped:
//
//   -1 ...    not now, or not there; nothing is wrong
//   -101 ...  the channel has come to an end, or is broken
//   -201 ...  a mistake in the call
//   -300 ...  the daemon refuses
//   -401 ...  the daemon, or this machine, is not as needed
//   -501 ...  a bug in this library
typedef enum ginnel_status {
    // Done.
    GINNEL_OK = 0,
    // Not now, and the handle is non-blocking: wait for its file descriptor and try again.
    GINNEL_ERR_WOULD_BLOCK = -1,
    // The timeout came first. Nothing was sent or received; try again when you like.
    GINNEL_ERR_TIMED_OUT = -2,
    // The cache has no item with this key.
    GINNEL_ERR_NO_ITEM = -3,
    // The cache has an item with this key already, or none where there must be one.
    GINNEL_ERR_NOT_STORED = -4,
    // The cache's item has another version now.
    GINNEL_ERR_CHANGED = -5,
    // The peer has finished sending, and everything has been received.
    GINNEL_ERR_FINISHED = -101,
    // The peer has closed the channel: it receives nothing more.
    GINNEL_ERR_CLOSED = -102,
    // The peer's process, or its VM, has died. What it had sent can be received first.
    GINNEL_ERR_PEER_DEAD = -103,
    // Somebody in the segment wrote what no correct program writes; the channel is of no more use.
    GINNEL_ERR_CORRUPT = -104,
    // The segment's memory is gone (its file was truncated, or the daemon has declared it broken).
    GINNEL_ERR_BROKEN = -105,
    // A writer has died in the read-write lock: take it for writing, repair the data, call them consistent.
    GINNEL_ERR_OWNER_DIED = -106,
    // The lock's owner died, and the next one unlocked without calling the data consistent: unlink it and make it anew.
    GINNEL_ERR_NOT_RECOVERABLE = -107,
    // A party of the barrier has died.
    GINNEL_ERR_BARRIER_BROKEN = -108,
    // The endpoint was declared dead, and what it had was handed on: attach again.
    GINNEL_ERR_FENCED = -109,
    // A farm's job had no worker for as long as its manager waits.
    GINNEL_ERR_NO_WORKER = -110,
    // A piece of a farm's job failed, or took its worker along, as often as it is tried.
    GINNEL_ERR_PIECE = -111,
    // A side of the channel has called ginnel_channel_abort(): what was on its way is lost.
    GINNEL_ERR_ABORTED = -112,
    // The cache's server has not answered: what it was asked for may have been done or not.
    GINNEL_ERR_LOST = -113,
    // A null pointer where something is needed.
    GINNEL_ERR_NULL = -201,
    // An argument outside its range.
    GINNEL_ERR_INVALID = -202,
    // A name or an address that is none.
    GINNEL_ERR_NAME = -203,
    // A channel, a listener or a lock of another kind.
    GINNEL_ERR_KIND = -204,
    // The message is longer than the channel takes (open it with a larger capacity), or the value than an item may be.
    GINNEL_ERR_TOO_LONG = -205,
    // The message is longer than the buffer. It is still there.
    GINNEL_ERR_BUFFER_TOO_SMALL = -206,
    // Sending after ginnel_channel_finish().
    GINNEL_ERR_AFTER_FINISH = -207,
    // A claim is open: send, commit or abort it first.
    GINNEL_ERR_CLAIMED = -208,
    // Nothing is claimed, or nothing is peeked at.
    GINNEL_ERR_NOT_CLAIMED = -209,
    // Bytes that the block does not have.
    GINNEL_ERR_RANGE = -210,
    // This handle does not have the lock.
    GINNEL_ERR_NOT_OWNER = -211,
    // This handle has the lock already.
    GINNEL_ERR_DEADLOCK = -212,
    // The semaphore would have more permits than its limit.
    GINNEL_ERR_OVERFLOW = -213,
    // A function of the program has ended the farm's job.
    GINNEL_ERR_CALLBACK = -214,
    // The daemon refuses, for a reason that this version of the library does not know.
    GINNEL_ERR_REFUSED_OTHERWISE = -300,
    // The daemon does not understand the library.
    GINNEL_ERR_NOT_UNDERSTOOD = -301,
    // Daemon and library have no common protocol version.
    GINNEL_ERR_VERSION = -302,
    // No segment of that name, or this machine has no share in it.
    GINNEL_ERR_NO_SEGMENT = -303,
    // This user may not.
    GINNEL_ERR_DENIED = -304,
    // Nobody listens at that name.
    GINNEL_ERR_REFUSED = -305,
    // The name is taken already.
    GINNEL_ERR_IN_USE = -306,
    // A limit is reached: endpoints, channels, bytes, or connections that wait to be accepted.
    GINNEL_ERR_LIMIT = -307,
    // The segment has no room.
    GINNEL_ERR_NO_MEMORY = -308,
    // The daemon does not know this endpoint any more.
    GINNEL_ERR_STALE = -309,
    // The daemon knows no such thing.
    GINNEL_ERR_NOT_FOUND = -312,
    // The daemon that decides cannot be reached just now.
    GINNEL_ERR_UNAVAILABLE = -313,
    // This machine may only read the segment, and whoever has a channel, a lock or a block of its own writes.
    GINNEL_ERR_READ_ONLY = -315,
    // A quota of memory is used up: bytes or number of blocks, open handles.
    GINNEL_ERR_QUOTA = -316,
    // Somebody has the block in a way that excludes this, or all places at a lock are taken.
    GINNEL_ERR_BUSY = -317,
    // The handle is not open any more: it was freed already.
    GINNEL_ERR_FREED = -318,
    // The host's daemon cannot record it: its disk is full or fails. Nothing was changed.
    GINNEL_ERR_UNRECORDED = -319,
    // The cache's server refuses; ginnel_last_error() has its words.
    GINNEL_ERR_SERVER = -320,
    // No daemon answers.
    GINNEL_ERR_NO_DAEMON = -401,
    // The daemon said something that is not in the protocol.
    GINNEL_ERR_PROTOCOL = -402,
    // A system call failed; ginnel_last_error() says which, and how.
    GINNEL_ERR_SYSTEM = -403,
    // This machine cannot do that: a VM without interrupts has no file descriptor to wait on.
    GINNEL_ERR_UNSUPPORTED = -404,
    // No server of the cache can be reached. Nothing was changed.
    GINNEL_ERR_NO_SERVER = -405,
    // A bug in this library. The handle is of no more use, but for closing it.
    GINNEL_ERR_INTERNAL = -501,
} ginnel_status;

// What goes through a channel.
typedef enum ginnel_kind {
    // Messages, each received whole and in order: ginnel_message_send() and its family.
    GINNEL_MESSAGE = 1,
    // A stream of bytes, like TCP: ginnel_stream_send() and its family.
    GINNEL_STREAM = 2,
} ginnel_kind;

// How to wait for a peer.
typedef enum ginnel_wait {
    // Look for as long as a budget, then sleep. The default.
    GINNEL_WAIT_ADAPTIVE = 0,
    // Look until it is there. Lowest latency; uses a CPU, but leaves it to others who want it after some microseconds.
    GINNEL_WAIT_POLL = 1,
    // Sleep at once. Uses no CPU; each wake costs a doorbell, some tens of microseconds.
    GINNEL_WAIT_INTERRUPT = 2,
} ginnel_wait;

// How a segment's bytes come to a process.
typedef enum ginnel_memory_kind {
    // In a VM, as a PCI BAR (ivshmem-plain).
    GINNEL_MEMORY_BAR = 1,
    // In a VM, as /dev/dax* (virtio-pmem).
    GINNEL_MEMORY_DAX = 2,
    // On the host, as a file.
    GINNEL_MEMORY_FILE = 3,
} ginnel_memory_kind;

// A direction of a channel, seen from this side. Some functions take both at once: GINNEL_SEND | GINNEL_RECEIVE.
typedef enum ginnel_direction {
    // What this side sends.
    GINNEL_SEND = 1,
    // What this side receives.
    GINNEL_RECEIVE = 2,
} ginnel_direction;

// What may be done with a block. Each right includes those above it.
typedef enum ginnel_rights {
    // Nothing.
    GINNEL_RIGHTS_NONE = 0,
    // Loads.
    GINNEL_RIGHTS_READ = 1,
    // Loads and stores.
    GINNEL_RIGHTS_READ_WRITE = 2,
    // The same, and nobody else has it open for stores meanwhile.
    GINNEL_RIGHTS_WRITE_EXCLUSIVE = 3,
} ginnel_rights;

// What an entry of a list is about.
typedef enum ginnel_subject {
    // A member: the host, or a VM. `active` says whether its VM is there.
    GINNEL_MEMBER = 1,
    // An endpoint: an attached process. `active` says whether it is there; it may be on its way back to a new daemon.
    GINNEL_ENDPOINT = 2,
    // A name at which somebody listens. `number` and `epoch` are those of the endpoint.
    GINNEL_LISTENER = 3,
} ginnel_subject;

// How far a job is.
typedef enum ginnel_farm_progress {
    // All is done.
    GINNEL_FARM_DONE = 0,
    // There is more to do at once: call again.
    GINNEL_FARM_WORKING = 1,
    // Nothing can be done until a worker says something: wait for ginnel_farm_fd(), then call again.
    GINNEL_FARM_WAITING = 2,
} ginnel_farm_progress;

// How a worker went.
typedef enum ginnel_farm_departure {
    // It did not: it was there to the end.
    GINNEL_FARM_STAYED = 0,
    // Its process or its VM died.
    GINNEL_FARM_DIED = 1,
    // It closed its channel.
    GINNEL_FARM_LEFT = 2,
    // It was dismissed: it broke the protocol, answered nonsense, or took too long.
    GINNEL_FARM_DISMISSED = 3,
} ginnel_farm_departure;

// A barrier of a segment: a number of parties wait for each other. A handle is used by one
// thread at a time; others open their own. Made by ginnel_barrier_open(), freed by ginnel_barrier_close().
typedef struct ginnel_barrier ginnel_barrier;

// An open block of a segment: memory by name, with rights. Any number of threads may use it at once, ginnel_block_resize()
// excepted. Made by ginnel_block_create() or ginnel_block_open(), freed by ginnel_block_close().
typedef struct ginnel_block ginnel_block;

// A cache that is open. Any number of threads may use it at once. Made by ginnel_cache_open(), freed by ginnel_cache_close().
typedef struct ginnel_cache ginnel_cache;

// A channel of either kind, with two directions that are independent: one thread may send while another receives, but
// no two may send at once, or receive at once. Made by ginnel_connect(), ginnel_endpoint_connect() or ginnel_accept(),
// freed by ginnel_channel_close().
typedef struct ginnel_channel ginnel_channel;

// A condition variable of a segment, beside a mutex. A handle is used by one
// thread at a time; others open their own. Made by ginnel_condvar_open(), freed by ginnel_condvar_close().
typedef struct ginnel_condvar ginnel_condvar;

// An attached process: a share in a segment, a place to listen and connect from. Any number of threads may use it at
// once. Made by ginnel_attach(), freed by ginnel_detach().
typedef struct ginnel_endpoint ginnel_endpoint;

// One who has work done by many: a manager, and the job that it has in hand. For one thread at a time. Made by
// ginnel_farm_open(), freed by ginnel_farm_close().
typedef struct ginnel_farm ginnel_farm;

// A worker of a farm: a channel to its manager. For one thread at a time. Made by ginnel_farm_connect(), freed by
// ginnel_farm_worker_close().
typedef struct ginnel_farm_worker ginnel_farm_worker;

// A list as it was when it was asked for. One thread at a time may use it. Made by ginnel_list_open(), freed by
// ginnel_list_close().
typedef struct ginnel_list ginnel_list;

// A name at which others connect. Any number of threads may use it at once. Made by ginnel_listen() or
// ginnel_endpoint_listen(), freed by ginnel_listener_close().
typedef struct ginnel_listener ginnel_listener;

// A mutex of a segment, robust: if its owner dies, the next one gets it and is told. A handle is used by one
// thread at a time; others open their own. Made by ginnel_mutex_open(), freed by ginnel_mutex_close().
typedef struct ginnel_mutex ginnel_mutex;

// Something that is done once in a segment. A handle is used by one
// thread at a time; others open their own. Made by ginnel_once_open(), freed by ginnel_once_close().
typedef struct ginnel_once ginnel_once;

// Many channels, listeners and other descriptors, for which one thread waits. One thread at a time. Made by
// ginnel_ready_set_new(), freed by ginnel_ready_set_close(). It belongs to the process that has made it.
typedef struct ginnel_ready_set ginnel_ready_set;

// A read-write lock of a segment: many readers or one writer, who goes first. Robust as to writers. A handle is used by one
// thread at a time; others open their own. Made by ginnel_rwlock_open(), freed by ginnel_rwlock_close().
typedef struct ginnel_rwlock ginnel_rwlock;

// A counting semaphore of a segment. What a process that dies has acquired is not given back. A handle is used by one
// thread at a time; others open their own. Made by ginnel_semaphore_open(), freed by ginnel_semaphore_close().
typedef struct ginnel_semaphore ginnel_semaphore;

// How to attach. Fill it with zeros, set `size`, then what you want otherwise.
typedef struct ginnel_attach_options {
    // sizeof(ginnel_attach_options).
    size_t size;
    // Path of the daemon's socket. NULL: $GINNEL_SOCKET, else /run/ginnel/ginnel.sock.
    const char *socket;
    // What this endpoint calls itself, for people. NULL: the program's name.
    const char *name;
    // How channels wait unless told otherwise: one of GINNEL_WAIT_*.
    int wait;
    // For GINNEL_WAIT_ADAPTIVE: how long to look, in nanoseconds. 0: the default, 100000.
    uint64_t budget_ns;
} ginnel_attach_options;

// Facts about an endpoint.
typedef struct ginnel_endpoint_info {
    // sizeof(ginnel_endpoint_info).
    size_t size;
    // Number of the member (host or VM) that the endpoint belongs to; 0 is the host.
    uint32_t member;
    // Number of the endpoint.
    uint32_t endpoint;
    // Epoch of that number: tells the endpoint from earlier ones that had the same number.
    uint32_t epoch;
    // 1 if this endpoint can sleep; 0 in a VM without interrupts, where waiting is looking from time to time.
    uint32_t interrupts;
    // Page of the segment, in bytes: the unit in which it is mapped.
    size_t page;
    // 1 if this machine may only read the segment, so that there are no channels in it; else 0.
    uint32_t read_only;
    // How the segment's bytes come here: one of GINNEL_MEMORY_*.
    uint32_t memory;
} ginnel_endpoint_info;

// How to open a channel. Fill it with zeros, set `size`, then what you want otherwise.
typedef struct ginnel_channel_options {
    // sizeof(ginnel_channel_options).
    size_t size;
    // Bytes that the ring holds into which this side sends, rounded up to a power of two; the larger wish of the two sides
    // counts. 0: the daemon's default. A message may be a quarter of it.
    size_t capacity;
    // For connecting: how long to wait for somebody to listen, in nanoseconds. 0: not at all.
    uint64_t patience_ns;
    // For listening: how many connections may wait to be accepted. 0: the daemon's default.
    uint32_t backlog;
    // The same as `capacity` for the ring from which this side receives. 0: as `capacity`.
    size_t input_capacity;
} ginnel_channel_options;

// What one direction of a channel has done so far, on this side.
typedef struct ginnel_counters {
    // sizeof(ginnel_counters).
    size_t size;
    // Messages, or calls on a stream.
    uint64_t operations;
    // Bytes of payload.
    uint64_t bytes;
    // Doorbells rung for the peer.
    uint64_t rings;
    // Operations that had to wait.
    uint64_t waits;
} ginnel_counters;

// Facts about a channel, and who is at its other end.
typedef struct ginnel_channel_info {
    // sizeof(ginnel_channel_info).
    size_t size;
    // Number of the channel; never used again in this installation.
    uint64_t id;
    // Bytes that the ring holds into which this side sends.
    size_t capacity;
    // The longest message, in bytes; 0 for a stream, which has no such limit.
    size_t max_message;
    // GINNEL_MESSAGE or GINNEL_STREAM.
    int kind;
    // Number of the peer's member (host or VM); 0 is the host.
    uint32_t peer_member;
    // Number of the peer's endpoint.
    uint32_t peer_endpoint;
    // Epoch of that number.
    uint32_t peer_epoch;
    // Name of the peer's member.
    char peer_member_name[64];
    // What the peer's endpoint calls itself.
    char peer_name[64];
    // Bytes that the ring holds from which this side receives.
    size_t input_capacity;
} ginnel_channel_info;

// How to make a block. Fill it with zeros, set `size`, then what you want otherwise.
typedef struct ginnel_block_options {
    // sizeof(ginnel_block_options).
    size_t size;
    // Its offset in the segment is a multiple of this power of two, in bytes. 0: of the segment's page.
    size_t align;
    // 1: nobody else can have it open for writing while the creator has.
    uint32_t exclusive;
    // 1: its name outlives the endpoint, until it is unlinked.
    uint32_t persistent;
    // 1: its bytes are whatever was there before, and it costs the same however large it is. 0: they are zero.
    uint32_t no_zero;
    // 1: others may do what `others` says; 0: GINNEL_RIGHTS_READ_WRITE.
    uint32_t set_others;
    // What those may who have not been granted anything else: one of GINNEL_RIGHTS_*.
    int others;
} ginnel_block_options;

// Facts about an open block.
typedef struct ginnel_block_info {
    // sizeof(ginnel_block_info).
    size_t size;
    // Number of the block; never used again.
    uint64_t number;
    // Its bytes.
    size_t length;
    // What this handle may do just now: one of GINNEL_RIGHTS_*.
    int rights;
} ginnel_block_info;

// How to open a lock. Fill it with zeros, set `size`, then what you want otherwise.
typedef struct ginnel_lock_options {
    // sizeof(ginnel_lock_options).
    size_t size;
    // 1: it must be there (GINNEL_ERR_NOT_FOUND). 0: it is made if it is not.
    uint32_t existing;
    // 1: it must not be there (GINNEL_ERR_IN_USE).
    uint32_t exclusive;
    // 1: if it is made by this, it stays until it is unlinked. 0: it goes with its last handle.
    uint32_t persistent;
    // 1: `wait` and `budget_ns` count. 0: it waits as the endpoint's channels do.
    uint32_t set_wait;
    // How to wait: one of GINNEL_WAIT_*.
    int wait;
    // For GINNEL_WAIT_ADAPTIVE: how long to look, in nanoseconds. 0: the default, 100000.
    uint64_t budget_ns;
} ginnel_lock_options;

// An entry of a list.
typedef struct ginnel_list_entry {
    // sizeof(ginnel_list_entry).
    size_t size;
    // GINNEL_MEMBER, GINNEL_ENDPOINT or GINNEL_LISTENER.
    int subject;
    // For listeners: GINNEL_MESSAGE or GINNEL_STREAM. Otherwise 0.
    int kind;
    // Number of the member or of the endpoint. The host is member 0.
    uint32_t number;
    // Epoch of the endpoint's number. 0 for a member.
    uint32_t epoch;
    // 1 if it is there, 0 if not.
    uint32_t active;
    // The segment. Empty for a member.
    char segment[64];
    // Name of the member.
    char member[64];
    // Name of the endpoint, or at which it listens. Empty for a member.
    char name[64];
} ginnel_list_entry;

// How a farm's manager works. Fill it with zeros, set `size`, then what you want otherwise.
typedef struct ginnel_farm_options {
    // sizeof(ginnel_farm_options).
    size_t size;
    // The longest piece, in bytes. A worker's channel takes about eight times as much shared memory. 0: what fits into
    // rings of 1 MiB.
    size_t piece;
    // Pieces that a worker may hold: one that it works on, and others that are transferred meanwhile. 0: the default.
    size_t window;
    // How the manager waits: one of GINNEL_WAIT_*.
    int wait;
    // How often a piece is tried. 0: five times.
    uint32_t tries;
    // For GINNEL_WAIT_ADAPTIVE: how long to look, in nanoseconds. 0: the default, 100000.
    uint64_t budget_ns;
    // A worker that takes longer for a piece is dismissed. 0: it may take any time.
    uint64_t piece_timeout_ns;
    // How long a job goes on without any worker. 0: 30 s; UINT64_MAX: for ever.
    uint64_t patience_ns;
} ginnel_farm_options;

// Cuts the next piece of the input: sets `*offset` and `*length`, and returns 1; 0 if there is none.
typedef int (*ginnel_farm_next)(void *context, uint64_t *offset, size_t *length);

// Writes the input's `length` bytes from `offset` to `room`, which lies in the worker's ring. Must give the same bytes each
// time: a piece whose worker has died is asked for again. Returns 0; anything else ends the job with GINNEL_ERR_CALLBACK.
typedef int (*ginnel_farm_fill)(void *context, uint64_t offset, void *room, size_t length);

// A piece of a job's input.
typedef struct ginnel_farm_piece {
    // sizeof(ginnel_farm_piece) of the library that runs.
    size_t size;
    // Its number; its manager never uses it again.
    uint64_t number;
    // Where in the input it begins.
    uint64_t offset;
    // Its bytes.
    size_t length;
    // How often it has been given to a worker.
    uint32_t tries;
} ginnel_farm_piece;

// Takes a worker's result, `length` bytes at `result`, which end with the call. Called once for each piece, in the order in
// which results come. Returns 0; 1 if the result is nonsense (its worker is dismissed, and another gets the piece);
// anything else ends the job with GINNEL_ERR_CALLBACK.
typedef int (*ginnel_farm_fold)(void *context,
                                const struct ginnel_farm_piece *piece,
                                const void *result,
                                size_t length);

// A job. Fill it with zeros, set `size`, then the rest.
typedef struct ginnel_farm_job {
    // sizeof(ginnel_farm_job).
    size_t size;
    // What the workers are told that it is.
    const char *name;
    // Bytes of the input, which is cut into equal pieces, unless there is `next`.
    uint64_t bytes;
    // Bytes of an equal piece. 0: as long as a worker's channel takes.
    size_t piece;
    // Cuts the input into pieces of any lengths; or NULL.
    ginnel_farm_next next;
    // Where the input comes from.
    ginnel_farm_fill fill;
    // Where the results go.
    ginnel_farm_fold fold;
    // For the three functions.
    void *context;
} ginnel_farm_job;

// What happened in a job.
typedef struct ginnel_farm_report {
    // sizeof(ginnel_farm_report).
    size_t size;
    // From the start to the last result, or to now, in nanoseconds.
    uint64_t time_ns;
    // Results that were taken.
    uint64_t pieces;
    // Bytes of these pieces.
    uint64_t bytes;
    // Pieces that were given to a second worker because the first died, left, was dismissed or failed.
    uint64_t reassigned;
    // Everybody who had a part in it: see ginnel_farm_get_worker().
    size_t workers;
    // How many of them have died.
    size_t deaths;
} ginnel_farm_report;

// What one worker did in a job.
typedef struct ginnel_farm_worker_report {
    // sizeof(ginnel_farm_worker_report).
    size_t size;
    // When it came, from the start of the job, in nanoseconds; 0 if it was there before.
    uint64_t joined_ns;
    // When its last result came.
    uint64_t last_ns;
    // Its results that were taken.
    uint64_t pieces;
    // Bytes of these pieces.
    uint64_t bytes;
    // Pieces that it could make nothing of.
    uint64_t failed;
    // Pieces that were taken from it and given to others.
    uint64_t lost;
    // How it went: one of GINNEL_FARM_STAYED and so on.
    int departure;
    // What it calls itself, and whose member it is.
    char name[64];
} ginnel_farm_worker_report;

// How to work. Fill it with zeros, set `size`, then what you want otherwise.
typedef struct ginnel_farm_worker_options {
    // sizeof(ginnel_farm_worker_options).
    size_t size;
    // How long to wait for a manager, in nanoseconds. 0: not at all.
    uint64_t patience_ns;
    // For GINNEL_WAIT_ADAPTIVE: how long to look, in nanoseconds. 0: the default, 100000.
    uint64_t budget_ns;
    // How to wait for pieces: one of GINNEL_WAIT_*.
    int wait;
} ginnel_farm_worker_options;

// A piece, as its worker sees it.
typedef struct ginnel_farm_task {
    // sizeof(ginnel_farm_task) of the library that runs.
    size_t size;
    // Name of the job.
    const char *job;
    // Number of the piece.
    uint64_t number;
    // Where in the input it begins.
    uint64_t offset;
    // Its bytes, where the manager has put them, aligned to 8. A hostile manager can still change them.
    const void *data;
    // How many.
    size_t length;
} ginnel_farm_task;

// Works on a piece: writes the result to `result`, which has room for `room` bytes, and returns its length. A negative
// number means that nothing can be made of the piece, which is then tried elsewhere; why may be written to `result`, as a
// string. Nothing of `task` is there after it has returned.
typedef ssize_t (*ginnel_farm_work)(void *context,
                                    const struct ginnel_farm_task *task,
                                    void *result,
                                    size_t room);

// How to open a cache. Fill it with zeros, set `size`, then what you want otherwise.
typedef struct ginnel_cache_options {
    // sizeof(ginnel_cache_options).
    size_t size;
    // Path of the daemon's socket. NULL: $GINNEL_SOCKET, else /run/ginnel/ginnel.sock.
    const char *socket;
    // What this endpoint calls itself, for people. NULL: the program's name.
    const char *name;
    // Where changes go: "channel SEGMENT", "tcp ADDRESS:PORT" or "unix PATH". NULL: where the cache says.
    const char *changes;
    // How long a cache that is not there, or a server that is being replaced, is waited for, in nanoseconds. 0: 3 seconds;
    // negative: not at all.
    int64_t patience_ns;
    // How long the server may take for an answer, in nanoseconds. 0: 10 seconds.
    uint64_t timeout_ns;
} ginnel_cache_options;

// What is known of an item that was found.
typedef struct ginnel_cache_item {
    // sizeof(ginnel_cache_item).
    size_t size;
    // Bytes of its value, also if the buffer has fewer.
    size_t length;
    // Its version, for ginnel_cache_cas().
    uint64_t cas;
    // The client's, as they were stored.
    uint32_t flags;
} ginnel_cache_item;

// A key, for ginnel_cache_get_many(). This structure does not grow.
typedef struct ginnel_cache_key {
    // Its bytes.
    const void *key;
    // How many.
    size_t key_length;
} ginnel_cache_key;

// What ginnel_cache_get_many() has found for a key. This structure does not grow.
typedef struct ginnel_cache_found {
    // GINNEL_OK; GINNEL_ERR_NO_ITEM; or GINNEL_ERR_BUFFER_TOO_SMALL if there was no room left for the value.
    int status;
    // The client's, as they were stored.
    uint32_t flags;
    // Its version, for ginnel_cache_cas().
    uint64_t cas;
    // Where its value begins in the buffer.
    size_t offset;
    // Bytes of its value, also if there was no room left for it.
    size_t length;
} ginnel_cache_found;

// An item to store, for ginnel_cache_set_many(). This structure does not grow.
typedef struct ginnel_cache_entry {
    // The bytes of its key.
    const void *key;
    // How many.
    size_t key_length;
    // The bytes of its value.
    const void *value;
    // How many.
    size_t length;
    // Whatever the program likes.
    uint32_t flags;
    // In how many seconds it ends; 0: never.
    uint32_t ttl;
} ginnel_cache_entry;

// What has become of an item of ginnel_cache_set_many(). This structure does not grow.
typedef struct ginnel_cache_stored {
    // GINNEL_OK, or why it is not stored.
    int status;
    // Its version.
    uint64_t cas;
} ginnel_cache_stored;

// What a handle of a cache has done since it was opened.
typedef struct ginnel_cache_counters {
    // sizeof(ginnel_cache_counters).
    size_t size;
    // Items that were found in memory.
    uint64_t hits;
    // Keys that memory has no item of.
    uint64_t misses;
    // Keys that the server was asked for, because memory could not tell.
    uint64_t asked;
    // Requests whose answers were lost.
    uint64_t lost;
    // Connections that were opened to servers.
    uint64_t connections;
    // Keys whose hits were reported to the server.
    uint64_t reported;
} ginnel_cache_counters;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library that runs, for example "0.1.0"; GINNEL_VERSION is that of the header. Never NULL, never to
// be freed. Any thread; does not block.
const char *ginnel_version(void);

// What a status means, in a few fixed words. Never NULL, never to be freed. Any thread; does not block.
const char *ginnel_strerror(int status);

// What went wrong in the last call of this thread that failed: what, where, and often the fix. Empty if none has. Never
// NULL, never to be freed; valid until this thread's next failing call. Does not block.
const char *ginnel_last_error(void);

// What the daemon knows of members, segments, endpoints, listeners and channels, as JSON: what `ginnel status --json`
// prints. On the host it is all; in a VM, what concerns the segments that the VM has a share in. `socket` is the path of
// the daemon's socket; NULL: $GINNEL_SOCKET, else /run/ginnel/ginnel.sock. On success `*json` is the caller's, to be
// freed with ginnel_string_free(); on failure it is NULL.
//
// Blocks for the daemon's answer, for a few seconds where the daemon is being restarted. Any thread. Errors:
// GINNEL_ERR_NO_DAEMON, GINNEL_ERR_UNAVAILABLE, GINNEL_ERR_PROTOCOL.
int ginnel_inspect(const char *socket,
                   char **json);

// Frees a text that this library has handed out. NULL is allowed. Any thread; does not block.
void ginnel_string_free(char *string);

// Attaches to a segment through the daemon of this machine. `options` may be NULL. On success `*endpoint` is the
// caller's, to be freed with ginnel_detach(); on failure it is NULL.
//
// Blocks for the daemon's answer, up to some 10 s for a daemon that is being restarted; where there never was one it
// fails at once. Any thread. Errors: GINNEL_ERR_NO_DAEMON, GINNEL_ERR_NO_SEGMENT, GINNEL_ERR_DENIED, GINNEL_ERR_LIMIT,
// GINNEL_ERR_NAME.
int ginnel_attach(const char *segment,
                  const struct ginnel_attach_options *options,
                  struct ginnel_endpoint **endpoint);

// Frees an endpoint. Its listeners and channels go on; it ends for the daemon when the last of them is closed. NULL is
// allowed. No other thread may be using the handle. May tell the daemon, for at most a second.
int ginnel_detach(struct ginnel_endpoint *endpoint);

// Fills in `*info`, whose `size` the caller has set. Any thread; does not block.
int ginnel_endpoint_get_info(const struct ginnel_endpoint *endpoint,
                             struct ginnel_endpoint_info *info);

// Attaches to the segment of `address`, which is "segment/name", and listens at that name. `kind` is GINNEL_MESSAGE or
// GINNEL_STREAM; `options` may be NULL. On success `*listener` is the caller's, to be freed with
// ginnel_listener_close(); on failure it is NULL. The endpoint lives as long as the listener and its channels.
//
// Blocks like ginnel_attach(). Any thread. Errors: those of ginnel_attach() and ginnel_endpoint_listen().
int ginnel_listen(const char *address,
                  int kind,
                  const struct ginnel_channel_options *options,
                  struct ginnel_listener **listener);

// Listens at a name in the endpoint's segment. On success `*listener` is the caller's, to be freed with
// ginnel_listener_close(); on failure it is NULL.
//
// Blocks for the daemon's answer, up to some 10 s for a daemon that is being restarted. Any thread. Errors:
// GINNEL_ERR_IN_USE, GINNEL_ERR_DENIED, GINNEL_ERR_LIMIT, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME, GINNEL_ERR_NO_DAEMON.
int ginnel_endpoint_listen(const struct ginnel_endpoint *endpoint,
                           const char *name,
                           int kind,
                           const struct ginnel_channel_options *options,
                           struct ginnel_listener **listener);

// Attaches to the segment of `address`, which is "segment/name", and opens a channel to who listens at that name.
// `kind` is GINNEL_MESSAGE or GINNEL_STREAM; `options` may be NULL. On success `*channel` is the caller's, to be freed
// with ginnel_channel_close(); on failure it is NULL. The endpoint lives as long as the channel.
//
// Blocks like ginnel_attach(). Any thread. Errors: those of ginnel_attach() and ginnel_endpoint_connect().
int ginnel_connect(const char *address,
                   int kind,
                   const struct ginnel_channel_options *options,
                   struct ginnel_channel **channel);

// Opens a channel to who listens at a name in the endpoint's segment. The peer need not have accepted yet. On success
// `*channel` is the caller's, to be freed with ginnel_channel_close(); on failure it is NULL.
//
// Blocks for the daemon's answer, up to some 10 s for a daemon that is being restarted, and for as long as
// `options->patience_ns` where nobody listens. Any thread. Errors: GINNEL_ERR_REFUSED, GINNEL_ERR_KIND,
// GINNEL_ERR_DENIED, GINNEL_ERR_LIMIT, GINNEL_ERR_NO_MEMORY, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME,
// GINNEL_ERR_NO_DAEMON.
int ginnel_endpoint_connect(const struct ginnel_endpoint *endpoint,
                            const char *name,
                            int kind,
                            const struct ginnel_channel_options *options,
                            struct ginnel_channel **channel);

// Takes the next connection. The channel is of the listener's kind. On success `*channel` is the caller's, to be freed
// with ginnel_channel_close(); on failure it is NULL.
//
// Blocks for at most `timeout_ns` nanoseconds: 0 means not at all, a negative number for ever. Goes on through
// restarts of the daemon. Any thread. Errors: GINNEL_ERR_TIMED_OUT; GINNEL_ERR_WOULD_BLOCK for a timeout of 0.
int ginnel_accept(const struct ginnel_listener *listener,
                  int64_t timeout_ns,
                  struct ginnel_channel **channel);

// A file descriptor for poll(2) and epoll(7): readable when ginnel_accept() with a timeout of 0 is worth a try (which
// may still say GINNEL_ERR_WOULD_BLOCK). It belongs to the listener's endpoint: do not read or close it, nor use it
// after the listener is closed. Any thread; does not block.
int ginnel_listener_fd(const struct ginnel_listener *listener);

// Frees a listener, and not its name: whoever adopts its endpoint (see ginnel_hold()) listens there, and accepts those who wait.
// The name is free when the endpoint ends. Before exec(3) a listener is better kept, for the case that it fails. NULL is allowed.
// No other thread may be using the handle. Does not block.
int ginnel_listener_leave(struct ginnel_listener *listener);

// Frees a listener and its name; connections that wait to be accepted are refused, accepted channels stay. NULL is
// allowed. No other thread may be using the handle. Tells the daemon, for at most a second.
int ginnel_listener_close(struct ginnel_listener *listener);

// How long operations in these directions may wait, in nanoseconds: 0 means one look, a negative number (the default)
// for ever. After that they return GINNEL_ERR_TIMED_OUT.
//
// Counts as an operation in these directions (one thread at a time each); does not block.
int ginnel_channel_set_timeout(struct ginnel_channel *channel,
                               int directions,
                               int64_t timeout_ns);

// How operations in these directions wait: one of GINNEL_WAIT_*. `budget_ns` is for GINNEL_WAIT_ADAPTIVE: how long to
// look before sleeping, in nanoseconds; 0 means the default, 100000. Where it is not set it is what was said at
// ginnel_attach().
//
// Counts as an operation in these directions (one thread at a time each); does not block.
int ginnel_channel_set_wait(struct ginnel_channel *channel,
                            int directions,
                            int wait,
                            uint64_t budget_ns);

// Whether operations in these directions return GINNEL_ERR_WOULD_BLOCK instead of waiting; 0 (the default) means no.
//
// Counts as an operation in these directions (one thread at a time each); does not block.
int ginnel_channel_set_nonblocking(struct ginnel_channel *channel,
                                   int directions,
                                   int nonblocking);

// A file descriptor for poll(2) and epoll(7), or a negative status. After an operation in this direction has returned
// GINNEL_ERR_WOULD_BLOCK, it becomes readable (POLLIN, for both directions) when another try is worth it, which may
// still say GINNEL_ERR_WOULD_BLOCK; it says nothing at other times, so always try first. It belongs to the channel: do
// not read or close it, nor use it after the channel is closed.
//
// Counts as an operation in this direction (one thread at a time); does not block. Errors: GINNEL_ERR_UNSUPPORTED in a
// VM without interrupts.
int ginnel_channel_fd(struct ginnel_channel *channel,
                      int direction);

// Fills in `*counters`, whose `size` the caller has set, for one direction.
//
// Counts as an operation in this direction (one thread at a time); does not block.
int ginnel_channel_get_counters(struct ginnel_channel *channel,
                                int direction,
                                struct ginnel_counters *counters);

// Fills in `*info`, whose `size` the caller has set. Any thread; does not block.
int ginnel_channel_get_info(const struct ginnel_channel *channel, struct ginnel_channel_info *info);

// Half-close: says that nothing more comes from this side. The peer receives the rest, then GINNEL_ERR_FINISHED (or 0,
// the end of its stream). Receiving goes on. An open claim is aborted, messages that are committed go out.
//
// An operation of the sending direction (one thread at a time); does not block.
int ginnel_channel_finish(struct ginnel_channel *channel);

// Ends these directions at once, and makes void what is on its way in them: what was sent and is not received yet never is,
// and the next operation of the peer says GINNEL_ERR_ABORTED. Of this side, the next to receive says so, and the next to send
// GINNEL_ERR_AFTER_FINISH. Open claims and peeks end.
//
// Counts as an operation in these directions (one thread at a time each); does not block.
int ginnel_channel_abort(struct ginnel_channel *channel,
                         int directions);

// Closes a channel and frees it: the peer receives what was sent, then the end, and its sends fail with
// GINNEL_ERR_CLOSED. Pointers from claims and peeks end. NULL is allowed. No other thread may be using the handle. Tells
// the daemon, for at most a second.
int ginnel_channel_close(struct ginnel_channel *channel);

// Sends a message of `len` bytes, which may be 0. The bytes are the caller's again when it returns. Messages that are
// committed go out before it.
//
// An operation of the sending direction (one thread at a time); blocks while the channel is full. Errors:
// GINNEL_ERR_WOULD_BLOCK, GINNEL_ERR_TIMED_OUT, GINNEL_ERR_TOO_LONG, GINNEL_ERR_CLAIMED, GINNEL_ERR_AFTER_FINISH,
// GINNEL_ERR_CLOSED, GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
int ginnel_message_send(struct ginnel_channel *channel,
                        const void *data,
                        size_t len);

// Claims room for a message of up to `len` bytes, to be written in place: `*data` points to it, aligned to 8 bytes,
// until it is sent, committed or aborted, or the channel is finished or closed. Nothing is visible to the peer before.
//
// An operation of the sending direction (one thread at a time); blocks while the channel is full. Errors: those of
// ginnel_message_send().
int ginnel_message_claim(struct ginnel_channel *channel,
                         size_t len,
                         void **data);

// Sends the first `len` bytes of what is claimed, and all that is committed before.
//
// An operation of the sending direction (one thread at a time); does not block. Errors: GINNEL_ERR_NOT_CLAIMED;
// GINNEL_ERR_INVALID if `len` is more than was claimed, and the claim stays; GINNEL_ERR_CLOSED, GINNEL_ERR_PEER_DEAD,
// GINNEL_ERR_CORRUPT or GINNEL_ERR_BROKEN, and the claim is gone.
int ginnel_message_send_claimed(struct ginnel_channel *channel,
                                size_t len);

// Makes the first `len` bytes of what is claimed a message that goes out with the next ginnel_message_publish(),
// ginnel_message_send() or ginnel_message_send_claimed(). So a batch costs the peer one look.
//
// An operation of the sending direction (one thread at a time); does not block. Errors: those of
// ginnel_message_send_claimed().
int ginnel_message_commit(struct ginnel_channel *channel,
                          size_t len);

// Lets all committed messages go out at once. A claim that is open stays open.
//
// An operation of the sending direction (one thread at a time); does not block. Errors: GINNEL_ERR_BROKEN, and the
// messages are gone.
int ginnel_message_publish(struct ginnel_channel *channel);

// Gives up what is claimed, if anything; nothing of it is ever seen.
//
// An operation of the sending direction (one thread at a time); does not block.
int ginnel_message_abort(struct ginnel_channel *channel);

// Receives a message into `buffer`, which has room for `len` bytes; returns the message's length, or a negative status.
// 0 is an empty message; the end is GINNEL_ERR_FINISHED.
//
// An operation of the receiving direction (one thread at a time); blocks while there is no message. Errors:
// GINNEL_ERR_WOULD_BLOCK, GINNEL_ERR_TIMED_OUT; GINNEL_ERR_BUFFER_TOO_SMALL, and the message stays;
// GINNEL_ERR_FINISHED, GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
ssize_t ginnel_message_recv(struct ginnel_channel *channel,
                            void *buffer,
                            size_t len);

// Looks at the next message in place: `*data` points to its `*len` bytes, aligned to 8, until it is released or
// received, or the channel is closed. Looking again yields the same message. A hostile peer can still change the
// bytes: copy what must not change before checking it.
//
// An operation of the receiving direction (one thread at a time); blocks while there is no message. Errors: those of
// ginnel_message_recv(), but for GINNEL_ERR_BUFFER_TOO_SMALL.
int ginnel_message_peek(struct ginnel_channel *channel,
                        const void **data,
                        size_t *len);

// Ends the look at a message and gives its room back to the peer.
//
// An operation of the receiving direction (one thread at a time); does not block. Errors: GINNEL_ERR_NOT_CLAIMED
// without a ginnel_message_peek() before; GINNEL_ERR_BROKEN, and what was read of the message may be zeros.
int ginnel_message_release(struct ginnel_channel *channel);

// Sends some of `len` bytes; returns how many, at least one unless `len` is 0, or a negative status.
//
// An operation of the sending direction (one thread at a time); blocks while the channel is full. Errors:
// GINNEL_ERR_WOULD_BLOCK, GINNEL_ERR_TIMED_OUT, GINNEL_ERR_CLAIMED, GINNEL_ERR_AFTER_FINISH, GINNEL_ERR_CLOSED,
// GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
ssize_t ginnel_stream_send(struct ginnel_channel *channel,
                           const void *data,
                           size_t len);

// Sends all of `len` bytes. The timeout counts for all of them together. After an error it is not known how many have
// gone; non-blocking programs use ginnel_stream_send().
//
// An operation of the sending direction (one thread at a time); blocks until all have gone. Errors: those of
// ginnel_stream_send().
int ginnel_stream_send_all(struct ginnel_channel *channel,
                           const void *data,
                           size_t len);

// Claims room for at most `most` bytes of the stream, in one run, to be written in place: `*data` points to `*len` bytes
// (at least one, if `most` is not 0) until they are sent or aborted, or the channel is finished or closed.
//
// An operation of the sending direction (one thread at a time); blocks while the channel is full. Errors: those of
// ginnel_stream_send().
int ginnel_stream_claim(struct ginnel_channel *channel,
                        size_t most,
                        void **data,
                        size_t *len);

// Sends the first `len` bytes of what is claimed.
//
// An operation of the sending direction (one thread at a time); does not block. Errors: GINNEL_ERR_NOT_CLAIMED;
// GINNEL_ERR_INVALID if `len` is more than was claimed, and the claim stays; GINNEL_ERR_CLOSED, GINNEL_ERR_PEER_DEAD,
// GINNEL_ERR_CORRUPT or GINNEL_ERR_BROKEN, and the claim is gone.
int ginnel_stream_send_claimed(struct ginnel_channel *channel,
                               size_t len);

// Gives up what is claimed, if anything; nothing of it is ever seen.
//
// An operation of the sending direction (one thread at a time); does not block.
int ginnel_stream_abort(struct ginnel_channel *channel);

// Receives what is there into `buffer`, which has room for `len` bytes; returns how many bytes came, 0 at the end of
// the stream (or for a `len` of 0), or a negative status.
//
// An operation of the receiving direction (one thread at a time); blocks while there is nothing. Errors:
// GINNEL_ERR_WOULD_BLOCK, GINNEL_ERR_TIMED_OUT, GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
ssize_t ginnel_stream_recv(struct ginnel_channel *channel,
                           void *buffer,
                           size_t len);

// Looks at the bytes that are there, in place and as one run: `*data` points to `*len` of them (at least one) until they
// are released or received, or the channel is closed. Looking again yields them again, perhaps with more behind. A
// hostile peer can still change the bytes: copy what must not change before checking it.
//
// An operation of the receiving direction (one thread at a time); blocks while there is nothing. Errors: those of
// ginnel_stream_recv(), and GINNEL_ERR_FINISHED at the end of the stream.
int ginnel_stream_peek(struct ginnel_channel *channel,
                       const void **data,
                       size_t *len);

// Ends the look at the first `len` bytes and gives their room back to the peer; the rest stays for the next look.
//
// An operation of the receiving direction (one thread at a time); does not block. Errors: GINNEL_ERR_NOT_CLAIMED
// without a ginnel_stream_peek() before; GINNEL_ERR_INVALID if `len` is more than was seen, and the look goes on;
// GINNEL_ERR_BROKEN, and what was read of the bytes may be zeros.
int ginnel_stream_release(struct ginnel_channel *channel,
                          size_t len);

// Makes an empty set. On success `*set` is the caller's, to be freed with ginnel_ready_set_close(); on failure it is NULL.
//
// Does not block. Any thread. Errors: GINNEL_ERR_SYSTEM if there are no more file descriptors, of which it takes two.
int ginnel_ready_set_new(struct ginnel_ready_set **set);

// From now on operations in these directions of the channel never wait: they return GINNEL_ERR_WOULD_BLOCK, and the set
// reports `key` when another try is worth it. It reports the key once at the beginning, too. What was reported is reported
// again only after another GINNEL_ERR_WOULD_BLOCK, so work on a channel until it says that. A direction is in one set at a
// time. The set may be closed before the channel and the channel before the set.
//
// Counts as an operation in these directions and of the set (one thread at a time each). Asks the daemon for a readiness
// board where those that the process has are full, each of which serves 24576 directions of an endpoint; then it blocks up
// to some 10 s for a daemon that is being restarted. Errors: GINNEL_ERR_LIMIT, GINNEL_ERR_NO_MEMORY, GINNEL_ERR_NO_DAEMON.
int ginnel_ready_set_add(struct ginnel_ready_set *set,
                         struct ginnel_channel *channel,
                         int directions,
                         uint64_t key);

// Takes these directions of a channel out of their set. Their operations wait again, unless they are non-blocking.
//
// Counts as an operation in these directions (one thread at a time each); does not block.
int ginnel_channel_leave_set(struct ginnel_channel *channel,
                             int directions);

// Reports `key` as long as `fd` is readable: ginnel_listener_fd(), a socket, a timer. A descriptor that is closed is no
// longer watched; say ginnel_ready_set_unwatch() before you close one of which there are duplicates.
//
// One thread at a time; does not block. Errors: GINNEL_ERR_SYSTEM, for example for a descriptor of a file.
int ginnel_ready_set_watch(struct ginnel_ready_set *set,
                           int fd,
                           uint64_t key);

// Reports a descriptor no more.
//
// One thread at a time; does not block. Errors: GINNEL_ERR_SYSTEM if it was not watched.
int ginnel_ready_set_unwatch(struct ginnel_ready_set *set, int fd);

// Waits until there is something to do, writes up to `most` keys to `keys`, in no order, and returns how many; 0 after the
// timeout. What did not fit is returned by the next call.
//
// One thread at a time. Blocks for at most `timeout_ns` nanoseconds: 0 means one look, a negative number for ever. Signals
// do not interrupt it. Errors: GINNEL_ERR_INVALID if `most` is 0; GINNEL_ERR_SYSTEM in a fork's child of the process that
// has made the set.
ssize_t ginnel_ready_set_wait(struct ginnel_ready_set *set,
                              uint64_t *keys,
                              size_t most,
                              int64_t timeout_ns);

// How ginnel_ready_set_wait() waits: one of GINNEL_WAIT_*. `budget_ns` is for GINNEL_WAIT_ADAPTIVE, as in
// ginnel_channel_set_wait(). The default is adaptive.
//
// One thread at a time; does not block.
int ginnel_ready_set_set_wait(struct ginnel_ready_set *set,
                              int wait,
                              uint64_t budget_ns);

// For programs with an event loop of their own: a file descriptor, the same each time. After a call of this function it
// becomes readable (POLLIN) when ginnel_ready_set_wait() with a timeout of 0 has something to report, or for no reason; it
// is readable at once if something is there already. Call this again after each ginnel_ready_set_wait(), before the next
// poll(2). It belongs to the set: do not read or close it.
//
// One thread at a time; does not block. In a VM without interrupts it never becomes readable: look from time to time.
int ginnel_ready_set_fd(struct ginnel_ready_set *set);

// Frees a set. Directions that are in it go on returning GINNEL_ERR_WOULD_BLOCK until they are closed, leave it or enter
// another. NULL is allowed. No other thread may be using the handle. Does not block.
int ginnel_ready_set_close(struct ginnel_ready_set *set);

// Has an endpoint live for `time_ns` even if no process owns it, so that the program which this process executes next, or
// another process, can adopt it. On success `*token`, which it needs for ginnel_adopt(), is the caller's, to be freed with
// ginnel_string_free(); on failure it is NULL. The token is a secret: whoever has it can be the endpoint.
//
// Blocks for the daemon's answer, up to 10 s. Any thread. Errors: GINNEL_ERR_LIMIT if the time is longer than the daemon
// allows, or there are too many holds; GINNEL_ERR_TIMED_OUT, GINNEL_ERR_NO_DAEMON, GINNEL_ERR_UNRECORDED.
int ginnel_hold(const struct ginnel_endpoint *endpoint,
                int64_t time_ns,
                char **token);

// Ends a hold of this endpoint before its time. Without effect if somebody has adopted the endpoint with this token.
//
// Any thread; does not block.
int ginnel_release(const struct ginnel_endpoint *endpoint,
                   const char *token);

// Becomes an owner of the endpoint that is held with this token, and ends that hold. `options` are those of ginnel_attach(),
// and may be NULL; their name is of no importance. On success `*endpoint` is the caller's, to be freed with ginnel_detach();
// on failure it is NULL.
//
// Blocks as ginnel_attach() does. Any thread. Errors: GINNEL_ERR_STALE if the hold is over or another process was faster,
// GINNEL_ERR_DENIED if this user is neither that of the endpoint nor one who may use the segment, GINNEL_ERR_LIMIT,
// GINNEL_ERR_NO_DAEMON, GINNEL_ERR_BROKEN.
int ginnel_adopt(const char *token,
                 const struct ginnel_attach_options *options,
                 struct ginnel_endpoint **endpoint);

// Stops using a channel and says where it stands, for ginnel_channel_resume(). On success the channel is freed, and `*saved` is
// the caller's, to be freed with ginnel_string_free(); it is no secret. On failure it is NULL, and the channel is as before. The
// peer notices nothing: what it sends meanwhile waits in the ring. What is claimed must be sent or given up before; what is peeked at
// and not released comes again.
//
// Counts as an operation in both directions; does not block. Errors: GINNEL_ERR_CLAIMED.
int ginnel_channel_save(struct ginnel_channel *channel,
                        char **saved);

// Goes on with a channel of this endpoint where it was saved: nothing that was on its way is lost, or comes twice. Each saved
// channel is resumed once, by one process. What was set of it (timeouts, how it waits, a ready set) is to be set again. On
// success `*channel` is the caller's, to be freed with ginnel_channel_close(); on failure it is NULL.
//
// Blocks for the daemon's answer, up to 10 s. Any thread. Errors: GINNEL_ERR_NOT_FOUND if the endpoint has no such channel,
// GINNEL_ERR_CORRUPT if it does not stand where it was saved (it is closed then), GINNEL_ERR_TIMED_OUT, GINNEL_ERR_NO_DAEMON,
// GINNEL_ERR_READ_ONLY.
int ginnel_channel_resume(const struct ginnel_endpoint *endpoint,
                          const char *saved,
                          struct ginnel_channel **channel);

// Makes a block of `size` bytes in the segment of `endpoint` and opens it for reading and writing. `name` may be NULL: then
// nobody finds it until ginnel_block_link(). `options` may be NULL. On success `*block` is the caller's, to be freed with
// ginnel_block_close(); on failure it is NULL.
//
// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY, GINNEL_ERR_QUOTA,
// GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_block_create(const struct ginnel_endpoint *endpoint,
                        const char *name,
                        size_t size,
                        const struct ginnel_block_options *options,
                        struct ginnel_block **block);

// Opens a block of the segment of `endpoint` by name, with these rights (one of GINNEL_RIGHTS_*, not NONE). Waits up to
// `patience_ns` nanoseconds for one that is not there or busy; 0: not at all. On success `*block` is the caller's, to be
// freed with ginnel_block_close(); on failure it is NULL.
//
// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_NOT_FOUND, GINNEL_ERR_DENIED, GINNEL_ERR_BUSY,
// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_block_open(const struct ginnel_endpoint *endpoint,
                      const char *name,
                      int wanted,
                      uint64_t patience_ns,
                      struct ginnel_block **block);

// Removes the name of a block. Its memory stays as long as somebody has it open. For its owner. Blocks for the daemon's answer.
// Any thread. Errors: GINNEL_ERR_NOT_FOUND, GINNEL_ERR_DENIED, GINNEL_ERR_NAME.
int ginnel_block_unlink(const struct ginnel_endpoint *endpoint,
                        const char *name);

// Gives a name to a block that has none. For its owner. Blocks for the daemon's answer. Any thread. Errors:
// GINNEL_ERR_IN_USE, GINNEL_ERR_DENIED, GINNEL_ERR_NAME.
int ginnel_block_link(const struct ginnel_block *block,
                      const char *name);

// Where the block's bytes lie, and how many there are: mapped with the rights of this handle, until ginnel_block_close() or
// ginnel_block_resize(). Others write there too: order your accesses by a lock. A store without the right is SIGSEGV,
// unless ginnel_block_guard(). `length` may be NULL. Any thread. Errors: GINNEL_ERR_DENIED, GINNEL_ERR_BROKEN.
int ginnel_block_map(const struct ginnel_block *block,
                     void **address,
                     size_t *length);

// Survives stores without the right from now on: they go into a private copy of the page, never into the block, and the
// next function of this block returns GINNEL_ERR_DENIED, after which the block shows what it has. Installs a handler for
// SIGSEGV, which passes on what does not lie in such a block. Any thread.
int ginnel_block_guard(const struct ginnel_block *block);

// Copies `len` bytes at `at` of the block to `buffer`. Any thread. Errors: GINNEL_ERR_RANGE, GINNEL_ERR_DENIED,
// GINNEL_ERR_BROKEN.
int ginnel_block_read(const struct ginnel_block *block,
                      size_t at,
                      void *buffer,
                      size_t len);

// Copies `len` bytes from `data` into the block at `at`. Any thread. Errors: GINNEL_ERR_RANGE, GINNEL_ERR_DENIED,
// GINNEL_ERR_BROKEN.
int ginnel_block_write(const struct ginnel_block *block,
                       size_t at,
                       const void *data,
                       size_t len);

// Makes the block longer or shorter where it is; it may be mapped elsewhere in the process afterwards. For its owner, and
// while no other thread uses the handle. Blocks for the daemon's answer. Errors: GINNEL_ERR_NO_MEMORY if there is no room
// behind it, GINNEL_ERR_BUSY if others have it open and would keep what is cut off, GINNEL_ERR_QUOTA, GINNEL_ERR_DENIED.
int ginnel_block_resize(struct ginnel_block *block,
                        size_t size);

// Says what a member may do with the block: number of the member, and of one of its endpoints, or 0 for all of them. Rights
// that handles have and that are not granted any more are taken away. For its owner. Blocks for the daemon's answer. Any
// thread. Errors: GINNEL_ERR_DENIED, GINNEL_ERR_NOT_FOUND.
int ginnel_block_grant(const struct ginnel_block *block,
                       uint32_t member,
                       uint32_t endpoint,
                       int granted);

// Fills in `*info`, whose `size` the caller has set. Any thread; does not block.
int ginnel_block_get_info(const struct ginnel_block *block, struct ginnel_block_info *info);

// Unmaps and frees a block handle. NULL is allowed. No other thread may be using the handle. May tell the daemon, for at most a second.
int ginnel_block_close(struct ginnel_block *block);

// Handles what the daemon has said unasked, for example that rights were taken away. Functions that ask the daemon do so
// too, and those of a block every 10 ms. Any thread; does not block.
int ginnel_process_events(const struct ginnel_endpoint *endpoint);

// Opens a mutex of the segment of `endpoint` by name. `options` may be NULL. On success the handle is the
// caller's, to be freed with ginnel_mutex_close(); on failure it is NULL. A lock has 63 handles at most.
//
// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_KIND if a lock of another kind has that name,
// GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_mutex_open(const struct ginnel_endpoint *endpoint,
                      const char *name,
                      const struct ginnel_lock_options *options,
                      struct ginnel_mutex **mutex);

// Locks. Waits up to `timeout_ns`; 0: not at all; negative: for ever. Returns 0, or GINNEL_OWNER_DIED: in both cases the
// caller has it. Errors: GINNEL_ERR_TIMED_OUT, GINNEL_ERR_NOT_RECOVERABLE, GINNEL_ERR_DEADLOCK if this handle has it
// already, GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
int ginnel_mutex_lock(struct ginnel_mutex *mutex,
                      int64_t timeout_ns);

// Unlocks. Errors: GINNEL_ERR_NOT_OWNER, GINNEL_ERR_CORRUPT.
int ginnel_mutex_unlock(struct ginnel_mutex *mutex);

// Says that the data are consistent again, after GINNEL_OWNER_DIED. Errors: GINNEL_ERR_NOT_OWNER.
int ginnel_mutex_consistent(struct ginnel_mutex *mutex);

// Frees a handle. What it still has locked is handed on as if its owner had died. NULL is allowed. No other thread may be using
// the handle. May tell the daemon, for at most a second.
int ginnel_mutex_close(struct ginnel_mutex *mutex);

// Opens a read-write lock of the segment of `endpoint` by name. `options` may be NULL. On success the handle is the
// caller's, to be freed with ginnel_rwlock_close(); on failure it is NULL. A lock has 63 handles at most.
//
// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_KIND if a lock of another kind has that name,
// GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_rwlock_open(const struct ginnel_endpoint *endpoint,
                       const char *name,
                       const struct ginnel_lock_options *options,
                       struct ginnel_rwlock **lock);

// Locks for reading. Waits up to `timeout_ns`; 0: not at all; negative: for ever. Errors: GINNEL_ERR_TIMED_OUT,
// GINNEL_ERR_OWNER_DIED if a writer has died in it: then take it for writing, GINNEL_ERR_NOT_RECOVERABLE,
// GINNEL_ERR_DEADLOCK, GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
int ginnel_rwlock_rdlock(struct ginnel_rwlock *lock,
                         int64_t timeout_ns);

// Locks for writing. Otherwise as ginnel_mutex_lock().
int ginnel_rwlock_wrlock(struct ginnel_rwlock *lock, int64_t timeout_ns);

// Unlocks, whichever way it was locked. Errors: GINNEL_ERR_NOT_OWNER, GINNEL_ERR_CORRUPT.
int ginnel_rwlock_unlock(struct ginnel_rwlock *lock);

// Says that the data are consistent again, after GINNEL_OWNER_DIED. Errors: GINNEL_ERR_NOT_OWNER.
int ginnel_rwlock_consistent(struct ginnel_rwlock *lock);

// Frees a handle. What it still has locked is handed on as if its owner had died. NULL is allowed. No other thread may be using
// the handle. May tell the daemon, for at most a second.
int ginnel_rwlock_close(struct ginnel_rwlock *lock);

// Opens a condvar of the segment of `endpoint` by name. `options` may be NULL. On success the handle is the
// caller's, to be freed with ginnel_condvar_close(); on failure it is NULL. A lock has 63 handles at most.
//
// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_KIND if a lock of another kind has that name,
// GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_condvar_open(const struct ginnel_endpoint *endpoint,
                        const char *name,
                        const struct ginnel_lock_options *options,
                        struct ginnel_condvar **condvar);

// Unlocks the mutex, waits for a signal up to `timeout_ns` (negative: for ever), and locks again, for which it waits for ever.
// Returns 0, or GINNEL_OWNER_DIED as ginnel_mutex_lock(); after these and after GINNEL_ERR_TIMED_OUT the caller has the
// mutex, after other errors not. Look at the condition in every case. Errors: those of ginnel_mutex_lock(), and
// GINNEL_ERR_NOT_OWNER if the caller did not have the mutex.
int ginnel_condvar_wait(struct ginnel_condvar *condvar,
                        struct ginnel_mutex *mutex,
                        int64_t timeout_ns);

// Signals one waiter, if there is one. The condition must have been changed with the mutex; this may be called without.
int ginnel_condvar_signal(struct ginnel_condvar *condvar);

// Signals all waiters.
int ginnel_condvar_broadcast(struct ginnel_condvar *condvar);

// Frees a handle. What it still has locked is handed on as if its owner had died. NULL is allowed. No other thread may be using
// the handle. May tell the daemon, for at most a second.
int ginnel_condvar_close(struct ginnel_condvar *condvar);

// Opens a semaphore of the segment of `endpoint` by name. A new one has `initial` permits, of at most `limit`; an existing one must have the same limit, or `limit` is 0. `options` may be NULL. On success the handle is the
// caller's, to be freed with ginnel_semaphore_close(); on failure it is NULL. A lock has 63 handles at most.
//
// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_KIND if a lock of another kind has that name,
// GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_semaphore_open(const struct ginnel_endpoint *endpoint,
                          const char *name,
                          uint32_t limit,
                          uint32_t initial,
                          const struct ginnel_lock_options *options,
                          struct ginnel_semaphore **semaphore);

// Acquires one permit. Waits up to `timeout_ns`; 0: not at all; negative: for ever. Errors: GINNEL_ERR_TIMED_OUT,
// GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
int ginnel_semaphore_wait(struct ginnel_semaphore *semaphore,
                          int64_t timeout_ns);

// Releases `count` permits. Errors: GINNEL_ERR_OVERFLOW if it would have more than its limit, GINNEL_ERR_CORRUPT.
int ginnel_semaphore_post(struct ginnel_semaphore *semaphore,
                          uint32_t count);

// How many permits are left just now, in `*permits`. Errors: GINNEL_ERR_CORRUPT.
int ginnel_semaphore_get(struct ginnel_semaphore *semaphore, uint64_t *permits);

// Frees a handle. What it still has locked is handed on as if its owner had died. NULL is allowed. No other thread may be using
// the handle. May tell the daemon, for at most a second.
int ginnel_semaphore_close(struct ginnel_semaphore *semaphore);

// Opens a barrier of the segment of `endpoint` by name. It is for `parties` (1 to 63), each with a handle of its own. `options` may be NULL. On success the handle is the
// caller's, to be freed with ginnel_barrier_close(); on failure it is NULL. A lock has 63 handles at most.
//
// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_KIND if a lock of another kind has that name,
// GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_barrier_open(const struct ginnel_endpoint *endpoint,
                        const char *name,
                        uint32_t parties,
                        const struct ginnel_lock_options *options,
                        struct ginnel_barrier **barrier);

// Waits until all parties have come, up to `timeout_ns`; negative: for ever. Returns 1 to one of them, 0 to the others.
// Errors: GINNEL_ERR_TIMED_OUT, GINNEL_ERR_BARRIER_BROKEN if a party has died, GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT.
int ginnel_barrier_wait(struct ginnel_barrier *barrier,
                        int64_t timeout_ns);

// Makes a broken barrier usable again. Errors: GINNEL_ERR_WOULD_BLOCK while some of those who waited have not found out yet.
int ginnel_barrier_reset(struct ginnel_barrier *barrier);

// Frees a handle. What it still has locked is handed on as if its owner had died. NULL is allowed. No other thread may be using
// the handle. May tell the daemon, for at most a second.
int ginnel_barrier_close(struct ginnel_barrier *barrier);

// Opens a once of the segment of `endpoint` by name. `options` may be NULL. On success the handle is the
// caller's, to be freed with ginnel_once_close(); on failure it is NULL. A lock has 63 handles at most.
//
// Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_KIND if a lock of another kind has that name,
// GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_once_open(const struct ginnel_endpoint *endpoint,
                     const char *name,
                     const struct ginnel_lock_options *options,
                     struct ginnel_once **once);

// The turn to do it. Waits while somebody else is at it, up to `timeout_ns`; negative: for ever. Returns 0 if it has been done,
// GINNEL_ONCE_BEGIN or GINNEL_ONCE_AGAIN if the caller has to. Errors: GINNEL_ERR_TIMED_OUT, GINNEL_ERR_FENCED,
// GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
int ginnel_once_begin(struct ginnel_once *once,
                      int64_t timeout_ns);

// Ends a turn. `done` is 1 if it has been done; with 0 the next caller has the turn. Errors: GINNEL_ERR_NOT_OWNER.
int ginnel_once_end(struct ginnel_once *once,
                    int done);

// Frees a handle. What it still has locked is handed on as if its owner had died. NULL is allowed. No other thread may be using
// the handle. May tell the daemon, for at most a second.
int ginnel_once_close(struct ginnel_once *once);

// Removes the name of a lock. Those who have it open keep it; the next open of the name makes another. For members that have
// made it. Blocks for the daemon's answer. Any thread. Errors: GINNEL_ERR_NOT_FOUND, GINNEL_ERR_DENIED, GINNEL_ERR_NAME.
int ginnel_lock_unlink(const struct ginnel_endpoint *endpoint,
                       const char *name);

// Lists the members, the endpoints and the listeners that the daemon knows: all on the host; in a VM, those of the
// segments that the VM has a share in. `socket` is the path of the daemon's socket; NULL: $GINNEL_SOCKET, else
// /run/ginnel/ginnel.sock. On success `*list` is the caller's, to be freed with ginnel_list_close(); on failure it is
// NULL.
//
// Blocks for the daemon's answer, for a few seconds where the daemon is being restarted. Any thread. Errors:
// GINNEL_ERR_NO_DAEMON, GINNEL_ERR_UNAVAILABLE, GINNEL_ERR_PROTOCOL.
int ginnel_list_open(const char *socket,
                     struct ginnel_list **list);

// Fills in `*entry`, whose `size` the caller has set, with the next entry: members come first, then endpoints, then
// listeners. Returns 1, or 0 at the end, or a negative status. Does not block.
int ginnel_list_next(struct ginnel_list *list,
                     struct ginnel_list_entry *entry);

// Frees a list. NULL is allowed. No other thread may be using the handle; does not block.
int ginnel_list_close(struct ginnel_list *list);

// Makes a manager without workers. `options` may be NULL. On success `*farm` is the caller's, to be freed with
// ginnel_farm_close(); on failure it is NULL.
int ginnel_farm_open(const struct ginnel_farm_options *options,
                     struct ginnel_farm **farm);

// Attaches to the segment of `address`, which is "segment/name", and lets workers come there: one, with a slice of its own,
// or as many as like in a segment that they share. May be called again, for more addresses, while no job is in hand.
//
// Blocks like ginnel_attach(). Errors: those of ginnel_attach() and ginnel_endpoint_listen().
int ginnel_farm_listen(struct ginnel_farm *farm,
                       const char *address);

// Starts a program as a child of this process: `argv` is its name, which is looked for in $PATH, its arguments, and NULL at
// the end. It should work for this farm (ginnel_farm_connect(), or "ginnel farm work ADDRESS") and end when the farm is
// closed. Its standard input is empty, and its standard output goes nowhere.
//
// Errors: GINNEL_ERR_SYSTEM if it cannot be started.
int ginnel_farm_spawn(struct ginnel_farm *farm,
                      const char *const *argv);

// Waits until `count` workers are here. A job needs not wait for that: who comes later gets work too. Not while a job is in
// hand.
//
// Blocks for at most `timeout_ns` nanoseconds: 0 means not at all, a negative number for ever. Errors:
// GINNEL_ERR_TIMED_OUT.
int ginnel_farm_wait_for_workers(struct ginnel_farm *farm,
                                 size_t count,
                                 int64_t timeout_ns);

// The longest piece that a worker's channel takes, in bytes, or a negative status. Not while a job is in hand.
ssize_t ginnel_farm_longest_piece(struct ginnel_farm *farm);

// Has a job done: scatters its pieces over the workers, and gathers their results, until all is done. The workers stay for
// the next job.
//
// Blocks until then. Errors, after which no job is in hand: GINNEL_ERR_NO_WORKER if there was none for as long as the
// manager waits, GINNEL_ERR_PIECE if a piece failed or took its worker along as often as it is tried, GINNEL_ERR_TOO_LONG
// for a piece that is longer than a worker's channel takes, GINNEL_ERR_CALLBACK.
int ginnel_farm_run(struct ginnel_farm *farm,
                    const struct ginnel_farm_job *job);

// Takes a job in hand, which ginnel_farm_step() does: for programs with an event loop. Does not block.
int ginnel_farm_start(struct ginnel_farm *farm,
                      const struct ginnel_farm_job *job);

// Does what can be done of the job without waiting. Returns GINNEL_FARM_WORKING, GINNEL_FARM_WAITING or GINNEL_FARM_DONE
// (then no job is in hand), or a negative status: those of ginnel_farm_run(), and the job has ended;
// GINNEL_ERR_UNSUPPORTED in a VM without interrupts.
int ginnel_farm_step(struct ginnel_farm *farm);

// A file descriptor for poll(2) and epoll(7), or a negative status: after ginnel_farm_step() has returned
// GINNEL_FARM_WAITING it becomes readable when a worker has said something, has come or has gone, or when a time has run
// out. It belongs to the farm: do not read or close it, nor use it after the farm is closed. Only while a job is in hand;
// it is the same for all jobs. Errors: GINNEL_ERR_UNSUPPORTED in a VM without interrupts.
int ginnel_farm_fd(struct ginnel_farm *farm);

// Gives up the job that is in hand, if any. The workers stay; what they still make of its pieces is thrown away.
int ginnel_farm_stop(struct ginnel_farm *farm);

// Fills in `*report`, whose `size` the caller has set: of the job in hand so far, or of the last one.
int ginnel_farm_get_report(struct ginnel_farm *farm,
                           struct ginnel_farm_report *report);

// Fills in `*worker`, whose `size` the caller has set, with what a worker did in the job in hand or the last one: `index`
// counts from 0, in the order in which they came. Errors: GINNEL_ERR_INVALID beyond the last.
int ginnel_farm_get_worker(struct ginnel_farm *farm,
                           size_t index,
                           struct ginnel_farm_worker_report *worker);

// Frees a farm. Its workers are told that there is no more; those that ginnel_farm_spawn() has started are waited for, for
// at most 5 s, and then killed. NULL is allowed.
int ginnel_farm_close(struct ginnel_farm *farm);

// Attaches to the segment of `address`, which is "segment/name", and connects to the manager that listens there. `options`
// may be NULL. On success `*worker` is the caller's, to be freed with ginnel_farm_worker_close(); on failure it is NULL.
//
// Blocks like ginnel_attach(), and for as long as `options->patience_ns`. Errors: those of ginnel_attach() and
// ginnel_endpoint_connect().
int ginnel_farm_connect(const char *address,
                        const struct ginnel_farm_worker_options *options,
                        struct ginnel_farm_worker **worker);

// Works until the manager has no more jobs: calls `work` for each piece, with `context`.
//
// Blocks until then. Errors: GINNEL_ERR_PEER_DEAD if the manager has died, GINNEL_ERR_CLOSED if it has dismissed this
// worker, GINNEL_ERR_SYSTEM if it breaks the protocol.
int ginnel_farm_serve(struct ginnel_farm_worker *worker,
                      ginnel_farm_work work,
                      void *context);

// Pieces that a worker has answered so far, and their bytes. Either may be NULL.
int ginnel_farm_worker_get_done(const struct ginnel_farm_worker *worker,
                                uint64_t *pieces,
                                uint64_t *bytes);

// Frees a worker; its manager gives what it still holds to others. NULL is allowed. Tells the daemon, for at most a second.
int ginnel_farm_worker_close(struct ginnel_farm_worker *worker);

// Opens the cache at `address`, which is SEGMENT/NAME. `options` may be NULL. On success `*cache` is the caller's, to be freed with
// ginnel_cache_close(); on failure it is NULL. It is enough that this machine may read the segment.
//
// Blocks for the daemon's answer, and for a cache that is not there yet. Any thread. Errors: GINNEL_ERR_NO_SEGMENT,
// GINNEL_ERR_NOT_FOUND if there is no such cache, GINNEL_ERR_KIND if it is none of this version, GINNEL_ERR_CORRUPT,
// GINNEL_ERR_DENIED, GINNEL_ERR_NO_DAEMON, GINNEL_ERR_NAME.
int ginnel_cache_open(const char *address,
                      const struct ginnel_cache_options *options,
                      struct ginnel_cache **cache);

// Closes a cache. NULL is allowed. No other thread may be using the handle. May tell the daemon, for at most a second.
int ginnel_cache_close(struct ginnel_cache *cache);

// Looks a key up and copies its value to `value`, which has `room` bytes. Returns how many bytes the value has, or a negative status.
// If it has more than there is room for, that is GINNEL_ERR_BUFFER_TOO_SMALL; its first `room` bytes are there then.
// `*item`, whose `size` the caller has set, is filled in in both cases; `item` may be NULL.
//
// Any thread; does not block wherever memory can tell. It cannot while the server changes that very item all the time or was killed
// while it did, for an item with an end while the server's clock stands, and if the cache is made anew: then it blocks for the server's
// answer. Errors: GINNEL_ERR_NO_ITEM, GINNEL_ERR_BUFFER_TOO_SMALL; of the server: GINNEL_ERR_NO_SERVER, GINNEL_ERR_LOST,
// GINNEL_ERR_SERVER.
ssize_t ginnel_cache_get(const struct ginnel_cache *cache,
                         const void *key,
                         size_t key_length,
                         void *value,
                         size_t room,
                         struct ginnel_cache_item *item);

// Looks `count` keys up, copies their values one after the other to `values`, which has `room` bytes, and says in `found`, which has
// `count` elements, what has become of each. Returns how many were found. This takes far less time than as many calls of
// ginnel_cache_get(): the memory of many is fetched at once.
//
// Any thread; blocks and fails as ginnel_cache_get() does. After an error nothing is known of any key.
ssize_t ginnel_cache_get_many(const struct ginnel_cache *cache,
                              const struct ginnel_cache_key *keys,
                              size_t count,
                              void *values,
                              size_t room,
                              struct ginnel_cache_found *found);

// Stores a value, whatever was there before. `ttl` is in how many seconds it ends; 0: never. `*cas` is its version; `cas` may be NULL.
// Once this has returned 0, the next get of any reader finds it, or something newer.
//
// Any thread; threads come one after the other. Blocks for the server's answer. Errors: GINNEL_ERR_TOO_LONG, GINNEL_ERR_SERVER,
// GINNEL_ERR_NO_SERVER, after which nothing was changed, GINNEL_ERR_LOST, after which it was changed or not.
int ginnel_cache_set(const struct ginnel_cache *cache,
                     const void *key,
                     size_t key_length,
                     const void *value,
                     size_t len,
                     uint32_t flags,
                     uint32_t ttl,
                     uint64_t *cas);

// Stores many values as ginnel_cache_set() does, without waiting for one before the next is sent. Returns how many were stored.
// `results`, which has `count` elements or is NULL, says what has become of each; ginnel_last_error() says why the last one of those failed
// that did.
//
// Any thread; threads come one after the other. Blocks for the server's answers.
ssize_t ginnel_cache_set_many(const struct ginnel_cache *cache,
                              const struct ginnel_cache_entry *entries,
                              size_t count,
                              struct ginnel_cache_stored *results);

// Stores a value unless there is one: then GINNEL_ERR_NOT_STORED. Otherwise as ginnel_cache_set().
int ginnel_cache_add(const struct ginnel_cache *cache,
                     const void *key,
                     size_t key_length,
                     const void *value,
                     size_t len,
                     uint32_t flags,
                     uint32_t ttl,
                     uint64_t *cas);

// Stores a value in the place of one; if there is none, GINNEL_ERR_NOT_STORED. Otherwise as ginnel_cache_set().
int ginnel_cache_replace(const struct ginnel_cache *cache,
                         const void *key,
                         size_t key_length,
                         const void *value,
                         size_t len,
                         uint32_t flags,
                         uint32_t ttl,
                         uint64_t *cas);

// Puts bytes behind a value, whose flags and end stay; if there is none, GINNEL_ERR_NOT_STORED. Otherwise as ginnel_cache_set().
int ginnel_cache_append(const struct ginnel_cache *cache,
                        const void *key,
                        size_t key_length,
                        const void *value,
                        size_t len,
                        uint64_t *cas);

// Puts bytes before a value, whose flags and end stay; if there is none, GINNEL_ERR_NOT_STORED. Otherwise as ginnel_cache_set().
int ginnel_cache_prepend(const struct ginnel_cache *cache,
                         const void *key,
                         size_t key_length,
                         const void *value,
                         size_t len,
                         uint64_t *cas);

// Stores a value in the place of the version `*cas`, which a get has returned; `*cas` is the new version then. If the item has another
// version now, GINNEL_ERR_CHANGED; if there is none, GINNEL_ERR_NO_ITEM. Otherwise as ginnel_cache_set().
int ginnel_cache_cas(const struct ginnel_cache *cache,
                     const void *key,
                     size_t key_length,
                     const void *value,
                     size_t len,
                     uint32_t flags,
                     uint32_t ttl,
                     uint64_t *cas);

// Removes an item; if there is none, GINNEL_ERR_NO_ITEM. Otherwise as ginnel_cache_set().
int ginnel_cache_delete(const struct ginnel_cache *cache, const void *key, size_t key_length);

// Adds to a value that is a number in decimal digits; beyond 64 bits it goes on from 0. `*result` is the sum; `result` may be NULL. If there
// is no such item, GINNEL_ERR_NO_ITEM; if it is no number, GINNEL_ERR_SERVER. Otherwise as ginnel_cache_set().
int ginnel_cache_increment(const struct ginnel_cache *cache,
                           const void *key,
                           size_t key_length,
                           uint64_t delta,
                           uint64_t *result);

// Takes from a value that is a number, but not below 0. A value that gets shorter keeps its length, with blanks behind the digits.
// Otherwise as ginnel_cache_increment().
int ginnel_cache_decrement(const struct ginnel_cache *cache,
                           const void *key,
                           size_t key_length,
                           uint64_t delta,
                           uint64_t *result);

// Changes in how many seconds an item ends; 0: never. If there is none, GINNEL_ERR_NO_ITEM. Otherwise as ginnel_cache_set().
int ginnel_cache_touch(const struct ginnel_cache *cache,
                       const void *key,
                       size_t key_length,
                       uint32_t ttl);

// Ends all items. Otherwise as ginnel_cache_set().
int ginnel_cache_flush(const struct ginnel_cache *cache);

// Asks the server for its statistics: of `kind`, or the general ones if that is NULL. `*text` has a line for each, its name and what it is,
// and is the caller's, to be freed with ginnel_string_free(); on failure it is NULL. Otherwise as ginnel_cache_set().
int ginnel_cache_stats(const struct ginnel_cache *cache,
                       const char *kind,
                       char **text);

// Fills in `*counters`, whose `size` the caller has set. Any thread; does not block.
int ginnel_cache_get_counters(const struct ginnel_cache *cache,
                              struct ginnel_cache_counters *counters);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GINNEL_H */
