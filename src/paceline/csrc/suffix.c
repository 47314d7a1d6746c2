/* The history drafter's hot path: many sequences at once, in many shards (automaton.h).

A sequence is a row of cursors, one per shard: in its own shard it stands at everything it said so far, in older ones at
the longest end of it that is known there. Both move on with every token at amortised O(1); no sequence is ever walked
again. drafters/slow_history.py has the same algorithm in plain Python. */

#include "automaton.h"

#define TILE 16      /* rows that wait for memory together */
#define LEVELS 6     /* contexts that are asked for ahead; more than most tokens need */
#define MAX_WIDTH 64 /* shards that a sequence stands in */

/* A context of so many tokens votes though another shard knows a longer one. drafters/slow_history.py says why. */
#define LONG 4

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

/* A sequence's place in a shard: its last `length` tokens are known there, and are among the strings of `state`. */
typedef struct {
    Automaton *shard; /* NULL: none, or dropped */
    int32_t state;    /* -1: the shard could not grow (only of a sequence's own) */
    int32_t length;
    int32_t num_states; /* of the shard when the place was found; states split later */
    int32_t unused;
} Cursor;

/* Since a cursor was set, its string may have been split off from its state's longer ones. */
static inline int32_t settle(const Automaton *a, int32_t u, int32_t length, int32_t num_states) {
    if (num_states != a->num_states)
        while (u > 0 && a->states[a->states[u].link].length >= length) u = a->states[u].link;
    return u;
}

/* Move on by a token: to the longest end of the old string that it followed. */
static inline void follow(const Automaton *a, int32_t *u, int32_t *length, int32_t token) {
    int32_t *target;
    while (!(target = find(a, *u, token))) {
        if (!*u) return; /* length is 0 */
        *u = a->states[*u].link;
        *length = a->states[*u].length;
    }
    *u = *target;
    ++*length;
}

/* Where a sequence that begins with these tokens stands in a shard that it did not speak in. */
void suffix_find(Automaton *a, const int32_t *tokens, int64_t num, int32_t *state, int32_t *length) {
    *state = *length = 0;
    for (int64_t i = 0; i < num; i++) follow(a, state, length, tokens[i]);
}

/* Rows wait for memory better together than one after the other. So what their first tokens will touch in their own
   shards is asked for link by link, all rows at each, and then the edges in the pool. Always inlined, since gcc leaves
   out calls of a function that does nothing but this. */
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

/* A cursor on its way along a row's new tokens, as in `follow`. */
typedef struct {
    Cursor *cursor;
    const int32_t *token, *end;
    const int32_t *head; /* the bucket to look into next */
    int32_t edge;        /* or the edge to look at */
} Walk;

/* One look at memory that was asked for before; the next is asked for. 0: arrived. */
static inline int look(Walk *w) {
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
        c->length = -1; /* that state's, when it has come */
    } else {
        w->token++;
    }
    __builtin_prefetch(&a->states[c->state]);
    return w->token < w->end;
}

static void walk(Cursor *cursors, int64_t width, const int32_t *slots, int num_rows, const int32_t *tokens,
                 int64_t stride, const int32_t *num) {
    Walk walks[TILE * MAX_WIDTH];
    int num_walks = 0;
    for (int i = 0; i < num_rows; i++)
        for (Cursor *c = &cursors[slots[i] * width + 1], *end = c + width - 1; num[i] && c < end; c++) {
            if (!c->shard) continue;
            c->state = settle(c->shard, c->state, c->length, c->num_states);
            c->num_states = c->shard->num_states;
            __builtin_prefetch(&c->shard->states[c->state]);
            walks[num_walks++] = (Walk){c, tokens + i * stride, tokens + i * stride + num[i], NULL, 0};
        }
    while (num_walks)
        for (int i = 0; i < num_walks;)
            if (look(&walks[i]))
                i++;
            else
                walks[i] = walks[--num_walks];
}

/* Row i is sequence slots[i], whose cursors are cursors[slot * width : width], its own first. It gained
   tokens[i * stride : num[i]]. All speak before any cursor of an older shard moves.
   Returns how many bytes the history grew, or -1 if a sequence found no memory; its own cursor is at -1 from then on. */
int64_t suffix_observe(Cursor *cursors, int64_t width, const int32_t *slots, int64_t num_rows, const int32_t *tokens,
                       int64_t stride, const int32_t *num) {
    int64_t grown = 0;
    int lost = 0;
    for (int64_t i = 0; i < num_rows; i++) {
        if (i % TILE == 0)
            prefetch(cursors, width, slots + i, num_rows - i < TILE ? (int)(num_rows - i) : TILE, tokens + i * stride,
                     stride, num + i);
        Cursor *own = &cursors[slots[i] * width];
        int64_t before = bytes_of(own->shard);
        int32_t now = say(own->shard, own->state, tokens + i * stride, num[i]);
        lost |= now < 0 && own->state >= 0;
        own->state = now;
        own->length += num[i];
        grown += bytes_of(own->shard) - before;
    }
    for (int64_t i = 0; i < num_rows; i += TILE)
        walk(cursors, width, slots + i, num_rows - i < TILE ? (int)(num_rows - i) : TILE, tokens + i * stride, stride,
             num + i);
    return lost ? -1 : grown;
}

/* drafters/slow_history.py says why. */
static float confidence_of(double count, double num, int32_t length) {
    if (num < count) num = count;
    return (float)((count - 0.4 * (count < 1 ? count : 1)) / (num + 2.0 / length));
}

/* A shard's say in a draft: where it stands, and what its counts weigh. */
typedef struct {
    const Automaton *shard;
    int32_t state, length; /* state 0: silent */
    double weight;
} Voice;

typedef struct {
    int32_t token, length;
    float confidence;
} Guess;

/* To the longest context of its own that something followed: where a shard ends (a live sibling's end, or the row's
   own), that is a shorter one. */
static inline void turn(Voice *v) {
    const State *states = v->shard->states;
    while (v->state && !states[v->state].best) v->length = states[v->state = states[v->state].link].length;
}

/* The next token, and the voices move on by it. Those with the longest context, or one of LONG tokens, vote with
   weighted counts for the token that they think likeliest; the newest shard wins ties. Who has no vote, or voted
   otherwise, is silent from then on: looking up how often it heard the token costs more than it brings. Returns how
   many are left, 0 without a token. */
static int vote(Voice *voices, int num_voices, int32_t min_match, Guess *guess) {
    int32_t longest = 0;
    for (int i = 0; i < num_voices; i++) {
        turn(&voices[i]);
        if (voices[i].state && voices[i].length > longest) longest = voices[i].length;
    }
    if (longest < min_match) return 0;
    int32_t least = longest < LONG ? longest : LONG;
    if (least < min_match) least = min_match;
    int num_voting = 0;
    for (int i = 0; i < num_voices; i++)
        if (voices[i].state && voices[i].length >= least) voices[num_voting++] = voices[i];
    double count = 0, num = 0;
    for (int i = 0; i < num_voting; i++) {
        const State *state = &voices[i].shard->states[voices[i].state];
        num += voices[i].weight * state->num_next;
        if (count && state->best_token == guess->token) continue;
        double votes = 0;
        for (int j = i; j < num_voting; j++) {
            const State *states = voices[j].shard->states, *other = &states[voices[j].state];
            if (other->best_token == state->best_token) votes += voices[j].weight * states[other->best].count;
        }
        if (votes > count) {
            count = votes;
            guess->token = state->best_token;
        }
    }
    guess->length = longest;
    guess->confidence = confidence_of(count, num, longest);
    int num_left = 0;
    for (int i = 0; i < num_voting; i++) {
        Voice v = voices[i];
        const State *states = v.shard->states;
        if (states[v.state].best_token != guess->token) continue;
        v.state = states[v.state].best;
        v.length++;
        voices[num_left++] = v;
        __builtin_prefetch(&states[states[v.state].best ? states[v.state].best : states[v.state].link]);
    }
    return num_left;
}

/* Up to caps[i] <= k tokens for row i, and the length of the context that the first was found by. weights[n] is what
   a cursor of age n counts. To `out`, one after the other: tokens [rows, k], confidence [rows, k], num [rows],
   match [rows]. */
void suffix_propose(const Cursor *cursors, int64_t width, const double *weights, const int32_t *slots, int64_t num_rows,
                    const int32_t *caps, int64_t k, int32_t min_match, int32_t *out) {
    int32_t *tokens = out, *num = out + 2 * num_rows * k, *match = num + num_rows;
    float *confidence = (float *)(out + num_rows * k);
    Voice voices[TILE][MAX_WIDTH];
    int num_voices[TILE];
    for (int64_t start = 0; start < num_rows; start += TILE) {
        int num_tile = num_rows - start < TILE ? (int)(num_rows - start) : TILE;
        for (int i = 0; i < num_tile; i++) {
            const Cursor *c = &cursors[slots[start + i] * width];
            for (int64_t age = 0; age < width; age++)
                if (c[age].shard && c[age].state > 0) __builtin_prefetch(&c[age].shard->states[c[age].state]);
        }
        for (int i = 0; i < num_tile; i++) {
            num_voices[i] = 0;
            num[start + i] = match[start + i] = 0;
            const Cursor *c = &cursors[slots[start + i] * width];
            for (int64_t age = 0; age < width; age++, c++) {
                if (!c->shard || c->state <= 0) continue;
                int32_t state = settle(c->shard, c->state, c->length, c->num_states);
                const State *s = &c->shard->states[state];
                __builtin_prefetch(&c->shard->states[s->best ? s->best : s->link]);
                voices[i][num_voices[i]++] = (Voice){c->shard, state, c->length, weights[age]};
            }
        }
        for (int i = 0; i < num_tile; i++)
            for (Voice *v = voices[i]; v < voices[i] + num_voices[i]; v++) {
                turn(v);
                __builtin_prefetch(&v->shard->states[v->shard->states[v->state].best]);
            }
        for (int32_t n = 0; n < k; n++)
            for (int i = 0; i < num_tile; i++) {
                int64_t row = start + i;
                Guess guess;
                if (num[row] < n || n >= caps[row]) continue;
                if (!(num_voices[i] = vote(voices[i], num_voices[i], min_match, &guess))) continue;
                if (!n) match[row] = guess.length;
                tokens[row * k + n] = guess.token;
                confidence[row * k + n] = guess.confidence;
                num[row] = n + 1;
            }
    }
}
