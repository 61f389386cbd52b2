// Blocks of a product of bfloat16 matrices with sums in float32, by AMX tiles if the processor has them, else by
// AVX-512. Both use pairs of numbers along the inner dimension: A[row][pair], the layout of matrices in memory, and
// B[pair][column].

#pragma once

#include "simd.h"

namespace longspan {

constexpr long kTile = 16;         // rows, columns and inner pairs of a tile
constexpr long kRows = 2 * kTile;  // rows of a block, which is multiplied at once

// 32 rows of pairs, 16 each at `first` and `second`. Strides: from row to row, and from 16 pairs to the next 16.
struct Rows {
    const uint32_t *first, *second;
    long row, step;
};

inline const uint32_t* row_at(const Rows& a, long number) {
    return number < kTile ? a.first + number * a.row : a.second + (number - kTile) * a.row;
}

// 16 * T columns of pairs. Strides: from pair to pair, from 16 pairs to the next 16, from 16 columns to the next 16.
struct Columns {
    const uint32_t* first;
    long pair, step, tile;
};

// C[32][16 * T] (+)= A B, for 16 * `steps` pairs.
template <int T>
void tiles(const Rows& a, const Columns& b, long steps, float* c, long ldc, bool add);

#ifdef LONGSPAN_AMX

// The tile registers of a thread, each of 16 rows of 64 bytes. The destructor restores the earlier configuration.
class TileRegisters {
public:
    TileRegisters() {
        _tile_storeconfig(before_);
        alignas(64) uint8_t config[64] = {1};
        for (int tile = 0; tile < 8; ++tile) {
            config[16 + 2 * tile] = 64;
            config[48 + tile] = kTile;
        }
        _tile_loadconfig(config);
    }
    ~TileRegisters() { _tile_loadconfig(before_); }
    TileRegisters(const TileRegisters&) = delete;

private:
    alignas(64) uint8_t before_[64];
};

template <int T>
void tiles(const Rows& a, const Columns& b, long steps, float* c, long ldc, bool add) {
    constexpr int kBytes = 4;
    if (add) {
        _tile_loadd(0, c, ldc * kBytes);
        _tile_loadd(2, c + kTile * ldc, ldc * kBytes);
        if constexpr (T == 2) {
            _tile_loadd(1, c + kTile, ldc * kBytes);
            _tile_loadd(3, c + kTile * ldc + kTile, ldc * kBytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const uint32_t *first = a.first, *second = a.second, *columns = b.first;
    for (long step = 0; step < steps; ++step, first += a.step, second += a.step, columns += b.step) {
        _tile_loadd(4, first, a.row * kBytes);
        _tile_loadd(6, columns, b.pair * kBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, second, a.row * kBytes);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (T == 2) {
            _tile_loadd(7, columns + b.tile, b.pair * kBytes);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, ldc * kBytes);
    _tile_stored(2, c + kTile * ldc, ldc * kBytes);
    if constexpr (T == 2) {
        _tile_stored(1, c + kTile, ldc * kBytes);
        _tile_stored(3, c + kTile * ldc + kTile, ldc * kBytes);
    }
}

constexpr long kMaxDots = 0;

#else

constexpr long kMaxDots = 8;

struct TileRegisters {
    TileRegisters() {}
};

// Prefetches rows while the rows before them are multiplied. Few processors prefetch this many streams themselves.
template <int T>
void tiles(const Rows& a, const Columns& b, long steps, float* c, long ldc, bool add) {
    constexpr int kTogether = 16 / T;  // rows with sums in registers
    for (int start = 0; start < kRows; start += kTogether, c += kTogether * ldc) {
        const uint32_t *rows = row_at(a, start), *next = row_at(a, start + kTogether), *columns = b.first;
        __m512 sum[kTogether][T];
        for (int r = 0; r < kTogether; ++r)
            for (int t = 0; t < T; ++t)
                sum[r][t] = add ? _mm512_loadu_ps(c + r * ldc + kTile * t) : _mm512_setzero_ps();
        for (long step = 0; step < steps; ++step, rows += a.step, next += a.step, columns += b.step) {
            for (int r = 0; r < kTogether; ++r) _mm_prefetch(next + r * a.row, _MM_HINT_T1);
            for (long pair = 0; pair < kTile; ++pair) {
                __m512bh column[T];
                for (int t = 0; t < T; ++t)
                    column[t] = (__m512bh)_mm512_loadu_si512(columns + pair * b.pair + t * b.tile);
                for (int r = 0; r < kTogether; ++r) {
                    const __m512bh number = (__m512bh)_mm512_set1_epi32(static_cast<int>(rows[r * a.row + pair]));
                    for (int t = 0; t < T; ++t) sum[r][t] = _mm512_dpbf16_ps(sum[r][t], number, column[t]);
                }
            }
        }
        for (int r = 0; r < kTogether; ++r)
            for (int t = 0; t < T; ++t) _mm512_storeu_ps(c + r * ldc + kTile * t, sum[r][t]);
    }
}

#endif

// The sums of four vectors.
inline __m128 four_sums(const __m512* each) {
    const __m512 even = _mm512_add_ps(_mm512_unpacklo_ps(each[0], each[1]), _mm512_unpackhi_ps(each[0], each[1]));
    const __m512 odd = _mm512_add_ps(_mm512_unpacklo_ps(each[2], each[3]), _mm512_unpackhi_ps(each[2], each[3]));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(even, odd, 0x44), _mm512_shuffle_ps(even, odd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// C[32][T] = A X for T <= kMaxDots contiguous columns [16 * steps] of pairs. For so few columns most of a block of 16
// columns would be wasted. (An AMX tile takes the same time for one column as for 16, and less than memory, so kMaxDots
// is 0 there.) Rows are read one by one, the fastest order for memory. `row_of(row)` returns a function of the step,
// which is 16 pairs. It may prefetch later rows.
template <int T, typename RowOf>
void dots(const RowOf& row_of, const uint32_t* x, long steps, float* c, long ldc) {
    constexpr int kTogether = T == 1 ? 4 : T == 2 ? 2 : 1;  // rows with sums in registers
    for (int start = 0; start < kRows; start += kTogether, c += kTogether * ldc) {
        __m512 sum[(kTogether * T + 3) / 4 * 4] = {};
        for (int r = 0; r < kTogether; ++r) {
            const auto row = row_of(start + r);
            for (long step = 0; step < steps; ++step) {
                const __m512bh numbers = (__m512bh)row(step);
                for (int t = 0; t < T; ++t) {
                    const __m512bh column = (__m512bh)_mm512_loadu_si512(x + (t * steps + step) * kTile);
                    sum[r * T + t] = _mm512_dpbf16_ps(sum[r * T + t], numbers, column);
                }
            }
        }
        for (int i = 0; i < kTogether * T; i += 4) {
            alignas(16) float four[4];
            _mm_storeu_ps(T % 4 ? four : c + i, four_sums(sum + i));
            for (int j = i; T % 4 && j < std::min(i + 4, kTogether * T); ++j) c[j / T * ldc + j % T] = four[j - i];
        }
    }
}

}  // namespace longspan
