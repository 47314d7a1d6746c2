"""The decoder's arithmetic on a CUDA device: Triton kernels with the plain torch code of `model/` as their slow twins.
Importing this imports no Triton."""
