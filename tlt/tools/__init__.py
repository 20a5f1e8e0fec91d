"""`tlt pack | check | show | index | pack-images`."""
