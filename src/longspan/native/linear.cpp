// Linear layers in bfloat16 on unpacked weights, and the small operators around them: RMSNorm before the product, and
// rotary embedding, SiLU of a gate, or a residual after it.
//
// The product is computed transposed, 32 outputs by 32 tokens at a time. So rows of weights are rows of tiles, and only
// the tokens are packed, once per call, when they are normalised. With few tokens weights are read once, in the order
// of memory. With many tokens, packed tokens stay in the L2 cache.

#include "kernels.h"
#include "tiles.h"

namespace longspan {

constexpr long kMaxMatrices = 3;

struct Matrix {
    const uint16_t *weight, *bias;  // [outputs][inputs], [outputs]; a null bias for none
    const uint8_t* levels;      // of quantised weights, [outputs][inputs], two per byte with 4 bits; else null
    const uint32_t* grid;       // [outputs][inputs / 32]: the step of a group in the low half, its base in the high
    const uint16_t* head_norm;  // [head_dim], of an RMSNorm of each head before rotation; null for none
    uint16_t* out;              // [tokens][outputs]
    long outputs, row, out_row;  // strides in numbers
    long rotated;                // not 0: apply the rotary embedding to the heads
    long bits;                   // of a level, 8 or 4
};

struct Linear {
    const uint16_t* x;  // [tokens][inputs]
    long tokens, inputs, x_row;
    const uint16_t* norm;  // [inputs], of an RMSNorm of x before; null for none
    float epsilon;
    long number;  // of matrices
    Matrix matrices[kMaxMatrices];
    long gated;                // not 0: the output of matrix 0 is SiLU(matrix 0) * matrix 1
    const uint16_t* residual;  // [tokens][outputs], added to the output of matrix 0; null for none
    long residual_row;
    const uint16_t *cos, *sin;  // [tokens][rotary_dim]
    long head_dim, rotary_dim;
};

namespace {

constexpr long kOutputs = 2 * kTile;    // outputs of a unit of work
constexpr long kTokens = 2 * kTile;     // tokens that are multiplied at once
constexpr long kTokenBytes = 5 << 18;   // bytes of tokens that are packed at a time
constexpr long kPackedTokens = 128;     // with more tokens than this, weights are packed, too
constexpr long kWeightBytes = 5 << 17;  // bytes of weights that are packed at a time
constexpr long kMaxUnits = 16;          // units that are computed at a time
constexpr long kRowsAhead = 4;          // rows of weights that are prefetched

__m512 silu(__m512 x) {
    const __m512 power =
        exp2(_mm512_min_ps(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-kLog2E)), _mm512_setzero_ps()));
    const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    const __m512 over = _mm512_mask_blend_ps(negative, _mm512_set1_ps(1.0f), power);
    return _mm512_div_ps(_mm512_mul_ps(x, over), _mm512_add_ps(_mm512_set1_ps(1.0f), power));
}

// RMSNorm of `size` numbers, rounded as in transformers: before and after the multiplication by weights.
void normalise(const uint16_t* x, const uint16_t* weight, float epsilon, long size, uint16_t* out) {
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < size; i += 16) {
        const __m512 numbers = widen(x + i);
        squares = _mm512_fmadd_ps(numbers, numbers, squares);
    }
    const float scale = 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(size) + epsilon);
    for (long i = 0; i < size; i += 16) {
        const __m512 numbers = round_bf16(_mm512_mul_ps(widen(x + i), _mm512_set1_ps(scale)));
        store_bf16(out + i, _mm512_mul_ps(numbers, widen(weight + i)));
    }
}

// Packs 16 tokens as [inputs / 2][16] pairs, padded with zeros. Up to kMaxDots tokens stay rows.
void pack_tokens(const Linear& p, long first, uint32_t* packed, uint16_t* rows) {
    const long number = std::min(kTile, p.tokens - first);
    if (p.tokens <= kMaxDots) rows = reinterpret_cast<uint16_t*>(packed);
    const uint16_t* each[kTile];
    for (long t = 0; t < number; ++t) {
        each[t] = p.x + (first + t) * p.x_row;
        if (!p.norm && p.tokens > kMaxDots) continue;
        uint16_t* row = rows + t * p.inputs;
        if (p.norm)
            normalise(each[t], p.norm, p.epsilon, p.inputs, row);
        else
            std::memcpy(row, each[t], p.inputs * sizeof(uint16_t));
        each[t] = row;
    }
    if (p.tokens <= kMaxDots) return;
    for (long pair = 0; pair < p.inputs / 2; pair += kTile) {
        __m512i block[kTile];
        for (long t = 0; t < kTile; ++t)
            block[t] = t < number ? _mm512_loadu_si512(each[t] + 2 * pair) : _mm512_setzero_si512();
        transpose(block);
        for (long t = 0; t < kTile; ++t) _mm512_storeu_si512(packed + (2 * pair + t) * kTile, block[t]);
    }
}

// 16 rows of a matrix.
struct Stripe {
    const Matrix* matrix;
    long output;  // the first
};

// Two stripes of a matrix, or one of the gate and one of the gated matrix.
struct Unit {
    Stripe first, second;
    bool is_whole;  // false if the second stripe repeats the first
};

Unit unit_of(const Linear& p, long index) {
    if (p.gated) return {{p.matrices, index * kTile}, {p.matrices + 1, index * kTile}, true};
    const Matrix* matrix = p.matrices;
    for (; index >= (matrix->outputs + kOutputs - 1) / kOutputs; ++matrix)
        index -= (matrix->outputs + kOutputs - 1) / kOutputs;
    const long output = index * kOutputs;
    const bool is_whole = output + kTile < matrix->outputs;
    return {{matrix, output}, {matrix, is_whole ? output + kTile : output}, is_whole};
}

long num_units(const Linear& p) {
    if (p.gated) return p.matrices[0].outputs / kTile;
    long number = 0;
    for (long i = 0; i < p.number; ++i) number += (p.matrices[i].outputs + kOutputs - 1) / kOutputs;
    return number;
}

const uint16_t* bias_of(const Stripe& stripe) {
    return stripe.matrix->bias ? stripe.matrix->bias + stripe.output : nullptr;
}

__m512 sum(const float* sums, const uint16_t* bias, long row) {
    const __m512 product = _mm512_load_ps(sums + row * kTokens);
    return bias ? _mm512_add_ps(product, _mm512_set1_ps(widen(bias[row]))) : product;
}

// SiLU(gate) * up of sums [2][16 outputs][32 tokens].
void write_gated(const Linear& p, const Unit& unit, const float* sums, long token) {
    const Matrix& gate = *unit.first.matrix;
    const uint16_t *gate_bias = bias_of(unit.first), *up_bias = bias_of(unit.second);
    const long number = std::min(kTokens, p.tokens - token);
    __m512i rows[kTile] = {};
    for (long row = 0; row < (number > kTile ? kTile : kTile / 2); ++row) {
        const float* here = sums + row / 8 * kTile;
        __m512 two[2];
        for (long i = 0; i < 2; ++i) {
            const long output = row % 8 * 2 + i;
            two[i] = _mm512_mul_ps(silu(sum(here, gate_bias, output)), sum(here + kTile * kTokens, up_bias, output));
        }
        rows[row] = pairs(two[0], two[1]);
    }
    transpose(rows);
    uint16_t* out = gate.out + token * gate.out_row + unit.first.output;
    for (long t = 0; t < number; ++t) {
        const __m512i both = rows[t % kTile];
        const __m256i own = t < kTile ? _mm512_castsi512_si256(both) : _mm512_extracti64x4_epi64(both, 1);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + t * gate.out_row), own);
    }
}

__m512i add_pairs(__m512i left, __m512i right) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    const __m512 even = _mm512_add_ps((__m512)_mm512_slli_epi32(left, 16), (__m512)_mm512_slli_epi32(right, 16));
    const __m512 odd = _mm512_add_ps((__m512)_mm512_and_si512(left, high), (__m512)_mm512_and_si512(right, high));
    return pairs(even, odd);
}

// Sums [32 outputs][16 tokens], or only the first 16 outputs, and the residual.
void write(const Linear& p, const Unit& unit, const float* sums, long token) {
    const Matrix& m = *unit.first.matrix;
    const uint16_t* bias = bias_of(unit.first);
    const long outputs = unit.is_whole ? kOutputs : kTile;
    __m512i rows[kTile];
    for (long row = 0; row < kTile; ++row)
        rows[row] =
            2 * row < outputs ? pairs(sum(sums, bias, 2 * row), sum(sums, bias, 2 * row + 1)) : _mm512_setzero_si512();
    transpose(rows);
    const __mmask16 inside = lanes(0, 0, outputs / 2);
    for (long t = 0; t < std::min(kTile, p.tokens - token); ++t) {
        const uint16_t* residual = p.residual + (token + t) * p.residual_row + unit.first.output;
        if (p.residual && &m == p.matrices) rows[t] = add_pairs(rows[t], _mm512_maskz_loadu_epi32(inside, residual));
        _mm512_mask_storeu_epi32(m.out + (token + t) * m.out_row + unit.first.output, inside, rows[t]);
    }
}

void write_block(const Linear& p, const Unit& unit, const float* sums, long token, long last) {
    if (p.gated) return write_gated(p, unit, sums, token);
    for (long start = token; start < std::min(token + kTokens, last); start += kTile)
        write(p, unit, sums + (start - token), start);
}

// Turns the levels of 32 weights of a row into bfloat16.
template <int kBits>
__m512i weights_of(const uint8_t* levels, uint32_t grid) {
    const __m512i both = _mm512_set1_epi32(static_cast<int>(grid));
    const __m512 step = (__m512)_mm512_slli_epi32(both, 16),
                 base = (__m512)_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
    const auto* here = reinterpret_cast<const __m128i*>(levels);
    if constexpr (kBits == 8) {
        const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(here)));
        const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(here + 1)));
        return (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(second, step, base), _mm512_fmadd_ps(first, step, base));
    } else {
        const __m256i low = _mm256_cvtepu8_epi16(_mm_loadu_si128(here)), high = _mm256_srli_epi16(low, 4);
        const __m512i places = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512 weights = _mm512_fmadd_ps(all, step, base);  // of all levels, twice, so that bit 5 has no effect
        return _mm512_permutexvar_epi16(places, (__m512i)_mm512_cvtne2ps_pbh(weights, weights));
    }
}

// Weights of a row of a matrix, 32 at a time, with kBits bits in memory. Prefetches weights of a later row.
template <int kBits>
struct Weights {
    const uint8_t* levels;
    const uint32_t* grid;
    long ahead;

    Weights(const Matrix& m, long row, long groups)
        : levels(m.levels + row * groups * 4 * kBits),
          grid(m.grid + row * groups),
          ahead(kRowsAhead * groups * 4 * kBits) {}
    __m512i operator()(long group) const {
        const uint8_t* here = levels + group * 4 * kBits;
        if (group % (16 / kBits) == 0) _mm_prefetch(here + ahead, _MM_HINT_T1);  // a cache line has several groups
        return weights_of<kBits>(here, grid[group]);
    }
};

template <>
struct Weights<16> {
    const uint16_t* weights;
    long ahead;

    Weights(const Matrix& m, long row, long) : weights(m.weight + row * m.row), ahead(kRowsAhead * m.row) {}
    __m512i operator()(long group) const {
        const uint16_t* here = weights + group * kOutputs;
        _mm_prefetch(here + ahead, _MM_HINT_T1);
        return _mm512_loadu_si512(here);
    }
};

// Copies a stripe of weights into contiguous tiles: [inputs / 32][16 rows][32 numbers], every other tile.
template <int kBits>
void pack_weights(const Linear& p, const Stripe& stripe, uint16_t* packed) {
    const long tiles = p.inputs / kOutputs;
    for (long row = 0; row < kTile; ++row) {
        const Weights<kBits> weights(*stripe.matrix, stripe.output + row, tiles);
        for (long tile = 0; tile < tiles; ++tile)
            _mm512_store_si512(packed + (2 * tile * kTile + row) * kOutputs, weights(tile));
    }
}

void pack_weights(const Linear& p, const Stripe& stripe, uint16_t* packed) {
    const Matrix& m = *stripe.matrix;
    !m.levels     ? pack_weights<16>(p, stripe, packed)
    : m.bits == 8 ? pack_weights<8>(p, stripe, packed)
                  : pack_weights<4>(p, stripe, packed);
}

// A unit of computation: the packed tokens [first, last), and the packed weights of a unit if `weights` is not null.
struct Piece {
    const uint32_t* tokens;
    long first, last;
    const uint32_t* weights;
};

const uint32_t* in_pairs(const Stripe& stripe) {
    return reinterpret_cast<const uint32_t*>(stripe.matrix->weight + stripe.output * stripe.matrix->row);
}

// Multiplies up to kMaxDots tokens by unpacked weights.
template <int kBits>
void compute_few(const Linear& p, const Unit& unit, const uint32_t* tokens, float* sums) {
    const long steps = p.inputs / kOutputs;
    const auto row_of = [&](long row) {
        const Stripe& stripe = row < kTile ? unit.first : unit.second;
        return Weights<kBits>(*stripe.matrix, stripe.output + row % kTile, steps);
    };
    using RowOf = decltype(row_of);
    using Dots = void (*)(const RowOf&, const uint32_t*, long, float*, long);
    static constexpr Dots kDots[] = {dots<1, RowOf>, dots<2, RowOf>, dots<3, RowOf>, dots<4, RowOf>,
                                     dots<5, RowOf>, dots<6, RowOf>, dots<7, RowOf>, dots<8, RowOf>};
    kDots[p.tokens - 1](row_of, tokens, steps, sums, kTokens);
}

void compute_few(const Linear& p, const Unit& unit, const uint32_t* tokens, float* sums) {
    const Matrix& m = *unit.first.matrix;
    !m.levels     ? compute_few<16>(p, unit, tokens, sums)
    : m.bits == 8 ? compute_few<8>(p, unit, tokens, sums)
                  : compute_few<4>(p, unit, tokens, sums);
}

void compute(const Linear& p, const Unit& unit, const Piece& piece, long token, float* sums) {
    if (p.tokens <= kMaxDots) return compute_few(p, unit, piece.tokens, sums);
    const long steps = p.inputs / kOutputs, block = p.inputs / 2 * kTile;
    const Rows unpacked{in_pairs(unit.first), in_pairs(unit.second), unit.first.matrix->row / 2, kTile};
    const Rows tiled{piece.weights, piece.weights + kTile * kTile, kTile, 2 * kTile * kTile};
    const Rows& rows = piece.weights ? tiled : unpacked;
    const Columns columns{piece.tokens + (token - piece.first) / kTile * block, kTile, 2 * kTile * kTile,
                          kTile * kTile};
    if (token + kTile < piece.last)
        tiles<2>(rows, columns, steps, sums, kTokens, false);
    else
        tiles<1>(rows, columns, steps, sums, kTokens, false);
}

// Computes some units for all tokens of a piece. Results are written while the next ones are computed.
void compute_units(const Linear& p, long first, long last, Piece piece, uint32_t* weights) {
    alignas(
        64) float sums[2][kOutputs * kTokens] = {};  // finite, also in unused parts, since NaN would be slow
    const long block = p.inputs / 2 * kTile, number = last - first;
    Unit units[kMaxUnits];
    for (long i = 0; i < number; ++i) {
        units[i] = unit_of(p, first + i);
        if (!weights) continue;
        auto* packed = reinterpret_cast<uint16_t*>(weights + 2 * i * block);
        pack_weights(p, units[i].first, packed);
        pack_weights(p, units[i].second, packed + kTile * kOutputs);
    }
    const long blocks = (piece.last - piece.first + kTokens - 1) / kTokens;
    for (long item = 0; item <= number * blocks; ++item) {
        if (item < number * blocks) {
            piece.weights = weights ? weights + item % number * 2 * block : nullptr;
            compute(p, units[item % number], piece, piece.first + item / number * kTokens, sums[item % 2]);
        }
        if (item > 0) {
            const long before = item - 1;
            write_block(p, units[before % number], sums[before % 2], piece.first + before / number * kTokens,
                        piece.last);
        }
    }
}

// Applies the norm and the rotary embedding of the first `rotary_dim` numbers to all heads of a token.
void rotate(const Linear& p, const Matrix& m, long token) {
    const long half = p.rotary_dim / 2;
    const uint16_t *cos = p.cos + token * p.rotary_dim, *sin = p.sin + token * p.rotary_dim;
    for (long head = 0; head < m.outputs; head += p.head_dim) {
        uint16_t* x = m.out + token * m.out_row + head;
        if (m.head_norm) normalise(x, m.head_norm, p.epsilon, p.head_dim, x);
        for (long d = 0; d < half; d += 16) {
            const __m512 low = widen(x + d), high = widen(x + half + d);
            const __m512 turned_low = _mm512_mul_ps(high, widen(sin + d)),
                         turned_high = _mm512_mul_ps(low, widen(sin + half + d));
            store_bf16(x + d, _mm512_fmsub_ps(low, widen(cos + d), turned_low));
            store_bf16(x + half + d, _mm512_fmadd_ps(high, widen(cos + half + d), turned_high));
        }
    }
}

// The partition of the work of a problem.
struct Cut {
    explicit Cut(const Linear& p) : units(num_units(p)), block(p.inputs / 2 * kTile) {
        at_once = std::max(kTokens, kTokenBytes / 4 / block * kTile / kTokens * kTokens);
        blocks = round_up(std::min(p.tokens, at_once), kTokens) / kTile;
        const bool has_many = p.tokens > kPackedTokens;
        packs_weights = has_many || (p.matrices[0].levels && p.tokens > kMaxDots);
        group = has_many ? std::clamp(kWeightBytes / 4 / (2 * block), 1L, kMaxUnits) : packs_weights ? 1 : kMaxUnits;
        slots = packs_weights ? group : 1;  // also the memory in which a thread normalises tokens
    }
    long size(int threads) const { return (blocks + 2 * slots * threads) * block; }

    long units, block;     // number of units; pairs of a block of 16 tokens
    long at_once, blocks;  // tokens that are packed at a time, and their blocks
    long group, slots;     // units that are computed at a time, and units per thread in memory
    bool packs_weights;
};

}  // namespace

long scratch_size(const Linear& p, int threads) { return Cut(p).size(threads); }

// Inputs are a multiple of 32. Outputs and halves of heads are multiples of 16.
void run(const Linear& p, uint32_t* packed) {
    const Cut cut(p);
    const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const long first = cut.units * thread / threads, last = cut.units * (thread + 1) / threads;
    uint32_t* own = packed + (cut.blocks + 2 * cut.slots * thread) * cut.block;
    for (long start = 0; start < p.tokens; start += cut.at_once) {
        const long stop = std::min(p.tokens, start + cut.at_once);
#pragma omp for schedule(static)
        for (long token = start; token < stop; token += kTile) {
            const long tile = (token - start) / kTile;  // tiles of two blocks of tokens alternate
            uint32_t* here = packed + tile / 2 * 2 * cut.block + tile % 2 * kTile * kTile;
            pack_tokens(p, token, here, reinterpret_cast<uint16_t*>(own));
        }
        for (long unit = first; unit < last; unit += cut.group)
            compute_units(p, unit, std::min(unit + cut.group, last), {packed, start, stop, nullptr},
                          cut.packs_weights ? own : nullptr);
#pragma omp barrier
    }
    for (long i = 0; i < p.number; ++i) {
        if (!p.matrices[i].rotated) continue;
#pragma omp for schedule(static)
        for (long token = 0; token < p.tokens; ++token) rotate(p, p.matrices[i], token);
    }
}

}  // namespace longspan
