// Attention of query runs over keys at hand in bfloat16, for CPUs with AVX-512 and its bfloat16 products.
//
// FlashAttention (arXiv 2205.14135) in blocks of kRows queries and kKeys keys: scores and sums are float32, and only the
// weights of the second product are rounded to bfloat16, as in PyTorch's kernel. Keys and values are packed once per call
// such that both products run the micro-kernel of strips.h.

#include "strips.h"

namespace {

using namespace longspan;

constexpr long kRows = 48;      // queries per block
constexpr long kKeys = 256;     // keys per block
constexpr long kMaxDim = 256;   // largest head dimension

struct Problem {
    const uint16_t *q, *k, *v;
    uint16_t* out;
    float* lse;
    long heads, kv_heads, queries, keys, dim;
    long q_head, q_row, k_head, k_row, v_head, v_row;  // strides in numbers; the last dimension is dense
    float scale;
    long lower, upper;  // query i sees key j if i + lower <= j <= i + upper
    long dense;         // not 0: compute the scores of all queries with all keys, those that are not seen, too
    const int* kept;    // [kv_heads][keys]: which keys are meant, of more; null for all
};

struct Row {
    float best = -kInfinity;  // of the scores so far, times scale and log2(e)
    float sum = 0.0f;         // of their weights
};

// Weights of the visible scores [first, last) of a row, in bfloat16, zeros for the others of [from, to); what was summed
// before counts `returned` times as much from now on.
float weigh(const float* scores, uint16_t* weights, long from, long to, long first, long last, float factor, Row& row) {
    __m512 most = _mm512_set1_ps(-kInfinity);
    for (long j = first / 16 * 16; j < last; j += 16)
        most = _mm512_mask_max_ps(most, lanes(j, first, last), most, _mm512_loadu_ps(scores + j));
    const float best = std::max(row.best, _mm512_reduce_max_ps(most) * factor);
    const __m512 shift = _mm512_set1_ps(best), times = _mm512_set1_ps(factor);
    __m512 sum = _mm512_setzero_ps();
    for (long j = from; j < to; j += 16) {
        const __m512 power = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores + j), times, shift));
        const __m512 weight = _mm512_maskz_mov_ps(lanes(j, first, last), power);
        sum = _mm512_add_ps(sum, weight);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + j), (__m256i)_mm512_cvtneps_pbh(weight));
    }
    const float decay = row.sum > 0.0f ? std::exp2(row.best - best) : 0.0f;
    row.best = best;
    row.sum = row.sum * decay + _mm512_reduce_add_ps(sum);
    return decay;
}

void scale_row(float* row, long width, float factor) {
    const __m512 times = _mm512_set1_ps(factor);
    for (long d = 0; d < width; d += 16) _mm512_storeu_ps(row + d, _mm512_mul_ps(_mm512_loadu_ps(row + d), times));
}

struct Packed {
    Pairs keys;    // [kv_heads][keys / 64][dim / 2][64]: of each key, numbers d and d + 1
    Pairs values;  // [kv_heads][keys / 2][width]: of each dimension, tokens n and n + 1
    long padded;   // keys, rounded up to 64; the additional ones are zeros
    long width;    // dim, rounded up to 64
};

void pack(const Problem& p, Packed& packed, long block) {
    const long per_head = packed.padded / kColumns, head = block / per_head, first = block % per_head * kColumns;
    const uint16_t *k = p.k + head * p.k_head, *v = p.v + head * p.v_head;
    const int* rows = p.kept ? p.kept + head * p.keys : nullptr;
    pack_keys(k, p.k_row, rows, first, p.keys, p.dim, packed.keys.get() + (head * packed.padded + first) * (p.dim / 2));
    for (long n = first; n < first + kColumns; n += 2) {
        uint32_t* values = packed.values.get() + (head * packed.padded + n) / 2 * packed.width;
        const uint16_t* one = n < p.keys ? v + place(rows, n) * p.v_row : nullptr;
        const uint16_t* other = n + 1 < p.keys ? v + place(rows, n + 1) * p.v_row : nullptr;
        for (long d = 0; d < packed.width; ++d) {
            const bool inside = d < p.dim;
            values[d] = pair(inside && one ? one[d] : 0, inside && other ? other[d] : 0);
        }
    }
}

struct Scratch {
    alignas(64) float scores[kRows * kKeys];
    alignas(64) uint16_t weights[kRows * kKeys];
    alignas(64) float out[kRows * kMaxDim];
    alignas(64) uint32_t queries[kRows * kMaxDim / 2];
    Row rows[kRows];
};

// One block of keys [start, start + kKeys) for queries [query, query + rows).
void attend_block(const Problem& p, const Packed& packed, long group, long query, long rows, long start, Scratch& s) {
    const long stop = std::min(start + kKeys, p.keys);
    // Columns that any of the rows sees, or all, counted from `start` and in whole strips.
    const long from = p.dense ? 0 : std::max(0L, query + p.lower - start) / kColumns * kColumns;
    const long to = round_up((p.dense ? stop : std::min(stop, query + rows + p.upper)) - start, kColumns);
    if (from >= to) return;
    const uint32_t* keys = packed.keys.get() + (group * packed.padded + start) * (p.dim / 2);
    for (long column = from; column < to; column += kColumns)
        strips(rows, s.queries, p.dim / 2, keys + column * (p.dim / 2), kColumns, p.dim / 2, s.scores + column, kKeys,
               false);
    for (long r = 0; r < rows; ++r) {
        const long first = std::max(0L, query + r + p.lower - start);
        const long last = std::min(stop, query + r + p.upper + 1) - start;
        uint16_t* weights = s.weights + r * kKeys;
        if (first >= last) {
            std::fill(weights + from, weights + to, uint16_t{0});
            continue;
        }
        const float decay = weigh(s.scores + r * kKeys, weights, from, to, first, last, p.scale * kLog2E, s.rows[r]);
        if (decay != 1.0f) scale_row(s.out + r * packed.width, packed.width, decay);
    }
    const uint32_t* values = packed.values.get() + (group * packed.padded + start + from) / 2 * packed.width;
    const auto* weights = reinterpret_cast<const uint32_t*>(s.weights + from);
    for (long column = 0; column < packed.width; column += kColumns)
        strips(rows, weights, kKeys / 2, values + column, packed.width, (to - from) / 2, s.out + column, packed.width,
               true);
}

void finish(const Problem& p, const Packed& packed, long head, long query, long rows, const Scratch& s) {
    for (long r = 0; r < rows; ++r) {
        const Row& row = s.rows[r];
        const __m512 share = _mm512_set1_ps(row.sum > 0.0f ? 1.0f / row.sum : 0.0f);
        uint16_t* out = p.out + (head * p.queries + query + r) * p.dim;
        for (long d = 0; d < p.dim; d += 16) {
            const __m512 values = _mm512_mul_ps(_mm512_loadu_ps(s.out + r * packed.width + d), share);
            _mm256_mask_storeu_epi16(out + d, lanes(d, 0, p.dim), (__m256i)_mm512_cvtneps_pbh(values));
        }
        const float sum = row.best + std::log2(row.sum);
        p.lse[head * p.queries + query + r] = row.sum > 0.0f ? sum / kLog2E : -kInfinity;
    }
}

void attend_rows(const Problem& p, const Packed& packed, long head, long query, Scratch& s) {
    const long rows = std::min(kRows, p.queries - query), group = head / (p.heads / p.kv_heads);
    for (long r = 0; r < rows; ++r) {
        s.rows[r] = Row();
        const uint16_t* row = p.q + head * p.q_head + (query + r) * p.q_row;
        for (long d = 0; d < p.dim / 2; ++d) s.queries[r * (p.dim / 2) + d] = pair(row[2 * d], row[2 * d + 1]);
    }
    std::fill(s.out, s.out + rows * packed.width, 0.0f);
    const long first = p.dense ? 0 : std::max(0L, query + p.lower) / kKeys * kKeys;
    const long last = p.dense ? p.keys : std::min(p.keys, query + rows + p.upper);
    for (long start = first; start < last; start += kKeys) attend_block(p, packed, group, query, rows, start, s);
    finish(p, packed, head, query, rows, s);
}

}  // namespace

// Returns 0, or 1 when there is no memory.
extern "C" int longspan_attend_bf16(const Problem* problem, int threads) {
    const Problem& p = *problem;
    Packed packed{nullptr, nullptr, round_up(p.keys, kColumns), round_up(p.dim, kColumns)};
    packed.keys = allocate(p.kv_heads * packed.padded * (p.dim / 2));
    packed.values = allocate(p.kv_heads * packed.padded / 2 * packed.width);
    if (!packed.keys || !packed.values) return 1;
    const long pieces = p.kv_heads * (packed.padded / kColumns);
    const long blocks = (p.queries + kRows - 1) / kRows;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long block = 0; block < pieces; ++block) pack(p, packed, block);
        Scratch scratch;
        // The last rows, which see most keys, first: so the threads end together.
#pragma omp for schedule(dynamic)
        for (long item = 0; item < p.heads * blocks; ++item)
            attend_rows(p, packed, item % p.heads, (blocks - 1 - item / p.heads) * kRows, scratch);
    }
    return 0;
}
