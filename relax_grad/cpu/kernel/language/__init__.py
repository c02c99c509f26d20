"""The language of kernels: buffers, vectors, loops, shares of threads, and functions of float32."""
