"""Where encoded images are: folders, shards, TFRecords, data sets of other libraries."""
