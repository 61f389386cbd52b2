// Attention of single queries over bfloat16 KV that lies in blocks, for CPUs with AVX-512 and its bfloat16 products.
//
// An item is one query and one block that it sees. Items and groups of heads that share keys are computed in parallel,
// then joined per query and head. What counts here is that keys and values are read once, as they come from memory.

#include <memory>
#include <new>

#include "simd.h"

namespace {

using namespace longspan;

constexpr long kMaxDim = 256;
constexpr long kMaxSlots = 1024;  // scores that are held at once

struct Problem {
    const uint16_t *q, *keys, *values;                // keys and values: [blocks][kv_heads][block_size][dim]
    uint16_t* out;                                    // [heads][queries][dim]
    float* lse;                                       // [heads][queries]
    const int64_t *first_item, *blocks, *low, *high;  // items of query t: [first_item[t], first_item[t + 1])
    long queries, heads, kv_heads, dim, block_size;
    long q_head, q_row;  // strides in numbers
    float scale;
};

struct Store {
    const uint16_t *k, *v;
    uint16_t *keys, *values;  // [blocks][kv_heads][block_size][dim]
    const int64_t *blocks, *offsets;
    long tokens, kv_heads, dim, block_size;
    long k_head, k_row, v_head, v_row;  // strides in numbers
};

// Sums of one head over some tokens: weights are 2 to the power of (score - best), scores times scale and log2(e).
struct Partial {
    float best = -kInfinity, sum = 0.0f;
};

float dot(const __m512i* query, const uint16_t* key, long chunks) {
    __m512 sum = _mm512_setzero_ps();
    for (long c = 0; c < chunks; ++c)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)query[c], (__m512bh)_mm512_loadu_si512(key + 32 * c));
    return _mm512_reduce_add_ps(sum);
}

void add_values(const float* weights, const uint16_t* values, long slots, long dim, float* out) {
    for (long d = 0; d < dim; d += 32) {
        __m512 low = _mm512_loadu_ps(out + d), high = _mm512_loadu_ps(out + d + 16);
        for (long n = 0; n < slots; ++n) {
            const __m512 weight = _mm512_set1_ps(weights[n]);
            low = _mm512_fmadd_ps(weight, widen(values + n * dim + d), low);
            high = _mm512_fmadd_ps(weight, widen(values + n * dim + d + 16), high);
        }
        _mm512_storeu_ps(out + d, low);
        _mm512_storeu_ps(out + d + 16, high);
    }
}

// One head over up to kMaxSlots tokens; `out` is made to count as `partial` says.
void attend_slots(const uint16_t* q, const uint16_t* keys, const uint16_t* values, long slots, long dim, float factor,
                  Partial& partial, float* out) {
    alignas(64) float weights[kMaxSlots];
    __m512i query[kMaxDim / 32];
    for (long c = 0; c < dim / 32; ++c) query[c] = _mm512_loadu_si512(q + 32 * c);
    float best = partial.best;
    for (long n = 0; n < slots; ++n) {
        weights[n] = dot(query, keys + n * dim, dim / 32) * factor;
        best = std::max(best, weights[n]);
    }
    __m512 sum = _mm512_setzero_ps();
    for (long n = 0; n < slots; n += 16) {
        const __mmask16 inside = lanes(n, 0, slots);
        const __m512 score = _mm512_maskz_loadu_ps(inside, weights + n);
        const __m512 weight = _mm512_maskz_mov_ps(inside, exp2(_mm512_sub_ps(score, _mm512_set1_ps(best))));
        _mm512_mask_storeu_ps(weights + n, inside, weight);
        sum = _mm512_add_ps(sum, weight);
    }
    if (partial.sum > 0.0f && best > partial.best) {
        const float decay = std::exp2(partial.best - best);
        partial.sum *= decay;
        for (long d = 0; d < dim; ++d) out[d] *= decay;
    }
    partial.best = best;
    partial.sum += _mm512_reduce_add_ps(sum);
    add_values(weights, values, slots, dim, out);
}

void attend_item(const Problem& p, long query, long item, long group, Partial* partials, float* outs) {
    const long heads = p.heads / p.kv_heads, begin = (p.blocks[item] * p.kv_heads + group) * p.block_size * p.dim;
    for (long h = 0; h < heads; ++h) {
        const long head = group * heads + h;
        float* out = outs + (item * p.heads + head) * p.dim;
        Partial& partial = partials[item * p.heads + head];
        partial = Partial();
        std::fill(out, out + p.dim, 0.0f);
        for (long slot = p.low[item]; slot < p.high[item]; slot += kMaxSlots) {
            const long slots = std::min(kMaxSlots, p.high[item] - slot), place = begin + slot * p.dim;
            attend_slots(p.q + head * p.q_head + query * p.q_row, p.keys + place, p.values + place, slots, p.dim,
                         p.scale * kLog2E, partial, out);
        }
    }
}

void join(const Problem& p, long query, long head, const Partial* partials, const float* outs) {
    alignas(64) float total[kMaxDim] = {};
    const long first = p.first_item[query], last = p.first_item[query + 1];
    float best = -kInfinity, sum = 0.0f;
    for (long item = first; item < last; ++item) best = std::max(best, partials[item * p.heads + head].best);
    for (long item = first; item < last; ++item) {
        const Partial& partial = partials[item * p.heads + head];
        const float share = std::exp2(partial.best - best);
        const float* out = outs + (item * p.heads + head) * p.dim;
        sum += partial.sum * share;
        for (long d = 0; d < p.dim; ++d) total[d] += out[d] * share;
    }
    const __m512 share = _mm512_set1_ps(sum > 0.0f ? 1.0f / sum : 0.0f);
    uint16_t* out = p.out + (head * p.queries + query) * p.dim;
    for (long d = 0; d < p.dim; d += 16) {
        const __m512 values = _mm512_mul_ps(_mm512_load_ps(total + d), share);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d), (__m256i)_mm512_cvtneps_pbh(values));
    }
    p.lse[head * p.queries + query] = sum > 0.0f ? (best + std::log2(sum)) / kLog2E : -kInfinity;
}

}  // namespace

// Returns 0, or 1 when there is no memory.
extern "C" int longspan_attend_paged_bf16(const Problem* problem, int threads) {
    const Problem& p = *problem;
    const long items = p.first_item[p.queries];
    std::unique_ptr<Partial[]> partials(new (std::nothrow) Partial[items * p.heads + 1]);
    std::unique_ptr<float[]> outs(new (std::nothrow) float[items * p.heads * p.dim + 1]);
    std::unique_ptr<int64_t[]> owner(new (std::nothrow) int64_t[items + 1]);
    if (!partials || !outs || !owner) return 1;
    for (long query = 0; query < p.queries; ++query)
        std::fill(owner.get() + p.first_item[query], owner.get() + p.first_item[query + 1], query);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (long unit = 0; unit < items * p.kv_heads; ++unit) {
            const long item = unit / p.kv_heads;
            attend_item(p, owner[item], item, unit % p.kv_heads, partials.get(), outs.get());
        }
#pragma omp for schedule(static)
        for (long unit = 0; unit < p.queries * p.heads; ++unit)
            join(p, unit / p.heads, unit % p.heads, partials.get(), outs.get());
    }
    return 0;
}

extern "C" void longspan_store_bf16(const Store* problem, int threads) {
    const Store& p = *problem;
#pragma omp parallel for num_threads(threads) schedule(static) if (p.tokens > 64)
    for (long token = 0; token < p.tokens; ++token)
        for (long head = 0; head < p.kv_heads; ++head) {
            const long place = ((p.blocks[token] * p.kv_heads + head) * p.block_size + p.offsets[token]) * p.dim;
            std::memcpy(p.keys + place, p.k + head * p.k_head + token * p.k_row, p.dim * sizeof(uint16_t));
            std::memcpy(p.values + place, p.v + head * p.v_head + token * p.v_row, p.dim * sizeof(uint16_t));
        }
}
