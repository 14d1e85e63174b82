"""Policy: who runs, with which blocks, and what came of it. Plain Python, no torch."""
