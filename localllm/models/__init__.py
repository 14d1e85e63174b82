"""Find, plan and load models: a checkpoint's spec, the memory plan, and the model that runs it."""
