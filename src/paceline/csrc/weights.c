/* Pack weights into panels, unpack them, and compute the partial sums of the checksum.
 *
 * pack and unpack copy bits. `sums` uses integer arithmetic modulo 2^64, so the results do not depend on the number of
 * threads or the vectors' width. `model/weights.py` defines the checksum.
 */
#include <stdint.h>

/* The weights of 16 outputs for one k are contiguous: panels [ceil(N/16), K, 16]. */
#define WIDTH 16

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

/* Copy rows [num_rows, K] to the panels' rows from `first` on. */
void pack(const uint32_t *rows, uint32_t *panels, int64_t first, int64_t num_rows, int64_t num_k) {
    int64_t end = first + num_rows;
#pragma omp parallel for schedule(static)
    for (int64_t p = first / WIDTH; p < (end + WIDTH - 1) / WIDTH; p++) {
        int64_t from = p * WIDTH > first ? p * WIDTH : first, num = at_most(end, (p + 1) * WIDTH) - from;
        const uint32_t *restrict x = rows + (from - first) * num_k;
        uint32_t *restrict y = panels + p * WIDTH * num_k + from % WIDTH;
        if (num == WIDTH) /* full panels: unrolled */
            for (int64_t k = 0; k < num_k; k++)
                for (int j = 0; j < WIDTH; j++) y[k * WIDTH + j] = x[j * num_k + k];
        else
            for (int64_t k = 0; k < num_k; k++)
                for (int64_t j = 0; j < num; j++) y[k * WIDTH + j] = x[j * num_k + k];
    }
}

/* Copy the panels' first rows to rows [num_rows, K]. */
void unpack(const uint32_t *panels, uint32_t *rows, int64_t num_rows, int64_t num_k) {
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < (num_rows + WIDTH - 1) / WIDTH; p++) {
        int64_t num = at_most(num_rows - p * WIDTH, WIDTH);
        const uint32_t *restrict x = panels + p * WIDTH * num_k;
        uint32_t *restrict y = rows + p * WIDTH * num_k;
        for (int64_t j = 0; j < num; j++) /* row by row: the panel stays in the cache, rows are written sequentially */
            for (int64_t k = 0; k < num_k; k++) y[j * num_k + k] = x[k * WIDTH + j];
    }
}

/* sums[s] = sum of word[i] * (high[i] * 2^32 + 2i + 1) over the i of span s. Computed in two parts that can be
 * vectorised: only the low 32 bits of word * high matter, and word * (2i + 1) is exact in 64 bits. */
#define SUMS(name, word)                                                                                               \
    static uint64_t name(const word *words, const uint32_t *high, int64_t num) {                                       \
        uint64_t low_sum = 0;                                                                                          \
        uint32_t high_sum = 0;                                                                                         \
        for (int32_t i = 0; i < (int32_t)num; i++) {                                                                   \
            int32_t w = words[i];                                                                                      \
            low_sum += (uint64_t)((int64_t)w * (2 * i + 1));                                                           \
            high_sum += (uint32_t)w * high[i];                                                                         \
        }                                                                                                              \
        return low_sum + ((uint64_t)high_sum << 32);                                                                   \
    }
SUMS(sum1, int8_t)
SUMS(sum2, int16_t)
SUMS(sum4, int32_t)

void sums(const void *words, int64_t size, int64_t num_words, const uint32_t *high, int64_t span, uint64_t *out) {
#pragma omp parallel for schedule(dynamic)
    for (int64_t s = 0; s < num_words / span + 1; s++) {
        int64_t num = at_most(num_words - s * span, span);
        const char *at = (const char *)words + s * span * size;
        out[s] = size == 1   ? sum1((const int8_t *)at, high, num)
                 : size == 2 ? sum2((const int16_t *)at, high, num)
                             : sum4((const int32_t *)at, high, num);
    }
}
