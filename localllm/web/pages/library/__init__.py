"""Models: what is here and what it does, finding others, fetching them."""
