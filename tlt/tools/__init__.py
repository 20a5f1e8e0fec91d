"""`tlt pack | check | probe | show | index | pack-images`."""
