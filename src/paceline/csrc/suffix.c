/* The history drafter's inner loops, over many sequences and shards (automaton.h).

A sequence has a row of cursors, one per shard. In its own shard the cursor is at all its tokens, in older shards at the
longest suffix of them that occurs there. A token moves each cursor in amortised O(1) time; a sequence is never read
again from its start. drafters/python_history.py is the reference implementation. */

#include "automaton.h"

#define TILE 16      /* rows with memory accesses in flight at the same time */
#define LEVELS 6     /* contexts that are prefetched; more than most tokens need */
#define MAX_WIDTH 64 /* cursors of a sequence */

/* A match of this length votes even if another shard has a longer one. drafters/python_history.py has measurements. */
#define LONG_MATCH 4

void suffix_free(Automaton *a) {
    if (!a) return;
    free(a->states);
    free(a->edges);
    free(a->buckets);
    free(a->log);
    free(a);
}

/* At most `limit` states, and as many edges in the pool. Both have int32 numbers. */
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

/* Insert a prompt. Returns its state, or -1 if out of memory. The log has this state before the next token, which shows
   where the prompt ends. */
int32_t suffix_prompt(Automaton *a, const int32_t *tokens, int64_t num) {
    a->tail = -1;
    int32_t state = append(a, 0, tokens, num);
    a->tail = -1;
    return state;
}

/* Append the tokens of a log without prompts. Returns 0 if it has unknown states, or if out of memory. */
int suffix_replay(Automaton *a, const int32_t *log, int64_t num) {
    int32_t last = -1;
    for (int64_t i = 0; i < num; i++) {
        last = log[i] < 0 ? ~log[i] : last < 0 ? -1 : append(a, last, log + i, 1);
        if (last < 0 || last >= a->num_states) return 0;
    }
    return 1;
}

/* A sequence's position in a shard: its last `length` tokens occur there, and are one of the strings of `state`. */
typedef struct {
    Automaton *shard; /* NULL: none, or deleted */
    int32_t state;    /* -1: out of memory (only in a sequence's own shard) */
    int32_t length;
    int32_t num_states; /* of the shard when `state` was set; later states may be splits */
    int32_t unused;
} Cursor;

/* The state of a cursor's string, which may have been split off since the cursor was set. */
static inline int32_t resolve_splits(const Automaton *a, int32_t u, int32_t length, int32_t num_states) {
    if (num_states != a->num_states)
        while (u > 0 && a->states[a->states[u].link].length >= length) u = a->states[u].link;
    return u;
}

/* Move a cursor by a token, to the longest suffix of its string that the token has followed. */
static inline void advance(const Automaton *a, int32_t *u, int32_t *length, int32_t token) {
    int32_t *target;
    while (!(target = find(a, *u, token))) {
        if (!*u) return; /* length is 0 */
        *u = a->states[*u].link;
        *length = a->states[*u].length;
    }
    *u = *target;
    ++*length;
}

/* The position, in an older shard, of a sequence with these tokens. */
void suffix_find(Automaton *a, const int32_t *tokens, int64_t num, int32_t *state, int32_t *length) {
    *state = *length = 0;
    for (int64_t i = 0; i < num; i++) advance(a, state, length, tokens[i]);
}

/* Prefetch the memory that the first token of each row accesses in its own shard: link by link, all rows at each level,
   then the edges in the pool. Then the accesses of different rows overlap. Always inlined, because gcc removes calls of
   a function that only prefetches. */
static inline __attribute__((always_inline)) void prefetch(const Cursor *cursors, int64_t width, const int32_t *slots,
                                                           int num_rows, const int32_t *tokens, int64_t stride,
                                                           const int32_t *num) {
    int32_t *heads[TILE][LEVELS];
    int32_t u[TILE];
    for (int i = 0; i < num_rows; i++) {
        const Cursor *own = &cursors[slots[i] * width];
        u[i] = num[i] ? own->state : -1;
        if (u[i] >= 0) __builtin_prefetch(&own->shard->states[u[i]]);
    }
    for (int level = 0; level < LEVELS; level++)
        for (int i = 0; i < num_rows; i++) {
            heads[i][level] = NULL;
            if (u[i] < 0) continue;
            const Automaton *a = cursors[slots[i] * width].shard;
            const State *s = &a->states[u[i]];
            if (s->best_token == tokens[i * stride])
                __builtin_prefetch(&a->states[s->best]);
            else if (s->more)
                __builtin_prefetch(heads[i][level] = &a->buckets[bucket_of(a, u[i], tokens[i * stride])]);
            u[i] = s->link;
            if (u[i] >= 0) __builtin_prefetch(&a->states[u[i]]);
        }
    for (int i = 0; i < num_rows; i++)
        for (int level = 0; level < LEVELS; level++)
            if (heads[i][level]) __builtin_prefetch(&cursors[slots[i] * width].shard->edges[*heads[i][level]]);
}

/* A cursor that moves along a row's new tokens, as in `advance`. */
typedef struct {
    Cursor *cursor;
    const int32_t *token, *end;
    const int32_t *head; /* the bucket to read next */
    int32_t edge;        /* or the edge to read next */
} Walk;

/* One memory access, which was prefetched before. Prefetches the next one. Returns 0 at the end. */
static inline int walk_step(Walk *w) {
    Cursor *c = w->cursor;
    const Automaton *a = c->shard;
    const State *s = &a->states[c->state];
    int32_t target = 0;
    if (w->head) {
        w->edge = *w->head;
        w->head = NULL;
    } else if (w->edge) {
        const Edge *e = &a->edges[w->edge];
        int found = e->source == c->state && e->token == *w->token;
        target = found ? e->target : 0;
        w->edge = found ? 0 : e->chain;
    } else {
        if (c->length < 0) c->length = s->length;
        if (s->best && s->best_token == *w->token) {
            target = s->best;
        } else if (s->more) {
            __builtin_prefetch(w->head = &a->buckets[bucket_of(a, c->state, *w->token)]);
            return 1;
        }
    }
    if (w->edge) {
        __builtin_prefetch(&a->edges[w->edge]);
        return 1;
    }
    if (target) {
        c->state = target;
        c->length++;
        w->token++;
    } else if (c->state) {
        c->state = s->link;
        c->length = -1; /* set to the state's length at the next call */
    } else {
        w->token++;
    }
    __builtin_prefetch(&a->states[c->state]);
    return w->token < w->end;
}

/* Move the cursors of all rows in older shards by the rows' new tokens. */
static void advance_all(Cursor *cursors, int64_t width, const int32_t *slots, int num_rows, const int32_t *tokens,
                        int64_t stride, const int32_t *num) {
    Walk walks[TILE * MAX_WIDTH];
    int num_walks = 0;
    for (int i = 0; i < num_rows; i++)
        for (Cursor *c = &cursors[slots[i] * width + 1], *end = c + width - 1; num[i] && c < end; c++) {
            if (!c->shard) continue;
            c->state = resolve_splits(c->shard, c->state, c->length, c->num_states);
            c->num_states = c->shard->num_states;
            __builtin_prefetch(&c->shard->states[c->state]);
            walks[num_walks++] = (Walk){c, tokens + i * stride, tokens + i * stride + num[i], NULL, 0};
        }
    while (num_walks)
        for (int i = 0; i < num_walks;)
            if (walk_step(&walks[i]))
                i++;
            else
                walks[i] = walks[--num_walks];
}

/* Row i is sequence slots[i] with cursors[slot * width : width], the first in its own shard. Its new tokens are
   tokens[i * stride : num[i]]. All rows append to their own shard before any cursor of an older shard moves. Returns
   the number of bytes by which the history grew, or -1 if out of memory for a sequence; its own cursor then stays at
   -1. */
int64_t suffix_observe(Cursor *cursors, int64_t width, const int32_t *slots, int64_t num_rows, const int32_t *tokens,
                       int64_t stride, const int32_t *num) {
    int64_t grown = 0;
    int failed = 0;
    for (int64_t i = 0; i < num_rows; i++) {
        if (i % TILE == 0)
            prefetch(cursors, width, slots + i, num_rows - i < TILE ? (int)(num_rows - i) : TILE, tokens + i * stride,
                     stride, num + i);
        Cursor *own = &cursors[slots[i] * width];
        int64_t before = bytes_of(own->shard);
        int32_t state = append(own->shard, own->state, tokens + i * stride, num[i]);
        failed |= state < 0 && own->state >= 0;
        own->state = state;
        own->length += num[i];
        grown += bytes_of(own->shard) - before;
    }
    for (int64_t i = 0; i < num_rows; i += TILE)
        advance_all(cursors, width, slots + i, num_rows - i < TILE ? (int)(num_rows - i) : TILE, tokens + i * stride,
                    stride, num + i);
    return failed ? -1 : grown;
}

/* See `confidence` in drafters/python_history.py. */
static float confidence_of(double count, double num, int32_t length) {
    if (num < count) num = count;
    return (float)((count - 0.4 * (count < 1 ? count : 1)) / (num + 2.0 / length));
}

/* A shard's match with the end of a sequence, and the weight of the shard's counts. */
typedef struct {
    const Automaton *shard;
    int32_t state, length; /* state 0: no match */
    double weight;
} ShardMatch;

typedef struct {
    int32_t token, length;
    float confidence;
} DraftToken;

/* To the longest suffix of the match that a token has followed; shorter if the match is at the end of a sequence. */
static inline void shorten_until_continued(ShardMatch *m) {
    const State *states = m->shard->states;
    while (m->state && !states[m->state].best) m->length = states[m->state = states[m->state].link].length;
}

/* The next draft token. The longest matches, and all of at least LONG_MATCH tokens, vote with weighted counts for their
   most frequent next token; the newest shard wins ties. The matches that voted for the token move on by it. All others
   are dropped: looking up their count of the token costs more than it gains. Returns the number of remaining matches, 0
   without a token. */
static int vote(ShardMatch *matches, int num_matches, int32_t min_match, DraftToken *draft) {
    int32_t longest = 0;
    for (int i = 0; i < num_matches; i++) {
        shorten_until_continued(&matches[i]);
        if (matches[i].state && matches[i].length > longest) longest = matches[i].length;
    }
    if (longest < min_match) return 0;
    int32_t least = longest < LONG_MATCH ? longest : LONG_MATCH;
    if (least < min_match) least = min_match;
    int num_voting = 0;
    for (int i = 0; i < num_matches; i++)
        if (matches[i].state && matches[i].length >= least) matches[num_voting++] = matches[i];
    double count = 0, num = 0;
    for (int i = 0; i < num_voting; i++) {
        const State *state = &matches[i].shard->states[matches[i].state];
        num += matches[i].weight * state->num_next;
        if (count && state->best_token == draft->token) continue;
        double votes = 0;
        for (int j = i; j < num_voting; j++) {
            const State *states = matches[j].shard->states, *other = &states[matches[j].state];
            if (other->best_token == state->best_token) votes += matches[j].weight * states[other->best].count;
        }
        if (votes > count) {
            count = votes;
            draft->token = state->best_token;
        }
    }
    draft->length = longest;
    draft->confidence = confidence_of(count, num, longest);
    int num_remaining = 0;
    for (int i = 0; i < num_voting; i++) {
        ShardMatch m = matches[i];
        const State *states = m.shard->states;
        if (states[m.state].best_token != draft->token) continue;
        m.state = states[m.state].best;
        m.length++;
        matches[num_remaining++] = m;
        __builtin_prefetch(&states[states[m.state].best ? states[m.state].best : states[m.state].link]);
    }
    return num_remaining;
}

/* Drafts up to caps[i] <= k tokens for row i. match[i] is the length of the match of the first token. weights[n] is the
   weight of the counts of cursor n. Writes to `out`, one after the other: tokens [rows, k], confidence [rows, k],
   num [rows], match [rows]. */
void suffix_propose(const Cursor *cursors, int64_t width, const double *weights, const int32_t *slots, int64_t num_rows,
                    const int32_t *caps, int64_t k, int32_t min_match, int32_t *out) {
    int32_t *tokens = out, *num = out + 2 * num_rows * k, *match = num + num_rows;
    float *confidence = (float *)(out + num_rows * k);
    ShardMatch matches[TILE][MAX_WIDTH];
    int num_matches[TILE];
    for (int64_t start = 0; start < num_rows; start += TILE) {
        int num_tile = num_rows - start < TILE ? (int)(num_rows - start) : TILE;
        for (int i = 0; i < num_tile; i++) {
            const Cursor *c = &cursors[slots[start + i] * width];
            for (int64_t age = 0; age < width; age++)
                if (c[age].shard && c[age].state > 0) __builtin_prefetch(&c[age].shard->states[c[age].state]);
        }
        for (int i = 0; i < num_tile; i++) {
            num_matches[i] = 0;
            num[start + i] = match[start + i] = 0;
            const Cursor *c = &cursors[slots[start + i] * width];
            for (int64_t age = 0; age < width; age++, c++) {
                if (!c->shard || c->state <= 0) continue;
                int32_t state = resolve_splits(c->shard, c->state, c->length, c->num_states);
                const State *s = &c->shard->states[state];
                __builtin_prefetch(&c->shard->states[s->best ? s->best : s->link]);
                matches[i][num_matches[i]++] = (ShardMatch){c->shard, state, c->length, weights[age]};
            }
        }
        for (int i = 0; i < num_tile; i++)
            for (ShardMatch *m = matches[i]; m < matches[i] + num_matches[i]; m++) {
                shorten_until_continued(m);
                __builtin_prefetch(&m->shard->states[m->shard->states[m->state].best]);
            }
        for (int32_t n = 0; n < k; n++)
            for (int i = 0; i < num_tile; i++) {
                int64_t row = start + i;
                DraftToken draft;
                if (num[row] < n || n >= caps[row]) continue;
                if (!(num_matches[i] = vote(matches[i], num_matches[i], min_match, &draft))) continue;
                if (!n) match[row] = draft.length;
                tokens[row * k + n] = draft.token;
                confidence[row * k + n] = draft.confidence;
                num[row] = n + 1;
            }
    }
}
