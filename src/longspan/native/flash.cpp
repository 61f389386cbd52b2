// Attention of query runs over local keys in bfloat16, for CPUs with AVX-512 and its bfloat16 products.
//
// FlashAttention (arXiv 2205.14135) in blocks of kQueries queries and kKeys keys. Scores and sums are float32, and only
// the weights of the second product are rounded to bfloat16, as in PyTorch's kernel. Both products are computed
// transposed, with a column per query. So keys need no packing, the softmax runs down the columns, 16 queries at once,
// and its weights have the layout of the second product. Values are packed once per call.

#include "tiles.h"

namespace {

using namespace longspan;

constexpr long kQueries = 64;  // per block
constexpr long kKeys = 256;    // per block
constexpr long kMaxDim = 256;  // largest head dimension

struct Problem {
    const uint16_t *q, *k, *v;
    uint16_t* out;
    float* lse;
    long heads, kv_heads, queries, keys, dim;
    long q_head, q_row, k_head, k_row, v_head, v_row, out_head, out_row;  // strides in numbers; the last is 1
    float scale;
    long lower, upper;  // query i sees key j if i + lower <= j <= i + upper
    long dense;         // not 0: compute the scores of all queries with all keys, hidden ones included
    const int* kept;    // [kv_heads][keys]: indices of the selected keys; null for all
};

// Keys and values of all KV heads, in whole blocks of keys, padded with zeros.
struct Packed {
    uint16_t* keys;    // [kv_heads][padded][dim], or only the last block, if the other keys are not copied
    uint32_t* values;  // [kv_heads][padded / 32][dim / 16][16 numbers][16 pairs of keys]
    long padded;
};

// The index of a key in memory. `rows` are the selected keys, if not all.
long place(const int* rows, long n) { return rows ? rows[n] : n; }

bool copies_keys(const Problem& p) { return p.kept != nullptr; }

const uint16_t* key_block(const Problem& p, const Packed& packed, long group, long start, long& row) {
    const bool is_last = start + kKeys > p.keys;
    row = copies_keys(p) || is_last ? p.dim : p.k_row;
    if (copies_keys(p)) return packed.keys + (group * packed.padded + start) * p.dim;
    return is_last ? packed.keys + group * kKeys * p.dim : p.k + group * p.k_head + start * p.k_row;
}

// Packs a block of keys and values of a KV head.
void pack(const Problem& p, const Packed& packed, long group, long start) {
    const int* rows = p.kept ? p.kept + group * p.keys : nullptr;
    long row;
    const uint16_t* keys = key_block(p, packed, group, start, row);
    if (copies_keys(p) || start + kKeys > p.keys)
        for (long n = 0; n < kKeys; ++n)
            for (long d = 0; d < p.dim; d += 32) {
                const uint16_t* key = p.k + group * p.k_head + place(rows, std::min(start + n, p.keys - 1)) * p.k_row;
                const __mmask16 inside = start + n < p.keys ? 0xffff : 0;
                _mm512_storeu_si512(const_cast<uint16_t*>(keys) + n * p.dim + d,
                                    _mm512_maskz_loadu_epi32(inside, key + d));
            }
    uint32_t* values = packed.values + (group * packed.padded + start) / 2 * p.dim;
    for (long n = start; n < start + kKeys; n += 32)
        for (long d = 0; d < p.dim; d += kTile, values += kTile * kTile) {
            __m512i block[kTile];
            for (long i = 0; i < kTile; ++i) {
                __m512i two[2];
                for (long j = 0; j < 2; ++j) {
                    const long key = n + 2 * i + j;
                    const uint16_t* value =
                        p.v + group * p.v_head + place(rows, std::min(key, p.keys - 1)) * p.v_row + d;
                    two[j] = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(key < p.keys ? 0xffff : 0, value));
                }
                block[i] = _mm512_or_si512(two[0], _mm512_slli_epi32(two[1], 16));
            }
            transpose(block);
            for (long i = 0; i < kTile; ++i) _mm512_storeu_si512(values + i * kTile, block[i]);
        }
}

// The working memory of a thread for its queries, which are columns.
struct Block {
    alignas(64) uint32_t queries[kMaxDim / 2 * kQueries];
    alignas(64) float scores[kKeys * kQueries];
    alignas(64) uint32_t weights[kKeys / 2 * kQueries];  // in pairs of keys
    alignas(64) float out[kMaxDim * kQueries];
    alignas(64) float best[kQueries];  // of the scores so far, times scale and log2(e)
    alignas(64) float sum[kQueries];   // of their weights
};

// Hides the scores of keys [from, to) of a block from queries that do not see them.
void hide(const Problem& p, long query, long start, long from, long to, Block& b) {
    for (long n = from; n < to; ++n) {
        const long key = start + n;
        for (long column = 0; column < kQueries; column += 16) {
            const __mmask16 seen = key < p.keys ? lanes(query + column, key - p.upper, key - p.lower + 1) : 0;
            float* scores = b.scores + n * kQueries + column;
            _mm512_store_ps(scores, _mm512_mask_mov_ps(_mm512_set1_ps(-kInfinity), seen, _mm512_load_ps(scores)));
        }
    }
}

// Turns the scores of keys [from, to) into weights, in 16 * C columns. Earlier sums are scaled down if `best` grows.
template <int C>
void weigh(const Problem& p, long from, long to, Block& b) {
    const __m512 factor = _mm512_set1_ps(p.scale * kLog2E);
    __m512 best[C], sum[C];
    for (int c = 0; c < C; ++c) best[c] = _mm512_set1_ps(-kInfinity);
    for (long n = from; n < to; ++n)
        for (int c = 0; c < C; ++c) best[c] = _mm512_max_ps(best[c], _mm512_load_ps(b.scores + n * kQueries + 16 * c));
    for (int c = 0; c < C; ++c) {
        const __m512 before = _mm512_load_ps(b.best + 16 * c);
        best[c] = _mm512_max_ps(before, _mm512_mul_ps(best[c], factor));
        const __m512 decay = exp2(_mm512_sub_ps(before, best[c]));
        _mm512_store_ps(b.best + 16 * c, best[c]);
        sum[c] = _mm512_mul_ps(_mm512_load_ps(b.sum + 16 * c), decay);
        if (!_mm512_cmp_ps_mask(before, best[c], _CMP_LT_OQ)) continue;
        for (long d = 0; d < p.dim; ++d) {
            float* out = b.out + d * kQueries + 16 * c;
            _mm512_store_ps(out, _mm512_mul_ps(_mm512_load_ps(out), decay));
        }
    }
    for (long n = from; n < to; n += 2)
        for (int c = 0; c < C; ++c) {
            const float* scores = b.scores + n * kQueries + 16 * c;
            const __m512 even = exp2(_mm512_fmsub_ps(_mm512_load_ps(scores), factor, best[c]));
            const __m512 odd = exp2(_mm512_fmsub_ps(_mm512_load_ps(scores + kQueries), factor, best[c]));
            sum[c] = _mm512_add_ps(sum[c], _mm512_add_ps(even, odd));
            _mm512_store_si512(b.weights + n / 2 * kQueries + 16 * c, pairs(even, odd));
        }
    for (int c = 0; c < C; ++c) _mm512_store_ps(b.sum + 16 * c, sum[c]);
}

// One block of keys [start, start + kKeys) for queries [query, query + number).
void attend_block(const Problem& p, const Packed& packed, long group, long query, long number, long start, Block& b) {
    // Keys that any of the queries sees, or all with `dense`, counted from `start` and in whole tiles.
    const long first = p.dense ? 0 : std::max(0L, query + p.lower - start);
    const long last = p.dense ? p.keys - start : std::min(p.keys, query + number + p.upper) - start;
    const long from = first / kRows * kRows, to = round_up(std::min(last, kKeys), kRows);
    if (from >= to) return;
    long row;
    const uint16_t* keys = key_block(p, packed, group, start, row);
    for (long n = from; n < to; n += kRows)
        for (long column = 0; column < number; column += kRows) {
            const auto* a = reinterpret_cast<const uint32_t*>(keys + n * row);
            tiles<2>({a, a + kTile * row / 2, row / 2, kTile}, {b.queries + column, kQueries, kTile * kQueries, kTile},
                     p.dim / 32, b.scores + n * kQueries + column, kQueries, false);
        }
    const bool is_seen = query + number - 1 + p.lower <= start + from && start + to - 1 <= query + p.upper;
    if (!is_seen || start + to > p.keys) hide(p, query, start, from, to, b);
    number > kRows ? weigh<4>(p, from, to, b) : weigh<2>(p, from, to, b);
    const long tile = kTile * kTile, step = p.dim / kTile * tile;
    const uint32_t* values = packed.values + (group * packed.padded + start + from) / 2 * p.dim;
    for (long d = 0; d < p.dim; d += kRows)
        for (long column = 0; column < number; column += kRows) {
            const uint32_t* a = values + d / kTile * tile;
            tiles<2>({a, a + tile, kTile, step},
                     {b.weights + from / 2 * kQueries + column, kQueries, kTile * kQueries, kTile}, (to - from) / 32,
                     b.out + d * kQueries + column, kQueries, true);
        }
}

void begin(const Problem& p, long head, long query, long number, Block& b) {
    for (long column = 0; column < kQueries; column += kTile)
        for (long d = 0; d < p.dim; d += 32) {
            __m512i block[kTile];
            for (long i = 0; i < kTile; ++i) {
                const uint16_t* row = p.q + head * p.q_head + (query + std::min(column + i, number - 1)) * p.q_row;
                block[i] = _mm512_loadu_si512(row + d);
            }
            transpose(block);
            for (long i = 0; i < kTile; ++i) _mm512_store_si512(b.queries + (d / 2 + i) * kQueries + column, block[i]);
        }
    std::fill(b.out, b.out + p.dim * kQueries, 0.0f);
    std::fill(b.best, b.best + kQueries, kLowest);
    std::fill(b.sum, b.sum + kQueries, 0.0f);
}

void finish(const Problem& p, long head, long query, long number, const Block& b) {
    for (long column = 0; column < number; column += kTile) {
        const __m512 sum = _mm512_load_ps(b.sum + column);
        const __mmask16 any = _mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_GT_OQ);
        const __m512 share = _mm512_maskz_div_ps(any, _mm512_set1_ps(1.0f), sum);
        for (long d = 0; d < p.dim; d += 32) {
            __m512i block[kTile];
            for (long i = 0; i < kTile; ++i) {
                const float* out = b.out + (d + 2 * i) * kQueries + column;
                block[i] = pairs(_mm512_mul_ps(_mm512_load_ps(out), share),
                                 _mm512_mul_ps(_mm512_load_ps(out + kQueries), share));
            }
            transpose(block);
            for (long i = 0; i < std::min(kTile, number - column); ++i)
                _mm512_storeu_si512(p.out + head * p.out_head + (query + column + i) * p.out_row + d, block[i]);
        }
    }
    for (long i = 0; i < number; ++i)
        p.lse[head * p.queries + query + i] = b.sum[i] > 0.0f ? (b.best[i] + std::log2(b.sum[i])) / kLog2E : -kInfinity;
}

void attend_queries(const Problem& p, const Packed& packed, long head, long query, Block& b) {
    const long number = std::min(kQueries, p.queries - query), group = head / (p.heads / p.kv_heads);
    begin(p, head, query, number, b);
    const long first = p.dense ? 0 : std::max(0L, query + p.lower) / kKeys * kKeys;
    const long last = p.dense ? p.keys : std::min(p.keys, query + number + p.upper);
    for (long start = first; start < last; start += kKeys) attend_block(p, packed, group, query, number, start, b);
    finish(p, head, query, number, b);
}

}  // namespace

// Returns 0, or 1 if there is no memory. `dim` is a multiple of 32.
extern "C" int longspan_attend_bf16(const Problem* problem, int threads) {
    const Problem& p = *problem;
    thread_local Scratch scratch;
    Packed packed{nullptr, nullptr, round_up(p.keys, kKeys)};
    const long values = p.kv_heads * packed.padded / 2 * p.dim;
    packed.values = scratch.take(values + (copies_keys(p) ? values : p.kv_heads * kKeys / 2 * p.dim));
    if (!packed.values) return 1;
    packed.keys = reinterpret_cast<uint16_t*>(packed.values + values);
    const long blocks = packed.padded / kKeys, pieces = (p.queries + kQueries - 1) / kQueries;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long item = 0; item < p.kv_heads * blocks; ++item) pack(p, packed, item / blocks, item % blocks * kKeys);
        const TileRegisters registers;
        static thread_local Block block;
        // The last queries see the most keys and come first, so that the threads end at the same time.
#pragma omp for schedule(dynamic)
        for (long item = 0; item < p.heads * pieces; ++item)
            attend_queries(p, packed, item % p.heads, (pieces - 1 - item / p.heads) * kQueries, block);
    }
    return 0;
}
