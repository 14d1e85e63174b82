"""The parts a decoder is built from. Plain objects, not modules: nothing hooks into the path of a token."""
