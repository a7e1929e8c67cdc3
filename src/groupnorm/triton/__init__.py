"""GPU kernels in Triton. Importing this package imports neither triton nor torch."""
