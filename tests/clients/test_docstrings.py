# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings of what imports a client."""

from __future__ import annotations

import pytest
from tests.clients.torchvision_operators import declare_missing
from tests.docs.test_docstrings import ALL, OF_CLIENTS, check_examples

declare_missing()  # Lightning imports torchvision


# mmengine 0.10.7, while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.mark.parametrize("name", sorted(ALL & OF_CLIENTS))
def test_the_examples_of_a_module_run(name):
    check_examples(name)
