"""The parts of a decoder, as plain objects instead of torch modules: there are no hooks in a token's path."""
