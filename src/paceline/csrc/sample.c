/* Sample tokens from logits on CPUs. `model/sample.py` is the reference implementation and defines the distribution.
 *
 * A draw is an exponential race: token v arrives at E_v / w_v with E_v = -log1p(-u_v) and u_v = (r_v + 1/2) / 2^32,
 * where r_v is word v mod 4 of Philox4x32-10 at counter (v div 4, position, stream, position's high half). Because E_v
 * >= u_v, v can be first only if u_v < first * w_v (and second, for the margin, only if u_v < second * w_v). This cheap
 * test excludes nearly all of the vocabulary, and tokens with such a small weight that even the least u_v is too large
 * need no noise at all. The remaining tokens are compared in double, ties to the lower token, so the result is that of
 * the full race. One thread draws a row, so its result is bit-identical for every number of threads.
 */
#include "vec.h"

#define CHUNK 64 /* tokens that are computed together: 16 Philox counters */
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));

INLINE void multiply(vu a, uint32_t m, vu *high, vu *low) {
#if defined(__ARM_NEON)
    uint64x2_t first = vmull_u32(vget_low_u32((uint32x4_t)a), vdup_n_u32(m));
    uint64x2_t second = vmull_high_u32((uint32x4_t)a, vdupq_n_u32(m));
    *low = (vu)vuzp1q_u32((uint32x4_t)first, (uint32x4_t)second);
    *high = (vu)vuzp2q_u32((uint32x4_t)first, (uint32x4_t)second);
#elif defined(__AVX512F__)
    __m512i w = _mm512_set1_epi32((int)m), even = _mm512_mul_epu32((__m512i)a, w);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), w);
    *low = (vu)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    *high = (vu)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
#elif defined(__AVX2__)
    __m256i w = _mm256_set1_epi32((int)m), even = _mm256_mul_epu32((__m256i)a, w);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), w);
    *low = (vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    *high = (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#else
    for (int i = 0; i < LANES; i++) {
        uint64_t full = (uint64_t)a[i] * m;
        (*low)[i] = (uint32_t)full;
        (*high)[i] = (uint32_t)(full >> 32);
    }
#endif
}

typedef struct {
    uint64_t key;
    int64_t position;
    uint32_t stream;
} Noise;

/* The noise words of tokens [first, first + CHUNK), first a multiple of CHUNK. */
INLINE void philox(Noise noise, uint32_t first, uint32_t words[CHUNK]) {
    enum { NUM = NV < 2 ? 1 : 2 }; /* vectors at a time: two hide the multiplier's latency and stay in registers */
    vu lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int done = 0; done < CHUNK / 4; done += NUM * LANES) {
        uint32_t k0 = (uint32_t)noise.key, k1 = (uint32_t)(noise.key >> 32);
        vu x[NUM][4];
        UNROLL for (int c = 0; c < NUM; c++) {
            x[c][0] = lane + (first / 4 + done + c * LANES);
            x[c][1] = (uint32_t)noise.position + (vu){0};
            x[c][2] = noise.stream + (vu){0};
            x[c][3] = (uint32_t)((uint64_t)noise.position >> 32) + (vu){0};
        }
        UNROLL for (int round = 0; round < 10; round++) {
            UNROLL for (int c = 0; c < NUM; c++) {
                vu high0, low0, high2, low2;
                multiply(x[c][0], 0xD2511F53u, &high0, &low0);
                multiply(x[c][2], 0xCD9E8D57u, &high2, &low2);
                x[c][0] = high2 ^ x[c][1] ^ k0;
                x[c][1] = low2;
                x[c][2] = high0 ^ x[c][3] ^ k1;
                x[c][3] = low0;
            }
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        UNROLL for (int c = 0; c < NUM; c++) {
            uint32_t *to = words + (done + c * LANES) * 4;
#if defined(__ARM_NEON)
            uint32x4x4_t four;
            memcpy(&four, x[c], sizeof four);
            vst4q_u32(to, four);
#else
            for (int i = 0; i < LANES; i++)
                for (int word = 0; word < 4; word++) to[i * 4 + word] = x[c][word][i];
#endif
        }
    }
}

static double to_uniform(uint32_t word) { return (word + 0.5) * 0x1p-32; }

/* The tokens of one row. weights [size]: e^((logit - max) / temperature), padded with zeros. greatest [size / CHUNK]:
 * the largest weight of every chunk. */
typedef struct {
    const float *logits;
    float *weights, *greatest;
    int64_t vocab, size;
} Row;

/* The token that arrives first. If log_margin is not NULL, also log(second arrival / first arrival). */
static int32_t run_race(const Row *row, Noise noise, double *log_margin) {
    double first = INFINITY, second = INFINITY, bound = INFINITY; /* later arrivals than the bound do not matter */
    int64_t token = 0, num_chunks = row->size / CHUNK;
    float likely = 0;
    for (int64_t i = 0; i < num_chunks; i++) likely = row->greatest[i] > likely ? row->greatest[i] : likely;
    likely *= 0.02f;
    for (int pass = 0; pass < 2; pass++) /* likely tokens first: an early bound excludes more of the others */
        for (int64_t i = 0; i < num_chunks; i++) {
            float greatest = row->greatest[i];
            if ((greatest < likely) != pass || !(greatest > 0) || greatest * bound < 0x1p-33) continue;
            const float *w = row->weights + i * CHUNK;
            uint32_t words[CHUNK];
            philox(noise, (uint32_t)(i * CHUNK), words);
            float limit = (float)(bound * 0x1p32 * 1.000001); /* a little too large, so that no candidate is lost */
            int hit = 0;
            for (int j = 0; j < CHUNK; j++) hit |= (float)words[j] < limit * w[j];
            if (!hit) continue;
            for (int j = 0; j < CHUNK; j++) {
                double u = to_uniform(words[j]);
                if (!(w[j] > 0) || u > bound * w[j]) continue;
                double arrival = -log1p(-u) / w[j];
                int64_t v = i * CHUNK + j;
                if (arrival < first || (arrival == first && v < token)) second = first, first = arrival, token = v;
                else if (arrival < second) second = arrival;
                bound = log_margin ? second : first;
            }
        }
    if (log_margin) *log_margin = log(second / first);
    return (int32_t)token;
}

/* ---- truncation ---- */

typedef struct {
    float logit, weight;
    int32_t token;
} Item;

INLINE int before(Item a, Item b) { return a.logit > b.logit || (a.logit == b.logit && a.token < b.token); }

/* The item at which the running sum of weights (or of ones), in descending order, reaches `need`; otherwise the last
 * one. Reorders the items. */
static Item find(Item *items, int64_t num, double need, int by_count) {
    double sum = 0;
    for (;;) {
        Item a = items[0], b = items[num / 2], c = items[num - 1];
        Item low = before(a, b) ? a : b, high = before(a, b) ? b : a;
        Item pivot = before(c, low) ? low : before(c, high) ? c : high; /* the median of three */
        int64_t head = 0; /* items before the pivot */
        double mass = 0;
        for (int64_t i = 0; i < num; i++) {
            Item x = items[i];
            if (!before(x, pivot)) continue;
            items[i] = items[head], items[head++] = x;
            mass += by_count ? 1 : x.weight;
        }
        if (head && sum + mass >= need) {
            num = head;
            continue;
        }
        sum += mass + (by_count ? 1 : pivot.weight);
        items += head, num -= head;
        if (sum >= need || num == 1) return pivot;
        int64_t at = 0;
        while (items[at].token != pivot.token) at++;
        items[at] = items[0], items[0] = pivot;
        items++, num--;
    }
}

/* The number or the sum of the weights that are at least `floor`. */
static double measure(const Row *row, float floor, int by_count) {
    double total = 0;
    for (int64_t i = 0; i < row->size / CHUNK; i++) {
        if (row->greatest[i] < floor) continue;
        vf sum[NV];
        EACH_VEC sum[c] = (vf){0};
        for (int64_t v = i * CHUNK; v < (i + 1) * CHUNK; v += 16) EACH_VEC {
            vf w = load(row->weights + v + c * LANES);
            sum[c] += where(w >= floor, by_count ? splat(1) : w, (vf){0});
        }
        total += sum16(sum);
    }
    return total;
}

/* The last item that top-k, then top-p, keep. Its token is INT32_MAX if all ties with it are kept. */
static Item boundary(const Row *row, double total, int64_t top_k, double top_p, Item *items) {
    int by_count = top_k > 0;
    double need = by_count ? (double)top_k : top_p * total * 1.000001;
    float floor = 0;
    for (float depth = 2; depth < 80 && !floor; depth *= 1.5f) /* a little lower, because exp_v is inexact */
        if (measure(row, expf(-depth), by_count) >= need) floor = expf(-depth) * 0.99f;
    int64_t num = 0;
    for (int64_t i = 0; i < row->size / CHUNK; i++) {
        if (row->greatest[i] < floor) continue;
        for (int64_t v = i * CHUNK; v < (i + 1) * CHUNK && v < row->vocab; v++) {
            items[num] = (Item){row->logits[v], row->weights[v], (int32_t)v};
            num += row->weights[v] >= floor;
        }
    }
    Item last = {-INFINITY, 0, INT32_MAX};
    if (by_count) {
        last = find(items, num, need, 1);
        last.token = INT32_MAX;
        int64_t kept = 0;
        total = 0;
        for (int64_t i = 0; i < num; i++)
            if (items[i].logit >= last.logit) total += items[i].weight, items[kept++] = items[i];
        num = kept;
    }
    return top_p < 1 ? find(items, num, top_p * total, 0) : last;
}

/* Set the weights beyond `last` or below min_p to zero; returns the sum of the others. */
static double truncate_row(const Row *row, Item last, double min_p) {
    double floor = (last.weight > min_p ? last.weight : min_p) * 0.99;
    double total = 0;
    for (int64_t i = 0; i < row->size / CHUNK; i++) {
        float greatest = 0;
        if (row->greatest[i] >= floor)
            for (int64_t v = i * CHUNK; v < (i + 1) * CHUNK && v < row->vocab; v++) {
                float z = row->logits[v], w = row->weights[v];
                if (z < last.logit || (z == last.logit && v > last.token) || w < min_p) w = 0;
                row->weights[v] = w;
                greatest = w > greatest ? w : greatest;
                total += w;
            }
        row->greatest[i] = greatest; /* chunks with 0 are skipped */
    }
    return total;
}

/* ---- exported functions ---- */

/* -infinity if num is 0. */
static float max_of(const float *x, int64_t num) {
    vf top[NV];
    EACH_VEC top[c] = splat(-INFINITY);
    int64_t i = 0;
    for (; i + 16 <= num; i += 16) EACH_VEC top[c] = max_v(load(x + i + c * LANES), top[c]);
    float max = max16(top);
    for (; i < num; i++) max = x[i] > max ? x[i] : max;
    return max;
}

/* The sum of e^((logit - max) * scale). If not NULL, stores them in `weights`, and the maximum of each chunk in
 * `greatest`. */
static double exponentials(const float *logits, int64_t num, float max, float scale, float *weights, float *greatest) {
    double total = 0;
    for (int64_t first = 0; first < num; first += CHUNK) {
        float last[CHUNK];
        const float *from = logits + first;
        if (first + CHUNK > num) {
            for (int i = 0; i < CHUNK; i++) last[i] = first + i < num ? from[i] : -INFINITY;
            from = last;
        }
        vf sum[NV], top[NV];
        EACH_VEC sum[c] = top[c] = (vf){0};
        for (int i = 0; i < CHUNK; i += 16) EACH_VEC {
            vf w = exp_v((load(from + i + c * LANES) - max) * scale);
            if (weights) store(weights + first + i + c * LANES, w);
            sum[c] += w;
            top[c] = max_v(w, top[c]);
        }
        total += sum16(sum);
        if (weights) greatest[first / CHUNK] = max16(top);
    }
    return total;
}

/* Logit v minus the largest other logit. */
static double gap_of(const float *logits, int64_t vocab, int64_t v) {
    float before = max_of(logits, v), after = max_of(logits + v + 1, vocab - v - 1);
    return (double)logits[v] - (before > after ? before : after);
}

/* margins: NULL, or how much lower each token's logit could be for the same token to be drawn. If no other token has
 * any weight (greedy, truncated, or a too low temperature for float32): its logit minus the next highest. */
void draw(const float *logits, int64_t num_rows, int64_t vocab, const uint64_t *keys, const int64_t *positions,
          uint32_t stream, const double *temperature, const int32_t *top_k, const double *top_p, const double *min_p,
          int32_t *tokens, double *logprobs, double *raw_logprobs, double *margins) {
    int64_t size = (vocab + CHUNK - 1) / CHUNK * CHUNK;
#pragma omp parallel for schedule(dynamic)
    for (int64_t p = 0; p < num_rows; p++) {
        const float *z = logits + p * vocab;
        float max = max_of(z, vocab);
        if (temperature[p] == 0) {
            int64_t v = 0;
            while (v < vocab - 1 && z[v] != max) v++;
            tokens[p] = (int32_t)v;
            logprobs[p] = 0;
            raw_logprobs[p] = -log(exponentials(z, vocab, max, 1, 0, 0));
            if (margins) margins[p] = gap_of(z, vocab, v);
            continue;
        }
        float *memory = scratch(size * 5);
        Row row = {z, memory, memory + size, vocab, size};
        Item *items = (Item *)(memory + 2 * size);
        double scale = 1. / temperature[p];
        double total = exponentials(z, vocab, max, (float)scale, row.weights, row.greatest);
        if (!(total < INFINITY)) { /* NaN or infinite logits: the caller detects NaN logprobs */
            tokens[p] = 0;
            logprobs[p] = raw_logprobs[p] = NAN;
            if (margins) margins[p] = NAN;
            continue;
        }
        double raw_total = temperature[p] == 1 ? total : exponentials(z, vocab, max, 1, 0, 0);
        int64_t k = top_k[p] < vocab ? top_k[p] : 0;
        if (k || top_p[p] < 1 || min_p[p] > 0) {
            Item last = {-INFINITY, 0, INT32_MAX};
            if (k || top_p[p] < 1) last = boundary(&row, total, k, top_p[p], items);
            total = truncate_row(&row, last, min_p[p]);
        }
        double log_margin;
        int32_t v = run_race(&row, (Noise){keys[p], positions[p], stream}, margins ? &log_margin : 0);
        tokens[p] = v;
        if (margins) margins[p] = log_margin < INFINITY ? log_margin * temperature[p] : gap_of(z, vocab, v);
        logprobs[p] = ((double)z[v] - max) * scale - log(total);
        raw_logprobs[p] = (double)z[v] - max - log(raw_total);
    }
}

void race(const float *weights, int64_t num_rows, int64_t vocab, const uint64_t *keys, const int64_t *positions,
          uint32_t stream, int32_t *tokens) {
    int64_t size = (vocab + CHUNK - 1) / CHUNK * CHUNK;
#pragma omp parallel for schedule(dynamic)
    for (int64_t p = 0; p < num_rows; p++) {
        float *memory = scratch(size * 2);
        Row row = {0, memory, memory + size, vocab, size};
        memcpy(row.weights, weights + p * vocab, vocab * sizeof(float));
        memset(row.weights + vocab, 0, (size - vocab) * sizeof(float));
        for (int64_t i = 0; i < size / CHUNK; i++) row.greatest[i] = max_of(row.weights + i * CHUNK, CHUNK);
        tokens[p] = run_race(&row, (Noise){keys[p], positions[p], stream}, 0);
    }
}

void uniform(int64_t num_rows, const uint64_t *keys, const int64_t *positions, uint32_t stream, double *out) {
    for (int64_t p = 0; p < num_rows; p++) {
        uint32_t words[CHUNK];
        philox((Noise){keys[p], positions[p], stream}, 0, words);
        out[p] = to_uniform(words[0]);
    }
}
