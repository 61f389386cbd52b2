// Blocks of a product of bfloat16 matrices, with sums in float32: by AMX's tiles where the processor has them, by
// AVX-512 otherwise. Both take numbers in pairs along the inner dimension: A[row][pair] as matrices lie in memory, and
// B[pair][column].

#pragma once

#include "simd.h"

namespace longspan {

constexpr long kTile = 16;  // rows, columns, and pairs of inner numbers of a tile

// 32 rows of pairs, 16 each at `first` and `second`: from one to the next, and from 16 pairs to the next 16.
struct Rows {
    const uint32_t *first, *second;
    long row, step;
};

// 16 * T columns of pairs: from a pair to the next, from 16 pairs to the next 16, and from 16 columns to the next 16.
struct Columns {
    const uint32_t* first;
    long pair, step, tile;
};

// C[32][16 * T] (+)= A B, for 16 * `steps` pairs.
template <int T>
void tiles(const Rows& a, const Columns& b, long steps, float* c, long ldc, bool add);

#ifdef LONGSPAN_AMX

// The tile registers of a thread, all of 16 rows of 64 bytes; what others had set is put back at the end.
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

constexpr long kMostDots = 0;

#else

constexpr long kMostDots = 4;

struct TileRegisters {
    TileRegisters() {}
};

template <int T>
void tiles(const Rows& a, const Columns& b, long steps, float* c, long ldc, bool add) {
    constexpr int kRows = 8;
    for (int start = 0; start < 2 * kTile; start += kRows, c += kRows * ldc) {
        const uint32_t* rows = start < kTile ? a.first + start * a.row : a.second + (start - kTile) * a.row;
        __m512 sum[kRows][T];
        for (int r = 0; r < kRows; ++r)
            for (int t = 0; t < T; ++t)
                sum[r][t] = add ? _mm512_loadu_ps(c + r * ldc + kTile * t) : _mm512_setzero_ps();
        for (long pair = 0; pair < kTile * steps; ++pair) {
            const uint32_t* columns = b.first + pair / kTile * b.step + pair % kTile * b.pair;
            const uint32_t* numbers = rows + pair / kTile * a.step + pair % kTile;
            __m512bh column[T];
            for (int t = 0; t < T; ++t) column[t] = (__m512bh)_mm512_loadu_si512(columns + t * b.tile);
            for (int r = 0; r < kRows; ++r) {
                const __m512bh number = (__m512bh)_mm512_set1_epi32(static_cast<int>(numbers[r * a.row]));
                for (int t = 0; t < T; ++t) sum[r][t] = _mm512_dpbf16_ps(sum[r][t], number, column[t]);
            }
        }
        for (int r = 0; r < kRows; ++r)
            for (int t = 0; t < T; ++t) _mm512_storeu_ps(c + r * ldc + kTile * t, sum[r][t]);
    }
}

#endif

// C[32][T] = A X for T columns [16 * steps] of pairs, each in one piece: for so few, up to kMostDots, that most of a
// block of 16 columns would be computed for nothing. (A tile of AMX takes as long for one column as for 16, and less
// than memory.)
template <int T>
void dots(const Rows& a, const uint32_t* x, long steps, float* c, long ldc) {
    constexpr int kRows = 4;
    for (int start = 0; start < 2 * kTile; start += kRows, c += kRows * ldc) {
        const uint32_t* rows = start < kTile ? a.first + start * a.row : a.second + (start - kTile) * a.row;
        __m512 sum[kRows][T] = {};
        for (long step = 0; step < steps; ++step) {
            __m512bh column[T];
            for (int t = 0; t < T; ++t) column[t] = (__m512bh)_mm512_loadu_si512(x + (t * steps + step) * kTile);
            for (int r = 0; r < kRows; ++r) {
                const __m512bh row = (__m512bh)_mm512_loadu_si512(rows + r * a.row + step * a.step);
                for (int t = 0; t < T; ++t) sum[r][t] = _mm512_dpbf16_ps(sum[r][t], row, column[t]);
            }
        }
        for (int r = 0; r < kRows; ++r)
            for (int t = 0; t < T; ++t) c[r * ldc + t] = _mm512_reduce_add_ps(sum[r][t]);
    }
}

}  // namespace longspan
