// Vectors of as many floats as a register of this machine holds: GCC's vector extension, with intrinsics where they save
// instructions. Wider vectors would be kept in memory.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace outrider {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int PADDED = 16;  // numbers of which a row's width in memory is a multiple, on any machine

struct bf16 {
    uint16_t bits;
};

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef float vf_any __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t v16_any __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t v8_any __attribute__((vector_size(LANES), aligned(1), may_alias));

static inline vf splat(float x) { return x - vf{}; }

static inline vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }

static inline vf load(const bf16* p) {
#if defined(__AVX512F__)
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#else
    vi wide = __builtin_convertvector(*reinterpret_cast<const v16_any*>(p), vi);
    return (vf)(wide << 16);
#endif
}

static inline vf load(const int8_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    return __builtin_convertvector(*reinterpret_cast<const v8_any*>(p), vf);
#endif
}

static inline void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }

static inline float widen(float x) { return x; }

static inline float widen(int8_t x) { return x; }

static inline float widen(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Round to nearest, ties to even; NaN stays NaN.
static inline void narrow(bf16* p, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        p->bits = static_cast<uint16_t>((bits >> 16) | 0x40);
        return;
    }
    p->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline void narrow(float* p, float x) { *p = x; }

static inline void store(bf16* p, vf x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    for (int i = 0; i < LANES; ++i) narrow(p + i, x[i]);
#endif
}

// a * b + c in one rounding wherever the hardware has it.
static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline vf larger(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// a where mask is all ones, b where it is zero.
static inline vf pick(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

// The sum of the lanes, always added in the same tree.
static inline float sum(vf x) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) x[i] += x[i + half];
    return x[0];
}

static inline float largest(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float best = x[0];
    for (int i = 1; i < LANES; ++i) best = x[i] > best ? x[i] : best;
    return best;
#endif
}

// 2^x to about 2 ulp: exactly 1 at 0, exactly 0 below -126, at most 2^126.
static inline vf exp2(vf x) {
    const vf lowest = splat(-126.0f), highest = splat(126.0f), shift = splat(12582912.0f);
    vi alive = x >= lowest;
    vf y = pick(alive, x, lowest);
    y = pick(y <= highest, y, highest);
    vf t = y + shift;
    vf f = y - (t - shift);  // -0.5 .. 0.5
    vf p = splat(1.5353362e-4f);
    p = fma(p, f, splat(1.3398874e-3f));
    p = fma(p, f, splat(9.6184373e-3f));
    p = fma(p, f, splat(5.5503324e-2f));
    p = fma(p, f, splat(2.4022648e-1f));
    p = fma(p, f, splat(6.9314720e-1f));
    p = fma(p, f, splat(1.0f));
    vf out = (vf)((vi)p + ((vi)t << 23));
    return (vf)((vi)out & alive);
}

constexpr float LOG2_E = 1.4426950408889634f;

static inline vf silu(vf x) {
    return x / (splat(1.0f) + exp2(x * splat(-LOG2_E)));
}

// gelu_pytorch_tanh: x / 2 * (1 + tanh(u)) is x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
static inline vf gelu(vf x) {
    constexpr float LINEAR = -2.0f * LOG2_E * 0.7978845608028654f;
    return x / (splat(1.0f) + exp2(x * fma(x * x, splat(0.044715f * LINEAR), splat(LINEAR))));
}

}  // namespace outrider
