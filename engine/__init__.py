"""The model's shift: sequences, blocks, the scheduler, the actors, the model and its text."""
