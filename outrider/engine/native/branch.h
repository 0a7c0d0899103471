// Attention of token trees: a node sees what comes before the tree, its ancestors and itself.
//
// Nodes lie in the cache in the order in which they were fed. From the tile in which the tree begins, the keys and values
// that a node sees are copied into a chain that ends with the node, so that its sums are added in the order of a chain's
// and have the same bits.
#pragma once

#include "attention.h"

namespace outrider {

struct Tree {
    int32_t start;           // tokens before it
    const int32_t* parents;  // index of each node's parent; -1 for the last token before the tree
};

// The chain that ends with one node, from the tile on in which the tree begins, for one key-value head.
class Branch {
   public:
    // Allocate for the chains of a tree, before threads run: none may wait for memory or fail at it.
    void fit(int32_t start, int32_t deepest, int size, int padded, int64_t element_bytes) {
        const int32_t num_blocks = (start % TILE + deepest) / BLOCK + 1;
        const int64_t key_bytes = num_blocks * size * BLOCK * element_bytes;
        const int64_t value_bytes = num_blocks * padded * BLOCK * element_bytes;
        keys_.fit(key_bytes);
        values_.fit(value_bytes);
        while (static_cast<int32_t>(table_.size()) < num_blocks) table_.push_back(static_cast<int32_t>(table_.size()));
        path_.reserve(deepest + 1);
        held_.reserve(deepest + 1);
    }

    // Copy the tokens before the tree, of the tile in which it begins: every node sees them.
    template <class KV>
    void begin(const Cache<KV>& from, int head, const int32_t* table, const Tree& tree) {
        const int32_t base = tree.start / TILE * TILE;
        const Cache<KV> to = cache<KV>(from.size, from.padded);
        for (int32_t place = base; place < tree.start; place += BLOCK) {
            const int32_t block = (place - base) / BLOCK;
            copy(to.key_block(block, 0), from.key_block(table[place / BLOCK], head), from.size * BLOCK);
            copy(to.value_block(block, 0), from.value_block(table[place / BLOCK], head), from.padded * BLOCK);
        }
        held_.clear();
    }

    // Copy the chain that ends with `node`; the nodes that it shares with the previous chain are there already.
    template <class KV>
    void follow(const Cache<KV>& from, int head, const int32_t* table, const Tree& tree, int32_t node) {
        path_.clear();
        for (int32_t at = node; at >= 0; at = tree.parents[at]) path_.push_back(at);
        std::reverse(path_.begin(), path_.end());
        const Cache<KV> to = cache<KV>(from.size, from.padded);
        for (size_t depth = 0; depth < path_.size(); ++depth)
            if (depth >= held_.size() || held_[depth] != path_[depth])
                copy_token(from, head, table, tree.start + path_[depth], to, tree.start % TILE + static_cast<int>(depth));
        held_.assign(path_.begin(), path_.end());
    }

    template <class KV>
    Cache<KV> cache(int size, int padded) const {
        return {static_cast<const KV*>(keys_.data()), static_cast<const KV*>(values_.data()), 1, size, padded};
    }
    const int32_t* table() const { return table_.data(); }  // its blocks are in order

   private:
    template <class KV>
    static void copy(const KV* to, const KV* from, int64_t count) {
        std::memcpy(const_cast<KV*>(to), from, count * sizeof(KV));
    }

    template <class KV>
    static void copy_token(const Cache<KV>& from, int head, const int32_t* table, int32_t place, const Cache<KV>& to,
                           int32_t at) {
        const KV* key = from.key_block(table[place / BLOCK], head) + place % BLOCK;
        KV* key_to = const_cast<KV*>(to.key_block(at / BLOCK, 0)) + at % BLOCK;
        for (int d = 0; d < from.size; ++d) key_to[d * BLOCK] = key[d * BLOCK];
        copy(to.value_block(at / BLOCK, 0) + at % BLOCK * from.padded,
             from.value_block(table[place / BLOCK], head) + place % BLOCK * from.padded, from.padded);
    }

    Memory keys_, values_;
    std::vector<int32_t> table_, path_, held_;
};

// Attend over the spans from the one in which the tree begins; their partial results lie one after another in `to`.
// `queries`: `group` for each of the nodes from `node` on; their positions are changed.
template <class KV>
static void attend_tree(const Keys<KV>& keys, const Tree& tree, int32_t node, Query* queries, int count, int group,
                        Branch& branch, const Partial& to) {
    const Cache<KV>& cache = keys.cache;
    const int32_t base = tree.start / TILE * TILE, begin = base / SPAN * SPAN;
    attend_tiles(Keys<KV>{cache, keys.head, keys.table, base - 1}, begin, base, queries, count, to);
    branch.begin(cache, keys.head, keys.table, tree);
    for (int at = 0; at < count; at += group, ++node) {
        branch.follow(cache, keys.head, keys.table, tree, node);
        const int32_t last = queries[at].position;
        for (int g = 0; g < group; ++g) {
            queries[at + g].position -= base;
            queries[at + g].first = std::max(0, queries[at + g].first - base);
        }
        const Keys<KV> chain{branch.cache<KV>(cache.size, cache.padded), 0, branch.table(), last - base};
        for (int32_t span = begin; span <= last; span += SPAN)
            attend_tiles(chain, std::max(0, span - base), span + SPAN - base, queries + at, group,
                         to.from(static_cast<int64_t>(span - begin) / SPAN * count + at));
    }
}

}  // namespace outrider
