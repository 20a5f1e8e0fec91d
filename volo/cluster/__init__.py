"""The processes of a run: how they are bound, meet, watch each other and stop. This package has no models."""
