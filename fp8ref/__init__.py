"""fp8ref: FP8 matrix products, bit for bit what an NVIDIA Hopper GPU returns."""
