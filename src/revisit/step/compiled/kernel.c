/* The usual step of ReVisiT for one sequence, on CPUs, computed in float32; revisit/step/compiled/kernel.py calls it.
 *
 * What it must give is written in revisit/step/reference.py, and tests hold it to that. The projected column of a token (the
 * logits of all vision states for it) is kept and used again when the token comes back. Vectors are GCC's and Clang's portable
 * ones. No result depends on the number of threads.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__)
#define FAST __attribute__((target_clones("default", "arch=x86-64-v3")))
#else
#define FAST
#endif
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (i8){__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));

INLINE f8 load(const float *from) { f8 x; memcpy(&x, from, sizeof x); return x; }
INLINE void store8(float *to, f8 x) { memcpy(to, &x, sizeof x); }
INLINE f8 all(float x) { return (f8){x, x, x, x, x, x, x, x}; }
INLINE f8 either(i8 first, f8 a, f8 b) { return (f8)((first & (i8)a) | (~first & (i8)b)); }

static const float LARGEST_LOGIT = 1e30f, RESOLUTION = 1e-6f; /* as in models/parts.py and step/interface.py */

/* The SHA-256 of this file when it was compiled. */
const char *revisit_source(void) { return SOURCE; }

/* -- the plausible set -------------------------------------------------------------------------------------------- */

/* The largest number, of those that are not NaN. */
FAST static float maximum(const float *x, long count)
{
    f8 top = all(-INFINITY);
    long i = 0;
    for (; i + 8 <= count; i += 8) {
        f8 value = load(x + i);
        top = either(value > top, value, top);
    }
    float most = -INFINITY;
    for (int lane = 0; lane < 8; lane++) most = top[lane] > most ? top[lane] : most;
    for (; i < count; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* The tokens whose logit is at least the largest plus log_alpha, ascending; how many there are.
 *
 * The reference compares log-probabilities: -1 where their rounding could decide about a token, where there are more than
 * `room` tokens, and where the logits are no distribution. */
static long plausible(const float *logits, long count, double log_alpha, int64_t *ids, long room)
{
    float best = maximum(logits, count);
    if (!isfinite(best)) return -1;
    double cut = best + log_alpha, slack = 4 * 1.1920929e-7 * (fabs(best) + fabs(log_alpha) + log((double)count));
    float low = (float)(cut - slack), high = (float)(cut + slack);
    long found = 0;
    for (long i = 0; i < count; i++) {
        if (logits[i] < low) continue;
        if (!(logits[i] > high) || found == room) return -1; /* also where a logit is NaN */
        ids[found++] = i;
    }
    return found;
}

/* -- the columns that are kept ------------------------------------------------------------------------------------- */

/* The slots of the columns of some tokens. Tokens without one are given the next free slot; when too few are free, all are freed
 * first. How many are new, with their tokens and slots.
 *
 * slot_of: token -> slot + 1, or 0. used: how many slots are taken.
 */
static long find_columns(int32_t *slot_of, int32_t *used, long vocabulary, long capacity, const int64_t *ids, long count,
                         int64_t *slots, int64_t *new_ids, int64_t *new_slots)
{
    long missing = 0, found = 0;
    for (long i = 0; i < count; i++) missing += !slot_of[ids[i]];
    if (*used + missing > capacity) {
        memset(slot_of, 0, vocabulary * sizeof *slot_of);
        *used = 0;
    }
    for (long i = 0; i < count; i++) {
        if (!slot_of[ids[i]]) {
            slot_of[ids[i]] = ++*used;
            new_ids[found] = ids[i];
            new_slots[found++] = *used - 1;
        }
        slots[i] = slot_of[ids[i]] - 1;
    }
    return found;
}

/* -- projection --------------------------------------------------------------------------------------------------- */

enum { ROWS = 4, TOKENS = 3, PANEL = 96, PART = 32 };

/* The sums of four vectors, each added up in the same order. */
INLINE void sums(f8 a, f8 b, f8 c, f8 d, float out[4])
{
    f8 ab = PICK(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + PICK(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    f8 cd = PICK(c, d, 0, 8, 2, 10, 4, 12, 6, 14) + PICK(c, d, 1, 9, 3, 11, 5, 13, 7, 15);
    f8 abcd = PICK(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + PICK(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    f8 whole = abcd + PICK(abcd, abcd, 4, 5, 6, 7, 0, 1, 2, 3);
    memcpy(out, &whole, 4 * sizeof *out);
}

/* Products of `rows` (at most four) states with three head rows that lie interleaved by eights. Every product is added up in the
 * same order, whatever else is in its tile. Only `tokens` columns are kept. Meanwhile some lines of memory ahead are fetched. */
INLINE void tile(const float *states, const float *heads, long width, int rows, long tokens, float *store, long height,
                 const int64_t *slots, const float *ahead, long lines)
{
    f8 total[TOKENS][ROWS];
    for (int t = 0; t < TOKENS; t++)
        for (int r = 0; r < ROWS; r++) total[t][r] = all(0);
    for (long i = 0; i + 8 <= width; i += 8) {
        if (i < 8 * lines) __builtin_prefetch(ahead + 2 * i);
        for (int r = 0; r < rows; r++) {
            f8 state = load(states + r * width + i);
            for (int t = 0; t < TOKENS; t++) total[t][r] += state * load(heads + TOKENS * i + 8 * t);
        }
    }
    for (int t = 0; t < tokens; t++) {
        float out[ROWS];
        sums(total[t][0], total[t][1], total[t][2], total[t][3], out);
        for (long i = width / 8 * 8; i < width; i++)
            for (int r = 0; r < rows; r++) out[r] += states[r * width + i] * heads[TOKENS * (width / 8 * 8) + 8 * t + i % 8];
        memcpy(store + slots[t] * height, out, rows * sizeof *out);
    }
}

FAST static void project(const float *states, long width, const float *heads, long tokens, float *store, long height,
                         const int64_t *slots, long from, long to)
{
    long size = (width + 7) / 8 * 8 * TOKENS, row = from;
    long groups = (tokens + TOKENS - 1) / TOKENS, lines = ROWS * width / 16 / groups + 1; /* of the next rows, each group some */
    for (; row + ROWS <= to; row += ROWS)
        for (long t = 0, g = 0; t < tokens; t += TOKENS, g++)
            tile(states + row * width, heads + g * size, width, ROWS, tokens - t < TOKENS ? tokens - t : TOKENS, store + row,
                 height, slots + t, states + (row + ROWS) * width + g * lines * 16, lines);
    for (; row < to; row++)
        for (long t = 0, g = 0; t < tokens; t += TOKENS, g++)
            tile(states + row * width, heads + g * size, width, 1, tokens - t < TOKENS ? tokens - t : TOKENS, store + row,
                 height, slots + t, states, 0);
}

/* Numbers of a head from some place on: float32, or bfloat16, whose bits are the upper half of float32's. */
INLINE void widen(const void *head, int bfloat16, long from, long count, float *to)
{
    if (!bfloat16) memcpy(to, (const float *)head + from, count * sizeof *to);
    for (long i = 0; i < count && bfloat16; i++) {
        uint32_t bits = (uint32_t)((const uint16_t *)head)[from + i] << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

/* Logits of all states (height, width) for some tokens of a head (vocabulary, width), into the rows `slots` of a store
 * whose rows are `height` long; `scratch` has room for 96 head rows whose width is a multiple of 8. */
static void project_columns(const float *states, long height, long width, const void *head, int bfloat16, const int64_t *ids,
                            long count, float *store, const int64_t *slots, float *scratch, int threads)
{
    long panels = (count + PANEL - 1) / PANEL, share = panels ? (count + panels - 1) / panels : 0, wide = (width + 7) / 8 * 8;
    share = (share + TOKENS - 1) / TOKENS * TOKENS;
    for (long start = 0; start < count; start += share) { /* so many head rows stay in the second cache */
        long tokens = count - start < share ? count - start : share, parts = (height + PART - 1) / PART;
#pragma omp parallel num_threads(threads) if (parts > 1)
        {
#pragma omp for schedule(static)
            for (long t = 0; t < tokens; t++) {
                float *to = scratch + t / TOKENS * TOKENS * wide + t % TOKENS * 8;
                for (long i = 0; i < width; i += 8)
                    widen(head, bfloat16, ids[start + t] * width + i, width - i < 8 ? width - i : 8, to + i * TOKENS);
            }
#pragma omp for schedule(static)
            for (long part = 0; part < parts; part++) {
                long from = part * PART, to = from + PART < height ? from + PART : height;
                project(states, width, scratch, tokens, store, height, slots + start, from, to);
            }
        }
    }
}

/* -- divergences -------------------------------------------------------------------------------------------------- */

/* exp for x <= 0, to 1e-7; below -87 it stays at exp(-87). */
INLINE f8 exponential(f8 x)
{
    const f8 magic = all(12582912.0f); /* adding it rounds to an integer, found in the low bits */
    x = either(x < all(-87.0f), all(-87.0f), x);
    f8 turns = x * all(1.44269504f) + magic;
    i8 power = ((i8)turns - (i8)magic + 127) << 23;
    turns -= magic;
    f8 r = x - turns * all(0.693145752f) - turns * all(1.42860677e-6f);
    f8 p = all(0.00139517174f);
    p = p * r + all(0.00836959854f);
    p = p * r + all(0.0416661873f);
    p = p * r + all(0.166665122f);
    p = p * r + all(0.5f);
    return (p * r * r + r + all(1.0f)) * (f8)power;
}

/* ln for positive normal x, to 1e-7. */
INLINE f8 logarithm(f8 x)
{
    i8 offset = (i8)x - 0x3f3504f3; /* of sqrt(1/2) */
    i8 power = offset >> 23;
    f8 f = (f8)((i8)x - (power << 23)) - all(1.0f);
    f8 turns = __builtin_convertvector(power, f8);
    f8 p = all(-0.0785954595f);
    p = p * f + all(0.128816217f);
    p = p * f + all(-0.131287679f);
    p = p * f + all(0.141811967f);
    p = p * f + all(-0.166245535f);
    p = p * f + all(0.200022861f);
    p = p * f + all(-0.250008106f);
    p = p * f + all(0.333333164f);
    f8 square = f * f;
    return turns * all(0.693145752f) + (f + (turns * all(1.42860677e-6f) - square * all(0.5f) + square * f * p));
}

enum { LANES = 2, BLOCK = 8 * LANES, CHUNK = 64 }; /* rows taken at once; columns summed before their sum is added */

/* Jensen-Shannon divergences of up to BLOCK states from P.
 *
 * With X = x - max, e = exp X, s = sum e, Q = e / s and u = e + s P (so that (P + Q) / 2 = u / 2s), all sums run over u ln u
 * and e X, and only u needs a logarithm. */
FAST static void block(const float *store, long height, const int64_t *slots, const float *p, long count, float entropy,
                       long row, long rows, float *x, float *out)
{
    f8 top[LANES], total[LANES], own[LANES], mixed[LANES];
    i8 bad[LANES] = {{0}};
    for (int v = 0; v < LANES; v++) {
        top[v] = all(-INFINITY);
        total[v] = own[v] = mixed[v] = all(0);
    }
    for (long j = 0; j < count; j++) {
        const float *from = store + slots[j] * height + row;
        float *to = x + j * BLOCK;
        __builtin_prefetch(from + BLOCK);
        if (rows < BLOCK) memset(to, 0, BLOCK * sizeof *x);
        memcpy(to, from, (rows < BLOCK ? rows : BLOCK) * sizeof *x);
        for (int v = 0; v < LANES; v++) {
            f8 value = load(to + 8 * v);
            top[v] = either(value > top[v], value, top[v]);
            bad[v] |= ~((value < all(LARGEST_LOGIT)) & (value > all(-LARGEST_LOGIT)));
        }
    }
    for (long start = 0; start < count; start += CHUNK) {
        long stop = start + CHUNK < count ? start + CHUNK : count;
        for (int v = 0; v < LANES; v++) {
            f8 partial = all(0), weighted = all(0);
            for (long j = start; j < stop; j++) {
                f8 shifted = load(x + j * BLOCK + 8 * v) - top[v], e = exponential(shifted);
                store8(x + j * BLOCK + 8 * v, e);
                partial += e;
                weighted += e * shifted;
            }
            total[v] += partial;
            own[v] += weighted;
        }
    }
    for (long start = 0; start < count; start += CHUNK) {
        long stop = start + CHUNK < count ? start + CHUNK : count;
        for (int v = 0; v < LANES; v++) {
            f8 partial = all(0);
            for (long j = start; j < stop; j++) {
                f8 u = load(x + j * BLOCK + 8 * v) + total[v] * all(p[j]);
                partial += u * logarithm(u);
            }
            mixed[v] += partial;
        }
    }
    float result[BLOCK];
    for (int v = 0; v < LANES; v++) {
        f8 sum = entropy + logarithm(total[v]) + (own[v] - mixed[v]) / total[v];
        store8(result + 8 * v, either(bad[v], all(NAN), 0.5f * sum + 0.693147181f));
    }
    memcpy(out + row, result, rows * sizeof *out);
}

/* Divergences of all `height` states from P, over the columns `slots`; NaN for those that cannot be selected.
 *
 * `scratch` has room for count numbers, and count * 16 more a thread. */
static void divergences_of(const float *store, long height, const int64_t *slots, const float *log_p, long count,
                         float *scratch, float *out, int threads)
{
    float *p = scratch;
    double entropy = 0;
    for (long i = 0; i < count; i++) {
        float probability = expf(log_p[i]);
        entropy += (double)probability * log_p[i];
        p[i] = probability > 1e-30f ? probability : 1e-30f;
    }
    scratch += count;
    long blocks = (height + BLOCK - 1) / BLOCK, share = (blocks + threads - 1) / threads;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (blocks > 1)
    for (int thread = 0; thread < threads; thread++)
        for (long b = thread * share; b < (thread + 1) * share && b < blocks; b++) {
            long row = b * BLOCK, rows = height - row < BLOCK ? height - row : BLOCK;
            block(store, height, slots, p, count, (float)entropy, row, rows, scratch + thread * count * BLOCK, out);
        }
}

/* -- the step ----------------------------------------------------------------------------------------------------- */

/* ln of the distribution whose unnormalized logarithms are x. */
static void normalize(float *x, long count)
{
    float top = maximum(x, count);
    double total = 0;
    for (long i = 0; i < count; i++) total += exp((double)x[i] - top);
    double shift = top + log(total);
    for (long i = 0; i < count; i++) x[i] = (float)(x[i] - shift);
}

/* The place of the largest number, the first of equals. */
static long largest_of(const float *x, long count)
{
    long best = 0;
    for (long i = 1; i < count; i++) best = x[i] > x[best] ? i : best;
    return best;
}

/* The states of the least distances (divergences times sign), the nearest first, the first of equals first; how many. */
static long select_states(const float *divergences, long height, float sign, long neighbors, int64_t *chosen)
{
    float least = INFINITY, last = -1;
    for (long i = 0; i < height; i++) least = sign * divergences[i] < least ? sign * divergences[i] : least;
    long found = 0, previous = -1;
    while (found < neighbors) {
        long best = -1;
        float nearest = INFINITY;
        for (long i = 0; i < height; i++) {
            float steps = rintf((sign * divergences[i] - least) / RESOLUTION); /* NaN compares as false */
            if (steps < nearest && (steps > last || (steps == last && i > previous))) {
                best = i;
                nearest = steps;
            }
        }
        if (best < 0) break;
        chosen[found++] = previous = best;
        last = nearest;
    }
    return found;
}

/* ln Q, the mean of the distributions of some states. */
static void mean_of(const float *store, long height, const int64_t *slots, long count, const int64_t *chosen, long found,
                    float *one, float *log_q)
{
    for (long n = 0; n < found; n++) {
        for (long i = 0; i < count; i++) one[i] = store[slots[i] * height + chosen[n]];
        normalize(one, count);
        for (long i = 0; i < count; i++)
            log_q[i] = n ? fmaxf(log_q[i], one[i]) + (float)log1p(exp(-fabs((double)log_q[i] - one[i]))) : one[i];
    }
    for (long i = 0; i < count && found > 1; i++) log_q[i] -= logf((float)found);
}

/* The weight of the vision side by name: 1 agreement, 2 uncertainty, 3 both. */
static double adaptive_weight(const float *log_p, const float *log_q, long count, int name)
{
    double divergence = 0, most = -INFINITY;
    for (long i = 0; i < count; i++) {
        double p = exp(log_p[i]), q = exp(log_q[i]), log_m = log(0.5 * (p + q));
        divergence += 0.5 * ((p > 0 ? p * (log_p[i] - log_m) : 0) + (q > 0 ? q * (log_q[i] - log_m) : 0));
        most = log_p[i] > most ? log_p[i] : most;
    }
    double agreement = fmin(1, fmax(0, 1 - divergence / log(2))), uncertainty = sqrt(fmax(0, -expm1(most)));
    return (name & 1 ? agreement : 1) * (name & 2 ? uncertainty : 1);
}

/* Lower ln Q of the written tokens towards ln sum P Q where it is above, by `once` of the excess. */
static void limit_written(const float *log_p, float *log_q, const int64_t *ids, long count, const int64_t *written, long length,
                          double once)
{
    double total = 0;
    for (long i = 0; i < count; i++) total += exp((double)log_p[i] + log_q[i]);
    double mean = log(total);
    for (long i = 0; i < count; i++) {
        int found = 0;
        for (long j = 0; j < length && log_q[i] > mean; j++) found |= written[j] == ids[i];
        if (found) log_q[i] = (float)(log_q[i] - once * (log_q[i] - mean));
    }
}

/* One step: Jensen-Shannon divergence, product of experts. The number of plausible tokens; -1 if it must be taken another way.
 *
 * logits, scores: (vocabulary); the scores are -inf outside the plausible set. states: (height, width). head: (vocabulary,
 * width), float32 or bfloat16. largest: whether the largest divergences are selected. adaptive: name of the weight, 0 for the given one.
 * written (length): tokens of the answer so far, and how much of their excess `once` removes. store (capacity, height), slot_of
 * (vocabulary) and used (1) keep columns from step to step; the latter two begin as zeros. out: the selected state (-1 for none),
 * whether the likeliest token changed, the weight. With several plausible tokens, divergences (height) of all states. */
long revisit_step(const float *logits, long vocabulary, double log_alpha, const float *states, long height, long width,
                  const void *head, int bfloat16, int largest, long neighbors, int adaptive, double weight, int normalized,
                  const int64_t *written, long length, double once, long capacity, float *store, int32_t *slot_of,
                  int32_t *used, float *scores, int threads, double *out, float *divergences)
{
    long room = capacity < vocabulary ? capacity : vocabulary;
    int64_t *ids = malloc(4 * room * sizeof *ids), *slots = ids + room, *new_ids = slots + room, *new_slots = new_ids + room;
    long count = ids ? plausible(logits, vocabulary, log_alpha, ids, room) : -1;
    long panel = PANEL * ((width + 7) / 8 * 8), compared = (1 + threads * BLOCK) * count;
    int64_t *chosen = NULL;
    if (count > 0) chosen = malloc(neighbors * sizeof *chosen + (4 * count + (panel > compared ? panel : compared)) * 4);
    if (!chosen) {
        free(ids);
        return -1;
    }
    float *log_p = (float *)(chosen + neighbors), *log_q = log_p + count, *one = log_q + count, *result = one + count;
    float *scratch = result + count;
    for (long i = 0; i < count; i++) log_p[i] = logits[ids[i]];
    normalize(log_p, count);
    memcpy(result, log_p, count * sizeof *result);
    out[0] = -1, out[1] = out[2] = 0;
    long found = 0;
    if (count > 1) {
        long missing = find_columns(slot_of, used, vocabulary, capacity, ids, count, slots, new_ids, new_slots);
        project_columns(states, height, width, head, bfloat16, new_ids, missing, store, new_slots, scratch, threads);
        divergences_of(store, height, slots, log_p, count, scratch, divergences, threads);
        found = select_states(divergences, height, largest ? -1.0f : 1.0f, neighbors, chosen);
    }
    if (found) {
        mean_of(store, height, slots, count, chosen, found, one, log_q);
        if (adaptive) weight = adaptive_weight(log_p, log_q, count, adaptive);
        if (length) limit_written(log_p, log_q, ids, count, written, length, once);
        for (long i = 0; i < count && weight != 0; i++) result[i] = (float)(log_p[i] + weight * log_q[i]);
        if (normalized) normalize(result, count);
        out[0] = chosen[0];
        out[1] = log_p[largest_of(result, count)] < log_p[largest_of(log_p, count)];
        out[2] = weight;
    }
    for (long i = 0; i < vocabulary; i++) scores[i] = -INFINITY;
    for (long i = 0; i < count; i++) scores[ids[i]] = result[i];
    free(chosen);
    free(ids);
    return count;
}
