// Uniform numbers of vocabulary ids, as coupled.py defines them: the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

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

// The numbers of 2 WIDTH ids: from `first` on, which is even, or of `ids` [count], of which there are at most as many.
// Two ids share a counter (id / 2, position, purpose, 0).
struct Uniforms {
    static constexpr int AT_ONCE = 2 * Philox::WIDTH;
    Philox philox;
    double u[AT_ONCE];

    void make(uint64_t seed, uint32_t position, uint32_t purpose, int64_t first) {
        for (int i = 0; i < Philox::WIDTH; i++) philox.word[0][i] = static_cast<uint32_t>((first >> 1) + i);
        run(seed, position, purpose);
        for (int i = 0; i < Philox::WIDTH; i++) {
            u[2 * i] = philox.unit(0, i);
            u[2 * i + 1] = philox.unit(2, i);
        }
    }

    void make(uint64_t seed, uint32_t position, uint32_t purpose, const int64_t* ids, int count) {
        for (int start = 0; start < count; start += Philox::WIDTH) {
            const int num = count - start < Philox::WIDTH ? count - start : Philox::WIDTH;
            for (int i = 0; i < Philox::WIDTH; i++)
                philox.word[0][i] = static_cast<uint32_t>(ids[start + (i < num ? i : 0)] >> 1);
            run(seed, position, purpose);
            for (int i = 0; i < num; i++) u[start + i] = philox.unit(ids[start + i] & 1 ? 2 : 0, i);
        }
    }

   private:
    void run(uint64_t seed, uint32_t position, uint32_t purpose) {
        for (int i = 0; i < Philox::WIDTH; i++) {
            philox.word[1][i] = position;
            philox.word[2][i] = purpose;
            philox.word[3][i] = 0;
        }
        philox.run(seed);
    }
};

// Call work(start, count, u) for all of `ids` [n] in order, or for 0 .. n - 1 where `ids` is null.
template <class Work>
void by_uniforms(uint64_t seed, uint32_t position, uint32_t purpose, const int64_t* ids, int64_t n, Work work) {
    Uniforms made;
    for (int64_t start = 0; start < n; start += Uniforms::AT_ONCE) {
        const int count = static_cast<int>(n - start < Uniforms::AT_ONCE ? n - start : Uniforms::AT_ONCE);
        if (ids) {
            made.make(seed, position, purpose, ids + start, count);
        } else {
            made.make(seed, position, purpose, start);
        }
        work(start, count, made.u);
    }
}

inline void id_uniforms(uint64_t seed, uint32_t position, uint32_t purpose, const int64_t* ids, int64_t n, double* out) {
    by_uniforms(seed, position, purpose, ids, n, [&](int64_t start, int count, const double* u) {
        std::memcpy(out + start, u, count * sizeof(double));
    });
}

// Write the indices of weights [n] among which the least -log(u) / weight is, as coupled.py's _may_win; return how many.
// No weight is infinite: it would be compared with infinity times 0.
inline int64_t may_win(uint64_t seed, uint32_t position, uint32_t purpose, const int64_t* ids, int64_t n,
                       const double* weights, int64_t* places) {
    constexpr double ROUNDING = 1.0 + 1e-9;
    double most = std::numeric_limits<double>::infinity();  // bound on -log(u) / weight: above it no id wins
    int64_t found = 0;
    by_uniforms(seed, position, purpose, ids, n, [&](int64_t start, int count, const double* u) {
        int any = 0;
        for (int i = 0; i < count; i++) any |= 1.0 - u[i] <= most * weights[start + i];  // -log(u) is no less than 1 - u
        if (!any) return;
        for (int i = 0; i < count; i++) {
            const double weight = weights[start + i], above = (1.0 - u[i]) / u[i] / weight * ROUNDING;
            if (!(weight > 0.0 && 1.0 - u[i] <= most * weight)) continue;
            places[found++] = start + i;
            if (above < most) most = above;
        }
    });
    int64_t kept = 0;  // indices found before a better one are dropped
    for (int64_t i = 0; i < found; i++) {
        Uniforms made;
        const int64_t place = places[i], id = ids ? ids[place] : place;
        made.make(seed, position, purpose, &id, 1);
        if (1.0 - made.u[0] <= most * weights[place]) places[kept++] = place;
    }
    return kept;
}

}  // namespace outrider
