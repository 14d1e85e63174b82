"""The dashboard: what the engine is doing, live."""
