"""From a name to weights on a device: what a checkpoint says, what fits, and the model that runs it."""
