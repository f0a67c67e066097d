/* The loops of a ReVisiT step that cost time on a CPU, in float32; revisit/kernel.py calls them.
 *
 * Each has a twin in Python (revisit/engine.py) that is used where this file was not compiled, and that tests hold it
 * to. Vectors are GCC's and Clang's portable ones. No result depends on the number of threads.
 */

#include <math.h>
#include <stdint.h>
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
INLINE void keep(float *to, f8 x) { memcpy(to, &x, sizeof x); }
INLINE f8 all(float x) { return (f8){x, x, x, x, x, x, x, x}; }
INLINE f8 either(i8 first, f8 a, f8 b) { return (f8)((first & (i8)a) | (~first & (i8)b)); }

/* The SHA-256 of this file when it was compiled. */
const char *revisit_source(void) { return SOURCE; }

/* -- the plausible set -------------------------------------------------------------------------------------------- */

enum { GROUP = 128, GROUPS = 8192 };

/* Whether any number is NaN; the largest of each group of 128, and of all. */
FAST static int maxima(const float *logits, long count, float *groups, float *best)
{
    f8 top = all(-INFINITY);
    i8 nan = {0};
    for (long g = 0; g < count / GROUP; g++) {
        f8 high = all(-INFINITY);
        for (int i = 0; i < GROUP; i += 8) {
            f8 x = load(logits + g * GROUP + i);
            nan |= x != x;
            high = either(x > high, x, high);
        }
        float most = high[0];
        for (int lane = 1; lane < 8; lane++) most = high[lane] > most ? high[lane] : most;
        groups[g] = most;
        top = either(high > top, high, top);
    }
    int bad = 0;
    float most = top[0];
    for (int lane = 0; lane < 8; lane++) {
        most = top[lane] > most ? top[lane] : most;
        bad |= nan[lane];
    }
    for (long i = count / GROUP * GROUP; i < count; i++) {
        most = logits[i] > most ? logits[i] : most;
        bad |= logits[i] != logits[i];
    }
    *best = most;
    return bad != 0;
}

/* The tokens whose logit is at least the largest plus log_alpha, ascending, at most `room`; how many there are.
 *
 * -1 where rounding of log-probabilities could decide about a token (the caller knows how), or no number is comparable.
 */
long revisit_plausible(const float *logits, long count, double log_alpha, int64_t *ids, long room)
{
    float groups[GROUPS], best;
    if (count / GROUP > GROUPS || maxima(logits, count, groups, &best) || !isfinite(best)) return -1;
    double cut = best + log_alpha, slack = 4 * 1.1920929e-7 * (fabs(best) + fabs(log_alpha) + log((double)count));
    float low = (float)(cut - slack), high = (float)(cut + slack);
    long found = 0, whole = count / GROUP * GROUP;
    for (long start = 0; start < count; start += GROUP) {
        if (start < whole && groups[start / GROUP] < low) continue;
        long stop = start < whole ? start + GROUP : count;
        for (long i = start; i < stop; i++) {
            if (logits[i] < low) continue;
            if (logits[i] <= high || found == room) return -1;
            ids[found++] = i;
        }
    }
    return found;
}

/* -- the books of the store --------------------------------------------------------------------------------------- */

/* Where the columns of some tokens are, -1 for those that are not there; how many are not, with their ids and places.
 *
 * slot_of: token -> slot + 1, or 0; used_at: slot -> the last step that read it; uses: token -> steps that asked for it.
 */
long revisit_look_up(const int16_t *slot_of, int64_t *used_at, uint8_t *uses, int64_t clock, const int64_t *ids,
                     long count, int64_t *slots, int64_t *missing, int64_t *places)
{
    long lacking = 0;
    for (long i = 0; i < count; i++) {
        int64_t slot = slots[i] = slot_of[ids[i]] - 1;
        if (uses[ids[i]] < 255) uses[ids[i]]++;
        if (slot >= 0) {
            used_at[slot] = clock;
        } else {
            missing[lacking] = ids[i];
            places[lacking++] = i;
        }
    }
    return lacking;
}

/* Reorders keys so that the `count` smallest come first. */
static void smallest_first(int64_t *keys, long size, long count)
{
    long low = 0, high = size - 1;
    while (low < high) {
        int64_t pivot = keys[low + (high - low) / 2];
        long i = low, j = high;
        while (i <= j) {
            while (keys[i] < pivot) i++;
            while (keys[j] > pivot) j--;
            if (i <= j) {
                int64_t key = keys[i];
                keys[i++] = keys[j];
                keys[j--] = key;
            }
        }
        if (count - 1 <= j) high = j;
        else if (count - 1 >= i) low = i;
        else return;
    }
}

/* Slots for the tokens that have none: empty ones first, which lie at the end, then those of the columns that were asked for
 * least often (eight times is as good as more) and longest ago, but never one that this step reads.
 *
 * id_in: slot -> token; a use counts for `credit` steps; keys has room for `held` numbers.
 */
void revisit_enter(int16_t *slot_of, int64_t *id_in, int64_t *used_at, const uint8_t *uses, long capacity, long held,
                   int64_t clock, int64_t credit, const int64_t *missing, const int64_t *places, long lacking,
                   int64_t *slots, int64_t *fresh, int64_t *keys)
{
    long spare = capacity - held, forgotten = lacking - spare;
    if (forgotten > 0) {
        for (long slot = 0; slot < held; slot++) {
            int64_t often = uses[id_in[slot]] < 8 ? uses[id_in[slot]] : 8;
            int64_t worth = used_at[slot] == clock ? (int64_t)1 << 40 : used_at[slot] + credit * often;
            keys[slot] = worth << 16 | slot;
        }
        smallest_first(keys, held, forgotten);
    }
    for (long i = 0; i < lacking; i++) {
        int64_t slot = i < spare ? held + i : keys[i - spare] & 0xffff;
        if (i >= spare) slot_of[id_in[slot]] = 0;
        fresh[i] = slots[places[i]] = slot;
        slot_of[missing[i]] = (int16_t)(slot + 1);
        id_in[slot] = missing[i];
        used_at[slot] = clock;
    }
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

/* Logits of all states (height, width) for some tokens of a head (vocabulary, width), into the rows `slots` of a store
 * whose rows are `height` long; `scratch` has room for 96 head rows whose width is a multiple of 8. */
void revisit_project(const float *states, long height, long width, const float *head, const int64_t *ids, long count,
                     float *store, const int64_t *slots, float *scratch, int threads)
{
    long panels = (count + PANEL - 1) / PANEL, share = panels ? (count + panels - 1) / panels : 0;
    share = (share + TOKENS - 1) / TOKENS * TOKENS;
    long wide = (width + 7) / 8 * 8;
    for (long start = 0; start < count; start += share) { /* so many head rows stay in the second cache */
        long tokens = count - start < share ? count - start : share, parts = (height + PART - 1) / PART;
#pragma omp parallel num_threads(threads) if (parts > 1)
        {
#pragma omp for schedule(static)
            for (long t = 0; t < tokens; t++) {
                const float *from = head + ids[start + t] * width;
                float *to = scratch + t / TOKENS * TOKENS * wide + t % TOKENS * 8;
                for (long i = 0; i < width; i += 8)
                    memcpy(to + i * TOKENS, from + i, (width - i < 8 ? width - i : 8) * sizeof *to);
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

/* Jensen-Shannon divergences of up to BLOCK rows from P; the arithmetic is that of `engine.screen`. */
FAST static void block(const float *store, long height, const int64_t *slots, const float *p, long count, float entropy,
                       long row, long rows, float *x, float *out)
{
    f8 top[LANES], total[LANES], own[LANES], mixed[LANES], bad[LANES];
    for (int v = 0; v < LANES; v++) {
        top[v] = all(-INFINITY);
        total[v] = own[v] = mixed[v] = bad[v] = all(0);
    }
    for (long j = 0; j < count; j++) {
        const float *from = store + slots[j] * height + row;
        float *to = x + j * BLOCK;
        if (rows == BLOCK) {
            __builtin_prefetch(from + BLOCK);
            memcpy(to, from, BLOCK * sizeof *x);
        } else {
            memset(to, 0, BLOCK * sizeof *x);
            memcpy(to, from, rows * sizeof *x);
        }
        for (int v = 0; v < LANES; v++) {
            f8 value = load(to + 8 * v);
            top[v] = either(value > top[v], value, top[v]);
            bad[v] += value * 0.0f; /* NaN if it is not finite */
        }
    }
    for (long start = 0; start < count; start += CHUNK) {
        long stop = start + CHUNK < count ? start + CHUNK : count;
        for (int v = 0; v < LANES; v++) {
            f8 some = all(0), weighted = all(0);
            for (long j = start; j < stop; j++) {
                f8 shifted = load(x + j * BLOCK + 8 * v) - top[v], e = exponential(shifted);
                keep(x + j * BLOCK + 8 * v, e);
                some += e;
                weighted += e * shifted;
            }
            total[v] += some;
            own[v] += weighted;
        }
    }
    for (long start = 0; start < count; start += CHUNK) {
        long stop = start + CHUNK < count ? start + CHUNK : count;
        for (int v = 0; v < LANES; v++) {
            f8 some = all(0);
            for (long j = start; j < stop; j++) {
                f8 u = load(x + j * BLOCK + 8 * v) + total[v] * all(p[j]);
                some += u * logarithm(u);
            }
            mixed[v] += some;
        }
    }
    float result[BLOCK];
    for (int v = 0; v < LANES; v++)
        keep(result + 8 * v,
             0.5f * (entropy + logarithm(total[v]) + (own[v] - mixed[v]) / total[v]) + 0.693147181f + bad[v]);
    memcpy(out + row, result, rows * sizeof *out);
}

/* Divergences of all `height` rows of a store from P, over the columns `slots`; NaN for rows that are not finite.
 *
 * `scratch` has room for count numbers, and count * 16 more a thread.
 */
void revisit_divergences(const float *store, long height, const int64_t *slots, const float *log_p, long count,
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
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (int thread = 0; thread < threads; thread++)
        for (long b = thread * share; b < (thread + 1) * share && b < blocks; b++) {
            long row = b * BLOCK, rows = height - row < BLOCK ? height - row : BLOCK;
            block(store, height, slots, p, count, (float)entropy, row, rows, scratch + thread * count * BLOCK, out);
        }
}

/* The rows whose divergence is within rounding * (scale + |best|) of the smallest (or largest), ascending, at most `room`;
 * how many. The very best, the first of equals, is rows[room]; no row is usable if there is none. */
long revisit_nearest(const float *divergences, long height, int largest, float scale, float rounding, int64_t *rows,
                     long room)
{
    long best = -1, found = 0;
    float sign = largest ? -1.0f : 1.0f, least = 0;
    for (long i = 0; i < height; i++) {
        float value = sign * divergences[i];
        if (value == value && (best < 0 || value < least)) {
            best = i;
            least = value;
        }
    }
    if (best < 0) return 0;
    rows[room] = best;
    float limit = isfinite(least) ? least + rounding * (scale + fabsf(least)) : least;
    for (long i = 0; i < height && found < room; i++)
        if (sign * divergences[i] <= limit) rows[found++] = i;
    return found;
}

/* -- the whole step ----------------------------------------------------------------------------------------------- */

/* One item and its settings; kernel.py has the same fields in the same order. */
typedef struct {
    const float *states, *head; /* (height, width), (vocabulary, width) */
    float *store;               /* (capacity, height) */
    int16_t *slot_of;
    int64_t *id_in, *used_at;
    uint8_t *uses;
    int64_t height, width, vocabulary, capacity, held, clock, credit;
    double log_alpha;
    float weight, rounding;
    int32_t largest, normalize, threads;
} item;

/* ln of the distribution whose unnormalised logarithms are x. */
static void normalise(float *x, long count)
{
    float top = x[0];
    double total = 0;
    for (long i = 1; i < count; i++) top = x[i] > top ? x[i] : top;
    for (long i = 0; i < count; i++) total += exp((double)x[i] - top);
    double shift = top + log(total);
    for (long i = 0; i < count; i++) x[i] = (float)(x[i] - shift);
}

/* The usual step: Jensen-Shannon divergence, product of experts. The number of plausible tokens, their ids, and ln P, ln Q and
 * the result in three rows of `capacity` numbers; made[0] is the selected row (-1 for a single plausible token), made[1] how
 * many columns were projected.
 *
 * 0 where it takes more than this: too many plausible tokens for the store, a token on the threshold, no usable row, or
 * several rows within rounding of the best. Room: 5 * capacity integers, and the larger of what revisit_project
 * and revisit_divergences need.
 */
long revisit_step(const item *it, const float *logits, int64_t *ids, float *vectors, float *divergences, int64_t *integers,
                  float *scratch, int64_t *made)
{
    long room = it->capacity;
    int64_t *slots = integers, *missing = slots + room, *places = missing + room, *fresh = places + room;
    float *log_p = vectors, *log_q = vectors + room, *result = vectors + 2 * room;
    made[0] = -1;
    made[1] = 0;
    long count = revisit_plausible(logits, it->vocabulary, it->log_alpha, ids, room);
    if (count < 1) return 0;
    for (long i = 0; i < count; i++) log_p[i] = logits[ids[i]];
    normalise(log_p, count);
    if (count == 1) return 1;
    long lacking = revisit_look_up(it->slot_of, it->used_at, it->uses, it->clock, ids, count, slots, missing, places);
    if (lacking) {
        revisit_enter(it->slot_of, it->id_in, it->used_at, it->uses, room, it->held, it->clock, it->credit, missing, places,
                      lacking, slots, fresh, fresh + room);
        revisit_project(it->states, it->height, it->width, it->head, missing, lacking, it->store, fresh, scratch,
                        it->threads);
    }
    made[1] = lacking;
    revisit_divergences(it->store, it->height, slots, log_p, count, scratch, divergences, it->threads);
    int64_t rows[3];
    if (revisit_nearest(divergences, it->height, it->largest, 1.0f, it->rounding, rows, 2) != 1) return 0;
    made[0] = rows[2];
    for (long i = 0; i < count; i++) log_q[i] = it->store[slots[i] * it->height + rows[2]];
    normalise(log_q, count);
    for (long i = 0; i < count; i++) result[i] = it->weight != 0 ? log_p[i] + it->weight * log_q[i] : log_p[i];
    if (it->normalize) normalise(result, count);
    return count;
}
