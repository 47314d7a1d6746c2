/* A generalised suffix automaton of token sequences that grow. There is one per shard of the history: the rollouts of
one problem under one policy version.

A state represents all strings ("contexts") that end at the same positions of the shard. `length` is that of its longest
string; `link` is the state of that string's longest suffix that ends at more positions. A sequence is one int32, the
state of all its tokens: appending a token takes amortised O(1) time, and the longest earlier match of its end is the
state's link.

Invariants:
  - State 0 is the empty context. No edge has it as target, so 0 also means "no edge".
  - The longest string of a state never changes: a split creates a new state for the shorter strings. So a sequence's
    state stays valid when other sequences grow, and a cursor at a shorter string finds its new state by links.
  - count[v] is the number of occurrences of v's strings, num_next[u] the number of times that a token followed u. The
    strings u.c of the edges to v all end where v ends, so count[v] is the count of "c after u" for every u with an edge
    to v.
  - Every state stores its most frequent edge (`best`, the most recent on ties). The others are in a pool, found by
    hash. Most states have one edge, so the pool is small: 28 bytes per state, and 24 to 28 per edge in the pool.
  - `log` has all appended tokens in order: a token, or ~s if the next token is appended to state s of another sequence.
    Replaying it gives the same automaton with the same state numbers, so a checkpoint stores only the log.

drafters/python_history.py is the reference implementation. */

#pragma once

#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* How many contexts of the new token are counted, longest first. Usually there are less than 20. A loop ("aaaa...") has
   as many as tokens: counting all would take O(n) per token, and they all have the same next token. */
#define MAX_COUNTED 64

typedef struct {
    int32_t length, link, count, num_next, best, best_token, more;
} State;

typedef struct {
    int32_t source, token, target;
    int32_t sibling; /* next edge of the same source in the pool */
    int32_t chain;   /* next edge of the same bucket */
} Edge;

typedef struct {
    State *states;
    Edge *edges; /* edge 0 is unused: 0 means "none" */
    int32_t *buckets;
    int32_t *log;
    int32_t num_states, max_states, num_edges, max_edges, num_log, max_log, limit;
    int32_t tail;   /* the state after the log's last token; -1: write the state before the next token in any case */
    int32_t broken; /* out of memory during an append */
    int bits;       /* 2^bits buckets */
    int64_t num_tokens;
} Automaton;

static inline uint64_t bucket_of(const Automaton *a, int32_t source, int32_t token) {
    uint64_t key = (uint64_t)(uint32_t)source << 32 | (uint32_t)token;
    key *= 0x9E3779B97F4A7C15u;
    key ^= key >> 32;
    key *= 0x9E3779B97F4A7C15u;
    return key >> (64 - a->bits);
}

static int64_t bytes_of(const Automaton *a) {
    return (int64_t)sizeof *a + a->max_states * (int64_t)sizeof(State) + a->max_edges * (int64_t)sizeof(Edge) +
           a->max_log * (int64_t)sizeof(int32_t) + ((int64_t)sizeof(int32_t) << a->bits);
}

#define HUGE_PAGE ((size_t)1 << 21)

/* realloc, with huge pages for large arrays: they are read at random, and TLB misses would take most of the time. */
static void *resized(void *items, size_t old, size_t bytes) {
    if (bytes < 2 * HUGE_PAGE) return realloc(items, bytes);
    void *moved;
    if (posix_memalign(&moved, HUGE_PAGE, bytes)) return NULL;
#ifdef MADV_HUGEPAGE
    madvise(moved, bytes & ~(HUGE_PAGE - 1), MADV_HUGEPAGE);
#endif
    if (items) memcpy(moved, items, old);
    free(items);
    return moved;
}

/* Memory for `need` items. Grows by a quarter only, to save memory. */
static int reserve(void **items, int32_t *max, int64_t need, size_t size, int32_t limit) {
    if (need <= *max) return 1;
    int64_t wanted = need + need / 4 + 16;
    if (wanted > limit) wanted = limit;
    if (wanted < need) return 0;
    void *moved = resized(*items, (size_t)*max * size, (size_t)wanted * size);
    if (!moved) return 0;
    *items = moved;
    *max = (int32_t)wanted;
    return 1;
}

static int rehash(Automaton *a, int bits) {
    int32_t *buckets = resized(NULL, 0, sizeof *buckets << bits);
    if (!buckets) return 0;
    memset(buckets, 0, sizeof *buckets << bits);
    free(a->buckets);
    a->buckets = buckets;
    a->bits = bits;
    for (int32_t e = 1; e < a->num_edges; e++) {
        int32_t *head = &buckets[bucket_of(a, a->edges[e].source, a->edges[e].token)];
        a->edges[e].chain = *head;
        *head = e;
    }
    return 1;
}

static int32_t find_in_pool(const Automaton *a, int32_t source, int32_t token) {
    int32_t e = a->buckets[bucket_of(a, source, token)];
    while (e && (a->edges[e].source != source || a->edges[e].token != token)) e = a->edges[e].chain;
    return e;
}

/* A pointer to the target of edge (source, token), or NULL. Valid until the next edge is added. */
static inline int32_t *find(const Automaton *a, int32_t source, int32_t token) {
    State *s = &a->states[source];
    if (s->best && s->best_token == token) return &s->best;
    if (!s->more) return NULL;
    int32_t e = find_in_pool(a, source, token);
    return e ? &a->edges[e].target : NULL;
}

static int add_edge(Automaton *a, int32_t source, int32_t token, int32_t target) {
    State *s = &a->states[source];
    if (!s->best) {
        s->best = target;
        s->best_token = token;
        return 1;
    }
    if (!reserve((void **)&a->edges, &a->max_edges, (int64_t)a->num_edges + 1, sizeof(Edge), a->limit)) return 0;
    if (a->num_edges >> a->bits && !rehash(a, a->bits + 1)) return 0;
    int32_t e = a->num_edges++;
    int32_t *head = &a->buckets[bucket_of(a, source, token)];
    a->edges[e] = (Edge){source, token, target, s->more, *head};
    *head = e;
    s->more = e;
    return 1;
}

/* Swap the pool's edge (source, token) with the source's best edge. */
static void promote(Automaton *a, int32_t source, int32_t token) {
    State *s = &a->states[source];
    int32_t *at = &a->buckets[bucket_of(a, source, token)];
    while (a->edges[*at].source != source || a->edges[*at].token != token) at = &a->edges[*at].chain;
    int32_t e = *at;
    Edge *edge = &a->edges[e];
    *at = edge->chain;
    int32_t target = edge->target;
    edge->token = s->best_token;
    edge->target = s->best;
    int32_t *head = &a->buckets[bucket_of(a, source, edge->token)];
    edge->chain = *head;
    *head = e;
    s->best = target;
    s->best_token = token;
}

/* Split q: a new state gets its strings up to `length`, and the edges to q from p and its links. The counts are those
   of q, because until now these strings occurred exactly where q's did. */
static int32_t split(Automaton *a, int32_t p, int32_t token, int32_t q, int32_t length) {
    int32_t clone = a->num_states++;
    a->states[clone] = a->states[q];
    a->states[clone].length = length;
    a->states[clone].more = 0;
    a->states[q].link = clone;
    for (int32_t e = a->states[q].more; e; e = a->edges[e].sibling)
        if (!add_edge(a, clone, a->edges[e].token, a->edges[e].target)) return -1;
    int32_t *target;
    for (; p >= 0 && (target = find(a, p, token)) && *target == q; p = a->states[p].link) *target = clone;
    return clone;
}

/* The state of (sequence in state `last`) + token, without counting. -1: out of memory. */
static int32_t extend(Automaton *a, int32_t last, int32_t token) {
    if (!reserve((void **)&a->states, &a->max_states, (int64_t)a->num_states + 2, sizeof(State), a->limit)) return -1;
    int32_t length = a->states[last].length + 1;
    int32_t *target = find(a, last, token);
    if (target) { /* the string occurred before, in another sequence or elsewhere in this one */
        int32_t q = *target;
        return a->states[q].length == length ? q : split(a, last, token, q, length);
    }
    int32_t state = a->num_states++;
    a->states[state] = (State){.length = length};
    int32_t p = last;
    do {
        if (!add_edge(a, p, token, state)) return -1;
        p = a->states[p].link;
    } while (p >= 0 && !(target = find(a, p, token)));
    if (p >= 0) {
        int32_t q = *target, shorter = a->states[p].length + 1;
        if (a->states[q].length != shorter && (q = split(a, p, token, q, shorter)) < 0) return -1;
        a->states[state].link = q;
    }
    return state;
}

/* Count "token after u" for every context u of the sequence's old end; v is the target of u's edge. Both link chains
   are walked together, so an edge is looked up only if the best one changes. */
static void count(Automaton *a, int32_t last, int32_t token, int32_t state) {
    State *states = a->states;
    int32_t u = last, v = state;
    states[v].count++;
    for (int n = 0; u >= 0 && n < MAX_COUNTED; n++, u = states[u].link) {
        if (states[states[v].link].length > states[u].length) {
            v = states[v].link;
            states[v].count++;
            __builtin_prefetch(&states[states[v].best]); /* for the next token, or a draft */
        }
        states[u].num_next++;
        if (states[u].best != v && states[v].count >= states[states[u].best].count) promote(a, u, token);
    }
}

/* Append tokens to the sequence in state `last`; returns its new state, or -1 if out of memory. */
static int32_t append(Automaton *a, int32_t last, const int32_t *tokens, int64_t num) {
    for (int64_t i = 0; i < num && last >= 0; i++) {
        int has_space = reserve((void **)&a->log, &a->max_log, (int64_t)a->num_log + 2, sizeof *a->log, INT32_MAX);
        int32_t state = a->broken || !has_space ? -1 : extend(a, last, tokens[i]);
        if (state < 0) {
            a->broken = 1;
        } else {
            count(a, last, tokens[i], state);
            if (last != a->tail) a->log[a->num_log++] = ~last;
            a->log[a->num_log++] = tokens[i];
            a->tail = state;
        }
        last = state;
        a->num_tokens += state >= 0;
    }
    return last;
}
