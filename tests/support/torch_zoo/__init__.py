"""Small models of well-known families, as PyTorch modules."""
