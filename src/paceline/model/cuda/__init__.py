"""The decoder's operations on a CUDA device: Triton kernels. The torch code of `model/` is their reference
implementation. Importing this package does not import Triton."""
