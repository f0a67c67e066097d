/* The loops of a ReVisiT step that cost time on a CPU, in float32; revisit/kernel.py calls them.
 *
 * Each has a twin in Python (revisit/engine.py) that is used where this file was not compiled, and that tests hold it
 * to. Vectors are GCC's and Clang's portable ones. No result depends on the number of threads.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

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
typedef int16_t h8 __attribute__((vector_size(16)));

INLINE f8 load(const float *from) { f8 x; memcpy(&x, from, sizeof x); return x; }
INLINE void keep(float *to, f8 x) { memcpy(to, &x, sizeof x); }
INLINE f8 all(float x) { return (f8){x, x, x, x, x, x, x, x}; }
INLINE void fetch(const float *from, long count) { for (long i = 0; i < count; i += 16) __builtin_prefetch(from + i); }
INLINE f8 either(i8 first, f8 a, f8 b) { return (f8)((first & (i8)a) | (~first & (i8)b)); }

/* A vector as 16-bit integers: what 1 stands for, and the lengths, at most, of what they stand for and of what they miss. */
typedef struct {
    float step, length, missed, unused;
} scale;

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

/* exp for x <= 0, to 1e-7 of it, `roughly` to 3e-6; below -87 it stays at exp(-87). */
INLINE f8 exponential(f8 x, int roughly)
{
    const f8 magic = all(12582912.0f); /* adding it rounds to an integer, found in the low bits */
    x = either(x < all(-87.0f), all(-87.0f), x);
    f8 turns = x * all(1.44269504f) + magic;
    i8 power = ((i8)turns - (i8)magic + 127) << 23;
    turns -= magic;
    if (roughly) {
        f8 r = x - turns * all(0.693147181f);
        f8 p = all(0.0414586094f) * r + all(0.167909067f);
        p = p * r + all(0.50004359f);
        p = p * r + all(0.999963402f);
        return (p * r + all(0.999999258f)) * (f8)power;
    }
    f8 r = x - turns * all(0.693145752f) - turns * all(1.42860677e-6f);
    f8 p = all(0.00139517174f);
    p = p * r + all(0.00836959854f);
    p = p * r + all(0.0416661873f);
    p = p * r + all(0.166665122f);
    p = p * r + all(0.5f);
    return (p * r * r + r + all(1.0f)) * (f8)power;
}

/* ln for positive normal x, to 1e-7, `roughly` to 1.1e-5. */
INLINE f8 logarithm(f8 x, int roughly)
{
    i8 offset = (i8)x - 0x3f3504f3; /* of sqrt(1/2) */
    i8 power = offset >> 23;
    f8 f = (f8)((i8)x - (power << 23)) - all(1.0f);
    f8 turns = __builtin_convertvector(power, f8);
    if (roughly) {
        f8 p = all(0.175156428f) * f + all(-0.2734931f);
        p = p * f + all(0.337338074f);
        p = p * f + all(-0.499234106f);
        p = p * f + all(0.999919224f);
        return p * f + turns * all(0.693147181f);
    }
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

/* Rows taken at once, as floats and as integers; columns summed before their sum is added. */
enum { BLOCK = 16, SHORT_BLOCK = 32, CHUNK = 64 };

/* Jensen-Shannon divergences of up to `size` rows from P, whose logits are in a store, or there as integers (`shorts`) with the
 * scales of the rows and of the columns; the arithmetic is that of `engine.screen`, with integers done roughly. */
INLINE void compare(const int size, const float *store, const int16_t *shorts, const scale *scales,
                    const scale *column_scales, long height, const int64_t *slots, const float *p, long count, float entropy,
                    long row, long rows, float *x, float *out)
{
    enum { MOST = SHORT_BLOCK / 8 };
    const int lanes = size / 8;
    f8 top[MOST], total[MOST], own[MOST], mixed[MOST], bad[MOST], step[MOST];
    for (int v = 0; v < lanes; v++) {
        top[v] = all(-INFINITY);
        total[v] = own[v] = mixed[v] = bad[v] = all(0);
        if (shorts)
            for (int r = 0; r < 8; r++) step[v][r] = 65536.0f * scales[row + 8 * v + r].step;
    }
    for (long j = 0; j < count; j++) {
        float *to = x + j * size;
        if (shorts) {
            const int16_t *from = shorts + slots[j] * height + row;
            f8 column = all(column_scales[slots[j]].step);
            __builtin_prefetch(from + size);
            for (int v = 0; v < lanes; v++) {
                h8 some;
                memcpy(&some, from + 8 * v, sizeof some);
                keep(to + 8 * v, __builtin_convertvector(__builtin_convertvector(some, i8), f8) * (step[v] * column));
            }
        } else if (rows == size) {
            const float *from = store + slots[j] * height + row;
            __builtin_prefetch(from + size);
            memcpy(to, from, size * sizeof *x);
        } else {
            memset(to, 0, size * sizeof *x);
            memcpy(to, store + slots[j] * height + row, rows * sizeof *x);
        }
        for (int v = 0; v < lanes; v++) {
            f8 value = load(to + 8 * v);
            top[v] = either(value > top[v], value, top[v]);
            bad[v] += value * 0.0f; /* NaN if it is not finite */
        }
    }
    for (long start = 0; start < count; start += CHUNK) {
        long stop = start + CHUNK < count ? start + CHUNK : count;
        for (int v = 0; v < lanes; v++) {
            f8 some = all(0), weighted = all(0);
            for (long j = start; j < stop; j++) {
                f8 shifted = load(x + j * size + 8 * v) - top[v], e = exponential(shifted, shorts != 0);
                keep(x + j * size + 8 * v, e);
                some += e;
                weighted += e * shifted;
            }
            total[v] += some;
            own[v] += weighted;
        }
    }
    for (long start = 0; start < count; start += CHUNK) {
        long stop = start + CHUNK < count ? start + CHUNK : count;
        for (int v = 0; v < lanes; v++) {
            f8 some = all(0);
            for (long j = start; j < stop; j++) {
                f8 u = load(x + j * size + 8 * v) + total[v] * all(p[j]);
                some += u * logarithm(u, shorts != 0);
            }
            mixed[v] += some;
        }
    }
    float result[SHORT_BLOCK];
    for (int v = 0; v < lanes; v++)
        keep(result + 8 * v,
             0.5f * (entropy + logarithm(total[v], 0) + (own[v] - mixed[v]) / total[v]) + 0.693147181f + bad[v]);
    memcpy(out + row, result, rows * sizeof *out);
}

FAST static void block(const float *store, long height, const int64_t *slots, const float *p, long count, float entropy,
                       long row, long rows, float *x, float *out)
{
    compare(BLOCK, store, 0, 0, 0, height, slots, p, count, entropy, row, rows, x, out);
}

FAST static void block_short(const int16_t *store, const scale *scales, const scale *column_scales, long height,
                             const int64_t *slots, const float *p, long count, float entropy, long row, long rows, float *x,
                             float *out)
{
    compare(SHORT_BLOCK, 0, store, scales, column_scales, height, slots, p, count, entropy, row, rows, x, out);
}

/* P with nothing smaller than 1e-30, and the sum of P ln P. */
static float output(const float *log_p, long count, float *p)
{
    double entropy = 0;
    for (long i = 0; i < count; i++) {
        float probability = expf(log_p[i]);
        entropy += (double)probability * log_p[i];
        p[i] = probability > 1e-30f ? probability : 1e-30f;
    }
    return (float)entropy;
}

/* Divergences of all `height` rows from P, over the columns `slots`; NaN for rows that are not finite.
 *
 * `scratch` has room for count numbers, and count * 16 more a thread, with integers count * 32.
 */
static void compare_all(const float *store, const int16_t *shorts, const scale *scales, const scale *column_scales, long height,
                        const int64_t *slots, const float *log_p, long count, float *scratch, float *out, int threads)
{
    float *p = scratch, entropy = output(log_p, count, p);
    long size = shorts ? SHORT_BLOCK : BLOCK, blocks = (height + size - 1) / size, share = (blocks + threads - 1) / threads;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (int thread = 0; thread < threads; thread++)
        for (long b = thread * share; b < (thread + 1) * share && b < blocks; b++) {
            long row = b * size, rows = height - row < size ? height - row : size;
            float *x = scratch + (1 + thread * size) * count;
            if (shorts)
                block_short(shorts, scales, column_scales, blocks * size, slots, p, count, entropy, row, rows, x, out);
            else
                block(store, height, slots, p, count, entropy, row, rows, x, out);
        }
}

void revisit_divergences(const float *store, long height, const int64_t *slots, const float *log_p, long count,
                         float *scratch, float *out, int threads)
{
    compare_all(store, 0, 0, 0, height, slots, log_p, count, scratch, out, threads);
}

void revisit_divergences_short(const int16_t *store, const scale *scales, const scale *column_scales, long height,
                               const int64_t *slots, const float *log_p, long count, float *scratch, float *out, int threads)
{
    compare_all(0, store, scales, column_scales, height, slots, log_p, count, scratch, out, threads);
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

/* -- screening in sixteen bits ------------------------------------------------------------------------------------ */

/* States, head rows and columns are also kept as 16-bit integers times a step: half the memory, and products twice as fast.
 * They only rank the rows: how wrong a divergence can be is known, and what that leaves in doubt is computed in float32. */

enum { BESIDE = 16, TOGETHER = 6, LINE = 32 }; /* rows side by side; tokens projected together; numbers in a line of the cache */
#define LONGEST 46340.0f /* of a vector: then no product of two exceeds 31 bits, and its upper half is what a column keeps */
#define SENSITIVITY 0.3084f /* of the divergence: how far it moves if logits move by at most 1 */
#define ARITHMETIC 3e-5f    /* error of a divergence from rounding and from the rough series, of which that of ln weighs 1.5 */

/* The length of a vector, at most, from its squares. */
INLINE float length_of(f8 squares)
{
    float total = 0;
    for (int lane = 0; lane < 8; lane++) total += squares[lane];
    return 1.00001f * sqrtf(total);
}

/* A vector as integers times a step; NaN for the step if some number is not finite. `stride`: from one pair of integers to the
 * next pair; an odd end is filled up with 0. */
FAST static scale integers_of(const float *x, long width, int16_t *to, long stride)
{
    f8 squares = all(0), kept = all(0), missed = all(0), largest = all(0);
    float end[8] = {0}, most = 0;
    memcpy(end, x + width / 8 * 8, width % 8 * sizeof *x);
    for (long i = 0; i < width; i += 8) {
        f8 value = load(i + 8 <= width ? x + i : end), size = (f8)((i8)value & 0x7fffffff);
        squares += value * value;
        largest = either(size > largest, size, largest);
    }
    for (int lane = 0; lane < 8; lane++) most = largest[lane] > most ? largest[lane] : most;
    float length = length_of(squares);
    if (length == INFINITY) length = most * sqrtf(width); /* too large for its square: at most that */
    float step = length / (LONGEST - 1 - 0.5f * sqrtf(width));
    if (step < most / 32767) step = 1.00001f * most / 32767;
    if (step < 1e-30f) step = 1e-30f;
    if (!isfinite(step)) step = NAN;
    for (long i = 0; i < width; i += 8) {
        f8 turns = load(i + 8 <= width ? x + i : end) / all(step);
        turns = either(turns == turns, turns, all(0));
        i8 whole = __builtin_convertvector(turns + either(turns < all(0), all(-0.5f), all(0.5f)), i8);
        h8 some = __builtin_convertvector(whole, h8);
        f8 integer = __builtin_convertvector(whole, f8);
        kept += integer * integer;
        missed += (turns - integer) * (turns - integer);
        for (int pair = 0; pair < 4 && i + 2 * pair < width; pair++)
            memcpy(to + (i / 2 + pair) * stride, (int16_t *)&some + 2 * pair, 2 * sizeof *to);
    }
    return (scale){step, step * length_of(kept), step * (length_of(missed) + 4e-3f), 0}; /* of rounding */
}

/* All states in blocks of 16 rows, in each the pairs of all rows side by side; missing rows, up to a multiple of 32, are 0. */
void revisit_shorten(const float *states, long height, long width, int16_t *to, scale *scales, int threads)
{
    long pairs = (width + 1) / 2, blocks = (height + SHORT_BLOCK - 1) / SHORT_BLOCK * SHORT_BLOCK / BESIDE;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long b = 0; b < blocks; b++)
        for (long r = 0; r < BESIDE; r++) {
            long row = b * BESIDE + r;
            int16_t *start = to + b * pairs * 2 * BESIDE + 2 * r;
            scale s = {0};
            if (row < height) s = integers_of(states + row * width, width, start, 2 * BESIDE);
            else
                for (long i = 0; i < pairs; i++) start[i * 2 * BESIDE] = start[i * 2 * BESIDE + 1] = 0;
            scales[row] = s;
        }
}

/* Upper halves of the products of 16 rows with some head rows; meanwhile some lines ahead are fetched. */
typedef void multiplier(const int16_t *states, const int16_t *heads, long pairs, long tokens, int16_t *const *to,
                        const int16_t *ahead, long lines);

static void products(const int16_t *states, const int16_t *heads, long pairs, long tokens, int16_t *const *to,
                     const int16_t *ahead, long lines)
{
    (void)ahead, (void)lines;
    for (long t = 0; t < tokens; t++) {
        int32_t total[BESIDE] = {0};
        for (long i = 0; i < pairs; i++)
            for (int r = 0; r < BESIDE; r++)
                total[r] += states[(i * BESIDE + r) * 2] * heads[(t * pairs + i) * 2] +
                            states[(i * BESIDE + r) * 2 + 1] * heads[(t * pairs + i) * 2 + 1];
        for (int r = 0; r < BESIDE; r++) to[t][r] = (int16_t)((total[r] + 32768) >> 16);
    }
}

#ifdef __x86_64__
#define AVX2 __attribute__((target("avx2")))

AVX2 INLINE void so_many(const int tokens, const int16_t *states, const int16_t *heads, long pairs, int16_t *const *to,
                         const int16_t *ahead, long lines)
{
    __m256i low[TOGETHER], high[TOGETHER], half = _mm256_set1_epi32(32768);
    for (int t = 0; t < tokens; t++) low[t] = high[t] = _mm256_setzero_si256();
    for (long i = 0; i < pairs; i++) {
        if (i < lines) __builtin_prefetch(ahead + i * LINE);
        __m256i a = _mm256_loadu_si256((const __m256i *)(states + i * 2 * BESIDE));
        __m256i b = _mm256_loadu_si256((const __m256i *)(states + i * 2 * BESIDE + BESIDE));
        for (int t = 0; t < tokens; t++) {
            int32_t pair;
            memcpy(&pair, heads + (t * pairs + i) * 2, sizeof pair);
            __m256i head = _mm256_set1_epi32(pair);
            low[t] = _mm256_add_epi32(low[t], _mm256_madd_epi16(a, head));
            high[t] = _mm256_add_epi32(high[t], _mm256_madd_epi16(b, head));
        }
    }
    for (int t = 0; t < tokens; t++) {
        __m256i x = _mm256_srai_epi32(_mm256_add_epi32(low[t], half), 16);
        __m256i y = _mm256_srai_epi32(_mm256_add_epi32(high[t], half), 16);
        _mm256_storeu_si256((__m256i *)to[t], _mm256_permute4x64_epi64(_mm256_packs_epi32(x, y), 0xd8));
    }
}

AVX2 static void products_avx2(const int16_t *states, const int16_t *heads, long pairs, long tokens, int16_t *const *to,
                               const int16_t *ahead, long lines)
{
    switch (tokens) {
    case 1: so_many(1, states, heads, pairs, to, ahead, lines); break;
    case 2: so_many(2, states, heads, pairs, to, ahead, lines); break;
    case 3: so_many(3, states, heads, pairs, to, ahead, lines); break;
    case 4: so_many(4, states, heads, pairs, to, ahead, lines); break;
    case 5: so_many(5, states, heads, pairs, to, ahead, lines); break;
    default: so_many(TOGETHER, states, heads, pairs, to, ahead, lines);
    }
}
#endif

/* Columns of some tokens, whose head rows become integers first: into the rows `slots` of a store whose rows are so
 * long, with the scale of each head row. `scratch` has room for 96 head rows of integers. */
void revisit_project_short(const int16_t *states, long height, long width, const float *head, const int64_t *ids, long count,
                           int16_t *store, scale *scales, const int64_t *slots, int16_t *scratch, int threads, int plain)
{
    long pairs = (width + 1) / 2, long_row = (height + SHORT_BLOCK - 1) / SHORT_BLOCK * SHORT_BLOCK;
    long blocks = long_row / BESIDE;
    multiplier *multiply = products;
#ifdef __x86_64__
    if (!plain && __builtin_cpu_supports("avx2")) multiply = products_avx2;
#endif
    for (long start = 0; start < count; start += PANEL) { /* so many head rows stay in the second cache */
        long tokens = count - start < PANEL ? count - start : PANEL, groups = (tokens + TOGETHER - 1) / TOGETHER;
        long lines = pairs / groups + 1;
#pragma omp parallel num_threads(threads) if (blocks > 1)
        {
#pragma omp for schedule(static)
            for (long t = 0; t < tokens; t++) {
                if (t + 1 < tokens) fetch(head + ids[start + t + 1] * width, width);
                scales[slots[start + t]] = integers_of(head + ids[start + t] * width, width, scratch + t * pairs * 2, 2);
            }
#pragma omp for schedule(static)
            for (long b = 0; b < blocks; b++)
                for (long g = 0; g < groups; g++) {
                    int16_t *to[TOGETHER];
                    long some = tokens - g * TOGETHER < TOGETHER ? tokens - g * TOGETHER : TOGETHER;
                    for (long t = 0; t < some; t++) to[t] = store + slots[start + g * TOGETHER + t] * long_row + b * BESIDE;
                    multiply(states + b * pairs * 2 * BESIDE, scratch + g * TOGETHER * pairs * 2, pairs, some, to,
                             states + (b + 1) * pairs * 2 * BESIDE + g * lines * LINE, b + 1 < blocks ? lines : 0);
                }
        }
    }
}

/* -- the whole step ----------------------------------------------------------------------------------------------- */

/* One item with its settings, and a step of it; kernel.py has the same fields in the same order. */
typedef struct {
    const float *states, *head; /* (height, width), (vocabulary, width) */
    const int16_t *shorts;      /* the states as integers */
    const scale *scales;        /* of the states */
    int16_t *store;             /* (capacity, height up to a multiple of 32) */
    scale *column_scales;       /* of the head rows of the columns */
    int16_t *slot_of;
    int64_t *id_in, *used_at;
    uint8_t *uses;
    const float *logits; /* (vocabulary) */
    float *scores;       /* (vocabulary) for the result, -inf outside the plausible set; or none */
    int64_t *ids;        /* (capacity) for the plausible tokens */
    float *vectors;      /* (3, capacity) for ln P, ln Q and the result */
    float *divergences;  /* (height); only those of rows that could have been selected are exact */
    int64_t *integers;   /* (5 * capacity + 65) to work with; the first ones are left with the rows within rounding of the best */
    float *scratch;      /* (revisit_room) to work with */
    int64_t height, width, vocabulary, capacity, held, clock, credit;
    int64_t given; /* plausible tokens, if the caller has found them */
    double log_alpha;
    float weight, rounding;
    int32_t largest, normalize;
    int64_t count;     /* plausible tokens; 0 where it takes more than this: too many of them, one on the threshold, no usable row */
    int64_t row;       /* the selected one; -1 for a single plausible token, -2 if several are within rounding of the best */
    int64_t near;      /* how many are */
    int64_t projected; /* columns that were not there */
    int64_t exact;     /* rows computed in float32 */
    int64_t moved;     /* whether the favourite token is another than before */
} item;

enum { SOME = 64, EXACT = 1 << 15, WIDE = 256 }; /* most rows computed at once in float32, and their logits; tokens of a wide step */

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

/* The place of the largest number, the first of equals. */
static long favourite(const float *x, long count)
{
    long best = 0;
    for (long i = 1; i < count; i++) best = x[i] > x[best] ? i : best;
    return best;
}

/* Logits of some rows for up to three tokens, x[token * count + row]. */
FAST static void dots(const float *states, const float *const *heads, long tokens, long width, const int64_t *rows, long count,
                      float *x)
{
    const float *head[TOKENS];
    for (int t = 0; t < TOKENS; t++) head[t] = heads[t < tokens ? t : 0];
    for (long first = 0; first < count; first += ROWS) {
        const float *state[ROWS];
        f8 total[TOKENS][ROWS];
        for (int r = 0; r < ROWS; r++) {
            state[r] = states + rows[first + r < count ? first + r : first] * width;
            for (int t = 0; t < TOKENS; t++) total[t][r] = all(0);
        }
        for (long i = 0; i + 8 <= width; i += 8)
            for (int r = 0; r < ROWS; r++)
                for (int t = 0; t < TOKENS; t++) total[t][r] += load(state[r] + i) * load(head[t] + i);
        for (int t = 0; t < tokens; t++) {
            float sum[ROWS];
            sums(total[t][0], total[t][1], total[t][2], total[t][3], sum);
            for (int r = 0; r < ROWS && first + r < count; r++) {
                for (long i = width / 8 * 8; i < width; i++) sum[r] += state[r][i] * head[t][i];
                x[t * count + first + r] = sum[r];
            }
        }
    }
}

/* Where a step's integers are. */
INLINE int64_t *slots_of(const item *it) { return it->integers + SOME + 1; }
INLINE int64_t *missing_of(const item *it) { return slots_of(it) + it->capacity; }
INLINE int64_t *places_of(const item *it) { return missing_of(it) + it->capacity; }
INLINE int64_t *fresh_of(const item *it) { return places_of(it) + it->capacity; }

/* Numbers of scratch that a step needs, at most. */
long revisit_room(long capacity, long width, int threads)
{
    long heads = PANEL * ((width + 1) / 2), compared = (1 + threads * SHORT_BLOCK) * capacity;
    return (heads > compared ? heads : compared) + EXACT;
}

/* The plausible set and its columns' places. */
static void begin(item *it)
{
    float *log_p = it->vectors;
    it->row = -1;
    it->near = it->projected = it->exact = it->moved = 0;
    it->count = it->given;
    if (!it->given) it->count = revisit_plausible(it->logits, it->vocabulary, it->log_alpha, it->ids, it->capacity);
    if (it->count < 1) it->count = 0;
    for (long i = 0; i < it->count; i++) log_p[i] = it->logits[it->ids[i]];
    if (it->count) normalise(log_p, it->count);
    if (it->count < 2) return;
    it->projected = revisit_look_up(it->slot_of, it->used_at, it->uses, it->clock, it->ids, it->count, slots_of(it),
                                    missing_of(it), places_of(it));
    if (it->projected)
        revisit_enter(it->slot_of, it->id_in, it->used_at, it->uses, it->capacity, it->held, it->clock, it->credit,
                      missing_of(it), places_of(it), it->projected, slots_of(it), fresh_of(it), fresh_of(it) + it->capacity);
}

/* The divergences by the integers. */
static void rank(const item *it, int threads)
{
    if (it->projected)
        revisit_project_short(it->shorts, it->height, it->width, it->head, missing_of(it), it->projected, it->store,
                              it->column_scales, fresh_of(it), (int16_t *)it->scratch, threads, 0);
    revisit_divergences_short(it->store, it->scales, it->column_scales, it->height, slots_of(it), it->vectors, it->count,
                              it->scratch, it->divergences, threads);
}

/* The divergences of some rows, computed in float32 and put where those by the integers were; x: their logits. */
static void exactly(item *it, const int64_t *rows, long some, float *x, int threads)
{
    float found[SOME];
    long count = it->count;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && count * some > 64)
    for (long j = 0; j < count; j += TOKENS) {
        const float *heads[TOKENS];
        long tokens = count - j < TOKENS ? count - j : TOKENS;
        for (long t = 0; t < tokens; t++) heads[t] = it->head + it->ids[j + t] * it->width;
        for (long t = j + TOKENS; t < j + 2 * TOKENS && t < count; t++) fetch(it->head + it->ids[t] * it->width, it->width);
        dots(it->states, heads, tokens, it->width, rows, some, x + j * some);
    }
    revisit_divergences(x, some, places_of(it), it->vectors, count, it->scratch, found, some > BLOCK ? threads : 1);
    for (long r = 0; r < some; r++) it->divergences[rows[r]] = found[r];
    it->exact += some;
}

/* The selected row, compared in float32 with every row that could be as good. */
static void choose(item *it, int threads)
{
    int64_t *near = it->integers, *slots = slots_of(it), *places = places_of(it);
    float *x = it->scratch + revisit_room(it->capacity, it->width, threads) - EXACT, *log_q = it->vectors + it->capacity;
    float step = 0, length = 0, missed = 0, sign = it->largest ? -1.0f : 1.0f;
    long some = 0, most = EXACT / it->count < SOME ? EXACT / it->count : SOME;
    if (!revisit_nearest(it->divergences, it->height, it->largest, 1.0f, 0.0f, near, 1)) return;
    int64_t first = near[1];
    for (long i = 0; i < it->count; i++) {
        scale head = it->column_scales[slots[i]];
        step = head.step > step ? head.step : step;
        length = head.length + head.missed > length ? head.length + head.missed : length;
        missed = head.missed > missed ? head.missed : missed;
        places[i] = i;
    }
    exactly(it, &first, 1, log_q, threads);
    float least = sign * it->divergences[first];
    if (least != least) return;
    for (long row = 0; row <= it->height; row++) {
        if (row < it->height && row != first) {
            scale state = it->scales[row];
            float wrong = state.missed * length + state.length * missed + 32768 * state.step * step; /* a logit, at most */
            float doubt = ARITHMETIC + SENSITIVITY * (wrong + 3e-7f * state.length * length);
            if (sign * it->divergences[row] - doubt <= least + it->rounding * (1 + fabsf(least))) near[some++] = row;
        }
        if (some == most || (some && row == it->height)) {
            exactly(it, near, some, x, threads);
            for (long r = 0; r < some; r++) least = fminf(least, sign * it->divergences[near[r]]);
            some = 0;
        }
    }
    it->near = revisit_nearest(it->divergences, it->height, it->largest, 1.0f, it->rounding, near, SOME);
    it->row = it->near == 1 ? near[SOME] : -2;
    if (it->near == 1 && it->row != first) exactly(it, &it->row, 1, log_q, threads);
}

static void end(item *it, int threads)
{
    const float *log_p = it->vectors;
    float *log_q = it->vectors + it->capacity, *result = it->vectors + 2 * it->capacity;
    if (it->count > 1) {
        choose(it, threads);
        if (!it->near) it->count = 0;
        if (it->near != 1) return;
        normalise(log_q, it->count);
        for (long i = 0; i < it->count; i++) result[i] = it->weight != 0 ? log_p[i] + it->weight * log_q[i] : log_p[i];
        if (it->normalize) normalise(result, it->count);
        it->moved = favourite(log_p, it->count) != favourite(result, it->count);
    }
    if (!it->scores || !it->count) return;
    for (long i = 0; i < it->vocabulary; i++) it->scores[i] = -INFINITY;
    for (long i = 0; i < it->count; i++) it->scores[it->ids[i]] = it->count > 1 ? result[i] : log_p[i];
}

/* The usual step (Jensen-Shannon divergence, product of experts) of some items, no two of them the same. What is short is done by one
 * thread, several at a time, the rest by all threads together. */
void revisit_steps(item **items, long count, int threads)
{
    if (count == 1) { /* not as a loop of one: regions inside a region make threads anew */
        begin(*items);
        if (items[0]->count > 1) rank(*items, threads);
        end(*items, threads);
        return;
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long i = 0; i < count; i++) begin(items[i]);
    for (long i = 0; i < count; i++)
        if (items[i]->count > 1) rank(items[i], threads);
    for (long i = 0; i < count; i++)
        if (items[i]->count > WIDE) end(items[i], threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long i = 0; i < count; i++)
        if (items[i]->count <= WIDE) end(items[i], 1);
}
