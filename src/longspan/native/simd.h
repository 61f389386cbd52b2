// Helpers of all kernels.

#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

namespace longspan {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;
constexpr float kLowest = -1e30f;  // less than all scores, and finite

// 2 to the power of x <= 0, to 2 units in the last place.
inline __m512 exp2(__m512 x) {
    const __m512 part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // of [0, 1)
    __m512 power = _mm512_set1_ps(1.87757e-3f);
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(8.98934e-3f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(5.582632e-2f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(2.4015362e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(6.9315307e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(power, x);  // uses the integer part of x
}

// The lanes of columns [column, column + 16) that lie in [first, last).
inline __mmask16 lanes(long column, long first, long last) {
    const long from = std::clamp(first - column, 0L, 16L), to = std::clamp(last - column, 0L, 16L);
    return static_cast<__mmask16>(((1u << to) - 1u) & ~((1u << from) - 1u));
}

// Dense bfloat16 numbers as float32.
inline __m512 widen(const uint16_t* numbers) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(low), 16));
}

inline float widen(uint16_t number) {
    const uint32_t bits = static_cast<uint32_t>(number) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void store_bf16(uint16_t* out, __m512 numbers) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(numbers));
}

// The nearest bfloat16 numbers, as float32.
inline __m512 round_bf16(__m512 numbers) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(numbers);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
}

// Two rows of numbers as one of bfloat16 pairs.
inline __m512i pairs(__m512 even, __m512 odd) {
    alignas(64) static constexpr uint16_t kInterleaved[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                              21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                              11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleaved), (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

inline long round_up(long number, long multiple) { return (number + multiple - 1) / multiple * multiple; }

// Transposes 16 x 16 numbers.
inline void transpose(__m512i* rows) {
    __m512i pairs[16], fours[16], eights[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
            fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; ++j) {
            eights[i + j] = _mm512_shuffle_i32x4(fours[i + j], fours[i + j + 4], 0x88);
            eights[i + j + 4] = _mm512_shuffle_i32x4(fours[i + j], fours[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; ++j) {
        rows[j] = _mm512_shuffle_i32x4(eights[j], eights[j + 8], 0x88);
        rows[j + 8] = _mm512_shuffle_i32x4(eights[j], eights[j + 8], 0xdd);
    }
}

// Memory that a thread keeps from call to call. New pages in each call would cost as much as filling them.
class Scratch {
public:
    // Returns memory for `number` numbers, or null. Earlier contents may be lost.
    uint32_t* take(long number) {
        if (number > size_) {
            memory_.reset();
            const size_t bytes = (static_cast<size_t>(number) * sizeof(uint32_t) + 63) / 64 * 64;
            memory_.reset(static_cast<uint32_t*>(std::aligned_alloc(64, bytes)));
            size_ = memory_ ? number : 0;
        }
        return memory_.get();
    }

private:
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    std::unique_ptr<uint32_t, Free> memory_;
    long size_ = 0;
};

}  // namespace longspan
