/* The emulated NIC, for writers that are not kvlane: its control socket and the memory of a queue pair.
 *
 * `kvlane emulated-nic --socket @NAME` is a process that reads mlx5 rings in shared memory and moves
 * bytes as an RDMA NIC would. It is a test device: its rates mean nothing. Whatever posts to a real
 * mlx5 queue pair (a CPU, a GPU kernel) can post to this one: rings, doorbell record, doorbell and
 * completions have the layouts of the public headers of rdma-core (mlx5dv.h). Only the set-up differs:
 * requests on a Unix socket instead of calls of a driver. transport/tests/foreign_poster.c does all of
 * it with nothing but this file and libc.
 *
 * Control socket
 * --------------
 * AF_UNIX, SOCK_SEQPACKET; "@NAME" is an abstract name (a zero byte, then NAME). One message is one
 * request or one answer. Numbers are little-endian, structs have no padding. A request has exactly the
 * length of its struct. Each is answered once, in order, KNIC_KICK never. What is no request ends the
 * connection, and with a connection ends all that was made on it: queue pairs, keys, domains.
 * Descriptors travel as SCM_RIGHTS, one a message.
 *
 * Set-up: HELLO, DOMAIN, REGISTER (memory of the pages), QUEUE_PAIR (memory of the rings), tell the
 * other side number and sequence, CONNECT with the other side's.
 *
 * Memory, of either kind, is a memfd of ordinary pages, sealed with F_SEAL_SHRINK, shorter never.
 */
#ifndef KVLANE_EMULATED_NIC_H
#define KVLANE_EMULATED_NIC_H

#include <stdint.h>

#define KNIC_VERSION 1

enum knic_kind {
    KNIC_HELLO = 1,
    KNIC_DOMAIN = 2,
    KNIC_DROP_DOMAIN = 3,
    KNIC_REGISTER = 4,
    KNIC_DEREGISTER = 5,
    KNIC_QUEUE_PAIR = 6,
    KNIC_CONNECT = 7,
    KNIC_ERROR = 8,
    KNIC_DESTROY = 9,
    KNIC_KICK = 10,
    KNIC_STATS = 11,
    KNIC_TRACE = 12,
    KNIC_FAULT = 13,
    KNIC_CLEAR = 14,
};

/* Every request begins with it. `serial` is the sender's and comes back in the answer.
 * Alone it is a request of kind DOMAIN, KICK or STATS. Followed by text (UTF-8, to the end of the
 * message, such as "hold-landing pair=300 skip=2") it is one of kind FAULT. */
struct knic_head {
    uint32_t kind;
    uint32_t serial;
};

/* HELLO (value: KNIC_VERSION), DROP_DOMAIN (domain), DEREGISTER (key), ERROR and DESTROY (queue
 * pair), TRACE (first event), CLEAR (fault; 0 is all).
 *
 * HELLO comes first. With it may come one end of a SOCK_SEQPACKET socket pair: the NIC sends a byte
 * on it for each event, and it ends with the NIC. The answer brings a descriptor of 4096 bytes that
 * can be read only: its first u64 is 1 while the NIC naps. Whoever finds 1 there after it has rung
 * may send a KICK; whoever does not look waits for a millisecond at most.
 *
 * ERROR takes a queue pair to error: it takes no packets any more, what is posted is flushed. What it
 * took before may still land. A receive posted after the first ERROR is flushed by the second, behind
 * all of that.
 * DESTROY is answered KNIC_BUSY as long as something may land. */
struct knic_one {
    struct knic_head head;
    uint64_t value;
};

/* REGISTER, with the descriptor. `address` is what entries call the first byte of the memory. With
 * `remote_write` 1 the other side's writes may land in it, else 0. */
struct knic_register {
    struct knic_head head;
    uint64_t domain;
    uint64_t address;
    uint64_t bytes;
    uint64_t remote_write;
};

/* QUEUE_PAIR, with the descriptor of its memory. All `_at` and `words` are in units of 8 bytes.
 * Nothing may overlap. Any places will do; usual are the KNIC_*_AT below. */
struct knic_queue_pair {
    struct knic_head head;
    uint64_t domain;
    uint64_t words;          /* of the memory, at most 2^21 */
    uint64_t sends_at;       /* send ring; a multiple of 8 */
    uint64_t sends;          /* its entries of 64 bytes; a power of two, at most 2^14 */
    uint64_t receives;       /* receives at a time; likewise, at most 2^15. No ring */
    uint64_t completions_at; /* completion ring; a multiple of 8 */
    uint64_t completions;    /* its entries of 64 bytes; a power of two, at least sends + receives */
    uint64_t record_at;      /* doorbell record */
    uint64_t doorbell_at;    /* doorbell, which stands in for the UAR */
    uint64_t consumed_at;    /* completions consumed, and the wish for an event */
    uint64_t flags;          /* bit 0: `consumed` is not kept, the ring never counts as full */
};
#define KNIC_RECORD_AT 0
#define KNIC_CONSUMED_AT 8
#define KNIC_DOORBELL_AT 512 /* a page of its own */
#define KNIC_SENDS_AT 1024
#define KNIC_COMPLETIONS_AT(sends) (KNIC_SENDS_AT + 8 * (sends)) /* right behind the send ring */

/* CONNECT. Only packets of that peer are taken, from that sequence number on. */
struct knic_connect {
    struct knic_head head;
    uint64_t number;
    uint64_t peer;
    uint64_t sequence;
};

enum knic_status {
    KNIC_DONE = 0,
    KNIC_MALFORMED = 1,
    KNIC_BUSY = 2,
    KNIC_NOT_FOUND = 3,
    KNIC_LIMIT = 4,
    KNIC_MEMORY = 5,
};

/* Behind it, to the end of the message, comes text: what is wrong and, behind a newline, how to fix
 * it; the NIC's name for HELLO; lines for STATS and TRACE. At most 49152 bytes in all.
 * values: HELLO { guid, words of its page, client }, DOMAIN { domain }, REGISTER { key },
 * QUEUE_PAIR { number, sequence }, TRACE { next event }, FAULT { fault }, CLEAR { how many }. */
struct knic_answer {
    uint32_t serial;
    uint32_t status;
    uint64_t values[4];
};

/* Memory of a queue pair
 * ----------------------
 * Everything in it is big-endian, as mlx5 has it. Rings begin as zeros, but byte 63 of every slot of
 * the completion ring as 0xf1.
 *
 * Entry (64 bytes at sends_at, place = index modulo sends), what is not named is 0:
 *   be32 [0]  index << 8 | opcode       index counts from 0 and wraps at 2^16; 0x00 no-op, 0x08 write,
 *                                       0x09 write with immediate
 *   be32 [1]  queue pair << 8 | ds      ds: 1 for a no-op, 2 no data, 3 one segment, 4 two
 *   be32 [2]  flags                     0x08: a completion is wanted
 *   be32 [3]  immediate
 *   be64      address, be32 key         where to; then 4 bytes that are not looked at
 *   be32 bytes, be32 key, be64 address  where from; twice with ds 4
 *   or be32   0x80000000 | bytes        and at once so many bytes: to 12 with ds 3, to 28 with ds 4
 *
 * Doorbell record: be32 [0] receives posted, be32 [1] entries posted, each modulo 2^16.
 * Doorbell (8 bytes, one store): be32 index << 8, be32 queue pair << 8, where index is that of the
 * next entry; or the first 8 bytes of the last entry.
 * To post: entries, then the record, then the doorbell, with a release (from a GPU: a fence of system
 * scope) before each of the latter two. The record counts; the doorbell says when to look.
 *
 * Consumed: be32 [0] completions read, modulo 2^24; be32 [1] 1 asks for one event, the NIC stores 0.
 *
 * Completion (64 bytes at completions_at, place = n modulo completions):
 *   byte 63   opcode << 4 | owner. There when owner is bit (n / completions) & 1 and opcode is not 15.
 *             0 an entry is done, and all before it; 1 an immediate came; 13 an entry failed, 14 a
 *             receive failed. Stored last: to be loaded first, with acquire
 *   be16 @60  index of the entry, or of the receive
 *   be32 @56  low 24 bits: queue pair
 *   be32 @36  immediate, be32 @44 bytes of its write
 *   byte @55  syndrome, byte @54 the vendor's code, of failures:
 *             0x01 length, 0x02 entry, 0x04 local key, 0x05 flushed, 0x13 remote key, 0x15 no answer,
 *             0x16 no receive
 * An entry completes well only when its bytes have landed. After one failed, all others are flushed.
 */

#endif
