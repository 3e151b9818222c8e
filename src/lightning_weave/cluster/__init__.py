"""`--cluster ray`: shards and training on a Ray cluster, whose nodes meet on a shared disk."""
