// An OpenAI-like model server of one thread, for routers that speak HTTP: the cheapest worker that can be had.
//
//   gateway_mock PORT TTFT_US ITL_US TOKENS CLOCK      PORT 0 takes a free one; the port is printed on stdout
//
// A POST whose body asks for "stream": true is answered by TOKENS server-sent events, one write each, the first after
// TTFT_US, the others ITL_US apart (0: as fast as they come). With CLOCK 1 every token is "t" and the nanoseconds of
// CLOCK_MONOTONIC at which it was written, as bench/clock_engine.py makes them, so a client on the same host reads
// one-way delays; with CLOCK 0 it is "t" and its number, so a client knows what a complete answer is. Other POSTs get
// one JSON answer. GETs get what routers ask for: health, models, server info.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST_CONNECTIONS = 8192, INPUT_BYTES = 1 << 18, TIMERS = 1 << 16 };

typedef struct {
    char *input;
    int length, tokens_left, generation, open;
} connection_t;

// Delays are constant, so a timer that is set later is due later: a ring is a sorted queue.
typedef struct {
    struct { int fd, generation; uint64_t due; } entries[TIMERS];
    unsigned head, tail;
} ring_t;

static connection_t connections[MOST_CONNECTIONS];
static ring_t first_tokens, next_tokens;
static uint64_t ttft_ns, itl_ns;
static int tokens, with_clock, port;

static uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000ull + at.tv_nsec;
}

static void set_timer(ring_t *ring, int fd, uint64_t due) {
    unsigned at = ring->tail++ % TIMERS;
    ring->entries[at].fd = fd;
    ring->entries[at].generation = connections[fd].generation;
    ring->entries[at].due = due;
}

static void hang_up(int fd) {
    connections[fd].open = 0;
    connections[fd].generation++;
    close(fd);
}

static void send_all(int fd, const char *data, size_t size) {
    while (size > 0) {
        ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) {
            struct pollfd writable = {.fd = fd, .events = POLLOUT};
            poll(&writable, 1, 1000);
        } else if (sent < 0) {
            return;  // the reader is gone; its end of file comes by epoll
        } else {
            data += sent;
            size -= sent;
        }
    }
}

static void send_json(int fd, const char *body) {
    char answer[2048];
    int size = snprintf(answer, sizeof answer,
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s", strlen(body), body);
    send_all(fd, answer, size);
}

static int add_chunk(char *out, const char *data) { return sprintf(out, "%zx\r\n%s\r\n", strlen(data), data); }

#define CHUNK_HEAD "data: {\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion.chunk\",\"created\":1700000000," \
    "\"model\":\"mock\",\"choices\":[{\"index\":0,"
#define USAGE "\"usage\":{\"prompt_tokens\":32,\"completion_tokens\":64,\"total_tokens\":96}"

static void send_token(int fd) {
    connection_t *connection = &connections[fd];
    char data[512], out[1536];
    uint64_t number = with_clock ? now_ns() : (uint64_t)(tokens - connection->tokens_left);
    sprintf(data, CHUNK_HEAD "\"delta\":{\"content\":\"t%020llu \"},\"finish_reason\":null}]}\n\n",
        (unsigned long long)number);
    int size = add_chunk(out, data);
    send_all(fd, out, size);
    if (--connection->tokens_left > 0) return;
    size = add_chunk(out, CHUNK_HEAD "\"delta\":{},\"finish_reason\":\"stop\"}]," USAGE "}\n\n");
    size += add_chunk(out + size, "data: [DONE]\n\n");
    size += sprintf(out + size, "0\r\n\r\n");
    send_all(fd, out, size);
}

static void answer_get(int fd, const char *path) {
    if (!strncmp(path, "/v1/models", 10))
        send_json(fd, "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1700000000,"
                      "\"owned_by\":\"mock\"}]}");
    else if (strstr(path, "model_info") || strstr(path, "server_info"))
        send_json(fd, "{\"model_path\":\"mock\",\"tokenizer_path\":\"mock\",\"served_model_name\":\"mock\","
                      "\"is_generation\":true,\"version\":\"0\",\"dp_size\":1,\"tp_size\":1,"
                      "\"max_running_requests\":1000,\"internal_states\":[{}]}");
    else
        send_json(fd, "{\"status\":\"ok\"}");
}

static void answer(int fd, char *request, char *body, int size) {
    if (!strncmp(request, "GET ", 4)) {
        answer_get(fd, request + 4);
        return;
    }
    char after = body[size];
    body[size] = 0;
    int streamed = strstr(body, "\"stream\":true") || strstr(body, "\"stream\": true");
    body[size] = after;
    if (!streamed) {
        char out[1024];
        snprintf(out, sizeof out,
            "{\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"mock\","
            "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"t%020llu The quick brown fox "
            "jumps over the lazy dog and then does it again, port %d.\"},\"finish_reason\":\"stop\"}]," USAGE "}",
            with_clock ? (unsigned long long)now_ns() : 0ull, port);
        send_json(fd, out);
        return;
    }
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
                               "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n";
    send_all(fd, head, sizeof head - 1);
    connections[fd].tokens_left = tokens;
    if (ttft_ns || itl_ns)
        set_timer(&first_tokens, fd, now_ns() + ttft_ns);
    else
        while (connections[fd].tokens_left > 0) send_token(fd);
}

// The bytes of the first complete request in the buffer and where its body begins; 0: not complete.
static int whole_request(connection_t *connection, int *body_at, int *body_size) {
    char *end = memmem(connection->input, connection->length, "\r\n\r\n", 4);
    if (!end) return 0;
    *body_at = end + 4 - connection->input;
    *end = 0;
    char *length = strcasestr(connection->input, "\r\ncontent-length:");
    int chunked = !length && strcasestr(connection->input, "transfer-encoding: chunked");
    *body_size = length ? atoi(length + 17) : 0;
    *end = '\r';
    if (chunked) {
        char *last = memmem(connection->input + *body_at, connection->length - *body_at, "0\r\n\r\n", 5);
        if (!last) return 0;
        *body_size = last + 5 - connection->input - *body_at;
    }
    return connection->length >= *body_at + *body_size ? *body_at + *body_size : 0;
}

static void read_requests(int fd) {
    connection_t *connection = &connections[fd];
    ssize_t size = recv(fd, connection->input + connection->length, INPUT_BYTES - 1 - connection->length, 0);
    if (size < 0 && errno == EAGAIN) return;
    if (size <= 0) {
        hang_up(fd);
        return;
    }
    connection->length += size;
    connection->input[connection->length] = 0;
    int used, body_at, body_size;
    while (connection->length && (used = whole_request(connection, &body_at, &body_size)) > 0) {
        answer(fd, connection->input, connection->input + body_at, body_size);
        connection->length -= used;
        memmove(connection->input, connection->input + used, connection->length + 1);
    }
}

static void accept_all(int listener, int poller) {
    int fd, one = 1;
    while ((fd = accept4(listener, 0, 0, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        if (fd >= MOST_CONNECTIONS) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        connection_t *connection = &connections[fd];
        if (!connection->input) connection->input = malloc(INPUT_BYTES);
        connection->length = connection->tokens_left = 0;
        connection->open = 1;
        struct epoll_event interest = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &interest);
    }
}

static void run_timers(ring_t *ring) {
    uint64_t now = now_ns();
    while (ring->head != ring->tail && ring->entries[ring->head % TIMERS].due <= now) {
        unsigned at = ring->head++ % TIMERS;
        int fd = ring->entries[at].fd;
        uint64_t due = ring->entries[at].due;
        if (!connections[fd].open || connections[fd].generation != ring->entries[at].generation) continue;
        do send_token(fd);
        while (!itl_ns && connections[fd].tokens_left > 0);
        if (connections[fd].tokens_left > 0) set_timer(&next_tokens, fd, due + itl_ns);
    }
}

static uint64_t earliest(const ring_t *ring, uint64_t otherwise) {
    if (ring->head == ring->tail) return otherwise;
    uint64_t due = ring->entries[ring->head % TIMERS].due;
    return due < otherwise ? due : otherwise;
}

int main(int count, char **words) {
    if (count != 6) return 2;
    port = atoi(words[1]);
    ttft_ns = strtoull(words[2], 0, 10) * 1000;
    itl_ns = strtoull(words[3], 0, 10) * 1000;
    tokens = atoi(words[4]);
    with_clock = atoi(words[5]);
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t address_size = sizeof address;
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 4096)) {
        perror("gateway_mock");
        return 1;
    }
    getsockname(listener, (void *)&address, &address_size);
    port = ntohs(address.sin_port);
    printf("%d\n", port);
    fflush(stdout);
    int poller = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event interest = {.events = EPOLLIN, .data.fd = listener}, events[256];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &interest);
    for (;;) {
        uint64_t due = earliest(&first_tokens, earliest(&next_tokens, UINT64_MAX)), now = now_ns();
        uint64_t wait = due > now ? due - now : 0;
        struct timespec timeout = {.tv_sec = wait / 1000000000, .tv_nsec = wait % 1000000000};
        int ready = epoll_pwait2(poller, events, 256, due == UINT64_MAX ? 0 : &timeout, 0);
        for (int index = 0; index < ready; index++) {
            if (events[index].data.fd == listener)
                accept_all(listener, poller);
            else
                read_requests(events[index].data.fd);
        }
        run_timers(&first_tokens);
        run_timers(&next_tokens);
    }
}
