"""The playground: try an API request; see the prompt, the answer, and the probability of each token."""
