// What sparse attention needs beside attention, in bfloat16: ratings of keys, and the merge of partial results.

#include <vector>

#include "strips.h"

namespace {

using namespace longspan;

struct Rating {
    const uint16_t *q, *k;
    const float* lse;   // [heads][samples]
    const long* seen;   // [samples]: each sees so many keys from the first on
    float* ratings;     // [kv_heads][keys]
    long heads, kv_heads, samples, keys, dim;
    long q_head, k_head, k_row;  // strides in numbers; the rows of q are dense
    float scale;
};

struct Partial {
    const uint16_t* out;
    const float* lse;
    long rows;                 // queries that it has results of
    long head, row, lse_head;  // strides in numbers
    const int* places;         // [kv_heads][queries]: the row of each query, which may be none of these; null: its own
    long kv_heads;
};

struct Merge {
    const Partial* partials;
    uint16_t* out;
    float* lse;  // [heads][queries]
    long number, heads, queries, dim;
    long head, row;
};

// The attention that 64 keys of a KV head get from all samples of its query heads.
void rate_block(const Rating& p, long group, long first, uint32_t* packed) {
    const long readers = p.heads / p.kv_heads;
    pack_keys(p.k + group * p.k_head, p.k_row, nullptr, first, p.keys, p.dim, packed);
    __m512 sums[4] = {};
    alignas(64) float scores[kStrip * kColumns];
    const __m512 factor = _mm512_set1_ps(p.scale * kLog2E);
    for (long head = group * readers; head < (group + 1) * readers; ++head)
        for (long start = 0; start < p.samples; start += kStrip) {
            const long rows = std::min(kStrip, p.samples - start);
            if (*std::max_element(p.seen + start, p.seen + start + rows) <= first) continue;
            const auto* a = reinterpret_cast<const uint32_t*>(p.q + head * p.q_head + start * p.dim);
            strips(rows, a, p.dim / 2, packed, kColumns, p.dim / 2, scores, kColumns, false);
            for (long r = 0; r < rows; ++r) {
                const __m512 shift = _mm512_set1_ps(p.lse[head * p.samples + start + r] * kLog2E);
                for (long j = 0; j < 4; ++j) {
                    const __mmask16 visible = lanes(first + 16 * j, 0, p.seen[start + r]);
                    const __m512 score = _mm512_load_ps(scores + r * kColumns + 16 * j);
                    sums[j] = _mm512_mask_add_ps(sums[j], visible, sums[j], exp2(_mm512_fmsub_ps(score, factor, shift)));
                }
            }
        }
    float* ratings = p.ratings + group * p.keys + first;
    for (long j = 0; j < 4; ++j)
        _mm512_mask_storeu_ps(ratings + 16 * j, lanes(first + 16 * j, 0, p.keys), sums[j]);
}

void merge_row(const Merge& p, long head, long query, float* weights, const uint16_t** rows) {
    float most = -kInfinity, sum = 0.0f;
    for (long i = 0; i < p.number; ++i) {
        const Partial& one = p.partials[i];
        const long group = one.places ? head / (p.heads / one.kv_heads) : 0;
        const long place = one.places ? one.places[group * p.queries + query] : query;
        weights[i] = place < one.rows ? one.lse[head * one.lse_head + place] : -kInfinity;
        rows[i] = one.out + head * one.head + place * one.row;
        most = std::max(most, weights[i]);
    }
    for (long i = 0; i < p.number; ++i) {
        weights[i] = weights[i] == -kInfinity ? 0.0f : std::exp(weights[i] - most);
        sum += weights[i];
    }
    p.lse[head * p.queries + query] = sum > 0.0f ? most + std::log(sum) : -kInfinity;
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

// Returns 0, or 1 when there is no memory.
extern "C" int longspan_rate_bf16(const Rating* problem, int threads) {
    const Rating& p = *problem;
    const long blocks = (p.keys + kColumns - 1) / kColumns;
    const long size = round_up(kColumns * (p.dim / 2), 16);
    const Pairs packed = allocate(threads * size);
    if (!packed) return 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (long worker = 0; worker < threads; ++worker)
        for (long item = worker; item < p.kv_heads * blocks; item += threads)
            rate_block(p, item / blocks, item % blocks * kColumns, packed.get() + worker * size);
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
