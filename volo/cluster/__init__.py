"""The processes of a run: where they are bound, how they meet, watch over each other and stop. No model."""
