"""The dashboard: the state of the engine, live."""
