"""The backends that kernels are tested on."""

import kernel_cases
import pytest


@pytest.fixture(params=["triton", "c"])
def backend(request):
    return kernel_cases.triton_backend() if request.param == "triton" else kernel_cases.c_backend()


@pytest.fixture
def triton_twins():
    return kernel_cases.triton_backend()


@pytest.fixture
def c_twins():
    return kernel_cases.c_backend()
