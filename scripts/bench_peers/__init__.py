"""Engines side by side: adapters that launch them, scenarios that load them, a table that compares them."""
