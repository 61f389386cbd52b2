// Products of bfloat16 matrices, with sums in float32: C[6][64] += A[6][k] B[k][64], where A's numbers are taken in
// pairs, broadcast, and B holds the same pair of 16 columns in one register.

#pragma once

#include <cstdlib>
#include <memory>

#include "simd.h"

namespace longspan {

constexpr long kColumns = 64;  // columns that the micro-kernel computes
constexpr long kStrip = 6;     // rows that it computes

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};
using Pairs = std::unique_ptr<uint32_t, Free>;

inline Pairs allocate(long number) {
    const size_t bytes = (static_cast<size_t>(number) * sizeof(uint32_t) + 63) / 64 * 64;
    return Pairs(static_cast<uint32_t*>(std::aligned_alloc(64, bytes)));
}

inline long round_up(long number, long multiple) { return (number + multiple - 1) / multiple * multiple; }

inline uint32_t pair(uint16_t low, uint16_t high) { return static_cast<uint32_t>(high) << 16 | low; }

// C[R][64] (+)= A[R][2 * steps] B[2 * steps][64], A and B in pairs.
template <int R>
void strip(const uint32_t* a, long lda, const uint32_t* b, long ldb, long steps, float* c, long ldc, bool add) {
    __m512 sum[R][4];
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < 4; ++j) sum[r][j] = add ? _mm512_loadu_ps(c + r * ldc + 16 * j) : _mm512_setzero_ps();
    for (long p = 0; p < steps; ++p) {
        __m512bh columns[4];
        for (int j = 0; j < 4; ++j) columns[j] = (__m512bh)_mm512_loadu_si512(b + p * ldb + 16 * j);
        for (int r = 0; r < R; ++r) {
            const __m512bh row = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[r * lda + p]));
            for (int j = 0; j < 4; ++j) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], row, columns[j]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < 4; ++j) _mm512_storeu_ps(c + r * ldc + 16 * j, sum[r][j]);
}

inline void strips(long rows, const uint32_t* a, long lda, const uint32_t* b, long ldb, long steps, float* c, long ldc,
            bool add) {
    for (; rows >= kStrip; rows -= kStrip, a += kStrip * lda, c += kStrip * ldc)
        strip<kStrip>(a, lda, b, ldb, steps, c, ldc, add);
    switch (rows) {
        case 5: return strip<5>(a, lda, b, ldb, steps, c, ldc, add);
        case 4: return strip<4>(a, lda, b, ldb, steps, c, ldc, add);
        case 3: return strip<3>(a, lda, b, ldb, steps, c, ldc, add);
        case 2: return strip<2>(a, lda, b, ldb, steps, c, ldc, add);
        case 1: return strip<1>(a, lda, b, ldb, steps, c, ldc, add);
        default: return;
    }
}

// The place of a key among those in memory: `rows` says which are meant, if not all.
inline long place(const int* rows, long n) { return rows ? rows[n] : n; }

// Keys [first, first + 64), of each numbers d and d + 1 as [dim / 2][64]; those from `keys` on are zeros.
inline void pack_keys(const uint16_t* k, long row, const int* rows, long first, long keys, long dim, uint32_t* packed) {
    const uint16_t* each[kColumns];
    for (long n = 0; n < kColumns; ++n) each[n] = first + n < keys ? k + place(rows, first + n) * row : nullptr;
    for (long d = 0; d < dim / 2; ++d)
        for (long n = 0; n < kColumns; ++n)
            packed[d * kColumns + n] = each[n] ? pair(each[n][2 * d], each[n][2 * d + 1]) : 0;
}

}  // namespace longspan
