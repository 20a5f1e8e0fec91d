"""`tlt pack | unpack | pack-images | check | show`."""
