/* Prompt lookup: where did a row's last few tokens occur before, and what came next? drafters/ngram.py has the twin. */

#include <stdint.h>

/* The longest suffix of text[:length] with min..max tokens that also ends earlier, at its most recent earlier place:
   the index after that place, and in *matched its length (0: none, never more than max). */
static int64_t lookup(const int32_t *text, int64_t length, int64_t min, int64_t max, int32_t *matched) {
    int64_t best = 0, after = 0;
    for (int64_t end = length - 1; end >= min && best < max; end--) {
        if (text[end - 1] != text[length - 1]) continue;
        int64_t n = 1;
        while (n < max && n < end && text[end - 1 - n] == text[length - 1 - n]) n++;
        if (n > best) best = n, after = end;
    }
    *matched = best >= min ? (int32_t)best : 0;
    return after;
}

/* Row i is texts[i][:lengths[i]]; its draft goes to tokens[i * k : num[i]], num[i] <= caps[i] <= k. A copy that runs
   past the end of the text goes on in the draft itself, as loops do. */
void ngram_propose(const int32_t *const *texts, const int64_t *lengths, int64_t num_rows, const int32_t *caps,
                   int64_t k, int64_t min, int64_t max, int32_t *tokens, int32_t *num, int32_t *matched) {
    for (int64_t i = 0; i < num_rows; i++) {
        int32_t *draft = tokens + i * k;
        int64_t after = lookup(texts[i], lengths[i], min, max, &matched[i]);
        num[i] = matched[i] ? caps[i] : 0;
        for (int64_t n = 0; n < num[i]; n++, after++)
            draft[n] = after < lengths[i] ? texts[i][after] : draft[after - lengths[i]];
    }
}
