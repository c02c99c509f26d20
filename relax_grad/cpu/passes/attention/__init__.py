"""The replacement of an attention that is written out by one operator."""
