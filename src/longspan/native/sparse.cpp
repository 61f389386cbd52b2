// Kernels of sparse attention in bfloat16: ratings of keys, and the merge of partial results.

#include <vector>

#include "tiles.h"

namespace {

using namespace longspan;

constexpr long kColumns = 64;  // keys per block

struct Rating {
    const uint16_t *q, *k;
    const float* lse;  // [heads][samples]
    const long* seen;  // [samples]: the number of keys that each sees, from the first on
    float* ratings;    // [kv_heads][keys]
    long heads, kv_heads, samples, keys, dim;
    long q_head, k_head, k_row;  // strides in numbers; the rows of q are dense
    float scale;
};

struct Partial {
    const uint16_t* out;
    const float* lse;
    long rows;                 // queries with results
    long head, row, lse_head;  // strides in numbers
    const int* places;         // [kv_heads][queries]: the row of each query, >= rows if it has none; null: its own
    long kv_heads;
};

struct Merge {
    const Partial* partials;
    uint16_t* out;
    float* lse;  // [heads][queries]
    long number, heads, queries, dim;
    long head, row;
};

// Packs keys [first, first + 64) as pairs of numbers, [dim / 2][64]. Keys from `keys` on are zeros.
void pack_keys(const uint16_t* k, long row, long first, long keys, long dim, uint32_t* packed) {
    for (long n = 0; n < kColumns; n += 16)
        for (long d = 0; d < dim / 2; d += 16) {
            __m512i block[16];
            for (long i = 0; i < 16; ++i) {
                const long key = first + n + i;
                block[i] = key < keys ? _mm512_loadu_si512(k + key * row + 2 * d) : _mm512_setzero_si512();
            }
            transpose(block);
            for (long i = 0; i < 16; ++i) _mm512_storeu_si512(packed + (d + i) * kColumns + n, block[i]);
        }
}

// Sums the attention that 64 keys of a KV head get from all samples of its query heads.
void rate_block(const Rating& p, long group, long first, uint32_t* packed) {
    const long readers = p.heads / p.kv_heads, pairs = p.dim / 2;
    uint32_t* rows = packed + kColumns * pairs;
    pack_keys(p.k + group * p.k_head, p.k_row, first, p.keys, p.dim, packed);
    __m512 sums[4] = {};
    alignas(64) float scores[kRows * kColumns];
    const __m512 factor = _mm512_set1_ps(p.scale * kLog2E);
    for (long head = group * readers; head < (group + 1) * readers; ++head)
        for (long start = 0; start < p.samples; start += kRows) {
            const long number = std::min(kRows, p.samples - start);
            if (*std::max_element(p.seen + start, p.seen + start + number) <= first) continue;
            std::memcpy(rows, p.q + head * p.q_head + start * p.dim, number * pairs * sizeof(uint32_t));
            for (long column = 0; column < kColumns; column += 2 * kTile)
                tiles<2>({rows, rows + kTile * pairs, pairs, kTile},
                         {packed + column, kColumns, kTile * kColumns, kTile}, pairs / kTile, scores + column, kColumns,
                         false);
            for (long r = 0; r < number; ++r) {
                const __m512 shift = _mm512_set1_ps(p.lse[head * p.samples + start + r] * kLog2E);
                for (long j = 0; j < 4; ++j) {
                    const __mmask16 visible = lanes(first + 16 * j, 0, p.seen[start + r]);
                    const __m512 score = _mm512_load_ps(scores + r * kColumns + 16 * j);
                    sums[j] =
                        _mm512_mask_add_ps(sums[j], visible, sums[j], exp2(_mm512_fmsub_ps(score, factor, shift)));
                }
            }
        }
    float* ratings = p.ratings + group * p.keys + first;
    for (long j = 0; j < 4; ++j) _mm512_mask_storeu_ps(ratings + 16 * j, lanes(first + 16 * j, 0, p.keys), sums[j]);
}

void merge_row(const Merge& p, long head, long query, float* weights, const uint16_t** rows) {
    float best = -kInfinity, sum = 0.0f;
    for (long i = 0; i < p.number; ++i) {
        const Partial& partial = p.partials[i];
        const long group = partial.places ? head / (p.heads / partial.kv_heads) : 0;
        const long place = partial.places ? partial.places[group * p.queries + query] : query;
        weights[i] = place < partial.rows ? partial.lse[head * partial.lse_head + place] : -kInfinity;
        rows[i] = partial.out + head * partial.head + place * partial.row;
        best = std::max(best, weights[i]);
    }
    for (long i = 0; i < p.number; ++i) {
        weights[i] = weights[i] == -kInfinity ? 0.0f : std::exp(weights[i] - best);
        sum += weights[i];
    }
    p.lse[head * p.queries + query] = sum > 0.0f ? best + std::log(sum) : -kInfinity;
    uint16_t* out = p.out + head * p.head + query * p.row;
    const float share = sum > 0.0f ? 1.0f / sum : 0.0f;
    for (long d = 0; d < p.dim; d += 16) {
        const __mmask16 inside = lanes(d, 0, p.dim);
        __m512 mean = _mm512_setzero_ps();
        for (long i = 0; i < p.number; ++i) {
            if (weights[i] == 0.0f) continue;
            const __m256i numbers = _mm256_maskz_loadu_epi16(inside, rows[i] + d);
            const __m512 values = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
            mean = _mm512_fmadd_ps(values, _mm512_set1_ps(weights[i] * share), mean);
        }
        _mm256_mask_storeu_epi16(out + d, inside, (__m256i)_mm512_cvtneps_pbh(mean));
    }
}

}  // namespace

// Returns 0, or 1 if there is no memory.
extern "C" int longspan_rate_bf16(const Rating* problem, int threads) {
    const Rating& p = *problem;
    const long blocks = (p.keys + kColumns - 1) / kColumns;
    const long size = (kColumns + kRows) * (p.dim / 2);
    thread_local Scratch scratch;
    uint32_t* packed = scratch.take(threads * size);
    if (!packed) return 1;
#pragma omp parallel num_threads(threads)
    {
        const TileRegisters registers;
#pragma omp for schedule(static, 1)
        for (long item = 0; item < p.kv_heads * blocks; ++item)
            rate_block(p, item / blocks, item % blocks * kColumns, packed + omp_get_thread_num() * size);
    }
    return 0;
}

extern "C" void longspan_merge_bf16(const Merge* problem, int threads) {
    const Merge& p = *problem;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> weights(p.number);
        std::vector<const uint16_t*> rows(p.number);
#pragma omp for schedule(static)
        for (long item = 0; item < p.heads * p.queries; ++item)
            merge_row(p, item / p.queries, item % p.queries, weights.data(), rows.data());
    }
}
