// Uniform numbers of vocabulary ids, as coupled.py defines them: the same bits.
#pragma once

#include <cstdint>

namespace outrider {

// Philox4x32-10 (Salmon et al., SC 2011), as many counters at once as vectorise well.
struct Philox {
    static constexpr int WIDTH = 32;
    uint32_t word[4][WIDTH];

    void run(uint64_t seed) {
        uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
        for (int round = 0; round < 10; round++) {
            for (int i = 0; i < WIDTH; i++) {
                const uint64_t even = uint64_t{0xD2511F53u} * word[0][i], odd = uint64_t{0xCD9E8D57u} * word[2][i];
                word[0][i] = static_cast<uint32_t>(odd >> 32) ^ word[1][i] ^ key0;
                word[2][i] = static_cast<uint32_t>(even >> 32) ^ word[3][i] ^ key1;
                word[1][i] = static_cast<uint32_t>(odd);
                word[3][i] = static_cast<uint32_t>(even);
            }
            key0 += 0x9E3779B9u;
            key1 += 0xBB67AE85u;
        }
    }

    // 53 bits of two words, in (0, 1).
    double unit(int pair, int i) const {
        const auto bits = static_cast<double>(uint64_t{word[pair][i]} << 21 | word[pair + 1][i] >> 11);
        return (bits < 0.5 ? 0.5 : bits) * 0x1p-53;
    }
};

// Of ids [n], or of 0 .. n - 1 where there are none; two ids share a counter (id / 2, position, purpose, 0).
inline void id_uniforms(uint64_t seed, uint32_t position, uint32_t purpose, const int64_t* ids, int64_t n, double* out) {
    Philox philox;
    const int64_t step = ids ? Philox::WIDTH : 2 * Philox::WIDTH;
    for (int64_t start = 0; start < n; start += step) {
        const int64_t count = n - start < step ? n - start : step;
        for (int i = 0; i < Philox::WIDTH; i++) {
            const int64_t id = ids ? ids[start + (i < count ? i : 0)] : start + 2 * i;
            philox.word[0][i] = static_cast<uint32_t>(id >> 1);
            philox.word[1][i] = position;
            philox.word[2][i] = purpose;
            philox.word[3][i] = 0;
        }
        philox.run(seed);
        if (ids) {
            for (int i = 0; i < count; i++) out[start + i] = philox.unit(ids[start + i] & 1 ? 2 : 0, i);
        } else {
            for (int i = 0; i < count; i++) out[start + i] = philox.unit(i & 1 ? 2 : 0, i / 2);
        }
    }
}

}  // namespace outrider
