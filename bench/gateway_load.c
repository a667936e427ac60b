// Load on one HTTP address, from one thread, and what became of it: the cheapest client that can be had.
//
//   gateway_load PORT BODY_FILE CONNECTIONS WARM_S SECONDS RATE [HEADER...]      → one line of JSON
//
// Closed loop (RATE 0): every keep-alive connection asks again as soon as it has its answer. Open loop: RATE requests a
// second, evenly spaced, over at most CONNECTIONS; a request that found no free connection counts from when it was due,
// so a stalled server is not asked less. Requests are those begun in SECONDS after WARM_S; those before warm up and count
// only in "all". Tokens "t" + 20 digits are read as CLOCK_MONOTONIC in nanoseconds (bench/gateway_mock.c): the delay of
// a token is from there until this process read it.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST_CONNECTIONS = 4096, LINE_BYTES = 1 << 16, READ_BYTES = 1 << 16 };
enum { GIVE_UP_S = 20, RECONNECT_MS = 50, TOKEN_DIGITS = 20 };

typedef enum { CLOSED, IDLE, WAITING, HEAD, SIZED, CHUNK_SIZE, CHUNK_DATA, CHUNK_END } state_t;

typedef struct {
    state_t state;
    int fd, counted, done_seen, last_chunk, status;
    long left;  // bytes of the body, or of its current chunk
    uint64_t begun, first, last, reopen_at;
    int tokens, line_size;
    char line[LINE_BYTES];
} connection_t;

typedef struct {
    double *values;
    size_t count, room;
} samples_t;

static connection_t *connections;
static int connection_count, poller, port;
static char *request;
static size_t request_size;
static uint64_t start, count_from, stop_at, interval_ns, next_due;
static samples_t ttft, total, delay, gap;
static long all, refused, broken, incomplete, token_count, event_count, in_window, in_flight, overdue, reads;
static int first_error_shown;

static uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000ull + at.tv_nsec;
}

static void keep(samples_t *samples, uint64_t nanoseconds) {
    if (samples->count == samples->room) {
        samples->room = samples->room ? samples->room * 2 : 4096;
        samples->values = realloc(samples->values, samples->room * sizeof(double));
    }
    samples->values[samples->count++] = nanoseconds / 1e6;
}

static void hang_up(connection_t *connection, uint64_t now) {
    close(connection->fd);
    connection->state = CLOSED;
    connection->reopen_at = now + RECONNECT_MS * 1000000ull;
}

static int open_connection(connection_t *connection) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int one = 1;
    connection->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(connection->fd, (void *)&address, sizeof address)) {  // loopback: at once, or refused
        hang_up(connection, now_ns());
        return 0;
    }
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    connection->state = IDLE;
    struct epoll_event interest = {.events = EPOLLIN, .data.ptr = connection};
    epoll_ctl(poller, EPOLL_CTL_ADD, connection->fd, &interest);
    return 1;
}

static void ask(connection_t *connection, uint64_t begun) {
    connection->begun = begun;
    connection->first = connection->last = 0;
    connection->tokens = connection->line_size = connection->done_seen = connection->last_chunk = 0;
    connection->counted = begun >= count_from && begun < stop_at;
    connection->left = -1;
    connection->state = WAITING;
    in_flight++;
    ssize_t sent = send(connection->fd, request, request_size, MSG_NOSIGNAL);
    (void)sent;  // a request is smaller than a socket's buffer; a broken connection is read as its end
}

static void lost(connection_t *connection, uint64_t now) {
    if (connection->state != IDLE) {
        in_flight--;
        if (connection->first) incomplete++;
        else broken++;
    }
    hang_up(connection, now);
}

static void answered(connection_t *connection, uint64_t now) {
    in_flight--;
    connection->state = IDLE;
    all++;
    if (connection->status != 200) {
        refused++;
        return;
    }
    token_count += connection->tokens;
    if (now >= count_from && now < stop_at) in_window++;
    if (!connection->counted) return;
    keep(&total, now - connection->begun);
    if (connection->first) keep(&ttft, connection->first - connection->begun);
}

// One line of an event stream, or the one line of a JSON answer.
static void read_line(connection_t *connection, uint64_t now) {
    connection->line[connection->line_size] = 0;
    if (strstr(connection->line, "data: [DONE]")) connection->done_seen = 1;
    char *content = strstr(connection->line, "\"content\":");
    if (!content) return;
    content += sizeof "\"content\":" - 1;
    while (*content == ' ') content++;
    if (content[0] != '"' || content[1] == '"') return;
    event_count++;
    int found = 0;
    for (char *at = content; (at = strchr(at, 't')); at++) {
        if (strspn(at + 1, "0123456789") < TOKEN_DIGITS) continue;
        found++;
        if (connection->counted) keep(&delay, now - strtoull(at + 1, 0, 10));
        at += TOKEN_DIGITS;
    }
    connection->tokens += found ? found : 1;
    if (!connection->first) connection->first = now;
    else if (connection->counted) keep(&gap, now - connection->last);
    connection->last = now;
}

static void read_body(connection_t *connection, const char *data, long size, uint64_t now) {
    while (size > 0) {
        const char *newline = memchr(data, '\n', size);
        long part = newline ? newline - data : size;
        long room = LINE_BYTES - 1 - connection->line_size, taken = part < room ? part : room;
        memcpy(connection->line + connection->line_size, data, taken);
        connection->line_size += taken;
        if (!newline) return;
        read_line(connection, now);
        connection->line_size = 0;
        data += part + 1;
        size -= part + 1;
    }
}

static void read_head(connection_t *connection) {
    connection->status = atoi(connection->line + 9);
    char *length = strcasestr(connection->line, "\r\ncontent-length:");
    if (length) connection->left = atol(length + 17);
    connection->state = length ? SIZED : CHUNK_SIZE;
    if (connection->status != 200 && !first_error_shown++)
        fprintf(stderr, "status %d: %.600s\n", connection->status, connection->line);
    connection->line_size = 0;
}

// Takes bytes of the answer; returns how many were used, 0 when the answer is complete.
static long step(connection_t *connection, const char *data, long size, uint64_t now) {
    switch (connection->state) {
    case WAITING:
    case HEAD: {
        long used = 0;
        connection->state = HEAD;
        while (used < size && connection->state == HEAD) {
            if (connection->line_size < LINE_BYTES - 1) connection->line[connection->line_size++] = data[used];
            used++;
            if (connection->line_size >= 4 && !memcmp(connection->line + connection->line_size - 4, "\r\n\r\n", 4)) {
                connection->line[connection->line_size] = 0;
                read_head(connection);
            }
        }
        return used;
    }
    case SIZED:
    case CHUNK_DATA: {
        long used = size < connection->left ? size : connection->left;
        read_body(connection, data, used, now);
        connection->left -= used;
        if (connection->left == 0) {
            if (connection->state == CHUNK_DATA) {
                connection->state = CHUNK_END;
            } else {
                read_line(connection, now);  // JSON ends without a newline
                answered(connection, now);
            }
        }
        return used;
    }
    case CHUNK_SIZE: {
        if (connection->left < 0) connection->left = 0;
        if (*data == '\n') {
            connection->last_chunk = connection->left == 0;
            connection->state = connection->last_chunk ? CHUNK_END : CHUNK_DATA;
        } else if (*data != '\r') {
            char digit[2] = {*data, 0};
            connection->left = connection->left * 16 + strtol(digit, 0, 16);
        }
        return 1;
    }
    case CHUNK_END:  // the line break after a chunk, or the empty line of the end
        if (*data == '\n') {
            connection->left = -1;
            connection->state = CHUNK_SIZE;
            if (connection->last_chunk) {
                if (connection->status == 200 && connection->line_size) read_line(connection, now);
                if (connection->status == 200 && event_count && !connection->done_seen && connection->tokens > 1)
                    incomplete++;
                answered(connection, now);
            }
        }
        return 1;
    default: return size;
    }
}

static void next_request(connection_t *connection, uint64_t now) {
    if (connection->state == CLOSED && (now < connection->reopen_at || !open_connection(connection))) return;
    if (connection->state != IDLE || now >= stop_at) return;
    if (!interval_ns) {
        ask(connection, now);
    } else if (next_due <= now && next_due < stop_at) {
        if (now - next_due > 1000000) overdue++;
        ask(connection, next_due);
        next_due += interval_ns;
    }
}

static void readable(connection_t *connection) {
    static char data[READ_BYTES];
    if (connection->state == CLOSED) return;
    ssize_t size = recv(connection->fd, data, sizeof data, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    uint64_t now = now_ns();
    if (size <= 0) {
        lost(connection, now);
        return;
    }
    reads++;
    for (long used = 0; used < size && connection->state != IDLE && connection->state != CLOSED;)
        used += step(connection, data + used, size - used, now);
    next_request(connection, now);
}

static int compare(const void *left, const void *right) {
    double difference = *(const double *)left - *(const double *)right;
    return difference < 0 ? -1 : difference > 0;
}

static void print_samples(const char *name, samples_t *samples) {
    if (!samples->count) return;
    qsort(samples->values, samples->count, sizeof(double), compare);
    static const struct { const char *name; double share; } marks[] = {{"p50", .5}, {"p90", .9}, {"p99", .99}, {"max", 1}};
    for (size_t index = 0; index < sizeof marks / sizeof *marks; index++) {
        size_t at = samples->count * marks[index].share;
        if (at >= samples->count) at = samples->count - 1;
        printf(", \"%s_ms_%s\": %.4f", name, marks[index].name, samples->values[at]);
    }
}

static void read_arguments(int count, char **words) {
    port = atoi(words[1]);
    FILE *file = fopen(words[2], "rb");
    if (!file) {
        perror(words[2]);
        exit(2);
    }
    static char body[1 << 16];
    size_t body_size = fread(body, 1, sizeof body, file);
    fclose(file);
    request = malloc(body_size + 4096);
    request_size = sprintf(request, "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
        "Content-Type: application/json\r\nContent-Length: %zu\r\n", port, body_size);
    for (int index = 7; index < count; index++)
        request_size += sprintf(request + request_size, "%s\r\n", words[index]);
    request_size += sprintf(request + request_size, "\r\n");
    memcpy(request + request_size, body, body_size);
    request_size += body_size;
    connection_count = atoi(words[3]);
    double rate = atof(words[6]);
    if (rate > 0) interval_ns = 1e9 / rate;
    start = now_ns();
    next_due = start;
    count_from = start + atof(words[4]) * 1e9;
    stop_at = count_from + atof(words[5]) * 1e9;
}

int main(int count, char **words) {
    if (count < 7) return 2;
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    poller = epoll_create1(EPOLL_CLOEXEC);
    read_arguments(count, words);
    connections = calloc(connection_count, sizeof *connections);
    // Closed loops begin one after the other while it warms up: paced streams that keep step would flatter who batches.
    for (int index = 0; index < connection_count && !interval_ns; index++)
        connections[index].reopen_at = start + (count_from - start) * index / connection_count;
    struct epoll_event events[256];
    for (uint64_t now = now_ns(); now < stop_at || (in_flight > 0 && now < stop_at + GIVE_UP_S * 1000000000ull);) {
        uint64_t wait = now < count_from ? 1000000 : 20000000;  // closed connections are tried again
        if (interval_ns && next_due < stop_at) {
            wait = next_due > now ? next_due - now : in_flight < connection_count ? 0 : wait;
            if (wait > 20000000) wait = 20000000;
        }
        struct timespec timeout = {.tv_nsec = wait};
        int ready = epoll_pwait2(poller, events, 256, &timeout, 0);
        for (int index = 0; index < ready; index++) readable(events[index].data.ptr);
        now = now_ns();
        for (int index = 0; index < connection_count && (interval_ns || !ready || now < count_from); index++) {
            if (interval_ns && next_due > now) break;
            next_request(&connections[index], now);
        }
    }
    printf("{\"all\": %ld, \"per_s\": %.3f, \"refused\": %ld, \"broken\": %ld, \"incomplete\": %ld, \"unanswered\": %ld, "
           "\"tokens\": %ld, \"events\": %ld, \"reads\": %ld, \"overdue\": %ld, \"counted\": %zu",
        all, in_window / ((stop_at - count_from) / 1e9), refused, broken, incomplete, in_flight, token_count,
        event_count, reads, overdue, total.count);
    print_samples("ttft", &ttft);
    print_samples("total", &total);
    print_samples("delay", &delay);
    print_samples("gap", &gap);
    printf("}\n");
    return 0;
}
