"""Matrix products: plans, tiles, panels, and kernels of them."""
