"""Label maps on disk: trees, archives, shards; and the annotators that write them."""
