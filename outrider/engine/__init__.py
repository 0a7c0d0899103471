"""The part that needs torch: KV cache, model runner, sampling, acceptance. Used by the two worker services."""
