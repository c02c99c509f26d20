"""Sums, normalisations, softmax, losses and pooling, and their gradients."""
