"""The native CPU backend: C++ kernels over packed weights and paged K and V, loaded with ctypes."""
