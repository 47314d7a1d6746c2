"""The modules with kernels, and a simulated device in place of CUDA."""

from __future__ import annotations

import pytest
from simulated_device import simulated_cuda

cuda = pytest.fixture(scope="module")(simulated_cuda)
