"""The playground: a request as the API takes it, what the model reads, what it answers, and how sure it was."""
