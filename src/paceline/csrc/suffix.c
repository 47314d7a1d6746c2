/* A history of token sequences that grows while it is read: one generalised suffix automaton per problem.

A state stands for all strings that end at the same places of the history ("contexts"); `length` is its longest,
`link` leads to the longest context that ends in more places. A sequence is one int32, the state of everything it
said so far: extending it costs amortised O(1), and the longest earlier match of its end is one link away.

What always holds:
  - State 0 is the empty context. No edge leads to it, so 0 also means "no edge".
  - A state's number never changes its longest string: a split makes a new state for the shorter ones. So a
    sequence's state stays right whatever its siblings do.
  - count[v] is how often v's strings were said, num_next[u] how often a token followed u. The strings u.c that lead
    to v all end where v ends, so count[v] is the count of the event "c after u" for every u with an edge to v.
  - Every state holds its likeliest edge itself (`best`, the most recent on ties); the others hang in a pool, found
    by hash. Most states have one edge, so the pool is small: 28 bytes a state and 24 to 28 an edge in the pool.
  - `log` is all that was said, in order: a token, or ~s where another sequence speaks, from state s on. Saying it
    again makes the same automaton, to the number of every state, so a checkpoint holds nothing else.

drafters/suffix.py has the same algorithm in plain Python. */

#include <limits.h>
#include <stdint.h>
#include <stdlib.h>

/* How many contexts of the new token are counted, longest first. Text rarely has more than 20; a loop ("aaaa...")
   has as many as it is long, and counting them all would cost O(n) per token for contexts that all say the same. */
#define MAX_COUNTED 64

typedef struct {
    int32_t length, link, count, num_next, best, best_token, more;
} State;

typedef struct {
    int32_t source, token, target;
    int32_t sibling; /* the source's next edge in the pool */
    int32_t chain;   /* the bucket's next edge */
} Edge;

typedef struct {
    State *states;
    Edge *edges; /* edge 0 is unused: 0 means "none" */
    int32_t *buckets;
    int32_t *log;
    int32_t num_states, max_states, num_edges, max_edges, num_log, max_log, limit;
    int32_t tail;   /* the state that the log has come to; -1: the next to speak is named whoever it is */
    int32_t broken; /* memory ran out within an extension */
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

/* Room for one more item; grows by a quarter, since the slack is paid for by every stored token. */
static int reserve(void **items, int32_t *max, int64_t need, size_t size, int32_t limit) {
    if (need <= *max) return 1;
    int64_t wanted = need + need / 4 + 16;
    if (wanted > limit) wanted = limit;
    if (wanted < need) return 0;
    void *moved = realloc(*items, (size_t)wanted * size);
    if (!moved) return 0;
    *items = moved;
    *max = (int32_t)wanted;
    return 1;
}

static int rehash(Automaton *a, int bits) {
    int32_t *buckets = calloc((size_t)1 << bits, sizeof *buckets);
    if (!buckets) return 0;
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

/* Where the target of (source, token) is written, or NULL. Valid until the next edge is added. */
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

/* The pool's edge (source, token) becomes the best one and changes places with it. */
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

/* Split q: a new state takes its strings up to `length`, and the edges that p and its links have to q.
   The counts are q's, for until now these strings were said exactly where q's were. */
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

/* The state of (sequence at `last`) + token, without counting. -1: out of memory. */
static int32_t extend(Automaton *a, int32_t last, int32_t token) {
    if (!reserve((void **)&a->states, &a->max_states, (int64_t)a->num_states + 2, sizeof(State), a->limit)) return -1;
    int32_t length = a->states[last].length + 1;
    int32_t *target = find(a, last, token);
    if (target) { /* said before: another sequence is ahead of us, or the context was seen elsewhere */
        int32_t q = *target;
        return a->states[q].length == length ? q : split(a, last, token, q, length);
    }
    int32_t now = a->num_states++;
    a->states[now] = (State){.length = length};
    int32_t p = last;
    do {
        if (!add_edge(a, p, token, now)) return -1;
        p = a->states[p].link;
    } while (p >= 0 && !(target = find(a, p, token)));
    if (p >= 0) {
        int32_t q = *target, shorter = a->states[p].length + 1;
        if (a->states[q].length != shorter && (q = split(a, p, token, q, shorter)) < 0) return -1;
        a->states[now].link = q;
    }
    return now;
}

/* Count the event "token after u" for every context u of the old end; v is where u's edge leads. Both link chains are
   walked together, so no edge is looked up unless the best one changes. */
static void count(Automaton *a, int32_t last, int32_t token, int32_t now) {
    State *states = a->states;
    int32_t u = last, v = now;
    states[v].count++;
    for (int n = 0; u >= 0 && n < MAX_COUNTED; n++, u = states[u].link) {
        if (states[states[v].link].length > states[u].length) {
            v = states[v].link;
            states[v].count++;
        }
        states[u].num_next++;
        if (states[u].best != v && states[v].count >= states[states[u].best].count) promote(a, u, token);
    }
}

static int32_t say(Automaton *a, int32_t last, const int32_t *tokens, int64_t num) {
    for (int64_t i = 0; i < num && last >= 0; i++) {
        int room = reserve((void **)&a->log, &a->max_log, (int64_t)a->num_log + 2, sizeof *a->log, INT32_MAX);
        int32_t now = a->broken || !room ? -1 : extend(a, last, tokens[i]);
        if (now < 0) {
            a->broken = 1;
        } else {
            count(a, last, tokens[i], now);
            if (last != a->tail) a->log[a->num_log++] = ~last;
            a->log[a->num_log++] = tokens[i];
            a->tail = now;
        }
        last = now;
        a->num_tokens += now >= 0;
    }
    return last;
}

void suffix_free(Automaton *a) {
    if (!a) return;
    free(a->states);
    free(a->edges);
    free(a->buckets);
    free(a->log);
    free(a);
}

/* At most `limit` states and as many edges in the pool; both are numbered with int32. */
Automaton *suffix_new(int32_t limit) {
    Automaton *a = calloc(1, sizeof *a);
    if (!a) return NULL;
    a->limit = limit;
    a->num_edges = 1;
    a->tail = -1;
    if (!reserve((void **)&a->states, &a->max_states, 1, sizeof(State), limit) || !rehash(a, 4)) {
        suffix_free(a);
        return NULL;
    }
    a->states[0] = (State){.link = -1};
    a->num_states = 1;
    return a;
}

int64_t suffix_num_bytes(const Automaton *a) { return bytes_of(a); }
int64_t suffix_num_tokens(const Automaton *a) { return a->num_tokens; }
int64_t suffix_num_log(const Automaton *a) { return a->num_log; }
const int32_t *suffix_log(const Automaton *a) { return a->log; }

/* Insert a prompt; its end, or -1 when memory ran out. Who goes on from there is named in the log, so that it shows
   where the prompt ends. */
int32_t suffix_prompt(Automaton *a, const int32_t *tokens, int64_t num) {
    a->tail = -1;
    int32_t now = say(a, 0, tokens, num);
    a->tail = -1;
    return now;
}

/* Say again what a log without prompts tells. 0 when it names states that are not there, or when memory ran out. */
int suffix_replay(Automaton *a, const int32_t *log, int64_t num) {
    int32_t last = -1;
    for (int64_t i = 0; i < num; i++) {
        last = log[i] < 0 ? ~log[i] : last < 0 ? -1 : say(a, last, log + i, 1);
        if (last < 0 || last >= a->num_states) return 0;
    }
    return 1;
}

/* Where the edges for a token will be looked up: their buckets first, the edges when those have come. Rows wait for
   memory better together than one after the other. */
static void prefetch(const Automaton *a, int32_t last, int32_t token, int stage) {
    for (int n = 0; n < 4 && last >= 0; n++, last = a->states[last].link) {
        if (!a->states[last].more) continue;
        const int32_t *head = &a->buckets[bucket_of(a, last, token)];
        __builtin_prefetch(stage ? (const void *)&a->edges[*head] : head);
    }
}

/* Row i is sequence slots[i] (of automata[slot], at last[slot]) and gained tokens[i * stride : num[i]].
   Returns how many bytes the history grew, or -1 if a sequence found no memory; that one is at -1 from then on. */
int64_t suffix_observe(Automaton *const *automata, int32_t *last, const int32_t *slots, int64_t num_rows,
                       const int32_t *tokens, int64_t stride, const int32_t *num) {
    int64_t grown = 0;
    int lost = 0;
    for (int stage = 0; stage < 2; stage++)
        for (int64_t i = 0; i < num_rows; i++)
            if (num[i]) prefetch(automata[slots[i]], last[slots[i]], tokens[i * stride], stage);
    for (int64_t i = 0; i < num_rows; i++) {
        Automaton *a = automata[slots[i]];
        int64_t before = bytes_of(a);
        int32_t now = say(a, last[slots[i]], tokens + i * stride, num[i]);
        lost |= now < 0 && last[slots[i]] >= 0;
        last[slots[i]] = now;
        grown += bytes_of(a) - before;
    }
    return lost ? -1 : grown;
}

/* drafters/suffix.py says why. */
static float confidence_of(int32_t count, int32_t num, int32_t length) {
    if (num < count) num = count;
    return (float)((count - 0.4) / (num + 2.0 / length));
}

/* The longest context of the row's end that something followed, at least min_match long, then best edge after best
   edge; where the history ends (a live sibling's end, or the row's own), the next shorter context goes on. */
void suffix_propose(Automaton *const *automata, const int32_t *last, const int32_t *slots, int64_t num_rows,
                    const int32_t *caps, int64_t k, int32_t min_match, int32_t *tokens, int32_t *num,
                    float *confidence) {
    for (int64_t i = 0; i < num_rows; i++) {
        const State *states = automata[slots[i]]->states;
        int32_t u = last[slots[i]], n = 0;
        int32_t length = u < 0 ? 0 : states[u].length; /* of the match; u may stand for longer strings too */
        for (; u >= 0 && n < caps[i]; n++, length++, u = states[u].best) {
            while (u && !states[u].best) length = states[u = states[u].link].length;
            if (!u || length < min_match) break;
            tokens[i * k + n] = states[u].best_token;
            confidence[i * k + n] = confidence_of(states[states[u].best].count, states[u].num_next, length);
        }
        num[i] = n;
    }
}
