"""Compare engines: adapters that launch them, scenarios that load them, a table of the results."""
