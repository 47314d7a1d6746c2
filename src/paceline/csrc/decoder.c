/* The decoder's operations on CPUs, float32.
 *
 * Invariant: an output is bit-identical for every batch and every number of threads, because every output is one chain
 * of fused multiply-adds in the order of k, in every blocking. A chain may be interrupted (its partial sum is stored
 * without rounding), but is never split into two that are added at the end.
 *
 * Shapes: T tokens, D hidden, H query heads, G key/value heads, E head dimension, I intermediate.
 */
#include "vec.h"

int omp_get_max_threads(void); /* some compilers with OpenMP have no omp.h */

#define SMALL 4096 /* number of floats below which one thread is faster than several */
#define BLOCK 16   /* positions per KV block */

/* ---- norms and activations ---- */

INLINE void norm_row(const float *x, const float *weight, float eps, float *y, int64_t dim) {
    vf acc[NV];
    EACH_VEC acc[c] = (vf){0};
    int64_t i = 0;
    for (; i + 16 <= dim; i += 16) EACH_VEC {
        vf v = load(x + i + c * LANES);
        acc[c] = fma_v(v, v, acc[c]);
    }
    float tail[16] = {0};
    memcpy(tail, x + i, (dim - i) * sizeof(float));
    EACH_VEC acc[c] = fma_v(load(tail + c * LANES), load(tail + c * LANES), acc[c]);
    float scale = 1.f / sqrtf(sum16(acc) / dim + eps);
    for (i = 0; i < dim; i++) y[i] = weight[i] * (x[i] * scale);
}

void norm(const float *x, const float *weight, float eps, float *y, int64_t num_rows, int64_t dim) {
#pragma omp parallel for schedule(static) if (num_rows * dim > SMALL)
    for (int64_t t = 0; t < num_rows; t++) norm_row(x + t * dim, weight, eps, y + t * dim, dim);
}

/* x += y, y = norm(x) */
void add_norm(float *x, float *y, const float *weight, float eps, int64_t num_rows, int64_t dim) {
#pragma omp parallel for schedule(static) if (num_rows * dim > SMALL)
    for (int64_t t = 0; t < num_rows; t++) {
        float *restrict xr = x + t * dim, *restrict yr = y + t * dim;
        for (int64_t i = 0; i < dim; i++) xr[i] += yr[i];
        norm_row(xr, weight, eps, yr, dim);
    }
}

INLINE vf silu_mul_v(vf gate, vf up) {
    vf x = where(gate < -88.f, splat(88.f), -gate);
    return gate / (exp_v(x) + 1.f) * up;
}

/* gate_up [T, 2I] -> y [T, I] */
void silu_mul(const float *gate_up, float *y, int64_t num_rows, int64_t dim) {
#pragma omp parallel for schedule(static) if (num_rows > 1 && num_rows * dim > SMALL)
    for (int64_t t = 0; t < num_rows; t++) {
        const float *gate = gate_up + t * 2 * dim, *up = gate + dim;
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) store(y + t * dim + i, silu_mul_v(load(gate + i), load(up + i)));
        for (; i < dim; i++) y[t * dim + i] = silu_mul_v(splat(gate[i]), splat(up[i]))[0];
    }
}

/* In place on qkv [T, (H + 2G) * E]: the q and k norms, if the model has them, then the half-split rotation. */
void rotate(float *qkv, const float *q_norm, const float *k_norm, float eps, const float *cos, const float *sin,
            const int64_t *positions, int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t dim) {
    int64_t half = dim / 2, width = (num_heads + 2 * num_kv_heads) * dim;
#pragma omp parallel for schedule(static) if (num_rows * width > SMALL)
    for (int64_t t = 0; t < num_rows; t++) {
        const float *restrict c = cos + positions[t] * half, *restrict s = sin + positions[t] * half;
        for (int64_t h = 0; h < num_heads + num_kv_heads; h++) {
            float *restrict a = qkv + t * width + h * dim, *restrict b = a + half;
            const float *weight = h < num_heads ? q_norm : k_norm;
            if (weight) norm_row(a, weight, eps, a, dim);
            for (int64_t i = 0; i < half; i++) {
                float x = a[i], y = b[i];
                a[i] = x * c[i] - y * s[i];
                b[i] = y * c[i] + x * s[i];
            }
        }
    }
}

/* scores[0..limit) -> e^(score - max); returns 1 / their sum. Scores from limit to the end of the block become 0. */
static float softmax(float *scores, int64_t limit) {
    int64_t end = (limit + BLOCK - 1) / BLOCK * BLOCK;
    for (int64_t p = limit; p < end; p++) scores[p] = -INFINITY;
    vf top[NV], sum[NV];
    EACH_VEC top[c] = splat(-INFINITY), sum[c] = (vf){0};
    for (int64_t p = 0; p < end; p += 16) EACH_VEC top[c] = max_v(load(scores + p + c * LANES), top[c]);
    vf max = splat(max16(top));
    for (int64_t p = 0; p < end; p += 16) EACH_VEC {
        vf w = exp_v(load(scores + p + c * LANES) - max);
        store(scores + p + c * LANES, w);
        sum[c] += w;
    }
    return 1.f / sum16(sum);
}

/* ---- the matrix product ---- */

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-schedule-insns") /* it hoists loads until the accumulators spill */
#endif

/* Rows per pass over a panel: as many as have their accumulators in registers. */
#if LANES == 16
#define MAX_ROWS 12
#elif LANES == 8
#define MAX_ROWS 6
#else
#define MAX_ROWS 5
#endif
#define EACH_ROW UNROLL for (int r = 0; r < rows; r++)

/* acc[r][0..16) += x[r][k] * panel[k][0..16) for `num_k` k's: the only matrix product here. For every four k's it
 * prefetches `lines` of the four cache lines at `ahead`, into L1 (`near`) or L2. */
INLINE void product(int rows, int64_t num_k, const float *x, int64_t x_stride, const float *panel, int64_t panel_stride,
                    vf acc[][NV], const float *ahead, int lines, int near) {
    int64_t k = 0;
    for (; k + 4 <= num_k; k += 4, ahead += lines ? 64 : 0) {
        UNROLL for (int i = 0; i < lines; i++) {
            if (near)
                __builtin_prefetch(ahead + i * 16, 0, 3);
            else
                __builtin_prefetch(ahead + i * 16, 0, 2);
        }
#if defined(__ARM_NEON)
        /* Four k's of x in one register: a broadcast from memory would occupy a multiplier's pipe. In assembler,
         * because compilers copy accumulators around vfmaq_laneq_f32. */
        float32x4_t xs[MAX_ROWS];
        EACH_ROW xs[r] = vld1q_f32(x + r * x_stride + k);
#define FMA(j) __asm__("fmla %0.4s, %1.4s, %2.s[" #j "]" : "+w"(acc[r][c]) : "w"(w[c]), "w"(xs[r]))
#else
#define FMA(j) acc[r][c] = fma_v(splat(x[r * x_stride + k + j]), w[c], acc[r][c])
#endif
#define STEP(j)                                                                                                        \
    {                                                                                                                  \
        vf w[NV];                                                                                                      \
        EACH_VEC w[c] = load(panel + (k + j) * panel_stride + c * LANES);                                              \
        EACH_ROW EACH_VEC FMA(j);                                                                                      \
    }
        STEP(0) STEP(1) STEP(2) STEP(3)
#undef STEP
#undef FMA
    }
    for (; k < num_k; k++) {
        vf w[NV];
        EACH_VEC w[c] = load(panel + k * panel_stride + c * LANES);
        EACH_ROW EACH_VEC acc[r][c] = fma_v(splat(x[r * x_stride + k]), w[c], acc[r][c]);
    }
}

/* f(n, a) with n as a constant, so that f is compiled for each number of rows. */
#define CASE(n, f, a)                                                                                                  \
    case n: f(n, a); break;
#if LANES == 16
#define MORE(f, a)                                                                                                     \
    CASE(6, f, a) CASE(7, f, a) CASE(8, f, a) CASE(9, f, a) CASE(10, f, a) CASE(11, f, a) CASE(12, f, a)
#elif LANES == 8
#define MORE(f, a) CASE(6, f, a)
#else
#define MORE(f, a)
#endif
#define WITH_ROWS(n, f, a)                                                                                             \
    switch (n) { CASE(1, f, a) CASE(2, f, a) CASE(3, f, a) CASE(4, f, a) CASE(5, f, a) MORE(f, a) }

/* ---- linear: x [T, K], panels [ceil(N/16), K, 16] -> y [T, N] ---- */

typedef struct {
    const float *x, *panel, *bias;
    float *y, *partial; /* partial [rows, 16]: the sums so far, between two chunks of k */
    int64_t x_stride, num_k, num_n;
    int width, first, last; /* the panel's outputs, at most 16; whether this is the first or last chunk of k */
    const float *ahead;
    int lines;
} LinearPass;

INLINE void linear_rows(int rows, const LinearPass *a) {
    vf acc[MAX_ROWS][NV];
    if (a->first)
        EACH_ROW EACH_VEC acc[r][c] = (vf){0};
    else
        EACH_ROW EACH_VEC acc[r][c] = load(a->partial + r * 16 + c * LANES);
#define WITH_LINES(n)                                                                                                  \
    case n: product(rows, a->num_k, a->x, a->x_stride, a->panel, 16, acc, a->ahead, n, 1); break;
    switch (a->lines) { WITH_LINES(0) WITH_LINES(1) WITH_LINES(2) WITH_LINES(4) }
#undef WITH_LINES
    EACH_ROW {
        float *y = a->y + r * a->num_n;
        if (a->last && a->width == 16 && !a->bias) {
            EACH_VEC store(y + c * LANES, acc[r][c]);
            continue;
        }
        EACH_VEC store(a->partial + r * 16 + c * LANES, acc[r][c]);
        for (int i = 0; a->last && i < a->width; i++) y[i] = a->partial[r * 16 + i] + (a->bias ? a->bias[i] : 0);
    }
}

#define GROUP 60    /* rows per group: the partial sums of a group are stored */
#define CHUNK_K 192 /* k's per chunk: their weights stay in L1 during the passes of a group */

/* The outer loop is over panels, the inner one over rows, so weights are read from memory once. */
void linear(const float *x, const float *panels, const float *bias, float *y, int64_t num_rows, int64_t num_k,
            int64_t num_n) {
    /* One contiguous part per thread streams best. Large matrices (the LM head) are split finer, because cores may
     * differ in speed and may be shared. */
    int64_t num_panels = (num_n + 15) / 16, num_parts = omp_get_max_threads() * (num_panels < 1024 ? 1 : 8);
    int64_t part = (num_panels + num_parts - 1) / num_parts;
#pragma omp parallel for schedule(dynamic, part)
    for (int64_t p = 0; p < num_panels; p++)
        for (int64_t group = 0; group < num_rows; group += GROUP) {
            float partial[GROUP * 16];
            int64_t size = num_rows - group < GROUP ? num_rows - group : GROUP;
            int64_t passes = (size + MAX_ROWS - 1) / MAX_ROWS, chunk = passes > 1 ? CHUNK_K : num_k;
            /* One or two rows are bound by memory, where the hardware prefetcher is best. More rows are bound by
             * arithmetic: then each pass prefetches an equal part of the weights of the next chunk. */
            int lines = size <= 2 || group ? 0 : passes == 1 ? 4 : passes == 2 ? 2 : 1;
            for (int64_t k = 0; k < num_k; k += chunk) {
                const float *panel = panels + (p * num_k + k) * 16;
                int64_t num = num_k - k < chunk ? num_k - k : chunk;
                for (int64_t row = 0, pass = 0, rows; pass < passes; row += rows, pass++) {
                    rows = (size - row + passes - pass - 1) / (passes - pass);
                    LinearPass a = {
                        .x = x + (group + row) * num_k + k,
                        .panel = panel,
                        .bias = bias ? bias + p * 16 : 0,
                        .y = y + (group + row) * num_n + p * 16,
                        .partial = partial + row * 16,
                        .x_stride = num_k,
                        .num_k = num,
                        .num_n = num_n,
                        .width = num_n - p * 16 < 16 ? (int)(num_n - p * 16) : 16,
                        .first = k == 0,
                        .last = k + num == num_k,
                        .ahead = panel + CHUNK_K * 16 + pass * lines * 16,
                        .lines = pass < 4 ? lines : 0,
                    };
                    WITH_ROWS(rows, linear_rows, &a)
                }
            }
        }
}

/* ---- adapters: y [T, y_stride] += scale * inner [T, inner_stride] B^T, with B [N, K] as panels ---- */

typedef struct {
    const float *inner, *panel;
    float *y, scale;
    int64_t inner_stride, y_stride, num_k;
    int width; /* the panel's outputs, at most 16 */
} AdapterPass;

INLINE void adapter_rows(int rows, const AdapterPass *a) {
    vf acc[MAX_ROWS][NV];
    EACH_ROW EACH_VEC acc[r][c] = (vf){0};
    product(rows, a->num_k, a->inner, a->inner_stride, a->panel, 16, acc, 0, 0, 0);
    EACH_ROW {
        float *y = a->y + r * a->y_stride, sums[16] = {0};
        memcpy(sums, y, a->width * sizeof(float));
        EACH_VEC store(sums + c * LANES, fma_v(splat(a->scale), acc[r][c], load(sums + c * LANES)));
        memcpy(y, sums, a->width * sizeof(float));
    }
}

void add_adapter(const float *inner, const float *panels, float scale, float *y, int64_t num_rows, int64_t num_k,
                 int64_t num_n, int64_t inner_stride, int64_t y_stride) {
    int64_t num_panels = (num_n + 15) / 16;
#pragma omp parallel for schedule(static) if (num_rows * num_n * num_k > 4 * SMALL)
    for (int64_t p = 0; p < num_panels; p++)
        for (int64_t row = 0, rows; row < num_rows; row += rows) {
            rows = num_rows - row < MAX_ROWS ? num_rows - row : MAX_ROWS;
            AdapterPass a = {
                .inner = inner + row * inner_stride,
                .panel = panels + p * num_k * 16,
                .y = y + row * y_stride + p * 16,
                .scale = scale,
                .inner_stride = inner_stride,
                .y_stride = y_stride,
                .num_k = num_k,
                .width = num_n - p * 16 < 16 ? (int)(num_n - p * 16) : 16,
            };
            WITH_ROWS(rows, adapter_rows, &a)
        }
}

void embed(const int64_t *tokens, const float *panels, float *y, int64_t num_rows, int64_t num_k) {
#pragma omp parallel for schedule(static) if (num_rows * num_k > SMALL)
    for (int64_t t = 0; t < num_rows; t++) {
        const float *from = panels + tokens[t] / 16 * num_k * 16 + tokens[t] % 16;
        for (int64_t k = 0; k < num_k; k++) y[t * num_k + k] = from[k * 16];
    }
}

/* ---- paged attention ---- */

/* One forward pass, the same for every layer. A tile is a range of a row's (query, head of a group) pairs, which share
 * the row's keys and values: tiles[i] = row, first pair, number of pairs. */
typedef struct {
    float *k, *v; /* [L, num_blocks, G, E, BLOCK], [L, num_blocks, G, BLOCK, E] */
    const int64_t *slots;
    const int32_t *query_start, *context, *tables, *tiles;
    int64_t num_blocks, max_blocks, num_tiles, num_tokens, num_heads, num_kv_heads, dim;
    int64_t q_stride, k_stride, v_stride; /* between tokens */
} Plan;

typedef struct {
    const float *x, *panel;
    float *out;
    int64_t x_stride, out_stride, num_k;
    const float *ahead; /* the next block, to prefetch: blocks are scattered, so the hardware can't predict it */
} ScorePass;

INLINE void score_rows(int rows, const ScorePass *a) {
    vf acc[MAX_ROWS][NV];
    EACH_ROW EACH_VEC acc[r][c] = (vf){0};
    if (a->ahead)
        product(rows, a->num_k, a->x, a->x_stride, a->panel, BLOCK, acc, a->ahead, 4, 0);
    else
        product(rows, a->num_k, a->x, a->x_stride, a->panel, BLOCK, acc, 0, 0, 0);
    EACH_ROW EACH_VEC store(a->out + r * a->out_stride + c * LANES, acc[r][c]);
}

typedef struct {
    const float *x, *v;
    float *sums;
    int64_t x_stride, dim, num_k;
    const float *ahead;
} ValuePass;

INLINE void value_rows(int rows, const ValuePass *a) {
    vf acc[MAX_ROWS][NV];
    EACH_ROW EACH_VEC acc[r][c] = load(a->sums + r * a->dim + c * LANES);
    if (a->ahead)
        product(rows, a->num_k, a->x, a->x_stride, a->v, a->dim, acc, a->ahead, 4, 0);
    else
        product(rows, a->num_k, a->x, a->x_stride, a->v, a->dim, acc, 0, 0, 0);
    EACH_ROW EACH_VEC store(a->sums + r * a->dim + c * LANES, acc[r][c]);
}

/* sums[r] += x[r][p] * v[p] over num_k positions, in their order */
static void add_values(int rows, ValuePass a) {
    int64_t e = 0;
    for (; e + 16 <= a.dim; e += 16, a.v += 16, a.sums += 16) {
        WITH_ROWS(rows, value_rows, &a)
        if (a.ahead) a.ahead += BLOCK * 16;
    }
    for (; e < a.dim; e++, a.v++, a.sums++) /* the same chain, one feature at a time */
        for (int r = 0; r < rows; r++)
            for (int64_t p = 0; p < a.num_k; p++)
                a.sums[r * a.dim] = fmaf(a.x[r * a.x_stride + p], a.v[p * a.dim], a.sums[r * a.dim]);
}

static void attend(const Plan *plan, int64_t layer, const int32_t *tile, int64_t group, const float *q, float *out) {
    int64_t dim = plan->dim, heads = plan->num_heads / plan->num_kv_heads, row = tile[0], first = tile[1];
    int64_t num_query = plan->query_start[row + 1] - plan->query_start[row], before = plan->context[row] - num_query;
    int64_t num_pairs = tile[2], longest = before + (first + num_pairs - 1) / heads + 1;
    int64_t num_blocks = (longest + BLOCK - 1) / BLOCK, width = num_blocks * BLOCK;
    int64_t head_size = dim * BLOCK, stride = plan->num_kv_heads * head_size;
    const float *k = plan->k + (layer * plan->num_blocks * plan->num_kv_heads + group) * head_size;
    const float *v = plan->v + (layer * plan->num_blocks * plan->num_kv_heads + group) * head_size;
    const int32_t *table = plan->tables + row * plan->max_blocks;
    float *queries = scratch(num_pairs * (2 * dim + width + 1)), *sums = queries + num_pairs * dim;
    float *scores = sums + num_pairs * dim, *inverse = scores + num_pairs * width;
    float scale = 1.f / sqrtf(dim);

#define AT(i, stride)                                                                                                  \
    ((plan->query_start[row] + (first + (i)) / heads) * (stride) + (group * heads + (first + (i)) % heads) * dim)
#define LIMIT(i) (before + (first + (i)) / heads + 1) /* pair i attends to the positions before this one */
#define PASSES(i, rows) /* loop over equal passes: pairs i to i + rows */                                        \
    for (int64_t i = 0, n = (num_pairs + MAX_ROWS - 1) / MAX_ROWS, rows;                                               \
         n > 0 && (rows = (num_pairs - i + n - 1) / n); i += rows, n--)
    for (int64_t i = 0; i < num_pairs; i++)
        for (int64_t e = 0; e < dim; e++) queries[i * dim + e] = q[AT(i, plan->q_stride) + e] * scale;
    for (int64_t b = 0; b < num_blocks; b++) {
        const float *next = b + 1 < num_blocks ? k + table[b + 1] * stride : v + table[0] * stride;
        PASSES(i, rows) {
            float *to = scores + i * width + b * BLOCK;
            ScorePass a = {queries + i * dim, k + table[b] * stride, to, dim, width, dim, i ? 0 : next};
            WITH_ROWS(rows, score_rows, &a)
        }
    }
    for (int64_t i = 0; i < num_pairs; i++) inverse[i] = softmax(scores + i * width, LIMIT(i));
    memset(sums, 0, num_pairs * dim * sizeof(float));
    for (int64_t b = 0; b < num_blocks; b++) {
        int64_t start = b * BLOCK, end = start + BLOCK;
        const float *values = v + table[b] * stride;
        const float *next = b + 1 < num_blocks ? v + table[b + 1] * stride : 0;
        /* The pairs of a pass share the positions up to the limit of the first one; each adds the others separately.
         * Masked values are never multiplied, not even by zero. */
        PASSES(i, rows) {
            const float *x = scores + i * width + start;
            int64_t common = LIMIT(i) < start ? start : LIMIT(i) < end ? LIMIT(i) : end;
            add_values((int)rows, (ValuePass){x, values, sums + i * dim, width, dim, common - start, i ? 0 : next});
            for (int64_t j = i; j < i + rows && common < end; j++) {
                int64_t limit = LIMIT(j) < end ? LIMIT(j) : end;
                if (limit <= common) continue;
                x = scores + j * width + common;
                const float *remaining = values + (common - start) * dim;
                add_values(1, (ValuePass){x, remaining, sums + j * dim, width, dim, limit - common, 0});
            }
        }
    }
    for (int64_t i = 0; i < num_pairs; i++)
        for (int64_t e = 0; e < dim; e++) out[AT(i, plan->num_heads * dim) + e] = sums[i * dim + e] * inverse[i];
#undef AT
#undef LIMIT
#undef PASSES
}

/* Write the keys and values to their slots, then compute the attention of q [T, H, E]: out [T, H * E]. */
void attention(const Plan *plan, int64_t layer, const float *q, const float *k, const float *v, float *out) {
    int64_t dim = plan->dim, groups = plan->num_kv_heads, layer_size = plan->num_blocks * groups * dim * BLOCK;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < plan->num_tokens; t++) {
            int64_t block = plan->slots[t] / BLOCK, offset = plan->slots[t] % BLOCK;
            for (int64_t g = 0; g < groups; g++) {
                float *to = plan->k + layer * layer_size + (block * groups + g) * dim * BLOCK + offset;
                for (int64_t e = 0; e < dim; e++) to[e * BLOCK] = k[t * plan->k_stride + g * dim + e];
                to = plan->v + layer * layer_size + ((block * groups + g) * BLOCK + offset) * dim;
                memcpy(to, v + t * plan->v_stride + g * dim, dim * sizeof(float));
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < plan->num_tiles * groups; i++)
            attend(plan, layer, plan->tiles + i / groups * 3, i % groups, q, out);
    }
}
