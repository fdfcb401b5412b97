/* Drives an emulated NIC with nothing but its header and libc: two queue pairs of one process, writes
 * that wrap a small ring, an immediate, a refused write. Says "ok" if every byte and completion is as
 * it must be. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "emulated-nic.h"

#define CHECK(what)                                                          \
    do {                                                                     \
        if (!(what)) {                                                       \
            fprintf(stderr, "line %d: %s\n", __LINE__, #what);               \
            exit(1);                                                         \
        }                                                                    \
    } while (0)

enum { SENDS = 4, RECEIVES = 4, COMPLETIONS = 8, PAGE = 64, WRITES = 200000 };
enum { COMPLETIONS_AT = KNIC_COMPLETIONS_AT(SENDS), WORDS = COMPLETIONS_AT + COMPLETIONS * 8 };

static int control;

static struct knic_answer call(void *request, size_t bytes, int fd) {
    static uint32_t serial;
    ((struct knic_head *)request)->serial = ++serial;
    struct iovec iov = {request, bytes};
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } with = {0};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = &with;
        message.msg_controllen = sizeof with;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(head), &fd, sizeof fd);
    }
    CHECK(sendmsg(control, &message, 0) == (ssize_t)bytes);
    struct {
        struct knic_answer answer;
        char text[4096];
    } got = {0};
    CHECK(recv(control, &got, sizeof got - 1, 0) >= (ssize_t)sizeof got.answer);
    CHECK(got.answer.serial == serial);
    if (got.answer.status != KNIC_DONE)
        fprintf(stderr, "request %u: status %u: %s\n", ((struct knic_head *)request)->kind,
                got.answer.status, got.text);
    return got.answer;
}

static struct knic_answer one(uint32_t kind, uint64_t value) {
    struct knic_one request = {{kind, 0}, value};
    return call(&request, sizeof request, -1);
}

static void *shared(size_t bytes, int *fd) {
    *fd = memfd_create("foreign", MFD_ALLOW_SEALING);
    CHECK(*fd >= 0 && ftruncate(*fd, (off_t)bytes) == 0);
    CHECK(fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    CHECK(at != MAP_FAILED);
    return at;
}

struct pair {
    uint64_t number, sequence;
    uint8_t *memory;
    uint32_t posted, received;
    uint64_t completed;
};

static struct pair make(uint64_t domain) {
    struct pair p = {0};
    int fd;
    p.memory = shared(WORDS * 8, &fd);
    for (int i = 0; i < COMPLETIONS; i++)
        p.memory[COMPLETIONS_AT * 8 + i * 64 + 63] = 0xf1;
    struct knic_queue_pair request = {
        .head = {KNIC_QUEUE_PAIR, 0},
        .domain = domain,
        .words = WORDS,
        .sends_at = KNIC_SENDS_AT,
        .sends = SENDS,
        .receives = RECEIVES,
        .completions_at = COMPLETIONS_AT,
        .completions = COMPLETIONS,
        .record_at = KNIC_RECORD_AT,
        .doorbell_at = KNIC_DOORBELL_AT,
        .consumed_at = KNIC_CONSUMED_AT,
    };
    struct knic_answer made = call(&request, sizeof request, fd);
    CHECK(made.status == KNIC_DONE);
    close(fd);
    p.number = made.values[0];
    p.sequence = made.values[1];
    return p;
}

static void join(struct pair *p, struct pair *peer) {
    struct knic_connect request = {{KNIC_CONNECT, 0}, p->number, peer->number, peer->sequence};
    CHECK(call(&request, sizeof request, -1).status == KNIC_DONE);
}

static void put32(uint8_t *at, uint32_t value) {
    value = htobe32(value);
    memcpy(at, &value, 4);
}
static void put64(uint8_t *at, uint64_t value) {
    value = htobe64(value);
    memcpy(at, &value, 8);
}

static void post(struct pair *p, uint64_t to, uint32_t rkey, uint64_t from, uint32_t lkey,
                 uint32_t bytes, int signalled, const uint32_t *immediate) {
    uint8_t entry[64] = {0};
    put32(entry, (p->posted & 0xffff) << 8 | (immediate ? 0x09 : 0x08));
    put32(entry + 4, (uint32_t)p->number << 8 | 3);
    put32(entry + 8, signalled ? 0x08 : 0);
    put32(entry + 12, immediate ? *immediate : 0);
    put64(entry + 16, to);
    put32(entry + 24, rkey);
    put32(entry + 28, 0xdeadbeef); /* not looked at */
    put32(entry + 32, bytes);
    put32(entry + 36, lkey);
    put64(entry + 40, from);
    memcpy(p->memory + KNIC_SENDS_AT * 8 + p->posted % SENDS * 64, entry, 64);
    p->posted++;
}

static void ring(struct pair *p) {
    uint32_t *record = (uint32_t *)(p->memory + KNIC_RECORD_AT * 8);
    uint64_t *doorbell = (uint64_t *)(p->memory + KNIC_DOORBELL_AT * 8);
    uint8_t value[8];
    put32(value, (p->posted & 0xffff) << 8);
    put32(value + 4, (uint32_t)p->number << 8);
    uint64_t word;
    memcpy(&word, value, 8);
    __atomic_store_n(record + 1, htobe32(p->posted & 0xffff), __ATOMIC_RELEASE);
    __atomic_store_n(doorbell, word, __ATOMIC_RELEASE);
}

static void receive(struct pair *p, uint32_t n) {
    p->received += n;
    uint32_t *record = (uint32_t *)(p->memory + KNIC_RECORD_AT * 8);
    __atomic_store_n(record, htobe32(p->received & 0xffff), __ATOMIC_RELEASE);
}

/* The next completion, 64 bytes; at most some 20 seconds away. */
static void next(struct pair *p, uint8_t *into) {
    uint8_t *slot = p->memory + COMPLETIONS_AT * 8 + p->completed % COMPLETIONS * 64;
    uint8_t owner = p->completed / COMPLETIONS & 1;
    for (int tries = 0;; tries++) {
        uint8_t last = __atomic_load_n(slot + 63, __ATOMIC_ACQUIRE);
        if ((last & 1) == owner && last >> 4 != 15)
            break;
        CHECK(tries < 2000000);
        if (tries > 100)
            poll(NULL, 0, tries > 1000 ? 1 : 0);
    }
    memcpy(into, slot, 64);
    p->completed++;
    uint32_t *consumed = (uint32_t *)(p->memory + KNIC_CONSUMED_AT * 8);
    __atomic_store_n(consumed, htobe32((uint32_t)p->completed & 0xffffff), __ATOMIC_RELEASE);
    uint32_t whose;
    memcpy(&whose, into + 56, 4);
    CHECK((be32toh(whose) & 0xffffff) == p->number);
}

int main(int argc, char **argv) {
    CHECK(argc == 2 && argv[1][0] == '@');
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(argv[1]);
    memcpy(address.sun_path + 1, argv[1] + 1, length - 1);
    control = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    socklen_t size = (socklen_t)(sizeof(sa_family_t) + length);
    CHECK(connect(control, (struct sockaddr *)&address, size) == 0);
    CHECK(one(KNIC_HELLO, KNIC_VERSION).status == KNIC_DONE);
    struct knic_head ask = {KNIC_DOMAIN, 0};
    uint64_t domain = call(&ask, sizeof ask, -1).values[0];

    int fd;
    uint8_t *pool = shared(2 * PAGE, &fd);
    struct knic_register request = {
        {KNIC_REGISTER, 0}, domain, (uint64_t)(uintptr_t)pool, 2 * PAGE, 1};
    struct knic_answer registered = call(&request, sizeof request, fd);
    CHECK(registered.status == KNIC_DONE);
    uint32_t key = (uint32_t)registered.values[0];

    struct pair a = make(domain), b = make(domain);
    join(&a, &b);
    join(&b, &a);

    uint64_t from = (uint64_t)(uintptr_t)pool, to = from + PAGE;
    uint8_t said[64];
    for (uint32_t i = 0; i < WRITES; i += 2) {
        uint32_t marks[2] = {i, i + 1};
        memcpy(pool, marks, 8);
        post(&a, to, key, from, key, 4, 0, NULL);
        post(&a, to + 4, key, from + 4, key, 4, 1, NULL);
        ring(&a);
        next(&a, said);
        CHECK(said[63] >> 4 == 0);
        uint16_t index;
        memcpy(&index, said + 60, 2);
        CHECK(be16toh(index) == (uint16_t)(i + 1));
        CHECK(memcmp(pool + PAGE, marks, 8) == 0);
    }

    uint32_t immediate = 0xcafebabe, found;
    receive(&b, 1);
    memset(pool, 7, PAGE);
    post(&a, to, key, from, key, PAGE, 1, &immediate);
    ring(&a);
    next(&b, said);
    CHECK(said[63] >> 4 == 1);
    memcpy(&found, said + 36, 4);
    CHECK(be32toh(found) == immediate);
    memcpy(&found, said + 44, 4);
    CHECK(be32toh(found) == PAGE);
    CHECK(memcmp(pool, pool + PAGE, PAGE) == 0);
    next(&a, said);
    CHECK(said[63] >> 4 == 0);

    post(&a, to + PAGE, key, from, key, 4, 1, NULL);
    ring(&a);
    next(&a, said);
    CHECK(said[63] >> 4 == 13 && said[55] == 0x13);

    CHECK(one(KNIC_DESTROY, a.number).status == KNIC_DONE);
    CHECK(one(KNIC_DESTROY, b.number).status == KNIC_DONE);
    CHECK(one(KNIC_DESTROY, b.number).status == KNIC_NOT_FOUND);
    puts("ok");
    return 0;
}
