# SPDX-License-Identifier: Apache-2.0
"""Workers keep OpenCV to one thread, whenever it is imported; the main process's stays as it is."""

from __future__ import annotations

import cv2
import pytest
from tests.process.plain_datasets import LateOpenCV

from penstock import Loader


class Threads:
    """Samples are the number of threads that OpenCV would use."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        import cv2

        return cv2.getNumThreads()


def ask_for_three(worker_id):
    import cv2

    cv2.setNumThreads(3)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_worker_uses_one_thread(start_method):
    before = cv2.getNumThreads()
    loader = Loader(Threads(), num_workers=2, multiprocessing_context=start_method)
    assert {int(n) for batch in loader for n in batch} == {1}
    assert cv2.getNumThreads() == before


def test_a_worker_init_fn_may_ask_for_more():
    loader = Loader(Threads(), num_workers=1, worker_init_fn=ask_for_three)
    assert {int(n) for batch in loader for n in batch} == {3}


def test_a_worker_that_imports_it_late_uses_one_thread():
    loader = Loader(LateOpenCV(4), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    ((was_there, numbers),) = loader
    assert not was_there.any()
    assert numbers.tolist() == [1] * 4
