// Attention of some queries of one sequence to its keys and values, read from the blocks they lie in.
//
// Keys are read in tiles of 64 positions and tiles in spans, both counted from the sequence's first token. Within a span
// the largest score is a running maximum. Any thread computes a span by itself, and spans are added in their order. So
// the order of a query's additions depends on its position alone: masked keys add exact zeros, and neither other queries,
// nor threads, nor the division of a prompt changes a bit. Scores and sums are float32 whatever the cache's dtype.
#pragma once

#include <algorithm>

#include "matrix.h"

namespace outrider {

constexpr int BLOCK = 16;            // tokens
constexpr int TILE = 4 * BLOCK;      // keys
constexpr int SPAN = 8 * TILE;       // keys
constexpr int GROUP = 6;             // queries for which a tile is read once
#if defined(__AVX512F__)
constexpr int AT_ONCE = 4;           // vectors whose sums are in registers at a time
#else
constexpr int AT_ONCE = 2;
#endif
constexpr int MOST_QUERIES = 96;     // queries of one piece of work; the heads of one token may be more

struct Query {
    const float* head;  // [head size], scaled so that scores are exponents of 2
    int32_t position;   // the last key it sees
    int32_t first;      // the first key it sees
    void* out;          // [head size]
};

// One layer's cache: keys [blocks][kv heads][head size][16], values [blocks][kv heads][16][padded head size].
template <class KV>
struct Cache {
    const KV* keys;
    const KV* values;
    int kv_heads, size, padded;

    const KV* key_block(int32_t block, int head) const {
        return keys + (static_cast<int64_t>(block) * kv_heads + head) * size * BLOCK;
    }
    const KV* value_block(int32_t block, int head) const {
        return values + (static_cast<int64_t>(block) * kv_heads + head) * padded * BLOCK;
    }
};

// Keys and values of one head of a sequence, in the blocks of its table, up to the token `last`.
template <class KV>
struct Keys {
    Cache<KV> cache;
    int head;
    const int32_t* table;
    int32_t last;
};

// Addresses of a tile's blocks, and of the next tile's, which is fetched into the second-level cache while this one is
// computed: blocks are too short for the hardware to recognise a stream.
template <class KV>
struct Tile {
    const KV* keys[TILE / BLOCK];
    const KV* values[TILE / BLOCK];
    const KV* next_keys[TILE / BLOCK];
    const KV* next_values[TILE / BLOCK];

    Tile(const Keys<KV>& of, int32_t first) {
        const int32_t end = of.last / BLOCK;
        for (int b = 0; b < TILE / BLOCK; ++b) {
            const int32_t here = std::min(first / BLOCK + b, end);  // what is past the end is masked
            const int32_t ahead = std::min(here + TILE / BLOCK, end);
            keys[b] = of.cache.key_block(of.table[here], of.head);
            values[b] = of.cache.value_block(of.table[here], of.head);
            next_keys[b] = of.cache.key_block(of.table[ahead], of.head);
            next_values[b] = of.cache.value_block(of.table[ahead], of.head);
        }
    }
};

// Partial result of attention over some keys: for each query the sums of weighted values, the sums of weights by lane,
// and the largest score.
struct Partial {
    float* data;  // [queries][padded head size + 2 * PADDED]
    int padded;

    static int64_t bytes(int64_t queries, int padded) { return queries * (padded + 2 * PADDED) * sizeof(float); }
    int stride() const { return padded + 2 * PADDED; }
    float* sums(int query) const { return data + static_cast<int64_t>(query) * stride(); }
    float* weights(int query) const { return sums(query) + padded; }
    float& top(int query) const { return sums(query)[padded + PADDED]; }
    Partial from(int64_t query) const { return {data + query * stride(), padded}; }

    void clear(int queries) const {
        for (int q = 0; q < queries; ++q) {
            std::fill_n(sums(q), padded + PADDED, 0.0f);
            top(q) = -1e30f;
        }
    }

    // Add the partial result over later keys.
    void add(const Partial& later, int queries) const {
        for (int q = 0; q < queries; ++q) {
            const float now = std::max(top(q), later.top(q));
            const vf keep = exp2(splat(top(q) - now)), take = exp2(splat(later.top(q) - now));
            for (int i = 0; i < padded + LANES; i += LANES)
                store(sums(q) + i, fma(load(later.sums(q) + i), take, load(sums(q) + i) * keep));
            top(q) = now;
        }
    }
};

template <class KV, int ROWS>
static void score(const Query* queries, int size, const Tile<KV>& tile, float (*scores)[TILE]) {
    const float* heads[ROWS];
    for (int r = 0; r < ROWS; ++r) heads[r] = queries[r].head;
    for (int from = 0; from < TILE; from += AT_ONCE * LANES) {
        vf acc[ROWS][AT_ONCE];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < AT_ONCE; ++v) acc[r][v] = splat(0.0f);
        for (int d = 0; d < size; ++d) {
            vf keys[AT_ONCE];
#pragma GCC unroll 8
            for (int v = 0; v < AT_ONCE; ++v) {
                const int key = from + v * LANES;
                keys[v] = load(tile.keys[key / BLOCK] + d * BLOCK + key % BLOCK);
                __builtin_prefetch(tile.next_keys[key / BLOCK] + d * BLOCK + key % BLOCK, 0, 2);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const vf q = splat(heads[r][d]);
#pragma GCC unroll 8
                for (int v = 0; v < AT_ONCE; ++v) acc[r][v] = fma(keys[v], q, acc[r][v]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < AT_ONCE; ++v) store(scores[r] + from + v * LANES, acc[r][v]);
    }
}

// Turn scores into weights in place; update the running maximum and the sums of weights.
static void weigh(const Query& query, int32_t tile, float* scores, float& top, float* weights, vf& shrink) {
    vi lanes{};
    for (int i = 0; i < LANES; ++i) lanes[i] = i;
    vf part[TILE / LANES];
    for (int v = 0; v < TILE / LANES; ++v) part[v] = load(scores + v * LANES);
    if (query.position < tile + TILE - 1 || query.first > tile) {
        for (int v = 0; v < TILE / LANES; ++v) {
            const vi key = lanes + (tile + v * LANES);
            part[v] = pick((key <= query.position) & (key >= query.first), part[v], splat(-INFINITY));
        }
    }
    vf best = part[0];
    for (int v = 1; v < TILE / LANES; ++v) best = larger(best, part[v]);
    const float most = largest(best);
    const float now = most > top ? most : top;
    shrink = exp2(splat(top - now));
    top = now;
    vf added = splat(0.0f);
    for (int v = 0; v < TILE / LANES; ++v) {
        part[v] = exp2(part[v] - splat(now));
        added = v ? added + part[v] : part[v];
        store(scores + v * LANES, part[v]);
    }
    store(weights, fma(load(weights), shrink, added));
}

template <class KV, int ROWS, int VECTORS>
static void mix(const float (*scores)[TILE], const vf* shrink, const Tile<KV>& tile, int column, int keys,
                const Partial& to) {
    const int padded = to.padded;
    vf acc[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) acc[r][v] = load(to.sums(r) + column + v * LANES) * shrink[r];
    for (int b = 0; b * BLOCK < keys; ++b) {
        const KV *values = tile.values[b] + column, *next = tile.next_values[b] + column;
        const int end = keys - b * BLOCK < BLOCK ? keys - b * BLOCK : BLOCK;
        for (int j = 0; j < end; ++j) {
            vf value[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) {
                value[v] = load(values + j * padded + v * LANES);
                if (v * LANES * sizeof(KV) % 64 == 0) __builtin_prefetch(next + j * padded + v * LANES, 0, 2);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const vf weight = splat(scores[r][b * BLOCK + j]);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v) acc[r][v] = fma(value[v], weight, acc[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) store(to.sums(r) + column + v * LANES, acc[r][v]);
}

// Attend with ROWS queries over the first `keys` keys of one tile; no query sees later ones.
template <class KV, int ROWS>
static void attend_tile(const Query* queries, const Tile<KV>& tile, int32_t first, int keys, int size,
                        const Partial& to) {
    alignas(64) float scores[ROWS][TILE];
    vf shrink[ROWS];
    score<KV, ROWS>(queries, size, tile, scores);
    for (int r = 0; r < ROWS; ++r) weigh(queries[r], first, scores[r], to.top(r), to.weights(r), shrink[r]);
    for (int column = 0; column < to.padded;) {
        const int left = (to.padded - column) / LANES, taken = left >= AT_ONCE ? AT_ONCE : left >= 2 ? 2 : 1;
        if (taken == AT_ONCE) mix<KV, ROWS, AT_ONCE>(scores, shrink, tile, column, keys, to);
        else if (taken == 2) mix<KV, ROWS, 2>(scores, shrink, tile, column, keys, to);
        else mix<KV, ROWS, 1>(scores, shrink, tile, column, keys, to);
        column += taken * LANES;
    }
}

template <class KV, int ROWS>
static void attend_rows(int rows, const Query* queries, const Tile<KV>& tile, int32_t first, int keys, int size,
                        const Partial& to) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return attend_rows<KV, ROWS - 1>(rows, queries, tile, first, keys, size, to);
    }
    attend_tile<KV, ROWS>(queries, tile, first, keys, size, to);
}

// Attend over the tiles of the keys `begin` to `end - 1`. `queries` are in the order of their positions, or every position
// is after all these keys.
template <class KV>
static void attend_tiles(const Keys<KV>& keys, int32_t begin, int32_t end, const Query* queries, int count,
                         const Partial& to) {
    int32_t from = queries[0].first;
    for (int i = 1; i < count; ++i) from = std::min(from, queries[i].first);
    end = std::min(end, keys.last + 1);
    const int groups = (count + GROUP - 1) / GROUP;
    for (int32_t first = std::max(begin, from / TILE * TILE); first < end; first += TILE) {
        const Tile<KV> tile(keys, first);
        for (int group = 0; group < groups; ++group) {
            const int at = group * GROUP, rows = std::min(GROUP, count - at);
            const int seen = std::min<int>(TILE, queries[at + rows - 1].position - first + 1);
            int32_t needed = queries[at].first;
            for (int r = 1; r < rows; ++r) needed = std::min(needed, queries[at + r].first);
            if (seen <= 0 || needed >= first + TILE) continue;
            attend_rows<KV, GROUP>(rows, queries + at, tile, first, seen, keys.cache.size, to.from(at));
        }
    }
}

template <class Out>
static void finish(const Query& query, const float* sums, const float* weights, int size) {
    const float share = 1.0f / sum(load(weights));
    for (int d = 0; d < size; ++d) narrow(static_cast<Out*>(query.out) + d, sums[d] * share);
}

static void finish(const Query* queries, int count, int size, const Partial& whole, Kind out) {
    for (int i = 0; i < count; ++i) {
        if (out == Kind::bfloat16) finish<bf16>(queries[i], whole.sums(i), whole.weights(i), size);
        else finish<float>(queries[i], whole.sums(i), whole.weights(i), size);
    }
}

}  // namespace outrider
