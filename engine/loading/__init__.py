"""From a name to an opened checkpoint: fetch it, read its metadata, hand out its tensors."""
