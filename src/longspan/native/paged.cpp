// Attention of single queries over bfloat16 KV in blocks, for CPUs with AVX-512 and its bfloat16 products.
//
// An item is one query and one block that it sees. Items and groups of heads that share keys are computed in parallel,
// then joined per query and head. Memory bandwidth is the bottleneck, so keys and values are read once, in order.

#include "kernels.h"
#include "tiles.h"

namespace longspan {

struct Paged {
    const uint16_t *q, *keys, *values;                // keys and values: [blocks][kv_heads][block_size][dim]
    uint16_t* out;
    float* lse;                                       // [heads][queries]; null if not needed
    const int64_t *first_item, *blocks, *low, *high;  // items of query t: [first_item[t], first_item[t + 1])
    long queries, heads, kv_heads, dim, block_size;
    long q_head, q_row, out_head, out_row;  // strides in numbers
    float scale;
};

struct Store {
    const uint16_t *k, *v;
    uint16_t *keys, *values;  // [blocks][kv_heads][block_size][dim]
    const int64_t *blocks, *offsets;
    long tokens, kv_heads, dim, block_size;
    long k_head, k_row, v_head, v_row;  // strides in numbers
};

namespace {

constexpr long kMaxDim = 256;
constexpr long kMaxSlots = 256;  // scores that are computed at once

// Sums of one head over some tokens. A weight is 2^(score - best), with scores times scale and log2(e).
struct Partial {
    float best, sum;
};
constexpr long kPartial = sizeof(Partial) / sizeof(uint32_t);

// The working memory of a thread for the heads that it computes.
struct Block {
    alignas(64) uint32_t queries[kMaxDim / 2 * kTile];
    alignas(64) float weights[kMaxSlots * kTile];  // [slots][W]; scores at first
    alignas(64) uint16_t last[kRows * kMaxDim];    // the last keys, if fewer than kRows
};

// Heads are W columns, padded with zeros: a whole tile, or fewer columns if products without tiles are faster. Then 16
// numbers belong to several slots.
constexpr bool by_dots(long width) { return width <= kMaxDots; }

template <int W>
void pack_heads(const uint16_t* q, long q_head, long number, long dim, uint32_t* packed) {
    for (long d = 0; d < dim; d += 32) {
        __m512i block[kTile];
        for (long h = 0; h < W; ++h)
            block[h] = h < number ? _mm512_loadu_si512(q + h * q_head + d) : _mm512_setzero_si512();
        if constexpr (by_dots(W)) {
            for (long h = 0; h < W; ++h) _mm512_store_si512(packed + (h * dim + d) / 2, block[h]);
        } else {
            transpose(block);
            for (long i = 0; i < kTile; ++i) _mm512_store_si512(packed + (d / 2 + i) * kTile, block[i]);
        }
    }
}

// Scores of the heads for some keys. Prefetches the values of these keys.
template <int W>
void multiply(const uint16_t* keys, const uint16_t* values, long slots, long dim, Block& b) {
    for (long n = 0; n < slots; n += kRows) {
        const uint16_t* rows = keys + n * dim;
        if (n + kRows > slots) {
            std::memcpy(b.last, rows, (slots - n) * dim * sizeof(uint16_t));
            rows = b.last;
        }
        if constexpr (by_dots(W)) {
            const auto row_of = [=](long row) {
                return [here = rows + row * dim, value = values + (n + row) * dim](long step) {
                    _mm_prefetch(value + 32 * step, _MM_HINT_T1);
                    return _mm512_loadu_si512(here + 32 * step);
                };
            };
            dots<W>(row_of, b.queries, dim / 32, b.weights + n * W, W);
        } else {
            const auto* a = reinterpret_cast<const uint32_t*>(rows);
            for (long i = n * dim; i < std::min(n + kRows, slots) * dim; i += 32)
                _mm_prefetch(values + i, _MM_HINT_T1);
            tiles<1>({a, a + kTile * dim / 2, dim / 2, kTile}, {b.queries, kTile, kTile * kTile, 0}, dim / 32,
                     b.weights + n * kTile, kTile, false);
        }
    }
}

// Combines the numbers of each head, which are W apart. All numbers of a head become the result.
template <int W, typename Combine>
__m512 over_slots(__m512 numbers, const Combine& combine) {
    if constexpr (W <= 8) numbers = combine(numbers, _mm512_shuffle_f32x4(numbers, numbers, 0x4e));
    if constexpr (W <= 4) numbers = combine(numbers, _mm512_shuffle_f32x4(numbers, numbers, 0xb1));
    return numbers;
}

// The keys of a block that one KV head reads. The keys that a thread reads next are prefetched.
struct Keys {
    const uint16_t* first = nullptr;
    long slots = 0;
};

// out[H][dim] += the weighted sum of values.
template <int H, int W>
void add_values(const float* weights, const uint16_t* values, long slots, long dim, const Keys& next, float* out) {
    for (long d = 0; d < dim; d += 32) {
        __m512 sum[H][2];
        for (int h = 0; h < H; ++h)
            for (int i = 0; i < 2; ++i) sum[h][i] = _mm512_loadu_ps(out + h * dim + d + 16 * i);
        for (long n = 0; n < slots; ++n) {
            if (n < next.slots) _mm_prefetch(next.first + n * dim + d, _MM_HINT_T1);
            const __m512 low = widen(values + n * dim + d), high = widen(values + n * dim + d + 16);
            for (int h = 0; h < H; ++h) {
                const __m512 weight = _mm512_set1_ps(weights[n * W + h]);
                sum[h][0] = _mm512_fmadd_ps(weight, low, sum[h][0]);
                sum[h][1] = _mm512_fmadd_ps(weight, high, sum[h][1]);
            }
        }
        for (int h = 0; h < H; ++h)
            for (int i = 0; i < 2; ++i) _mm512_storeu_ps(out + h * dim + d + 16 * i, sum[h][i]);
    }
}

template <int W>
void add_values(long number, const float* weights, const uint16_t* values, long slots, long dim, const Keys& next,
                float* out) {
    for (; number >= 4; number -= 4, weights += 4, out += 4 * dim)
        add_values<4, W>(weights, values, slots, dim, next, out);
    switch (number) {
        case 3:
            return add_values<3, W>(weights, values, slots, dim, next, out);
        case 2:
            return add_values<2, W>(weights, values, slots, dim, next, out);
        case 1:
            return add_values<1, W>(weights, values, slots, dim, next, out);
        default:
            return;
    }
}

Keys keys_of(const Paged& p, long item, long group) {
    const long place = ((p.blocks[item] * p.kv_heads + group) * p.block_size + p.low[item]) * p.dim;
    return {p.keys + place, p.high[item] - p.low[item]};
}

// Attends up to W heads that share keys to one block. `outs` are sums of values, weighted as in `partials`.
template <int W>
void attend_heads(const Paged& p, long query, long item, long group, long head, long number, const Keys& next,
                  Partial* partials, float* outs, Block& b) {
    constexpr long kSlots = kTile / W;  // slots of 16 numbers
    pack_heads<W>(p.q + head * p.q_head + query * p.q_row, p.q_head, number, p.dim, b.queries);
    std::fill(outs, outs + number * p.dim, 0.0f);
    const __m512 factor = _mm512_set1_ps(p.scale * kLog2E);
    __m512 best = _mm512_set1_ps(kLowest), sum = _mm512_setzero_ps();
    for (long slot = p.low[item]; slot < p.high[item]; slot += kMaxSlots) {
        const long slots = std::min(kMaxSlots, p.high[item] - slot);
        const long place = ((p.blocks[item] * p.kv_heads + group) * p.block_size + slot) * p.dim;
        multiply<W>(p.keys + place, p.values + place, slots, p.dim, b);
        std::fill(b.weights + slots * W, b.weights + round_up(slots * W, kTile), -kInfinity);
        const __m512 before = best;
        for (long n = 0; n < slots; n += kSlots)
            best = _mm512_max_ps(best, _mm512_mul_ps(_mm512_load_ps(b.weights + n * W), factor));
        best = over_slots<W>(best, [](__m512 one, __m512 other) { return _mm512_max_ps(one, other); });
        alignas(64) float decay[kTile];
        _mm512_store_ps(decay, exp2(_mm512_sub_ps(before, best)));
        sum = _mm512_mul_ps(sum, _mm512_load_ps(decay));
        for (long h = 0; h < (slot > p.low[item] ? number : 0); ++h)
            for (long d = 0; d < p.dim; ++d) outs[h * p.dim + d] *= decay[h];
        for (long n = 0; n < slots; n += kSlots) {
            const __m512 weight = exp2(_mm512_fmsub_ps(_mm512_load_ps(b.weights + n * W), factor, best));
            _mm512_store_ps(b.weights + n * W, weight);
            sum = _mm512_add_ps(sum, weight);
        }
        add_values<W>(number, b.weights, p.values + place, slots, p.dim, next, outs);
    }
    sum = over_slots<W>(sum, [](__m512 one, __m512 other) { return _mm512_add_ps(one, other); });
    alignas(64) float bests[kTile], sums[kTile];
    _mm512_store_ps(bests, best);
    _mm512_store_ps(sums, sum);
    for (long h = 0; h < number; ++h) partials[h] = {bests[h], sums[h]};
}

void attend_item(const Paged& p, long query, long item, long group, const Keys& next, Partial* partials, float* outs,
                 Block& b) {
    const long heads = p.heads / p.kv_heads;
    const auto attend = heads <= 4 && by_dots(4)   ? attend_heads<4>
                        : heads <= 8 && by_dots(8) ? attend_heads<8>
                                                   : attend_heads<kTile>;
    for (long first = 0; first < heads; first += kTile) {
        const long head = group * heads + first, row = item * p.heads + head;
        attend(p, query, item, group, head, std::min(kTile, heads - first), next, partials + row, outs + row * p.dim,
               b);
    }
}

void join(const Paged& p, long query, long head, const Partial* partials, const float* outs) {
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
    uint16_t* out = p.out + head * p.out_head + query * p.out_row;
    for (long d = 0; d < p.dim; d += 16) {
        const __m512 values = _mm512_mul_ps(_mm512_load_ps(total + d), share);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d), (__m256i)_mm512_cvtneps_pbh(values));
    }
    if (p.lse) p.lse[head * p.queries + query] = sum > 0.0f ? (best + std::log2(sum)) / kLog2E : -kInfinity;
}

}  // namespace

long scratch_size(const Paged& p) { return p.first_item[p.queries] * p.heads * (kPartial + p.dim); }

void run(const Paged& p, uint32_t* memory) {
    const long items = p.first_item[p.queries], units = items * p.kv_heads, step = omp_get_num_threads();
    auto* partials = reinterpret_cast<Partial*>(memory);
    auto* outs = reinterpret_cast<float*>(memory + items * p.heads * kPartial);
    static thread_local Block block;
    long query = 0;
#pragma omp for schedule(static, 1)
    for (long unit = 0; unit < units; ++unit) {
        const long item = unit / p.kv_heads, after = unit + step;
        while (p.first_item[query + 1] <= item) ++query;
        const Keys next = after < units ? keys_of(p, after / p.kv_heads, after % p.kv_heads) : Keys();
        attend_item(p, query, item, unit % p.kv_heads, next, partials, outs, block);
    }
#pragma omp for schedule(static)
    for (long unit = 0; unit < p.queries * p.heads; ++unit)
        join(p, unit / p.heads, unit % p.heads, partials, outs);
}

void run(const Store& p) {
#pragma omp for schedule(static)
    for (long token = 0; token < p.tokens; ++token)
        for (long head = 0; head < p.kv_heads; ++head) {
            const long place = ((p.blocks[token] * p.kv_heads + head) * p.block_size + p.offsets[token]) * p.dim;
            std::memcpy(p.keys + place, p.k + head * p.k_head + token * p.k_row, p.dim * sizeof(uint16_t));
            std::memcpy(p.values + place, p.v + head * p.v_head + token * p.v_row, p.dim * sizeof(uint16_t));
        }
}

}  // namespace longspan
