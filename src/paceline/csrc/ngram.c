/* Prompt lookup: find an earlier occurrence of a row's last tokens and draft the tokens after it. drafters/ngram.py has
   the reference implementation. */

#include <stdint.h>

/* Find the longest suffix of context[:length] with min to max tokens that also occurs earlier. Returns the index after
   its most recent earlier occurrence, and its length in *matched (0: none). */
static int64_t lookup(const int32_t *context, int64_t length, int64_t min, int64_t max, int32_t *matched) {
    int64_t best = 0, after = 0;
    for (int64_t end = length - 1; end >= min && best < max; end--) {
        if (context[end - 1] != context[length - 1]) continue;
        int64_t n = 1;
        while (n < max && n < end && context[end - 1 - n] == context[length - 1 - n]) n++;
        if (n > best) best = n, after = end;
    }
    *matched = best >= min ? (int32_t)best : 0;
    return after;
}

/* Row i is contexts[i][:lengths[i]]. Its draft is written to tokens[i * k : num[i]], num[i] <= caps[i] <= k. A copy
   that reaches the end of the context continues with the draft itself, as in a loop. */
void ngram_propose(const int32_t *const *contexts, const int64_t *lengths, int64_t num_rows, const int32_t *caps,
                   int64_t k, int64_t min, int64_t max, int32_t *tokens, int32_t *num, int32_t *matched) {
    for (int64_t i = 0; i < num_rows; i++) {
        int32_t *draft = tokens + i * k;
        int64_t after = lookup(contexts[i], lengths[i], min, max, &matched[i]);
        num[i] = matched[i] ? caps[i] : 0;
        for (int64_t n = 0; n < num[i]; n++, after++)
            draft[n] = after < lengths[i] ? contexts[i][after] : draft[after - lengths[i]];
    }
}
