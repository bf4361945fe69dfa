/*
 * Ginnel: shared-memory channels between virtual machines on one host, and between those and the host.
 *
 * Generated from crates/faces/capi by scripts/header-check; change it there.
 * SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * A process attaches to a segment and so becomes an endpoint. Endpoints of one segment listen and connect
 * by name. A connection is a channel of messages or of bytes, which lies in shared memory; using it needs
 * neither the kernel nor the daemon. Endpoints can also share blocks of memory, guarded by locks. The
 * manual pages begin with ginnel(7).
 *
 * These rules hold for all functions:
 *
 * - Results. A function returns 0 or a number that is not negative, or a negative ginnel_status. In the
 *   latter case ginnel_last_error() returns the details, per thread. errno has no meaning. The errors named
 *   at a function are those that a correct program can meet; mistakes in a call (-201 to -299),
 *   GINNEL_ERR_SYSTEM and GINNEL_ERR_INTERNAL are possible everywhere.
 * - Handles are opaque and must not be dereferenced. They come from this library, and are valid until they
 *   are freed by the function that the type names (which allows NULL). From then on every function returns
 *   GINNEL_ERR_FREED for them, that one too, even if other handles have been created since. A handle of
 *   another type, and any other value that is no handle, is GINNEL_ERR_INVALID.
 * - Pointers. Strings end with a zero and are UTF-8; the library keeps no pointer that it is given. Other
 *   pointers must point to what the function says. A NULL that is not allowed is GINNEL_ERR_NULL.
 * - Structures begin with their size, which the caller must always set (to sizeof the structure), so
 *   that programs and libraries of different versions fit together. Options start as all zeros.
 * - Time is in nanoseconds; a negative timeout means for ever. Sizes are in bytes.
 * - Threads. Endpoints and listeners may be used by any number of threads at once. In a channel, one
 *   thread may send while another receives; several threads in one direction need a lock of their own. A
 *   handle of a lock, a farm or a worker may be used by one thread at a time. An endpoint or a listener may
 *   be freed while other threads use it: their calls go on, later ones fail with GINNEL_ERR_FREED. Free a
 *   handle of another type only when no other thread is in a call with it: that is not checked, because it
 *   would slow down each call.
 * - Signals do not interrupt a wait. A function blocks only if its comment says so.
 * - fork(2): parent and child are the same endpoint, which lives until both have ended or closed it. A handle
 *   that was open before the fork may be used by only one of the two processes from then on. It belongs to
 *   the process that opened it, as long as that process lives: meanwhile, closing it in a child tells neither
 *   the peer nor the daemon, and a child cannot accept at such a listener. After that it belongs to its children.
 * - exec(3) ends an endpoint, unless the endpoint is held and the next program adopts it: see ginnel_hold().
 * - The first attach installs a handler for SIGBUS, so that a truncated segment causes an error and does not
 *   end the process. The handler passes on faults outside of segments.
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

// The result of ginnel_mutex_lock(), ginnel_rwlock_wrlock() and ginnel_condvar_wait() if the caller holds the lock now
// and its previous owner died while it held it, so that the data may be half-written. Repair the data and call
// ginnel_mutex_consistent() or ginnel_rwlock_consistent() before unlocking; otherwise every later lock fails with
// GINNEL_ERR_NOT_RECOVERABLE.
#define GINNEL_OWNER_DIED 1

// The result of ginnel_once_begin() if the caller must do the work and then call ginnel_once_end().
#define GINNEL_ONCE_BEGIN 1

// Like GINNEL_ONCE_BEGIN, if an earlier caller died in its turn or gave it up, and so may have done a part of the
// work.
#define GINNEL_ONCE_AGAIN 2

// The result of most functions: GINNEL_OK, or a negative number that tells what went wrong. A number never changes and
// never gets another meaning; later versions may add numbers. They are grouped:
//
//   -1 ...    not possible at the moment, or not there; nothing is wrong
//   -101 ...  the channel, lock or job has ended, or is broken
//   -201 ...  a mistake in the call
//   -300 ...  the daemon or a server refuses
//   -401 ...  a daemon or server is missing, or this machine lacks something
//   -501 ...  a bug in this library
typedef enum ginnel_status {
    // Success.
    GINNEL_OK = 0,
    // The operation is not possible now, and the handle is non-blocking: wait for its file descriptor and try again.
    GINNEL_ERR_WOULD_BLOCK = -1,
    // The timeout expired. Nothing was sent or received; the caller can try again.
    GINNEL_ERR_TIMED_OUT = -2,
    // The cache has no item with this key.
    GINNEL_ERR_NO_ITEM = -3,
    // The cache already has an item with this key, or has none where one is needed.
    GINNEL_ERR_NOT_STORED = -4,
    // The cache's item has another version by now.
    GINNEL_ERR_CHANGED = -5,
    // The peer has finished sending, and everything that it sent has been received.
    GINNEL_ERR_FINISHED = -101,
    // The peer has closed the channel and does not receive any more.
    GINNEL_ERR_CLOSED = -102,
    // The peer's process or its VM has died. Everything that it sent before can be received first.
    GINNEL_ERR_PEER_DEAD = -103,
    // A member of the segment has written something that no correct program writes. The object is unusable now.
    GINNEL_ERR_CORRUPT = -104,
    // The segment's memory is gone: its file was truncated, or the daemon has declared the segment broken.
    GINNEL_ERR_BROKEN = -105,
    // A writer has died while it held the read-write lock: lock it for writing, repair the data, and mark them
    // consistent.
    GINNEL_ERR_OWNER_DIED = -106,
    // The lock's owner died, and the next owner unlocked it without marking the data consistent: unlink the lock and
    // create a new one.
    GINNEL_ERR_NOT_RECOVERABLE = -107,
    // A party of the barrier has died.
    GINNEL_ERR_BARRIER_BROKEN = -108,
    // The endpoint was declared dead, and its locks and other objects were handed on: attach again.
    GINNEL_ERR_FENCED = -109,
    // A farm's job had no worker for as long as its manager waits.
    GINNEL_ERR_NO_WORKER = -110,
    // A piece of a farm's job failed, or its worker died, on each attempt.
    GINNEL_ERR_PIECE = -111,
    // A side of the channel has called ginnel_channel_abort(). Data that was sent and not received is lost.
    GINNEL_ERR_ABORTED = -112,
    // The cache's server has not answered. It may or may not have done what it was asked for.
    GINNEL_ERR_LOST = -113,
    // A pointer that must not be NULL is NULL.
    GINNEL_ERR_NULL = -201,
    // An argument is outside its range, or not a handle of its type.
    GINNEL_ERR_INVALID = -202,
    // Not a valid name or address.
    GINNEL_ERR_NAME = -203,
    // The channel, listener or lock is of another kind.
    GINNEL_ERR_KIND = -204,
    // The message is longer than the channel permits (open it with a larger capacity), or the value is longer than an
    // item may be.
    GINNEL_ERR_TOO_LONG = -205,
    // The message is longer than the buffer, and stays in the channel; or the value is longer than the buffer.
    GINNEL_ERR_BUFFER_TOO_SMALL = -206,
    // The program has sent after ginnel_channel_finish().
    GINNEL_ERR_AFTER_FINISH = -207,
    // A claim is open: send, commit or abort it first.
    GINNEL_ERR_CLAIMED = -208,
    // Nothing is claimed, or nothing was peeked at.
    GINNEL_ERR_NOT_CLAIMED = -209,
    // The range is not inside the block.
    GINNEL_ERR_RANGE = -210,
    // This handle does not hold the lock.
    GINNEL_ERR_NOT_OWNER = -211,
    // This handle already holds the lock.
    GINNEL_ERR_DEADLOCK = -212,
    // The semaphore would have more permits than its limit.
    GINNEL_ERR_OVERFLOW = -213,
    // A function of the program has ended the farm's job.
    GINNEL_ERR_CALLBACK = -214,
    // The daemon refuses, for a reason that this version of the library does not know.
    GINNEL_ERR_REFUSED_OTHERWISE = -300,
    // The daemon does not understand the request.
    GINNEL_ERR_NOT_UNDERSTOOD = -301,
    // Daemon and library have no common protocol version.
    GINNEL_ERR_VERSION = -302,
    // There is no segment of that name, or this machine is not a member of it.
    GINNEL_ERR_NO_SEGMENT = -303,
    // This user or program is not permitted to do this.
    GINNEL_ERR_DENIED = -304,
    // No program listens at that name.
    GINNEL_ERR_REFUSED = -305,
    // The name is already in use.
    GINNEL_ERR_IN_USE = -306,
    // A limit is reached: endpoints, channels, bytes, or connections that wait to be accepted.
    GINNEL_ERR_LIMIT = -307,
    // The segment has not enough free memory.
    GINNEL_ERR_NO_MEMORY = -308,
    // The daemon does not know this endpoint any more.
    GINNEL_ERR_STALE = -309,
    // The daemon knows no such object.
    GINNEL_ERR_NOT_FOUND = -312,
    // The host's daemon cannot be reached at the moment.
    GINNEL_ERR_UNAVAILABLE = -313,
    // This machine may only read the segment; channels, locks and the creation of blocks need write access.
    GINNEL_ERR_READ_ONLY = -315,
    // A quota is used up: bytes of memory, number of blocks, or open handles.
    GINNEL_ERR_QUOTA = -316,
    // Another program has the block open in a way that excludes this, or the lock has as many handles as it may have.
    GINNEL_ERR_BUSY = -317,
    // The handle was freed already.
    GINNEL_ERR_FREED = -318,
    // The host's daemon cannot record the change, because its disk is full or fails. Nothing was changed.
    GINNEL_ERR_UNRECORDED = -319,
    // The cache's server refuses; ginnel_last_error() returns its message.
    GINNEL_ERR_SERVER = -320,
    // No daemon answers.
    GINNEL_ERR_NO_DAEMON = -401,
    // The daemon has sent something that violates the protocol.
    GINNEL_ERR_PROTOCOL = -402,
    // A system call failed; ginnel_last_error() names the call and the error.
    GINNEL_ERR_SYSTEM = -403,
    // This machine does not support the operation: a VM without interrupts has no file descriptor to wait on.
    GINNEL_ERR_UNSUPPORTED = -404,
    // The cache's server cannot be reached. Nothing was changed.
    GINNEL_ERR_NO_SERVER = -405,
    // There is a bug in this library. The handle can only be closed.
    GINNEL_ERR_INTERNAL = -501,
} ginnel_status;

// What a channel carries.
typedef enum ginnel_kind {
    // Messages, each of which is received whole and in order: ginnel_message_send() and related functions.
    GINNEL_MESSAGE = 1,
    // A stream of bytes, like TCP: ginnel_stream_send() and related functions.
    GINNEL_STREAM = 2,
} ginnel_kind;

// How an operation waits.
typedef enum ginnel_wait {
    // Spin for as long as the budget, then sleep. The default.
    GINNEL_WAIT_ADAPTIVE = 0,
    // Spin until the operation is possible. Lowest latency; uses a CPU, but after some microseconds leaves it to other
    // threads that need it.
    GINNEL_WAIT_POLL = 1,
    // Sleep at once. Uses no CPU; each wake-up costs a doorbell, some tens of microseconds.
    GINNEL_WAIT_INTERRUPT = 2,
} ginnel_wait;

// How a process has the segment's memory mapped.
typedef enum ginnel_memory_kind {
    // In a VM, from a PCI BAR (ivshmem-plain).
    GINNEL_MEMORY_BAR = 1,
    // In a VM, from /dev/dax* (virtio-pmem).
    GINNEL_MEMORY_DAX = 2,
    // On the host, from a file.
    GINNEL_MEMORY_FILE = 3,
} ginnel_memory_kind;

// A direction of a channel, seen from this side. Some functions take both at once: GINNEL_SEND | GINNEL_RECEIVE.
typedef enum ginnel_direction {
    // The direction in which this side sends.
    GINNEL_SEND = 1,
    // The direction in which this side receives.
    GINNEL_RECEIVE = 2,
} ginnel_direction;

// Rights to a block. Each right includes those above it.
typedef enum ginnel_rights {
    // No access.
    GINNEL_RIGHTS_NONE = 0,
    // Read access.
    GINNEL_RIGHTS_READ = 1,
    // Read and write access.
    GINNEL_RIGHTS_READ_WRITE = 2,
    // Read and write access, while nobody else has the block open for writing.
    GINNEL_RIGHTS_WRITE_EXCLUSIVE = 3,
} ginnel_rights;

// The subject of an entry of a list.
typedef enum ginnel_subject {
    // A member: the host, or a VM. `active` is 1 while its VM is connected.
    GINNEL_MEMBER = 1,
    // An endpoint: an attached process. `active` is 0 while it reconnects to a daemon that was restarted.
    GINNEL_ENDPOINT = 2,
    // A name at which an endpoint listens. `number` and `epoch` are those of the endpoint.
    GINNEL_LISTENER = 3,
} ginnel_subject;

// The progress of a job.
typedef enum ginnel_farm_progress {
    // The job is complete.
    GINNEL_FARM_DONE = 0,
    // There is more to do at once: call ginnel_farm_step() again.
    GINNEL_FARM_WORKING = 1,
    // Nothing can be done until a worker sends something: wait for ginnel_farm_fd(), then call ginnel_farm_step()
    // again.
    GINNEL_FARM_WAITING = 2,
} ginnel_farm_progress;

// How a worker left the farm.
typedef enum ginnel_farm_departure {
    // It did not leave.
    GINNEL_FARM_STAYED = 0,
    // Its process or its VM died.
    GINNEL_FARM_DIED = 1,
    // It closed its channel.
    GINNEL_FARM_LEFT = 2,
    // It was dismissed because it broke the protocol, returned nonsense, or took too long.
    GINNEL_FARM_DISMISSED = 3,
} ginnel_farm_departure;

// A handle of a barrier in a segment, at which a fixed number of parties wait for each other. One thread at a time may
// use a handle; other threads open their own. Created by ginnel_barrier_open(), freed by ginnel_barrier_close().
typedef struct ginnel_barrier ginnel_barrier;

// An open block of a segment: named memory with access rights. Any number of threads may use it at once, except for
// ginnel_block_resize(). Created by ginnel_block_create() or ginnel_block_open(), freed by ginnel_block_close().
typedef struct ginnel_block ginnel_block;

// An open cache. Any number of threads may use it at once. Created by ginnel_cache_open(), freed by
// ginnel_cache_close().
typedef struct ginnel_cache ginnel_cache;

// A channel of either kind. Its two directions are independent: one thread may send while another receives, but no two
// threads may send at once or receive at once. Created by ginnel_connect(), ginnel_endpoint_connect() or
// ginnel_accept(), freed by ginnel_channel_close().
typedef struct ginnel_channel ginnel_channel;

// A handle of a condition variable in a segment, used together with a mutex. One thread at a time may use a handle;
// other threads open their own. Created by ginnel_condvar_open(), freed by ginnel_condvar_close().
typedef struct ginnel_condvar ginnel_condvar;

// An attached process, which can listen, connect, and open blocks and locks in one segment. Any number of threads may
// use it at once. Created by ginnel_attach(), freed by ginnel_detach().
typedef struct ginnel_endpoint ginnel_endpoint;

// A farm's manager, which distributes a job to its workers. One thread at a time may use it. Created by
// ginnel_farm_open(), freed by ginnel_farm_close().
typedef struct ginnel_farm ginnel_farm;

// A worker of a farm: a channel to its manager. One thread at a time may use it. Created by ginnel_farm_connect(),
// freed by ginnel_farm_worker_close().
typedef struct ginnel_farm_worker ginnel_farm_worker;

// A list, as it was when it was opened. One thread at a time may use it. Created by ginnel_list_open(), freed by
// ginnel_list_close().
typedef struct ginnel_list ginnel_list;

// A name at which other endpoints connect. Any number of threads may use it at once. Created by ginnel_listen() or
// ginnel_endpoint_listen(), freed by ginnel_listener_close().
typedef struct ginnel_listener ginnel_listener;

// A handle of a robust mutex in a segment: if the mutex's owner dies, the next owner gets it and learns of the death.
// One thread at a time may use a handle; other threads open their own. Created by ginnel_mutex_open(), freed by
// ginnel_mutex_close().
typedef struct ginnel_mutex ginnel_mutex;

// A handle of a one-time initialisation in a segment. One thread at a time may use a handle; other threads open their
// own. Created by ginnel_once_open(), freed by ginnel_once_close().
typedef struct ginnel_once ginnel_once;

// A set of many channels, listeners and other descriptors for which one thread waits. One thread at a time may use it.
// Created by ginnel_ready_set_new(), freed by ginnel_ready_set_close(). It belongs to the process that has created it.
typedef struct ginnel_ready_set ginnel_ready_set;

// A handle of a read-write lock in a segment: many readers or one writer. Writers have priority, and a writer's death
// is reported to the next user. One thread at a time may use a handle; other threads open their own. Created by
// ginnel_rwlock_open(), freed by ginnel_rwlock_close().
typedef struct ginnel_rwlock ginnel_rwlock;

// A handle of a counting semaphore in a segment. Permits that were acquired by a process that dies are not returned.
// One thread at a time may use a handle; other threads open their own. Created by ginnel_semaphore_open(), freed by
// ginnel_semaphore_close().
typedef struct ginnel_semaphore ginnel_semaphore;

// Options for attaching. Fill the structure with zeros, set `size`, then the members that should differ from the
// default.
typedef struct ginnel_attach_options {
    // sizeof(ginnel_attach_options).
    size_t size;
    // Path of the daemon's socket. NULL: $GINNEL_SOCKET if it is set, otherwise /run/ginnel/ginnel.sock.
    const char *socket;
    // The name under which this endpoint appears to people and peers. NULL: the program's name.
    const char *name;
    // The default wait mode of channels and locks: one of GINNEL_WAIT_*.
    int wait;
    // For GINNEL_WAIT_ADAPTIVE: how long to spin, in nanoseconds. 0: the default, 100000.
    uint64_t budget_ns;
} ginnel_attach_options;

// Properties of an endpoint.
typedef struct ginnel_endpoint_info {
    // sizeof(ginnel_endpoint_info).
    size_t size;
    // Number of the endpoint's member (host or VM); 0 is the host.
    uint32_t member;
    // Number of the endpoint.
    uint32_t endpoint;
    // Epoch of that number, which distinguishes the endpoint from earlier ones with the same number.
    uint32_t epoch;
    // 1 if this endpoint can sleep on a doorbell; 0 in a VM without interrupts, where a waiting thread checks at short
    // intervals.
    uint32_t interrupts;
    // Page size of the segment in bytes: the unit in which it is mapped.
    size_t page;
    // 1 if this machine may only read the segment and so cannot open channels; otherwise 0.
    uint32_t read_only;
    // How the segment's memory is mapped: one of GINNEL_MEMORY_*.
    uint32_t memory;
} ginnel_endpoint_info;

// Options for opening a channel. Fill the structure with zeros, set `size`, then the members that should differ from
// the default.
typedef struct ginnel_channel_options {
    // sizeof(ginnel_channel_options).
    size_t size;
    // Size in bytes of the ring into which this side sends, rounded up to a power of two. If both sides ask for a
    // size, the larger one counts. 0: the daemon's default. A message may have at most a quarter of this size.
    size_t capacity;
    // For connecting: how long to wait until a program listens at the name, in nanoseconds. 0: not at all.
    uint64_t patience_ns;
    // For listening: how many connections may wait to be accepted. 0: the daemon's default.
    uint32_t backlog;
    // Size in bytes of the ring from which this side receives, like `capacity`. 0: the same as `capacity`.
    size_t input_capacity;
} ginnel_channel_options;

// Counters of one direction of a channel, on this side, since the channel was opened.
typedef struct ginnel_counters {
    // sizeof(ginnel_counters).
    size_t size;
    // Number of messages, or of calls on a stream.
    uint64_t operations;
    // Number of payload bytes.
    uint64_t bytes;
    // Number of times that the peer's doorbell was rung.
    uint64_t rings;
    // Number of operations that had to wait.
    uint64_t waits;
} ginnel_counters;

// Properties of a channel and of its peer.
typedef struct ginnel_channel_info {
    // sizeof(ginnel_channel_info).
    size_t size;
    // Number of the channel, which is never reused in this installation.
    uint64_t id;
    // Size in bytes of the ring into which this side sends.
    size_t capacity;
    // The longest message, in bytes; 0 for a stream, which has no such limit.
    size_t max_message;
    // GINNEL_MESSAGE or GINNEL_STREAM.
    int kind;
    // Number of the peer's member (host or VM); 0 is the host.
    uint32_t peer_member;
    // Number of the peer's endpoint.
    uint32_t peer_endpoint;
    // Epoch of that number: see ginnel_endpoint_info.
    uint32_t peer_epoch;
    // Name of the peer's member.
    char peer_member_name[64];
    // Name that the peer's endpoint has chosen for itself.
    char peer_name[64];
    // Size in bytes of the ring from which this side receives.
    size_t input_capacity;
} ginnel_channel_info;

// Options for creating a block. Fill the structure with zeros, set `size`, then the members that should differ from
// the default.
typedef struct ginnel_block_options {
    // sizeof(ginnel_block_options).
    size_t size;
    // Alignment of the block in the segment, in bytes, a power of two. 0: the segment's page size.
    size_t align;
    // 1: nobody else can open the block for writing while the creator has it open.
    uint32_t exclusive;
    // 1: the name outlives the endpoint, until it is unlinked or the host reboots.
    uint32_t persistent;
    // 1: the contents are unspecified, and creating the block takes the same time for every size. 0: the bytes are
    // zero.
    uint32_t no_zero;
    // 1: `others` counts. 0: the rights of others are GINNEL_RIGHTS_READ_WRITE.
    uint32_t set_others;
    // Rights of members and endpoints that have no grant of their own: one of GINNEL_RIGHTS_*.
    int others;
} ginnel_block_options;

// Properties of an open block.
typedef struct ginnel_block_info {
    // sizeof(ginnel_block_info).
    size_t size;
    // Number of the block, which is never reused in this installation.
    uint64_t number;
    // Length of the block in bytes.
    size_t length;
    // Rights that this handle has at present: one of GINNEL_RIGHTS_*.
    int rights;
} ginnel_block_info;

// Options for opening a lock. Fill the structure with zeros, set `size`, then the members that should differ from the
// default.
typedef struct ginnel_lock_options {
    // sizeof(ginnel_lock_options).
    size_t size;
    // 1: the lock must exist (otherwise GINNEL_ERR_NOT_FOUND). 0: it is created if it does not exist.
    uint32_t existing;
    // 1: the lock must not exist (otherwise GINNEL_ERR_IN_USE).
    uint32_t exclusive;
    // 1: if this call creates the lock, it stays until it is unlinked. 0: it is removed with its last handle.
    uint32_t persistent;
    // 1: `wait` and `budget_ns` count. 0: the handle waits as the endpoint's channels do.
    uint32_t set_wait;
    // How the handle waits: one of GINNEL_WAIT_*.
    int wait;
    // For GINNEL_WAIT_ADAPTIVE: how long to spin, in nanoseconds. 0: the default, 100000.
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
    // 1 if the subject is active, otherwise 0; see ginnel_subject.
    uint32_t active;
    // Name of the segment. Empty for a member.
    char segment[64];
    // Name of the member.
    char member[64];
    // Name of the endpoint, or the name at which it listens. Empty for a member.
    char name[64];
} ginnel_list_entry;

// Options for a farm's manager. Fill the structure with zeros, set `size`, then the members that should differ from
// the default.
typedef struct ginnel_farm_options {
    // sizeof(ginnel_farm_options).
    size_t size;
    // Length of the longest piece, in bytes. A worker's channel takes about eight times as much shared memory. 0: as
    // much as fits into rings of 1 MiB.
    size_t piece;
    // The most pieces that a worker may hold: one that it works on, and others that are transferred meanwhile. 0: the
    // default, 2.
    size_t window;
    // How the manager waits: one of GINNEL_WAIT_*.
    int wait;
    // The most attempts at one piece. 0: five.
    uint32_t tries;
    // For GINNEL_WAIT_ADAPTIVE: how long to spin, in nanoseconds. 0: the default, 100000.
    uint64_t budget_ns;
    // How long a worker may take for one piece before it is dismissed, in nanoseconds. 0: without a limit.
    uint64_t piece_timeout_ns;
    // How long a job continues without any worker, in nanoseconds. 0: 30 s; UINT64_MAX: for ever.
    uint64_t patience_ns;
} ginnel_farm_options;

// Cuts the next piece of the input: sets `*offset` and `*length` (both in bytes) and returns 1, or returns 0 if there
// is none.
typedef int (*ginnel_farm_next)(void *context, uint64_t *offset, size_t *length);

// Writes the input's `length` bytes from `offset` to `room`, which lies in the worker's ring. It must write the same
// bytes each time, because it is called again for a piece whose worker has died. Returns 0; any other result ends the
// job with GINNEL_ERR_CALLBACK.
typedef int (*ginnel_farm_fill)(void *context, uint64_t offset, void *room, size_t length);

// A piece of a job's input.
typedef struct ginnel_farm_piece {
    // sizeof(ginnel_farm_piece) of the library that runs.
    size_t size;
    // Number of the piece, which its manager never reuses.
    uint64_t number;
    // Offset of the piece in the input, in bytes.
    uint64_t offset;
    // Length of the piece in bytes.
    size_t length;
    // Number of times that the piece has been given to a worker.
    uint32_t tries;
} ginnel_farm_piece;

// Takes a worker's result: `length` bytes at `result`, which are valid only during the call. It is called once for
// each piece, in the order in which the results arrive. Returns 0; or 1 if the result is nonsense, in which case its
// worker is dismissed and another one gets the piece; any other result ends the job with GINNEL_ERR_CALLBACK.
typedef int (*ginnel_farm_fold)(void *context,
                                const struct ginnel_farm_piece *piece,
                                const void *result,
                                size_t length);

// A job. Fill the structure with zeros, set `size`, then the other members.
typedef struct ginnel_farm_job {
    // sizeof(ginnel_farm_job).
    size_t size;
    // Name of the job, which the workers are told.
    const char *name;
    // Length of the input in bytes, which is cut into equal pieces. Unused if `next` is set.
    uint64_t bytes;
    // Length of an equal piece in bytes. 0: as long as a worker's channel takes.
    size_t piece;
    // Cuts the input into pieces of any lengths, unless it is NULL.
    ginnel_farm_next next;
    // Writes a piece of the input.
    ginnel_farm_fill fill;
    // Takes a result.
    ginnel_farm_fold fold;
    // Argument for the three functions.
    void *context;
} ginnel_farm_job;

// The report of a job.
typedef struct ginnel_farm_report {
    // sizeof(ginnel_farm_report).
    size_t size;
    // Time from the start to the last result, or until now, in nanoseconds.
    uint64_t time_ns;
    // Number of results that were taken.
    uint64_t pieces;
    // Number of input bytes in the pieces with these results.
    uint64_t bytes;
    // Number of pieces that were given to another worker because the first one died, left, was dismissed or failed.
    uint64_t reassigned;
    // Number of workers that took part: see ginnel_farm_get_worker().
    size_t workers;
    // Number of these workers that have died.
    size_t deaths;
} ginnel_farm_report;

// The work of one worker in a job.
typedef struct ginnel_farm_worker_report {
    // sizeof(ginnel_farm_worker_report).
    size_t size;
    // Time from the start of the job until it connected, in nanoseconds; 0 if it was there before.
    uint64_t joined_ns;
    // Time from the start of the job until its last result, in nanoseconds.
    uint64_t last_ns;
    // Number of its results that were taken.
    uint64_t pieces;
    // Number of input bytes in the pieces with these results.
    uint64_t bytes;
    // Number of pieces that it could not process.
    uint64_t failed;
    // Number of pieces that were taken from it and given to others.
    uint64_t lost;
    // How it left: one of GINNEL_FARM_STAYED and so on.
    int departure;
    // Its endpoint's name, and its member's.
    char name[64];
} ginnel_farm_worker_report;

// Options for a worker. Fill the structure with zeros, set `size`, then the members that should differ from the
// default.
typedef struct ginnel_farm_worker_options {
    // sizeof(ginnel_farm_worker_options).
    size_t size;
    // How long to wait for a manager, in nanoseconds. 0: not at all.
    uint64_t patience_ns;
    // For GINNEL_WAIT_ADAPTIVE: how long to spin, in nanoseconds. 0: the default, 100000.
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
    // Offset of the piece in the input, in bytes.
    uint64_t offset;
    // The bytes of the piece, in the ring, aligned to 8. A hostile manager can still change them.
    const void *data;
    // Length of the piece in bytes.
    size_t length;
} ginnel_farm_task;

// Works on a piece: writes the result to `result`, which has room for `room` bytes, and returns its length. A negative
// number means that the piece cannot be processed; the reason may be written to `result`, as a string, and the piece
// is tried elsewhere. `task` and everything in it are valid only during the call.
typedef ssize_t (*ginnel_farm_work)(void *context,
                                    const struct ginnel_farm_task *task,
                                    void *result,
                                    size_t room);

// Options for opening a cache. Fill the structure with zeros, set `size`, then the members that should differ from the
// default.
typedef struct ginnel_cache_options {
    // sizeof(ginnel_cache_options).
    size_t size;
    // Path of the daemon's socket. NULL: $GINNEL_SOCKET if it is set, otherwise /run/ginnel/ginnel.sock.
    const char *socket;
    // The name under which this endpoint appears to people and peers. NULL: the program's name.
    const char *name;
    // Where to send changes: "channel SEGMENT", "tcp ADDRESS:PORT" or "unix PATH". NULL: where the cache itself says.
    const char *changes;
    // How long to wait for a cache that does not exist yet, or for a server that is being replaced, in nanoseconds. 0:
    // 3 seconds; negative: not at all.
    int64_t patience_ns;
    // How long the server may take to answer, in nanoseconds. 0: 10 seconds.
    uint64_t timeout_ns;
} ginnel_cache_options;

// Properties of an item that was found.
typedef struct ginnel_cache_item {
    // sizeof(ginnel_cache_item).
    size_t size;
    // Length of the value in bytes, even if it is longer than the buffer.
    size_t length;
    // Version of the item, for ginnel_cache_cas().
    uint64_t cas;
    // The client's flags, as they were stored.
    uint32_t flags;
} ginnel_cache_item;

// A key, for ginnel_cache_get_many(). This structure never grows.
typedef struct ginnel_cache_key {
    // The bytes of the key.
    const void *key;
    // Length of the key in bytes.
    size_t key_length;
} ginnel_cache_key;

// The result of ginnel_cache_get_many() for one key. This structure never grows.
typedef struct ginnel_cache_found {
    // GINNEL_OK, GINNEL_ERR_NO_ITEM, or GINNEL_ERR_BUFFER_TOO_SMALL if there was no room left for the value.
    int status;
    // The client's flags, as they were stored.
    uint32_t flags;
    // Version of the item, for ginnel_cache_cas().
    uint64_t cas;
    // Offset of the value in the buffer.
    size_t offset;
    // Length of the value in bytes, even if there was no room left for it.
    size_t length;
} ginnel_cache_found;

// An item to store, for ginnel_cache_set_many(). This structure never grows.
typedef struct ginnel_cache_entry {
    // The bytes of the key.
    const void *key;
    // Length of the key in bytes.
    size_t key_length;
    // The bytes of the value.
    const void *value;
    // Length of the value in bytes.
    size_t length;
    // Flags, whose meaning the program chooses.
    uint32_t flags;
    // Time to live in seconds; 0: the item does not expire.
    uint32_t ttl;
} ginnel_cache_entry;

// The result of ginnel_cache_set_many() for one item. This structure never grows.
typedef struct ginnel_cache_stored {
    // GINNEL_OK, or the reason why the item was not stored.
    int status;
    // New version of the item.
    uint64_t cas;
} ginnel_cache_stored;

// Counters of a cache handle since it was opened.
typedef struct ginnel_cache_counters {
    // sizeof(ginnel_cache_counters).
    size_t size;
    // Number of items that were found in memory.
    uint64_t hits;
    // Number of keys for which memory has no item.
    uint64_t misses;
    // Number of keys that were looked up at the server, because memory could not tell.
    uint64_t asked;
    // Number of requests whose answers were lost.
    uint64_t lost;
    // Number of connections that were opened to servers.
    uint64_t connections;
    // Number of keys whose hits were reported to the server.
    uint64_t reported;
} ginnel_cache_counters;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Returns the version of the running library, for example "0.1.0"; GINNEL_VERSION is that of the header. The result is
// never NULL and must not be freed. Any thread may call it; it does not block.
const char *ginnel_version(void);

// Returns a short fixed text for a status. The result is never NULL and must not be freed. Any thread may call it; it
// does not block.
const char *ginnel_strerror(int status);

// Returns a description of the last call of this thread that failed: what failed, where, and often how to fix it. The
// text is empty if no call has failed. It is never NULL, must not be freed, and is valid until the next call of this
// thread that fails. It does not block.
const char *ginnel_last_error(void);

// Stores the daemon's state as JSON in `*json`: members, segments, endpoints, listeners and channels, as "ginnel
// status --json" prints them. On the host, administrators get everything, and other users the segments to which they
// may attach; in a VM, it covers the segments of that VM. `socket` is the path of the daemon's socket; NULL means
// $GINNEL_SOCKET if it is set, otherwise /run/ginnel/ginnel.sock. On success the caller must free `*json` with
// ginnel_string_free(); on failure it is NULL.
//
// Blocks until the daemon answers, for a few seconds if the daemon is being restarted. Any thread may call it. Errors:
// GINNEL_ERR_NO_DAEMON, GINNEL_ERR_UNAVAILABLE, GINNEL_ERR_PROTOCOL.
int ginnel_inspect(const char *socket,
                   char **json);

// Frees a text that this library has returned for the caller to free. NULL is allowed. Any thread may call it; it does
// not block.
void ginnel_string_free(char *string);

// Attaches to a segment through the daemon of this machine. `options` may be NULL. On success the caller must free
// `*endpoint` with ginnel_detach(); on failure it is NULL.
//
// Blocks until the daemon answers, for up to 10 s if the daemon is being restarted; if there was never a daemon at the
// socket, it fails at once. Any thread may call it. Errors: GINNEL_ERR_NO_DAEMON, GINNEL_ERR_NO_SEGMENT,
// GINNEL_ERR_DENIED, GINNEL_ERR_LIMIT, GINNEL_ERR_NAME.
int ginnel_attach(const char *segment,
                  const struct ginnel_attach_options *options,
                  struct ginnel_endpoint **endpoint);

// Frees an endpoint. Its listeners and channels continue to work; the daemon considers the endpoint ended when the
// last of them is closed. NULL is allowed. A call of another thread that uses the endpoint goes on. May inform the daemon,
// which takes at most a second.
int ginnel_detach(struct ginnel_endpoint *endpoint);

// Fills in `*info`, whose `size` the caller has set. Any thread may call it; it does not block.
int ginnel_endpoint_get_info(const struct ginnel_endpoint *endpoint,
                             struct ginnel_endpoint_info *info);

// Attaches to the segment of `address`, which is "segment/name", and listens at that name. `kind` is GINNEL_MESSAGE or
// GINNEL_STREAM; `options` may be NULL. On success the caller must free `*listener` with ginnel_listener_close(); on
// failure it is NULL. The endpoint lives as long as the listener and its channels.
//
// Blocks like ginnel_attach(). Any thread may call it. Errors: those of ginnel_attach() and ginnel_endpoint_listen().
int ginnel_listen(const char *address,
                  int kind,
                  const struct ginnel_channel_options *options,
                  struct ginnel_listener **listener);

// Listens at a name in the endpoint's segment. On success the caller must free `*listener` with
// ginnel_listener_close(); on failure it is NULL.
//
// Blocks until the daemon answers, for up to 10 s if the daemon is being restarted. Any thread may call it. Errors:
// GINNEL_ERR_IN_USE, GINNEL_ERR_DENIED, GINNEL_ERR_LIMIT, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME, GINNEL_ERR_NO_DAEMON.
int ginnel_endpoint_listen(const struct ginnel_endpoint *endpoint,
                           const char *name,
                           int kind,
                           const struct ginnel_channel_options *options,
                           struct ginnel_listener **listener);

// Attaches to the segment of `address`, which is "segment/name", and opens a channel to the program that listens at
// that name. `kind` is GINNEL_MESSAGE or GINNEL_STREAM; `options` may be NULL. On success the caller must free
// `*channel` with ginnel_channel_close(); on failure it is NULL. The endpoint lives as long as the channel.
//
// Blocks like ginnel_attach(). Any thread may call it. Errors: those of ginnel_attach() and ginnel_endpoint_connect().
int ginnel_connect(const char *address,
                   int kind,
                   const struct ginnel_channel_options *options,
                   struct ginnel_channel **channel);

// Opens a channel to the program that listens at a name in the endpoint's segment. The peer need not have accepted it
// when this returns. On success the caller must free `*channel` with ginnel_channel_close(); on failure it is NULL.
//
// Blocks until the daemon answers, for up to 10 s if the daemon is being restarted, and for up to
// `options->patience_ns` if no program listens. Any thread may call it. Errors: GINNEL_ERR_REFUSED, GINNEL_ERR_KIND,
// GINNEL_ERR_DENIED, GINNEL_ERR_LIMIT, GINNEL_ERR_NO_MEMORY, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME,
// GINNEL_ERR_NO_DAEMON.
int ginnel_endpoint_connect(const struct ginnel_endpoint *endpoint,
                            const char *name,
                            int kind,
                            const struct ginnel_channel_options *options,
                            struct ginnel_channel **channel);

// Accepts the next connection. The channel is of the listener's kind. On success the caller must free `*channel` with
// ginnel_channel_close(); on failure it is NULL.
//
// Blocks for at most `timeout_ns` nanoseconds: 0 means not at all, a negative number for ever. Continues to wait when
// the daemon is restarted. Any thread may call it. Errors: GINNEL_ERR_TIMED_OUT; GINNEL_ERR_WOULD_BLOCK for a timeout
// of 0.
int ginnel_accept(const struct ginnel_listener *listener,
                  int64_t timeout_ns,
                  struct ginnel_channel **channel);

// Returns a file descriptor for poll(2) and epoll(7), or a negative status. The descriptor is readable when
// ginnel_accept() with a timeout of 0 is worth a call, which may still return GINNEL_ERR_WOULD_BLOCK. It belongs to
// the library: do not read or close it, and do not use it after the listener is closed. Any thread may call it; it
// does not block.
int ginnel_listener_fd(const struct ginnel_listener *listener);

// Frees a listener but keeps its name: a process that adopts the endpoint (see ginnel_hold()) can listen there and
// accept the connections that wait. The name becomes free when the endpoint ends. Before exec(3) it is better to keep
// the listener, in case the call fails. NULL is allowed. Does not block.
int ginnel_listener_leave(struct ginnel_listener *listener);

// Frees a listener and its name. Connections that wait to be accepted are refused; accepted channels stay open. NULL
// is allowed. A call of another thread that uses the listener goes on, and frees it when it returns. Informs the daemon,
// which takes at most a second.
int ginnel_listener_close(struct ginnel_listener *listener);

// Sets how long each operation in these directions may wait, in nanoseconds: 0 means that it checks once, a negative
// number (the default) that it waits for ever. After that it returns GINNEL_ERR_TIMED_OUT.
//
// Counts as an operation in these directions (one thread at a time in each); does not block.
int ginnel_channel_set_timeout(struct ginnel_channel *channel,
                               int directions,
                               int64_t timeout_ns);

// Sets how operations in these directions wait: one of GINNEL_WAIT_*. `budget_ns` is for GINNEL_WAIT_ADAPTIVE: how
// long to spin before sleeping, in nanoseconds; 0 means the default, 100000. A channel that is not set uses the mode
// that was given to ginnel_attach().
//
// Counts as an operation in these directions (one thread at a time in each); does not block.
int ginnel_channel_set_wait(struct ginnel_channel *channel,
                            int directions,
                            int wait,
                            uint64_t budget_ns);

// Sets whether operations in these directions return GINNEL_ERR_WOULD_BLOCK instead of waiting; 0 (the default) means
// that they wait.
//
// Counts as an operation in these directions (one thread at a time in each); does not block.
int ginnel_channel_set_nonblocking(struct ginnel_channel *channel,
                                   int directions,
                                   int nonblocking);

// Returns a file descriptor for poll(2) and epoll(7), or a negative status. After an operation in this direction has
// returned GINNEL_ERR_WOULD_BLOCK, the descriptor becomes readable (POLLIN, for both directions) when another attempt
// is worthwhile; that attempt may still return GINNEL_ERR_WOULD_BLOCK. At other times the descriptor has no meaning,
// so always try first. It belongs to the channel: do not read or close it, and do not use it after the channel is
// closed.
//
// Counts as an operation in this direction (one thread at a time); does not block. Errors: GINNEL_ERR_UNSUPPORTED in a
// VM without interrupts.
int ginnel_channel_fd(struct ginnel_channel *channel,
                      int direction);

// Fills in `*counters`, whose `size` the caller has set, with the counters of one direction.
//
// Counts as an operation in this direction (one thread at a time); does not block.
int ginnel_channel_get_counters(struct ginnel_channel *channel,
                                int direction,
                                struct ginnel_counters *counters);

// Fills in `*info`, whose `size` the caller has set. Any thread may call it; it does not block.
int ginnel_channel_get_info(const struct ginnel_channel *channel, struct ginnel_channel_info *info);

// Closes the sending direction. The peer receives everything that was sent, and then GINNEL_ERR_FINISHED (for a
// stream, 0 bytes). This side can continue to receive. An open claim is aborted; committed messages are sent.
//
// Counts as an operation in the sending direction (one thread at a time); does not block.
int ginnel_channel_finish(struct ginnel_channel *channel);

// Ends these directions at once and discards the data in them: what was sent and not received is lost, and the peer's
// next operation returns GINNEL_ERR_ABORTED. On this side, the next receive returns that too, and the next send
// returns GINNEL_ERR_AFTER_FINISH. Open claims and peeks end.
//
// Counts as an operation in these directions (one thread at a time in each); does not block.
int ginnel_channel_abort(struct ginnel_channel *channel,
                         int directions);

// Closes and frees a channel. The peer receives everything that was sent and then the end, and its sends fail with
// GINNEL_ERR_CLOSED. Pointers from claims and peeks become invalid. NULL is allowed. No other thread may be using the
// handle. Informs the daemon, which takes at most a second.
int ginnel_channel_close(struct ginnel_channel *channel);

// Sends a message of `len` bytes, which may be 0. The library does not use `data` after the return. Committed messages
// are sent before it.
//
// Counts as an operation in the sending direction (one thread at a time); blocks while the channel is full. Errors:
// GINNEL_ERR_WOULD_BLOCK, GINNEL_ERR_TIMED_OUT, GINNEL_ERR_TOO_LONG, GINNEL_ERR_CLAIMED, GINNEL_ERR_AFTER_FINISH,
// GINNEL_ERR_CLOSED, GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
int ginnel_message_send(struct ginnel_channel *channel,
                        const void *data,
                        size_t len);

// Claims room for a message of up to `len` bytes, to be written in place. `*data` points to the room, aligned to 8
// bytes, until it is sent, committed or aborted, or the channel is finished or closed. Nothing is visible to the peer
// before.
//
// Counts as an operation in the sending direction (one thread at a time); blocks while the channel is full. Errors:
// those of ginnel_message_send().
int ginnel_message_claim(struct ginnel_channel *channel,
                         size_t len,
                         void **data);

// Sends the first `len` bytes of the claimed room as a message, after all messages that were committed before.
//
// Counts as an operation in the sending direction (one thread at a time); does not block. Errors:
// GINNEL_ERR_NOT_CLAIMED; GINNEL_ERR_INVALID if `len` is more than was claimed, after which the claim stays;
// GINNEL_ERR_CLOSED, GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT or GINNEL_ERR_BROKEN, after which the claim is gone.
int ginnel_message_send_claimed(struct ginnel_channel *channel,
                                size_t len);

// Commits the first `len` bytes of the claimed room as a message, which becomes visible with the next
// ginnel_message_publish(), ginnel_message_send() or ginnel_message_send_claimed(). So the peer looks only once for a
// batch of messages.
//
// Counts as an operation in the sending direction (one thread at a time); does not block. Errors: those of
// ginnel_message_send_claimed().
int ginnel_message_commit(struct ginnel_channel *channel,
                          size_t len);

// Makes all committed messages visible to the peer at once. An open claim stays open.
//
// Counts as an operation in the sending direction (one thread at a time); does not block. Errors: GINNEL_ERR_BROKEN,
// after which the messages are gone.
int ginnel_message_publish(struct ginnel_channel *channel);

// Gives up the claimed room, if there is any. The peer never sees anything of it.
//
// Counts as an operation in the sending direction (one thread at a time); does not block.
int ginnel_message_abort(struct ginnel_channel *channel);

// Receives a message into `buffer`, which has room for `len` bytes. Returns the length of the message, which may be 0,
// or a negative status. The end of the channel is GINNEL_ERR_FINISHED.
//
// Counts as an operation in the receiving direction (one thread at a time); blocks while there is no message. Errors:
// GINNEL_ERR_WOULD_BLOCK, GINNEL_ERR_TIMED_OUT; GINNEL_ERR_BUFFER_TOO_SMALL, after which the message stays;
// GINNEL_ERR_FINISHED, GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
ssize_t ginnel_message_recv(struct ginnel_channel *channel,
                            void *buffer,
                            size_t len);

// Peeks at the next message in place. `*data` points to its `*len` bytes, aligned to 8, until the message is released
// or received, or the channel is closed. Peeking again returns the same message. A hostile peer can still change the
// bytes, so copy data that must not change between a check and its use.
//
// Counts as an operation in the receiving direction (one thread at a time); blocks while there is no message. Errors:
// those of ginnel_message_recv(), except GINNEL_ERR_BUFFER_TOO_SMALL.
int ginnel_message_peek(struct ginnel_channel *channel,
                        const void **data,
                        size_t *len);

// Ends the peek at a message and gives its room back to the peer.
//
// Counts as an operation in the receiving direction (one thread at a time); does not block. Errors:
// GINNEL_ERR_NOT_CLAIMED without an earlier ginnel_message_peek(); GINNEL_ERR_BROKEN, in which case the bytes that
// were read may have been zeros.
int ginnel_message_release(struct ginnel_channel *channel);

// Sends a part of `len` bytes. Returns how many bytes were sent, at least one unless `len` is 0, or a negative status.
//
// Counts as an operation in the sending direction (one thread at a time); blocks while the channel is full. Errors:
// GINNEL_ERR_WOULD_BLOCK, GINNEL_ERR_TIMED_OUT, GINNEL_ERR_CLAIMED, GINNEL_ERR_AFTER_FINISH, GINNEL_ERR_CLOSED,
// GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
ssize_t ginnel_stream_send(struct ginnel_channel *channel,
                           const void *data,
                           size_t len);

// Sends all of `len` bytes. The timeout limits the whole call. After an error it is unknown how many bytes have been
// sent, so non-blocking programs should use ginnel_stream_send().
//
// Counts as an operation in the sending direction (one thread at a time); blocks until all bytes are sent. Errors:
// those of ginnel_stream_send().
int ginnel_stream_send_all(struct ginnel_channel *channel,
                           const void *data,
                           size_t len);

// Claims room for at most `most` contiguous bytes of the stream, to be written in place. `*data` points to `*len`
// bytes (at least one, unless `most` is 0) until they are sent or aborted, or the channel is finished or closed.
//
// Counts as an operation in the sending direction (one thread at a time); blocks while the channel is full. Errors:
// those of ginnel_stream_send().
int ginnel_stream_claim(struct ginnel_channel *channel,
                        size_t most,
                        void **data,
                        size_t *len);

// Sends the first `len` bytes of the claimed room.
//
// Counts as an operation in the sending direction (one thread at a time); does not block. Errors:
// GINNEL_ERR_NOT_CLAIMED; GINNEL_ERR_INVALID if `len` is more than was claimed, after which the claim stays;
// GINNEL_ERR_CLOSED, GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT or GINNEL_ERR_BROKEN, after which the claim is gone.
int ginnel_stream_send_claimed(struct ginnel_channel *channel,
                               size_t len);

// Gives up the claimed room, if there is any. The peer never sees anything of it.
//
// Counts as an operation in the sending direction (one thread at a time); does not block.
int ginnel_stream_abort(struct ginnel_channel *channel);

// Receives the available bytes into `buffer`, which has room for `len` bytes. Returns how many bytes were received, 0
// at the end of the stream (or if `len` is 0), or a negative status.
//
// Counts as an operation in the receiving direction (one thread at a time); blocks while there are no bytes. Errors:
// GINNEL_ERR_WOULD_BLOCK, GINNEL_ERR_TIMED_OUT, GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
ssize_t ginnel_stream_recv(struct ginnel_channel *channel,
                           void *buffer,
                           size_t len);

// Peeks at the available bytes in place, as one contiguous run. `*data` points to `*len` bytes (at least one) until
// they are released or received, or the channel is closed. Peeking again returns the same bytes, perhaps followed by
// more. A hostile peer can still change the bytes, so copy data that must not change between a check and its use.
//
// Counts as an operation in the receiving direction (one thread at a time); blocks while there are no bytes. Errors:
// those of ginnel_stream_recv(), and GINNEL_ERR_FINISHED at the end of the stream.
int ginnel_stream_peek(struct ginnel_channel *channel,
                       const void **data,
                       size_t *len);

// Ends the peek at the first `len` bytes and gives their room back to the peer; the rest stays for the next peek.
//
// Counts as an operation in the receiving direction (one thread at a time); does not block. Errors:
// GINNEL_ERR_NOT_CLAIMED without an earlier ginnel_stream_peek(); GINNEL_ERR_INVALID if `len` is more than was peeked
// at, after which the peek stays; GINNEL_ERR_BROKEN, in which case the bytes that were read may have been zeros.
int ginnel_stream_release(struct ginnel_channel *channel,
                          size_t len);

// Creates an empty set. On success the caller must free `*set` with ginnel_ready_set_close(); on failure it is NULL.
//
// Does not block. Any thread may call it. Errors: GINNEL_ERR_SYSTEM if there are no more file descriptors, of which a
// set needs two.
int ginnel_ready_set_new(struct ginnel_ready_set **set);

// Adds these directions of the channel to the set. From now on their operations never wait: they return
// GINNEL_ERR_WOULD_BLOCK, and the set reports `key` when another attempt is worthwhile. It also reports the key once
// at the beginning. It reports the key again only after another GINNEL_ERR_WOULD_BLOCK, so use a reported channel
// until it returns that. A direction is in at most one set at a time. The set and the channel may be closed in any
// order.
//
// Counts as an operation in these directions and on the set (one thread at a time in each). Asks the daemon for a
// readiness board if the boards of this process are full, each of which serves 24576 directions of an endpoint; then
// it blocks for up to 10 s if the daemon is being restarted. Errors: GINNEL_ERR_LIMIT, GINNEL_ERR_NO_MEMORY,
// GINNEL_ERR_NO_DAEMON.
int ginnel_ready_set_add(struct ginnel_ready_set *set,
                         struct ginnel_channel *channel,
                         int directions,
                         uint64_t key);

// Removes these directions of a channel from their set. Their operations wait again, unless they are non-blocking.
//
// Counts as an operation in these directions (one thread at a time in each); does not block.
int ginnel_channel_leave_set(struct ginnel_channel *channel,
                             int directions);

// Reports `key` as long as `fd` is readable. It may be the descriptor of ginnel_listener_fd(), a socket or a timer,
// for example. A descriptor that is closed is no longer watched; if it has duplicates, call ginnel_ready_set_unwatch()
// before closing it.
//
// One thread at a time; does not block. Errors: GINNEL_ERR_SYSTEM, for example for the descriptor of a regular file.
int ginnel_ready_set_watch(struct ginnel_ready_set *set,
                           int fd,
                           uint64_t key);

// Stops watching a descriptor.
//
// One thread at a time; does not block. Errors: GINNEL_ERR_SYSTEM if it was not watched.
int ginnel_ready_set_unwatch(struct ginnel_ready_set *set, int fd);

// Waits until there is something to do, writes up to `most` keys to `keys`, in no particular order, and returns how
// many; 0 after the timeout. Keys that do not fit are returned by the next call.
//
// One thread at a time. Blocks for at most `timeout_ns` nanoseconds: 0 means that it checks once, a negative number
// that it waits for ever. Signals do not interrupt it. Errors: GINNEL_ERR_INVALID if `most` is 0; GINNEL_ERR_SYSTEM in
// the child of a fork while the process that has created the set lives.
ssize_t ginnel_ready_set_wait(struct ginnel_ready_set *set,
                              uint64_t *keys,
                              size_t most,
                              int64_t timeout_ns);

// Sets how ginnel_ready_set_wait() waits: one of GINNEL_WAIT_*. `budget_ns` is for GINNEL_WAIT_ADAPTIVE, as in
// ginnel_channel_set_wait(). The default is adaptive.
//
// One thread at a time; does not block.
int ginnel_ready_set_set_wait(struct ginnel_ready_set *set,
                              int wait,
                              uint64_t budget_ns);

// Arms the set and returns a file descriptor for programs with an event loop of their own, the same each time. After
// this call the descriptor becomes readable (POLLIN) when ginnel_ready_set_wait() with a timeout of 0 has something to
// report; it may also become readable without need, and is readable at once if there is something already. Call this
// function again after each ginnel_ready_set_wait(), before the next poll(2). The descriptor belongs to the set: do
// not read or close it.
//
// One thread at a time; does not block. In a VM without interrupts the descriptor never becomes readable, so call
// ginnel_ready_set_wait() at intervals.
int ginnel_ready_set_fd(struct ginnel_ready_set *set);

// Frees a set. Directions that are in it continue to return GINNEL_ERR_WOULD_BLOCK until they are closed, leave the
// set or enter another one. NULL is allowed. No other thread may be using the handle. Does not block.
int ginnel_ready_set_close(struct ginnel_ready_set *set);

// Keeps an endpoint alive for `time_ns` nanoseconds even if no process owns it, so that the program that this process
// executes next, or another process, can adopt it. On success the caller must free `*token` with ginnel_string_free();
// on failure it is NULL. The token is needed for ginnel_adopt(). It is secret, because any process that has it can
// become the endpoint.
//
// Blocks until the daemon answers, for at most 10 s. Any thread may call it. Errors: GINNEL_ERR_LIMIT if the time is
// longer than the daemon allows or there are too many holds; GINNEL_ERR_TIMED_OUT, GINNEL_ERR_NO_DAEMON,
// GINNEL_ERR_UNRECORDED.
int ginnel_hold(const struct ginnel_endpoint *endpoint,
                int64_t time_ns,
                char **token);

// Ends a hold of this endpoint early. Has no effect if a process has adopted the endpoint with this token.
//
// Any thread may call it; it does not block.
int ginnel_release(const struct ginnel_endpoint *endpoint,
                   const char *token);

// Becomes an owner of the endpoint that is held with this token, and ends that hold. `options` are those of
// ginnel_attach() and may be NULL; their name is ignored. On success the caller must free `*endpoint` with
// ginnel_detach(); on failure it is NULL.
//
// Blocks like ginnel_attach(). Any thread may call it. Errors: GINNEL_ERR_STALE if the hold is over or another process
// was faster, GINNEL_ERR_DENIED if this user is neither the endpoint's user nor allowed to use the segment,
// GINNEL_ERR_LIMIT, GINNEL_ERR_NO_DAEMON, GINNEL_ERR_BROKEN.
int ginnel_adopt(const char *token,
                 const struct ginnel_attach_options *options,
                 struct ginnel_endpoint **endpoint);

// Stops using a channel and returns its position for ginnel_channel_resume(). On success the channel is freed, and the
// caller must free `*saved` with ginnel_string_free(); it is not secret. On failure `*saved` is NULL, and the channel
// is unchanged. The peer notices nothing: what it sends meanwhile waits in the ring. Send or abort a claim before this
// call; a message or bytes that were peeked at and not released will be received again.
//
// Counts as an operation in both directions; does not block. Errors: GINNEL_ERR_CLAIMED.
int ginnel_channel_save(struct ginnel_channel *channel,
                        char **saved);

// Continues a channel of this endpoint at the position where it was saved: no data is lost or received twice. Each
// saved channel must be resumed only once, by one process. Its settings (timeouts, wait mode, ready set) must be made
// again. On success the caller must free `*channel` with ginnel_channel_close(); on failure it is NULL.
//
// Blocks until the daemon answers, for at most 10 s. Any thread may call it. Errors: GINNEL_ERR_NOT_FOUND if the
// endpoint has no such channel, GINNEL_ERR_CORRUPT if the channel is not at the saved position (it is closed then),
// GINNEL_ERR_TIMED_OUT, GINNEL_ERR_NO_DAEMON, GINNEL_ERR_READ_ONLY.
int ginnel_channel_resume(const struct ginnel_endpoint *endpoint,
                          const char *saved,
                          struct ginnel_channel **channel);

// Creates a block of `size` bytes in the segment of `endpoint` and opens it for reading and writing. `name` may be
// NULL: then other programs cannot open the block until ginnel_block_link() names it. `options` may be NULL. On
// success the caller must free `*block` with ginnel_block_close(); on failure it is NULL.
//
// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_block_create(const struct ginnel_endpoint *endpoint,
                        const char *name,
                        size_t size,
                        const struct ginnel_block_options *options,
                        struct ginnel_block **block);

// Opens a block of the segment of `endpoint` by name, with the given rights (one of GINNEL_RIGHTS_*, not NONE). If the
// block does not exist or is busy, waits for up to `patience_ns` nanoseconds; 0 means not at all. On success the
// caller must free `*block` with ginnel_block_close(); on failure it is NULL.
//
// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_NOT_FOUND, GINNEL_ERR_DENIED,
// GINNEL_ERR_BUSY, GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_block_open(const struct ginnel_endpoint *endpoint,
                      const char *name,
                      int wanted,
                      uint64_t patience_ns,
                      struct ginnel_block **block);

// Removes the name of a block. Its memory stays allocated as long as a program has the block open. Only the owner may
// call it. Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_NOT_FOUND, GINNEL_ERR_DENIED,
// GINNEL_ERR_NAME.
int ginnel_block_unlink(const struct ginnel_endpoint *endpoint,
                        const char *name);

// Gives a name to a block that has none. Only the owner may call it. Blocks until the daemon answers. Any thread may
// call it. Errors: GINNEL_ERR_IN_USE, GINNEL_ERR_DENIED, GINNEL_ERR_NAME.
int ginnel_block_link(const struct ginnel_block *block,
                      const char *name);

// Stores the address of the block's bytes and, unless `length` is NULL, their number. They are mapped with the rights
// of this handle, until ginnel_block_close() or ginnel_block_resize(). Other programs write to the same bytes, so use
// a lock to order the accesses. A store without the right to write raises SIGSEGV, unless ginnel_block_guard() was
// called. Any thread may call it. Errors: GINNEL_ERR_DENIED, GINNEL_ERR_BROKEN.
int ginnel_block_map(const struct ginnel_block *block,
                     void **address,
                     size_t *length);

// Protects this process from stores without the right to write. From now on such a store goes to a private copy of the
// page and never to the block. The next function of this block returns GINNEL_ERR_DENIED, and after that the block
// shows its real contents again. Installs a handler for SIGSEGV, which passes on faults outside of such blocks. Any
// thread may call it.
int ginnel_block_guard(const struct ginnel_block *block);

// Copies `len` bytes from offset `at` of the block to `buffer`. Does not block. Any thread may call it. Errors:
// GINNEL_ERR_RANGE, GINNEL_ERR_DENIED, GINNEL_ERR_BROKEN.
int ginnel_block_read(const struct ginnel_block *block,
                      size_t at,
                      void *buffer,
                      size_t len);

// Copies `len` bytes from `data` to offset `at` of the block. Does not block. Any thread may call it. Errors:
// GINNEL_ERR_RANGE, GINNEL_ERR_DENIED, GINNEL_ERR_BROKEN.
int ginnel_block_write(const struct ginnel_block *block,
                       size_t at,
                       const void *data,
                       size_t len);

// Changes the length of the block to `size` bytes without moving it in the segment; afterwards it may be mapped at
// another address of this process. Only the owner may call it, and only while no other thread uses the handle. Blocks
// until the daemon answers. Errors: GINNEL_ERR_NO_MEMORY if the memory behind the block is in use, GINNEL_ERR_BUSY if
// others have the block open and would keep access to the part that is cut off, GINNEL_ERR_QUOTA, GINNEL_ERR_DENIED.
int ginnel_block_resize(struct ginnel_block *block,
                        size_t size);

// Sets the rights of a member, or of one of its endpoints, to the block. `endpoint` 0 means all endpoints of the
// member. Open handles lose the rights that are no longer granted. Only the owner may call it. Blocks until the daemon
// answers. Any thread may call it. Errors: GINNEL_ERR_DENIED, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_QUOTA if the block has
// as many grants as the daemon allows.
int ginnel_block_grant(const struct ginnel_block *block,
                       uint32_t member,
                       uint32_t endpoint,
                       int granted);

// Fills in `*info`, whose `size` the caller has set. Any thread may call it; it does not block.
int ginnel_block_get_info(const struct ginnel_block *block, struct ginnel_block_info *info);

// Unmaps and frees a block handle. NULL is allowed. No other thread may be using the handle. May inform the daemon,
// which takes at most a second.
int ginnel_block_close(struct ginnel_block *block);

// Handles pending messages from the daemon, such as the revocation of rights to blocks. Functions that ask the daemon
// do this too, and functions of a block do so at most every 10 ms. Any thread may call it; it does not block.
int ginnel_process_events(const struct ginnel_endpoint *endpoint);

// Opens a mutex of the segment of `endpoint` by name, and creates it if it does not exist. `options` may be NULL. On
// success the caller must free the handle with ginnel_mutex_close(); on failure it is NULL. A mutex has at most 63
// handles.
//
// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_KIND if a lock of another kind has that
// name, GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_mutex_open(const struct ginnel_endpoint *endpoint,
                      const char *name,
                      const struct ginnel_lock_options *options,
                      struct ginnel_mutex **mutex);

// Locks the mutex. Waits for up to `timeout_ns` nanoseconds; 0 means not at all, a negative number for ever. Returns 0
// or GINNEL_OWNER_DIED; in both cases the caller holds the mutex. Errors: GINNEL_ERR_TIMED_OUT,
// GINNEL_ERR_NOT_RECOVERABLE, GINNEL_ERR_DEADLOCK if this handle already holds it, GINNEL_ERR_FENCED,
// GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
int ginnel_mutex_lock(struct ginnel_mutex *mutex,
                      int64_t timeout_ns);

// Unlocks the mutex. Does not block. Errors: GINNEL_ERR_NOT_OWNER, GINNEL_ERR_CORRUPT.
int ginnel_mutex_unlock(struct ginnel_mutex *mutex);

// Marks the data as consistent again, after GINNEL_OWNER_DIED. Does not block. Errors: GINNEL_ERR_NOT_OWNER.
int ginnel_mutex_consistent(struct ginnel_mutex *mutex);

// Frees a handle. If it still holds the mutex, the mutex is handed on as if its owner had died. NULL is allowed. No
// other thread may be using the handle. May inform the daemon, which takes at most a second.
int ginnel_mutex_close(struct ginnel_mutex *mutex);

// Opens a read-write lock of the segment of `endpoint` by name, and creates it if it does not exist. `options` may be
// NULL. On success the caller must free the handle with ginnel_rwlock_close(); on failure it is NULL. A lock has at
// most 63 handles.
//
// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_KIND if a lock of another kind has that
// name, GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_rwlock_open(const struct ginnel_endpoint *endpoint,
                       const char *name,
                       const struct ginnel_lock_options *options,
                       struct ginnel_rwlock **lock);

// Locks for reading. Waits for up to `timeout_ns` nanoseconds; 0 means not at all, a negative number for ever. Errors:
// GINNEL_ERR_TIMED_OUT, GINNEL_ERR_OWNER_DIED if a writer died while it held the lock (then lock it for writing),
// GINNEL_ERR_NOT_RECOVERABLE, GINNEL_ERR_DEADLOCK, GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
int ginnel_rwlock_rdlock(struct ginnel_rwlock *lock,
                         int64_t timeout_ns);

// Locks for writing; otherwise like ginnel_mutex_lock().
int ginnel_rwlock_wrlock(struct ginnel_rwlock *lock, int64_t timeout_ns);

// Unlocks, whether the lock is held for reading or for writing. Does not block. Errors: GINNEL_ERR_NOT_OWNER,
// GINNEL_ERR_CORRUPT.
int ginnel_rwlock_unlock(struct ginnel_rwlock *lock);

// Marks the data as consistent again, after GINNEL_OWNER_DIED. Does not block. Errors: GINNEL_ERR_NOT_OWNER.
int ginnel_rwlock_consistent(struct ginnel_rwlock *lock);

// Frees a handle. If it still holds the lock, the lock is handed on as if its owner had died. NULL is allowed. No
// other thread may be using the handle. May inform the daemon, which takes at most a second.
int ginnel_rwlock_close(struct ginnel_rwlock *lock);

// Opens a condition variable of the segment of `endpoint` by name, and creates it if it does not exist. `options` may
// be NULL. On success the caller must free the handle with ginnel_condvar_close(); on failure it is NULL. A condition
// variable has at most 63 handles.
//
// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_KIND if a lock of another kind has that
// name, GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_condvar_open(const struct ginnel_endpoint *endpoint,
                        const char *name,
                        const struct ginnel_lock_options *options,
                        struct ginnel_condvar **condvar);

// Unlocks the mutex, waits for a signal for up to `timeout_ns` nanoseconds (a negative number means for ever), and
// locks the mutex again, for which it waits for ever. Returns 0, or GINNEL_OWNER_DIED as ginnel_mutex_lock() does.
// After these and after GINNEL_ERR_TIMED_OUT the caller holds the mutex; after other errors it does not. Check the
// condition in every case. Errors: those of ginnel_mutex_lock(), and GINNEL_ERR_NOT_OWNER if the caller did not hold
// the mutex.
int ginnel_condvar_wait(struct ginnel_condvar *condvar,
                        struct ginnel_mutex *mutex,
                        int64_t timeout_ns);

// Wakes one waiter, if there is one. The condition must have been changed while the mutex was held; the mutex need not
// be held for this call. Does not block.
int ginnel_condvar_signal(struct ginnel_condvar *condvar);

// Wakes all waiters. Does not block.
int ginnel_condvar_broadcast(struct ginnel_condvar *condvar);

// Frees a handle. NULL is allowed. No other thread may be using the handle. May inform the daemon, which takes at most
// a second.
int ginnel_condvar_close(struct ginnel_condvar *condvar);

// Opens a semaphore of the segment of `endpoint` by name. If it does not exist, creates it with `initial` permits and
// a maximum of `limit`; an existing one must have the same limit, unless `limit` is 0. `options` may be NULL. On
// success the caller must free the handle with ginnel_semaphore_close(); on failure it is NULL. A semaphore has at
// most 63 handles.
//
// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_KIND if a lock of another kind has that
// name, GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_semaphore_open(const struct ginnel_endpoint *endpoint,
                          const char *name,
                          uint32_t limit,
                          uint32_t initial,
                          const struct ginnel_lock_options *options,
                          struct ginnel_semaphore **semaphore);

// Acquires one permit. Waits for up to `timeout_ns` nanoseconds; 0 means not at all, a negative number for ever.
// Errors: GINNEL_ERR_TIMED_OUT, GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
int ginnel_semaphore_wait(struct ginnel_semaphore *semaphore,
                          int64_t timeout_ns);

// Releases `count` permits. Does not block. Errors: GINNEL_ERR_OVERFLOW if the semaphore would have more than its
// limit, after which none is released; GINNEL_ERR_CORRUPT.
int ginnel_semaphore_post(struct ginnel_semaphore *semaphore,
                          uint32_t count);

// Stores the current number of permits in `*permits`. Does not block. Errors: GINNEL_ERR_CORRUPT.
int ginnel_semaphore_get(struct ginnel_semaphore *semaphore, uint64_t *permits);

// Frees a handle. Permits that were acquired through it are not returned. NULL is allowed. No other thread may be
// using the handle. May inform the daemon, which takes at most a second.
int ginnel_semaphore_close(struct ginnel_semaphore *semaphore);

// Opens a barrier of the segment of `endpoint` by name, for `parties` parties (1 to 63), each with a handle of its
// own. Creates it if it does not exist. `options` may be NULL. On success the caller must free the handle with
// ginnel_barrier_close(); on failure it is NULL. A barrier has at most 63 handles.
//
// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_KIND if a lock of another kind has that
// name, GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_barrier_open(const struct ginnel_endpoint *endpoint,
                        const char *name,
                        uint32_t parties,
                        const struct ginnel_lock_options *options,
                        struct ginnel_barrier **barrier);

// Arrives at the barrier and waits until all parties have arrived, for up to `timeout_ns` nanoseconds; a negative
// number means for ever. Returns 1 to exactly one of the parties and 0 to the others. Errors: GINNEL_ERR_TIMED_OUT,
// GINNEL_ERR_BARRIER_BROKEN if a party has died, GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT.
int ginnel_barrier_wait(struct ginnel_barrier *barrier,
                        int64_t timeout_ns);

// Makes a broken barrier usable again. Does not block. Errors: GINNEL_ERR_WOULD_BLOCK while some waiting parties have
// not yet noticed that it is broken.
int ginnel_barrier_reset(struct ginnel_barrier *barrier);

// Frees a handle. NULL is allowed. No other thread may be using the handle. May inform the daemon, which takes at most
// a second.
int ginnel_barrier_close(struct ginnel_barrier *barrier);

// Opens a once of the segment of `endpoint` by name, and creates it if it does not exist. `options` may be NULL. On
// success the caller must free the handle with ginnel_once_close(); on failure it is NULL. A once has at most 63
// handles.
//
// Blocks until the daemon answers. Any thread may call it. Errors: GINNEL_ERR_KIND if a lock of another kind has that
// name, GINNEL_ERR_BUSY if all handles are taken, GINNEL_ERR_NOT_FOUND, GINNEL_ERR_IN_USE, GINNEL_ERR_NO_MEMORY,
// GINNEL_ERR_QUOTA, GINNEL_ERR_READ_ONLY, GINNEL_ERR_NAME.
int ginnel_once_open(const struct ginnel_endpoint *endpoint,
                     const char *name,
                     const struct ginnel_lock_options *options,
                     struct ginnel_once **once);

// Asks for the turn to do the work. Waits while another handle has the turn, for up to `timeout_ns` nanoseconds; a
// negative number means for ever. Returns 0 if the work is done already, and GINNEL_ONCE_BEGIN or GINNEL_ONCE_AGAIN if
// the caller must do it. Errors: GINNEL_ERR_TIMED_OUT, GINNEL_ERR_FENCED, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
int ginnel_once_begin(struct ginnel_once *once,
                      int64_t timeout_ns);

// Ends a turn. `done` is 1 if the work is done; with 0 the next caller gets the turn. Does not block. Errors:
// GINNEL_ERR_NOT_OWNER.
int ginnel_once_end(struct ginnel_once *once,
                    int done);

// Frees a handle. If it still has the turn, the turn is handed on as if its owner had died. NULL is allowed. No other
// thread may be using the handle. May inform the daemon, which takes at most a second.
int ginnel_once_close(struct ginnel_once *once);

// Removes the name of a lock. Existing handles stay usable; the next open of the name creates another lock. Only the
// member that has created the lock may call it. Blocks until the daemon answers. Any thread may call it. Errors:
// GINNEL_ERR_NOT_FOUND, GINNEL_ERR_DENIED, GINNEL_ERR_NAME.
int ginnel_lock_unlink(const struct ginnel_endpoint *endpoint,
                       const char *name);

// Lists the members, endpoints and listeners that the daemon tells this user about. In a VM they are those of the VM's
// segments. `socket` is the path of the daemon's socket; NULL means $GINNEL_SOCKET if it is set, otherwise
// /run/ginnel/ginnel.sock. On success the caller must free `*list` with ginnel_list_close(); on failure it is NULL.
//
// Blocks until the daemon answers, for a few seconds if the daemon is being restarted. Any thread may call it. Errors:
// GINNEL_ERR_NO_DAEMON, GINNEL_ERR_UNAVAILABLE, GINNEL_ERR_PROTOCOL.
int ginnel_list_open(const char *socket,
                     struct ginnel_list **list);

// Fills in `*entry`, whose `size` the caller has set, with the next entry: first the members, then the endpoints, then
// the listeners. Returns 1, or 0 at the end, or a negative status. Does not block.
int ginnel_list_next(struct ginnel_list *list,
                     struct ginnel_list_entry *entry);

// Frees a list. NULL is allowed. No other thread may be using the handle. Does not block.
int ginnel_list_close(struct ginnel_list *list);

// Creates a manager without workers. `options` may be NULL. On success the caller must free `*farm` with
// ginnel_farm_close(); on failure it is NULL. Does not block.
int ginnel_farm_open(const struct ginnel_farm_options *options,
                     struct ginnel_farm **farm);

// Attaches to the segment of `address`, which is "segment/name", and lets workers connect there: one worker in a slice
// of its own, or any number in a segment that they share. It may be called again for more addresses while no job is in
// progress.
//
// Blocks like ginnel_attach(). Errors: those of ginnel_attach() and ginnel_endpoint_listen().
int ginnel_farm_listen(struct ginnel_farm *farm,
                       const char *address);

// Starts a program as a child of this process. `argv` holds its name, which is looked up in $PATH, its arguments, and
// NULL at the end. The program should work for this farm (with ginnel_farm_connect(), or "ginnel farm work ADDRESS")
// and end when the farm is closed. Its standard input is empty, and its standard output is discarded.
//
// Errors: GINNEL_ERR_SYSTEM if it cannot be started.
int ginnel_farm_spawn(struct ginnel_farm *farm,
                      const char *const *argv);

// Waits until `count` workers have connected. A job need not wait for that, because workers that connect later get
// work too. Must not be called while a job is in progress.
//
// Blocks for at most `timeout_ns` nanoseconds: 0 means not at all, a negative number for ever. Errors:
// GINNEL_ERR_TIMED_OUT.
int ginnel_farm_wait_for_workers(struct ginnel_farm *farm,
                                 size_t count,
                                 int64_t timeout_ns);

// Returns the length of the longest piece that a worker's channel takes, in bytes, or a negative status. Must not be
// called while a job is in progress.
ssize_t ginnel_farm_longest_piece(struct ginnel_farm *farm);

// Runs a job: distributes its pieces to the workers and collects their results, until all are done. The workers stay
// for the next job.
//
// Blocks until then. Errors, after which no job is in progress: GINNEL_ERR_NO_WORKER if there was no worker for as
// long as the manager waits, GINNEL_ERR_PIECE if a piece failed, or its worker died, on each attempt,
// GINNEL_ERR_TOO_LONG if a piece is longer than a worker's channel permits, GINNEL_ERR_CALLBACK.
int ginnel_farm_run(struct ginnel_farm *farm,
                    const struct ginnel_farm_job *job);

// Begins a job, which ginnel_farm_step() executes; for programs with an event loop. Does not block.
int ginnel_farm_start(struct ginnel_farm *farm, const struct ginnel_farm_job *job);

// Does as much of the job as is possible without waiting. Returns GINNEL_FARM_WORKING, GINNEL_FARM_WAITING or
// GINNEL_FARM_DONE (after which no job is in progress), or a negative status: one of those of ginnel_farm_run(), after
// which the job has ended, or GINNEL_ERR_UNSUPPORTED in a VM without interrupts.
int ginnel_farm_step(struct ginnel_farm *farm);

// Returns a file descriptor for poll(2) and epoll(7), or a negative status. After ginnel_farm_step() has returned
// GINNEL_FARM_WAITING, the descriptor becomes readable when a worker has sent something, has connected or has ended,
// or when a timeout has expired. It belongs to the farm: do not read or close it, and do not use it after the farm is
// closed. It may be used only while a job is in progress, and is the same for all jobs. Errors: GINNEL_ERR_UNSUPPORTED
// in a VM without interrupts.
int ginnel_farm_fd(struct ginnel_farm *farm);

// Cancels the job that is in progress, if any. The workers stay; their later results for its pieces are discarded.
int ginnel_farm_stop(struct ginnel_farm *farm);

// Fills in `*report`, whose `size` the caller has set, for the job in progress, or for the last one.
int ginnel_farm_get_report(struct ginnel_farm *farm,
                           struct ginnel_farm_report *report);

// Fills in `*worker`, whose `size` the caller has set, with the work of one worker in the job in progress or the last
// one. `index` counts from 0, in the order in which the workers connected. Errors: GINNEL_ERR_INVALID beyond the last.
int ginnel_farm_get_worker(struct ginnel_farm *farm,
                           size_t index,
                           struct ginnel_farm_worker_report *worker);

// Frees a farm. Its workers are told that there is no more work. Workers that ginnel_farm_spawn() has started get at
// most 5 s to end, and are then killed. NULL is allowed.
int ginnel_farm_close(struct ginnel_farm *farm);

// Attaches to the segment of `address`, which is "segment/name", and connects to the manager that listens there.
// `options` may be NULL. On success the caller must free `*worker` with ginnel_farm_worker_close(); on failure it is
// NULL.
//
// Blocks like ginnel_attach(), and for up to `options->patience_ns` if no manager listens. Errors: those of
// ginnel_attach() and ginnel_endpoint_connect().
int ginnel_farm_connect(const char *address,
                        const struct ginnel_farm_worker_options *options,
                        struct ginnel_farm_worker **worker);

// Works until the manager has no more jobs: calls `work` for each piece, with `context`.
//
// Blocks until then. Errors: GINNEL_ERR_PEER_DEAD if the manager has died, GINNEL_ERR_CLOSED if it has dismissed this
// worker, GINNEL_ERR_SYSTEM if it violates the protocol.
int ginnel_farm_serve(struct ginnel_farm_worker *worker,
                      ginnel_farm_work work,
                      void *context);

// Stores the number of pieces that a worker has answered so far, and the number of their bytes. Either pointer may be
// NULL.
int ginnel_farm_worker_get_done(const struct ginnel_farm_worker *worker,
                                uint64_t *pieces,
                                uint64_t *bytes);

// Frees a worker. Its manager gives the pieces that the worker still holds to others. NULL is allowed. Informs the
// daemon, which takes at most a second.
int ginnel_farm_worker_close(struct ginnel_farm_worker *worker);

// Opens the cache at `address`, which is SEGMENT/NAME. `options` may be NULL. On success the caller must free `*cache`
// with ginnel_cache_close(); on failure it is NULL. Read access to the segment is sufficient.
//
// Blocks until the daemon answers, and for up to `options->patience_ns` for a cache that does not exist yet. Any
// thread may call it. Errors: GINNEL_ERR_NO_SEGMENT, GINNEL_ERR_NOT_FOUND if there is no such cache, GINNEL_ERR_KIND
// if it is not a cache of this version, GINNEL_ERR_CORRUPT, GINNEL_ERR_DENIED, GINNEL_ERR_NO_DAEMON, GINNEL_ERR_NAME.
int ginnel_cache_open(const char *address,
                      const struct ginnel_cache_options *options,
                      struct ginnel_cache **cache);

// Closes a cache. NULL is allowed. No other thread may be using the handle. May inform the daemon, which takes at most
// a second.
int ginnel_cache_close(struct ginnel_cache *cache);

// Looks up a key and copies its value to `value`, which has room for `room` bytes. Returns the length of the value in
// bytes, or a negative status. If the value is longer than `room`, the status is GINNEL_ERR_BUFFER_TOO_SMALL, and the
// first `room` bytes have been copied. `item` may be NULL; otherwise `*item`, whose `size` the caller has set, is
// filled in in both cases.
//
// Any thread may call it. It does not block if the answer can be read from memory. Otherwise it blocks until the
// server answers: while the server keeps changing this item or was killed while it changed it, for an item that
// expires while the server's clock is stopped, and if the cache was created anew. Errors: GINNEL_ERR_NO_ITEM,
// GINNEL_ERR_BUFFER_TOO_SMALL; from the server: GINNEL_ERR_NO_SERVER, GINNEL_ERR_LOST, GINNEL_ERR_SERVER.
ssize_t ginnel_cache_get(const struct ginnel_cache *cache,
                         const void *key,
                         size_t key_length,
                         void *value,
                         size_t room,
                         struct ginnel_cache_item *item);

// Looks up `count` keys and copies their values one after another to `values`, which has room for `room` bytes.
// `found`, which has `count` elements, receives the result for each key. Returns how many keys were found. This is
// much faster than `count` calls of ginnel_cache_get(), because the memory of many items is fetched at once.
//
// Any thread may call it. It blocks and fails as ginnel_cache_get() does. After an error, no result is valid.
ssize_t ginnel_cache_get_many(const struct ginnel_cache *cache,
                              const struct ginnel_cache_key *keys,
                              size_t count,
                              void *values,
                              size_t room,
                              struct ginnel_cache_found *found);

// Stores a value, whether the key has one or not. `ttl` is its time to live in seconds; 0 means that it does not
// expire. `cas` may be NULL; otherwise `*cas` receives the item's version. Once this has returned 0, the next get of
// any reader finds this value or a newer one.
//
// Any thread may call it; concurrent calls are executed one after another. Blocks until the server answers. Errors:
// GINNEL_ERR_TOO_LONG, GINNEL_ERR_SERVER; GINNEL_ERR_NO_SERVER, after which nothing was changed; GINNEL_ERR_LOST,
// after which the value may or may not have been stored.
int ginnel_cache_set(const struct ginnel_cache *cache,
                     const void *key,
                     size_t key_length,
                     const void *value,
                     size_t len,
                     uint32_t flags,
                     uint32_t ttl,
                     uint64_t *cas);

// Stores `count` values as ginnel_cache_set() does, without waiting for an answer before sending the next. Returns how
// many were stored. `results` may be NULL; otherwise its `count` elements receive the result for each item.
// ginnel_last_error() describes the last item that was not stored.
//
// Any thread may call it; concurrent calls are executed one after another. Blocks until the server answers.
ssize_t ginnel_cache_set_many(const struct ginnel_cache *cache,
                              const struct ginnel_cache_entry *entries,
                              size_t count,
                              struct ginnel_cache_stored *results);

// Stores a value unless the key has one, which is GINNEL_ERR_NOT_STORED. Otherwise like ginnel_cache_set().
int ginnel_cache_add(const struct ginnel_cache *cache,
                     const void *key,
                     size_t key_length,
                     const void *value,
                     size_t len,
                     uint32_t flags,
                     uint32_t ttl,
                     uint64_t *cas);

// Replaces a value. If the key has none, that is GINNEL_ERR_NOT_STORED. Otherwise like ginnel_cache_set().
int ginnel_cache_replace(const struct ginnel_cache *cache,
                         const void *key,
                         size_t key_length,
                         const void *value,
                         size_t len,
                         uint32_t flags,
                         uint32_t ttl,
                         uint64_t *cas);

// Appends bytes to a value, and keeps its flags and expiry time. If the key has no value, that is
// GINNEL_ERR_NOT_STORED. Otherwise like ginnel_cache_set().
int ginnel_cache_append(const struct ginnel_cache *cache,
                        const void *key,
                        size_t key_length,
                        const void *value,
                        size_t len,
                        uint64_t *cas);

// Prepends bytes to a value, and keeps its flags and expiry time. If the key has no value, that is
// GINNEL_ERR_NOT_STORED. Otherwise like ginnel_cache_set().
int ginnel_cache_prepend(const struct ginnel_cache *cache,
                         const void *key,
                         size_t key_length,
                         const void *value,
                         size_t len,
                         uint64_t *cas);

// Replaces a value if its version is `*cas`, which a get has returned, and stores the new version in `*cas`. If the
// item has another version now, that is GINNEL_ERR_CHANGED; if there is no item, GINNEL_ERR_NO_ITEM. Otherwise like
// ginnel_cache_set().
int ginnel_cache_cas(const struct ginnel_cache *cache,
                     const void *key,
                     size_t key_length,
                     const void *value,
                     size_t len,
                     uint32_t flags,
                     uint32_t ttl,
                     uint64_t *cas);

// Removes an item. If there is none, that is GINNEL_ERR_NO_ITEM. Otherwise like ginnel_cache_set().
int ginnel_cache_delete(const struct ginnel_cache *cache, const void *key, size_t key_length);

// Adds `delta` to a value that is a decimal number; the sum wraps around at 64 bits. `result` may be NULL; otherwise
// `*result` receives the sum. If there is no such item, that is GINNEL_ERR_NO_ITEM; if its value is not a number,
// GINNEL_ERR_SERVER. Otherwise like ginnel_cache_set().
int ginnel_cache_increment(const struct ginnel_cache *cache,
                           const void *key,
                           size_t key_length,
                           uint64_t delta,
                           uint64_t *result);

// Subtracts `delta` from a value that is a decimal number, but not below 0. If the result has fewer digits, the value
// keeps its length and is filled with blanks at its end. Otherwise like ginnel_cache_increment().
int ginnel_cache_decrement(const struct ginnel_cache *cache,
                           const void *key,
                           size_t key_length,
                           uint64_t delta,
                           uint64_t *result);

// Changes the time to live of an item, in seconds; 0 means that it does not expire. If there is no item, that is
// GINNEL_ERR_NO_ITEM. Otherwise like ginnel_cache_set().
int ginnel_cache_touch(const struct ginnel_cache *cache,
                       const void *key,
                       size_t key_length,
                       uint32_t ttl);

// Removes all items. Otherwise like ginnel_cache_set().
int ginnel_cache_flush(const struct ginnel_cache *cache);

// Asks the server for its statistics: those named `kind`, or the general ones if `kind` is NULL. `*text` receives a
// line for each, with its name and value. On success the caller must free `*text` with ginnel_string_free(); on
// failure it is NULL. Otherwise like ginnel_cache_set().
int ginnel_cache_stats(const struct ginnel_cache *cache,
                       const char *kind,
                       char **text);

// Fills in `*counters`, whose `size` the caller has set. Any thread may call it; it does not block.
int ginnel_cache_get_counters(const struct ginnel_cache *cache,
                              struct ginnel_cache_counters *counters);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GINNEL_H */
