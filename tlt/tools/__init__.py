"""`tlt pack | check | probe | show | index | shrink`."""
