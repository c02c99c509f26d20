"""Convolutions and their gradients: direct ones, depthwise ones, and Winograd's."""
