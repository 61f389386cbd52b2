// What the kernels share.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace longspan {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;

// 2 to the power of x <= 0, to 2 units in the last place.
inline __m512 exp2(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 power = _mm512_set1_ps(1.5403530e-4f);
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(1.3333558e-3f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(9.6181291e-3f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(5.5504109e-2f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(2.4022651e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(6.9314718e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(power, whole);
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

}  // namespace longspan
