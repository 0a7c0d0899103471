// Attention of some queries of one sequence to its keys and values, read from the blocks they lie in.
//
// Keys are taken in tiles of 64 positions, counted from the sequence's first token, with a running maximum. A query's
// additions come in an order that its own position decides: masked keys add exact zeros, so neither the queries beside
// it nor the way in which a prompt was cut changes a bit. Scores and sums are float32 whatever the cache holds.
#pragma once

#include <algorithm>

#include "matrix.h"

namespace outrider {

constexpr int BLOCK = 16;            // tokens
constexpr int TILE = 4 * BLOCK;      // keys
constexpr int GROUP = 6;             // queries that share the reading of a tile
#if defined(__AVX512F__)
constexpr int AT_ONCE = 4;           // vectors, for each of them a sum in a register
#else
constexpr int AT_ONCE = 2;
#endif
constexpr int MOST_QUERIES = 96;     // of one piece of work; one token's heads may be more

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

// Where a tile lies, and the one after it, which is on its way to the second-level cache while this one is computed:
// blocks are too short for the hardware to see a stream in them.
template <class KV>
struct Tile {
    const KV* keys[TILE / BLOCK];
    const KV* values[TILE / BLOCK];
    const KV* next_keys[TILE / BLOCK];
    const KV* next_values[TILE / BLOCK];

    Tile(const Cache<KV>& cache, int head, const int32_t* table, int32_t first, int32_t last) {
        const int32_t end = last / BLOCK;
        for (int b = 0; b < TILE / BLOCK; ++b) {
            const int32_t here = std::min(first / BLOCK + b, end);  // what is past the end is masked
            const int32_t ahead = std::min(here + TILE / BLOCK, end);
            keys[b] = cache.key_block(table[here], head);
            values[b] = cache.value_block(table[here], head);
            next_keys[b] = cache.key_block(table[ahead], head);
            next_values[b] = cache.value_block(table[ahead], head);
        }
    }
};

struct Softmax {
    std::vector<float> sums;    // [queries][padded head size]
    std::vector<vf> total;      // [queries] lanes
    std::vector<float> top;     // [queries]
    alignas(64) float scores[GROUP][TILE];
    vf shrink[GROUP];

    void reset(int queries, int padded) {
        sums.assign(static_cast<size_t>(queries) * padded, 0.0f);
        total.assign(queries, splat(0.0f));
        top.assign(queries, -1e30f);
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

// Scores to weights in place; keeps the running maximum and total.
static void weigh(const Query& query, int32_t tile, float* scores, float& top, vf& total, vf& shrink) {
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
    total = fma(total, shrink, added);
}

template <class KV, int ROWS, int VECTORS>
static void mix(const float (*scores)[TILE], const vf* shrink, const Tile<KV>& tile, int column, int keys,
                int padded, float* sums) {
    vf acc[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) acc[r][v] = load(sums + r * padded + v * LANES) * shrink[r];
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
        for (int v = 0; v < VECTORS; ++v) store(sums + r * padded + v * LANES, acc[r][v]);
}

// ROWS queries, the first of them number `at` of the work, and one tile, of whose keys some see the first `keys`.
template <class KV, int ROWS>
static void attend_tile(const Query* queries, const Tile<KV>& tile, int32_t first, int keys, int size, int padded,
                        Softmax& state, int at) {
    score<KV, ROWS>(queries, size, tile, state.scores);
    for (int r = 0; r < ROWS; ++r)
        weigh(queries[r], first, state.scores[r], state.top[at + r], state.total[at + r], state.shrink[r]);
    float* sums = state.sums.data() + static_cast<int64_t>(at) * padded;
    for (int column = 0; column < padded;) {
        const int left = (padded - column) / LANES, taken = left >= AT_ONCE ? AT_ONCE : left >= 2 ? 2 : 1;
        float* to = sums + column;
        if (taken == AT_ONCE) mix<KV, ROWS, AT_ONCE>(state.scores, state.shrink, tile, column, keys, padded, to);
        else if (taken == 2) mix<KV, ROWS, 2>(state.scores, state.shrink, tile, column, keys, padded, to);
        else mix<KV, ROWS, 1>(state.scores, state.shrink, tile, column, keys, padded, to);
        column += taken * LANES;
    }
}

template <class KV, int ROWS>
static void attend_rows(int rows, const Query* queries, const Tile<KV>& tile, int32_t first, int keys, int size,
                        int padded, Softmax& state, int at) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS)
            return attend_rows<KV, ROWS - 1>(rows, queries, tile, first, keys, size, padded, state, at);
    }
    attend_tile<KV, ROWS>(queries, tile, first, keys, size, padded, state, at);
}

template <class Out>
static void finish(const Query& query, const float* sums, vf total, int size) {
    const float share = 1.0f / sum(total);
    for (int d = 0; d < size; ++d) narrow(static_cast<Out*>(query.out) + d, sums[d] * share);
}

// The tiles of the keys up to `last`. `queries`, the first of them number `number` of the work, come in the order of their
// positions, or every position is past all these keys.
template <class KV>
static void attend_tiles(const Cache<KV>& cache, int head, const int32_t* table, const Query* queries, int count,
                         int32_t last, Softmax& state, int number) {
    int32_t from = queries[0].first;
    for (int i = 1; i < count; ++i) from = std::min(from, queries[i].first);
    for (int32_t first = from / TILE * TILE; first <= last; first += TILE) {
        const Tile<KV> tile(cache, head, table, first, last);
        for (int at = 0; at < count; at += GROUP) {
            const int rows = std::min(GROUP, count - at);
            const int seen = std::min<int>(TILE, queries[at + rows - 1].position - first + 1);
            int32_t begin = queries[at].first;
            for (int r = 1; r < rows; ++r) begin = std::min(begin, queries[at + r].first);
            if (seen <= 0 || begin >= first + TILE) continue;
            attend_rows<KV, GROUP>(rows, queries + at, tile, first, seen, cache.size, cache.padded, state,
                                   number + at);
        }
    }
}

static void finish_all(const Query* queries, int count, int size, int padded, const Softmax& state, bool narrow_out) {
    for (int i = 0; i < count; ++i) {
        const float* sums = state.sums.data() + static_cast<int64_t>(i) * padded;
        if (narrow_out) finish<bf16>(queries[i], sums, state.total[i], size);
        else finish<float>(queries[i], sums, state.total[i], size);
    }
}

// `queries` in the order of their positions; `table` is their sequence's, and holds the last of those.
template <class KV>
static void attend(const Cache<KV>& cache, int head, const int32_t* table, const Query* queries, int count,
                   Softmax& state, bool narrow_out) {
    state.reset(count, cache.padded);
    attend_tiles(cache, head, table, queries, count, queries[count - 1].position, state, 0);
    finish_all(queries, count, cache.size, cache.padded, state, narrow_out);
}

}  // namespace outrider
