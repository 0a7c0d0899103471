"""A second table over the tokens of one, as when two sequences begin alike: neither sees what the other writes."""

from outrider.engine.kv_pool import BlockTable, KVPool


def forked(pool: KVPool, table: BlockTable) -> BlockTable:
    other = pool.new_table()
    other.blocks, other.num_tokens, other.digests = list(table.blocks), table.num_tokens, list(table.digests)
    pool.share(other.blocks)
    return other
