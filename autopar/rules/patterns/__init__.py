"""Rules that depend on an operator's literals: views, slices, products, images, and kernels that know the split."""
