"""Models that see: pictures to tensors, tensors to rows of the decoder's input.

The image processor and the tower are transformers' own; the decoder, its cache and its kernels are localllm's. What
differs between families is data in families.py.
Does not know: files of pictures, messages, scheduling.
"""
